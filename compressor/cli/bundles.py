"""Commands on what lies on disk (bundles, models, the cache), and on devices that kernels run on."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Any

import click

from compressor.cli.invocation import (
    BUNDLE,
    BUNDLE_OR_MODEL,
    emit,
    folder_with,
    json_option,
    reported,
    threads_option,
)
from compressor.errors import VerificationError


class _Days(click.FloatRange):
    """At least 0, and a number: NaN is neither older nor younger than anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        days = float(super().convert(value, param, ctx))
        if math.isnan(days):
            self.fail(f"{value} is not a number of days", param, ctx)
        return days


DAYS = _Days(0)


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
@json_option
@reported
def serve(bundle: Path, port: int, as_json: bool) -> None:
    """Serve BUNDLE, made for browsers, on this machine alone until interrupted."""
    from compressor.cli.serve import HOST, make_server

    with make_server(bundle, port) as server:
        url = f"http://{HOST}:{server.server_port}/"
        click.echo(f"{bundle}; Ctrl-C ends it", err=True)
        emit(as_json, {"url": url, "bundle": str(bundle)}, lambda: click.echo(url))
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):  # how serving ends
            server.serve_forever()


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
@click.argument("model", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE_OR_MODEL))
@json_option
@reported
def check(model: Path, as_json: bool) -> None:
    """Tell in seconds what MODEL is, what of it can be compressed, and which targets serve it."""
    from compressor.cli.contents import check_model
    from compressor.cli.show_run import show_inspection

    content = check_model(model)
    emit(as_json, content, lambda: show_inspection(content))


@click.group()
def cache() -> None:
    """Show or empty the cache of finished blocks, in COMPRESS_CACHE_DIR or the user's cache folder."""


@cache.command("list")
@json_option
@reported
def cache_list(as_json: bool) -> None:
    """List the finished blocks, the most recently used first."""
    from compressor.cli.catalogue import cached
    from compressor.cli.show_run import show_inspection

    content = cached()
    emit(as_json, content, lambda: show_inspection(content))


@cache.command("prune")
@click.option("--older-than", type=DAYS, default=0.0, metavar="DAYS", help="Keep what was used since.")
@json_option
@reported
def cache_prune(older_than: float, as_json: bool) -> None:
    """Remove finished blocks, and what killed runs left; runs that use one keep it."""
    from compressor.pipeline.segment_cache import SegmentCache

    removed = SegmentCache().prune(older_than)
    content = {"removed_blocks": len(removed), "removed_bytes": sum(entry.size_bytes for entry in removed)}
    emit(as_json, content, lambda: click.echo(f"removed {len(removed)} blocks, {content['removed_bytes']} bytes"))


@click.group()
def device() -> None:
    """Serve a device to a machine that compresses for it: `compress run --device rpc://HOST:PORT/KEY`."""


@device.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; whoever reaches it may run "
              "programs here: prefer `ssh -L` to opening it.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=9090, show_default=True, help="0 takes any free one.")
@click.option("--key", default="device", show_default=True, help="Name of this device.")
@click.option("--tracker", metavar="HOST:PORT", help="TVM's tracker to report to.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where files go [default: the temporary folder].")
@click.option("--runtime", type=click.Path(path_type=Path), help="TVM's run-time library [default: the installed one].")
@reported
def device_serve(
    host: str, port: int, key: str, tracker: str | None, folder: Path | None, runtime: Path | None
) -> None:
    """Serve this device until interrupted: time kernels, and run bundles, for one client at a time.

    Needs neither PyTorch nor the compiler.  On a device without Compressor, `python -m compressor_runtime.remote` in a
    bundle's folder, or in one that `compress device pack` made, does the same.
    """
    from compressor_runtime.remote.server import Address, ServeError, serve

    from compressor.errors import UsageError

    try:
        serve(Address(host, port), key, None if tracker is None else Address.parse(tracker), folder, runtime)
    except ServeError as error:
        raise UsageError(str(error)) from error


@device.command("pack")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--machine", type=click.Choice(["aarch64", "x86_64"]), default="aarch64", show_default=True)
@json_option
@reported
def device_pack(folder: Path, machine: str, as_json: bool) -> None:
    """Write into the new FOLDER what serves a device of another kind: copy it there, 6 MB."""
    import shutil

    from compressor.export.publish import publishing
    from compressor.host.resources import runtime_files
    from compressor.host.wheels import tvm_runtime

    library = tvm_runtime(machine) / "libtvm_runtime.so"
    with publishing(folder) as partial:
        for name, source in [*runtime_files().items(), (f"lib/{library.name}", library)]:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, partial / name)
    command = "pip install numpy apache-tvm-ffi==0.1.14.post1 && python -m compressor_runtime.remote"
    emit(
        as_json, {"folder": str(folder), "start": command}, lambda: click.echo(f"copy {folder} there; in it: {command}")
    )


COMMANDS = (generate, serve, bench_command, inspect, check, verify, sign, cache, device)
