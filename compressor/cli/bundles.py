"""Commands on what lies on disk: bundles and models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from compressor.cli.groups.layouts import layout_options
from compressor.cli.invocation import (
    BUNDLE,
    BUNDLE_OR_MODEL,
    emit,
    folder_with,
    json_option,
    reported,
    threads_option,
)
from compressor.errors import UsageError, VerificationError


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@click.option("--prompt", required=True, help="The text to continue; for a model of speech, a WAV file.")
@click.option("--max-tokens", type=click.IntRange(0), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Sample among the k likeliest.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Nucleus sampling.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the generation.")
@click.option(
    "--speculate",
    metavar="KIND",
    help="Draft tokens (lookup, recycle, auto, ...; off does not), and verify several in a step: the text is the same, "
    "unless the bundle says that such drafts are lossy. As its recipe says, if left out.",
)
@threads_option
@json_option
@reported
def generate(bundle: Path, prompt: str, threads: int | None, as_json: bool, **options: Any) -> None:
    """Continue a prompt with the kernels of BUNDLE; the text streams to stdout."""
    from compressor.runtime import load

    pieces = load(bundle, threads=threads).generate(prompt, **options)
    if as_json:
        text = "".join(pieces)
        facts = {key: getattr(pieces, key) for key in ("prompt_tokens", "new_tokens", "finish_reason")}
        for name in ("speculation", "depth"):
            counts = getattr(pieces, name)
            facts |= {} if counts is None else {name: counts.facts()}
        emit(True, {"prompt": prompt, "text": text, **facts}, lambda: None)
        return
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()
    if (counts := pieces.speculation or pieces.depth) is not None:
        click.echo(str(counts), err=True)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free one.")
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--api-key", help="Key that clients must give [default: $COMPRESS_API_KEY].")
@click.option("--batch", type=click.IntRange(1, 32), help="Requests at once [default: 8].")
@click.option("--queue", type=click.IntRange(1), help="Requests that wait; more are refused with 429 [default: 64].")
@click.option("--context", type=click.IntRange(1), help="Most tokens of a prompt with its continuation.")
@click.option("--max-body", type=click.IntRange(1), help="Most bytes of a request [default: 2097152].")
@click.option("--name", help="Name of the model [default: the manifest's].")
@click.option("--pooling", type=click.Choice(["mean", "cls", "max"]), help="How an encoder makes one vector of a text.")
@click.option(
    "--grace-s", type=click.IntRange(0, 3600), help="Seconds that requests have to end at SIGTERM [default: 10]."
)
@threads_option
@json_option
@reported
def serve(bundle: Path, port: int, threads: int | None, as_json: bool, **options: Any) -> None:
    """Serve BUNDLE by OpenAI's API, or show it in a browser if it was made for one, until interrupted.

    Takes the extra `serve`; on 127.0.0.1 unless --host says otherwise.
    """
    from compressor.cli.serve import is_web, serve_api, serve_files

    def announce(url: str) -> None:
        click.echo(f"{bundle}; Ctrl-C ends it", err=True)
        emit(as_json, {"url": url, "bundle": str(bundle)}, lambda: click.echo(url))
        sys.stdout.flush()

    given = {name: value for name, value in options.items() if value is not None}
    if is_web(bundle):
        serve_files(bundle, port, {**given, **({} if threads is None else {"threads": threads})}, announce)
    else:
        serve_api(bundle, port, given, threads, announce)


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE_OR_MODEL))
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@click.option(
    "--speculate",
    metavar="KIND",
    help="Also time verifications by their rows, and passages of --text with drafts and without.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A text file; left out: the shipped documentation of Python.",
)
@threads_option
@json_option
@reported
def bench_command(
    bundle: Path,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    speculate: str | None,
    text: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Time BUNDLE (or a Hugging Face folder, in PyTorch float32) in a process of its own."""
    from compressor.cli.show_run import show_metrics
    from compressor.evaluate.speed import bench
    from compressor.host.resources import resource

    drafts = (speculate, text or resource("calibration") / "python_docs_heldout.txt") if speculate else None
    metrics = bench(
        bundle, threads=threads, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats, drafts=drafts
    )
    emit(as_json, metrics, lambda: show_metrics(str(bundle), metrics))


@click.command()
@click.argument("path", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE_OR_MODEL))
@json_option
@reported
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in PATH: a bundle's formats, bytes and kernels, or the linears of a Hugging Face folder."""
    from compressor.cli.contents import inspect_path
    from compressor.cli.show_run import show_inspection

    content = inspect_path(path)
    emit(as_json, content, lambda: show_inspection(content))


@click.command()
@click.argument("bundles", nargs=-1, metavar="A B ...")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write a page of one file here.")
@json_option
@reported
def compare(bundles: tuple[str, ...], html: Path | None, as_json: bool) -> None:
    """Lay bundles side by side: sizes, quality and speed with intervals, kernels, formats that differ.

    Figures that do not compare with the first bundle's, for another text or machine, are marked.
    """
    from compressor.cli.show_run import show_bundles
    from compressor.export.manifest import finite
    from compressor.report.comparison import compare_bundles

    comparison = compare_bundles(bundles)
    if html is not None:
        from compressor.report.content import write_file
        from compressor.report.page.side_by_side import comparison_page

        if html.is_dir():
            raise UsageError(f"{html}: is a folder; name a file")
        write_file(html, comparison_page(comparison).encode())
    emit(as_json, finite(comparison.content()), lambda: show_bundles(comparison))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@click.option(
    "--public-key", type=click.Path(path_type=Path), help="PEM of the ed25519 key that must have signed the bundle."
)
@threads_option
@json_option
@reported
def verify(bundle: Path, public_key: Path | None, threads: int | None, as_json: bool) -> None:
    """Check BUNDLE: files, schema, bytes, signature, its kernels against stored outputs, and the evidence it declares.

    Exit code 4 when a check fails. Kernels run in a process of their own, and only if files and signature are right.
    """
    from compressor.verify.bundle import verify_bundle

    result = verify_bundle(bundle, threads=threads, public_key=public_key)
    emit(as_json, result.content(), lambda: click.echo("\n".join(map(str, result.checks))))
    if not result.verified:
        failed = ", ".join(check.name for check in result.checks if check.passed is False)
        raise VerificationError(f"{bundle}: not what it should be: {failed} failed")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), help="PEM of a private ed25519 key, without passphrase."
)
@json_option
@reported
def sign(bundle: Path, key: Path, as_json: bool) -> None:
    """Sign BUNDLE with ed25519: writes manifest.json.sig, which `compress verify --public-key` checks."""
    from compressor.export.signing import sign_bundle

    file = sign_bundle(bundle, key)
    emit(as_json, {"signature": str(file)}, lambda: click.echo(f"signed: {file}"))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--private", is_flag=True, help="A repository that is made is seen by its owner alone.")
@click.option("--replace", is_flag=True, help="Put the bundle in the place of files that the repository holds.")
@json_option
@reported
def push(bundle: Path, repository: str, private: bool, replace: bool, as_json: bool) -> None:
    """Push BUNDLE to a repository of the Hugging Face hub, as one commit, with its model card."""
    from compressor.export.hub import push_bundle

    url = push_bundle(bundle, repository, private=private, replace=replace)
    emit(as_json, {"commit": url, "repository": repository}, lambda: click.echo(f"pushed: {url}"))


@click.command()
@click.argument("model", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE_OR_MODEL))
@json_option
@reported
def check(model: Path, as_json: bool) -> None:
    """Tell in seconds what MODEL is, what of it can be compressed, and which targets serve it."""
    from compressor.cli.contents import check_model
    from compressor.cli.show_run import show_inspection

    content = check_model(model)
    emit(as_json, content, lambda: show_inspection(content))


@click.command("export")
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@layout_options
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder.")
@json_option
@reported
def export_command(
    bundle: Path,
    to: str,
    output: Path,
    options: tuple[str, ...],
    model: str | None,
    check: bool | None,
    as_json: bool,
) -> None:
    """Write BUNDLE as another program loads it; what that cannot hold exactly is refused by name.

    The folder is read again and compared with the bundle, number by number, then loaded by the program itself.
    """
    from compressor.cli.progress import progress
    from compressor.cli.show_run import show_exported
    from compressor.host.modules import loading
    from compressor.recipe.exports import make_export

    with progress() as reporter:
        with loading():
            layout = make_export(to, options)
            from compressor.export.exchange.job import export_bundle
        done = export_bundle(bundle, layout, output, model, check, reporter)
    emit(as_json, done.content(), lambda: show_exported(done.content()))


COMMANDS = (export_command, generate, serve, bench_command, inspect, compare, check, verify, sign, push)
