"""The ``compress`` command: parse, call, print.

Exit codes: 0 done, 1 anything else, 2 bad usage or recipe, 3 a gate failed, 4 verification failed, 5 too
little memory or disk.
Results go to stdout (one JSON object with ``--json``), progress and messages to stderr.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from compressor.errors import CompressorError, GateError, VerificationError
from compressor.host.threads import wait_passively

F = TypeVar("F", bound=Callable[..., Any])


def _reported(command: F) -> F:
    """Errors that are meant for the user become one message and their exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except CompressorError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except (BrokenPipeError, KeyboardInterrupt):
            sys.exit(130)
        except OSError as error:  # a full disk, a folder that went away
            place = "" if error.filename is None else f"{error.filename}: "
            click.echo(f"error: {place}{error.strerror or error}; free some space, or check the folder", err=True)
            sys.exit(1)
        except MemoryError:
            click.echo("error: out of memory; compress with fewer or shorter calibration samples", err=True)
            sys.exit(1)
        except Exception as error:
            runtime = sys.modules.get("compressor_runtime")
            if runtime is None or not isinstance(error, runtime.BundleError):
                raise
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)

    return run  # type: ignore[return-value]


def _emit(as_json: bool, content: Any, show: Callable[[], None]) -> None:
    if as_json:
        click.echo(json.dumps(content, indent=2, default=str))
    else:
        show()


def _folder_with(*markers: str) -> Callable[[click.Context, click.Parameter, Path], Path]:
    """Check of an argument: a folder that holds one of these files."""

    def check(_ctx: click.Context, _parameter: click.Parameter, path: Path) -> Path:
        if not path.is_dir():
            raise click.BadParameter(f"{path}: no such folder")
        if not any((path / marker).is_file() for marker in markers):
            kind = "a bundle" if markers == _BUNDLE else "a bundle or a Hugging Face folder"
            raise click.BadParameter(f"{path}: not {kind}: it has no {' and no '.join(markers)}")
        return path

    return check


_BUNDLE = ("manifest.json",)
_BUNDLE_OR_MODEL = ("manifest.json", "config.json")
_json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, nothing else.")
_threads_option = click.option("--threads", type=click.IntRange(1), help="Threads [default: the physical cores].")
_RECIPE_OPTIONS = (
    click.argument("recipe"),
    click.option("--model", help="Hugging Face folder or id, in place of the recipe's."),
    click.option("--target", help="Target, in place of the recipe's."),
    click.option("-o", "--output", help="Folder of the bundle."),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override, e.g. passes.gptq.group_size=64."
    ),
)


def _recipe_options(command: F) -> F:
    """A recipe, and what replaces parts of it: the arguments of :func:`compressor.recipe.recipe.load_recipe`."""
    for option in reversed(_RECIPE_OPTIONS):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="compressor")
def main() -> None:
    """Compress PyTorch models: recipe in, bundle out, measured.

    Exit codes: 0 done, 2 bad usage or recipe, 3 a gate failed, 4 verification failed, 5 too little memory or
    disk, 1 anything else.
    """
    wait_passively()


@main.command()
@_recipe_options
@click.option("--dump", type=click.Path(path_type=Path), help="Write the graph after each pass and phase here.")
@click.option("--locked", is_flag=True, help="Repeat the run of the lock; refuse when anything changed.")
@click.option(
    "--lock", type=click.Path(path_type=Path), help="The lock, or a bundle: read if --locked, else written as a file."
)
@click.option("--time-passes", is_flag=True, help="Show the time and bytes of each pass.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here: a test case for each gate.")
@click.option("--report", type=click.Path(path_type=Path), help="Write here what --json prints.")
@_threads_option
@_json_option
@_reported
def run(
    recipe: str,
    dump: Path | None,
    locked: bool,
    lock: Path | None,
    time_passes: bool,
    junit: Path | None,
    report: Path | None,
    threads: int | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Run RECIPE (a file, or a shipped recipe's name): compress, generate kernels, measure, write the bundle."""
    from compressor.cli.show_run import progress, show_outcome
    from compressor.recipe.recipe import load_recipe
    from compressor.report.content import outcome_content
    from compressor.report.recorder import recording
    from compressor.run.lock import LOCK_NAME, check_place, read_lock, save_lock

    failed: GateError | None = None
    with recording(recipe, junit, report, changes["output"]) as recorder:
        loaded = load_recipe(recipe, **changes)
        recorder.begin(loaded.output)
        former = read_lock(lock or Path(LOCK_NAME)) if locked else None
        if lock is not None and not locked:
            check_place(lock)
        with progress() as reporter:
            from compressor.run.job import run_recipe

            try:
                outcome = run_recipe(loaded, reporter=reporter, dump=dump, threads=threads, locked=former)
            except GateError as error:
                outcome, failed = error.outcome, error
        if lock is not None and not locked and failed is None:
            save_lock(outcome.bundle, lock)
        _emit(as_json, outcome_content(outcome), lambda: show_outcome(outcome, time_passes))
        recorder.end(outcome)
    if failed is not None:
        raise failed


@main.command("plan")
@_recipe_options
@click.option("--probe", is_flag=True, help="Measure this machine anew; else it is measured once and remembered.")
@_json_option
@_reported
def plan_command(recipe: str, probe: bool, as_json: bool, **changes: Any) -> None:
    """Tell what running RECIPE would do and cost, before any weight is read: bytes, memory, disk, time, speed bounds.

    Exit code 5 when memory or disk will not do.
    """
    from compressor.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, **changes)
    from compressor.cli.show_plan import show_plan
    from compressor.plan.plan import check_plan, make_plan

    plan = make_plan(loaded, measure=probe)
    _emit(as_json, plan.to_json(), lambda: show_plan(plan))
    check_plan(plan)


@main.command("eval")
@click.argument("path", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE_OR_MODEL))
@click.option(
    "--data", default="python_docs_heldout", show_default=True, help="A set's name, a .yaml spec or a text file."
)
@click.option("--tokens", type=click.IntRange(2), help="Tokens to evaluate on [default: the set's].")
@click.option("--dense", help="Hugging Face folder or id to compare with: KL divergence, top-1 agreement, embeddings.")
@_threads_option
@_json_option
@_reported
def evaluate(path: Path, data: str, tokens: int | None, dense: str | None, threads: int | None, as_json: bool) -> None:
    """Measure the quality of PATH: a bundle (its own kernels) or a Hugging Face folder.

    Of a decoder the perplexity; of an encoder the cosine of its embeddings with those of the model after --dense.
    """
    from compressor.cli.show_run import progress, show_metrics
    from compressor.recipe.recipe import load_text_spec

    spec = load_text_spec(data, evaluation=True)
    if tokens is not None:
        spec = spec.model_copy(update={"tokens": tokens})
    with progress() as reporter:
        from compressor.evaluate.models import evaluate_path

        metrics = evaluate_path(path, spec, dense=dense, threads=threads, reporter=reporter)
    _emit(as_json, metrics, lambda: show_metrics(str(path), metrics))


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE))
@click.option("--prompt", required=True, help="The text to continue.")
@click.option("--max-tokens", type=click.IntRange(0), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Sample among the k likeliest.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Nucleus sampling.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the generation.")
@_threads_option
@_json_option
@_reported
def generate(bundle: Path, prompt: str, threads: int | None, as_json: bool, **options: Any) -> None:
    """Continue a prompt with the kernels of BUNDLE; the text streams to stdout."""
    from compressor.runtime import load

    pieces = load(bundle, threads=threads).generate(prompt, **options)
    if as_json:
        click.echo(json.dumps({"prompt": prompt, "text": "".join(pieces)}))
        return
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE))
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free one.")
@_json_option
@_reported
def serve(bundle: Path, port: int, as_json: bool) -> None:
    """Serve BUNDLE, made for browsers, on this machine alone until interrupted."""
    from compressor.cli.serve import HOST, make_server

    with make_server(bundle, port) as server:
        url = f"http://{HOST}:{server.server_port}/"
        _emit(as_json, {"url": url, "bundle": str(bundle)}, lambda: click.echo(f"{bundle} at {url}; Ctrl-C ends it"))
        sys.stdout.flush()
        server.serve_forever()


@main.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE_OR_MODEL))
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True)
@_threads_option
@_json_option
@_reported
def bench_command(
    bundle: Path, prompt_tokens: int, new_tokens: int, repeats: int, threads: int | None, as_json: bool
) -> None:
    """Time BUNDLE (or a Hugging Face folder, in PyTorch float32) in a process of its own."""
    from compressor.cli.show_run import show_metrics
    from compressor.evaluate.speed import bench

    metrics = bench(bundle, threads=threads, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats)
    _emit(as_json, metrics, lambda: show_metrics(str(bundle), metrics))


@main.command()
@click.argument("path", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE_OR_MODEL))
@_json_option
@_reported
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in PATH: a bundle's formats, bytes and kernels, or the linears of a Hugging Face folder."""
    from compressor.cli.contents import inspect_path
    from compressor.cli.show_run import show_inspection

    content = inspect_path(path)
    _emit(as_json, content, lambda: show_inspection(content))


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE))
@click.option(
    "--public-key", type=click.Path(path_type=Path), help="PEM of the ed25519 key that must have signed the bundle."
)
@_threads_option
@_json_option
@_reported
def verify(bundle: Path, public_key: Path | None, threads: int | None, as_json: bool) -> None:
    """Check BUNDLE: files, schema, bytes, signature, its kernels against stored outputs, and the evidence it declares.

    Exit code 4 when a check fails. Kernels run in a process of their own, and only if files and signature are right.
    """
    from compressor.verify.bundle import verify_bundle

    result = verify_bundle(bundle, threads=threads, public_key=public_key)
    _emit(as_json, result.content(), lambda: click.echo("\n".join(map(str, result.checks))))
    if not result.verified:
        failed = ", ".join(check.name for check in result.checks if check.passed is False)
        raise VerificationError(f"{bundle}: not what it should be: {failed} failed")


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE))
@click.option(
    "--key", required=True, type=click.Path(path_type=Path), help="PEM of a private ed25519 key, without passphrase."
)
@_json_option
@_reported
def sign(bundle: Path, key: Path, as_json: bool) -> None:
    """Sign BUNDLE with ed25519: writes manifest.json.sig, which `compress verify --public-key` checks."""
    from compressor.export.signing import sign_bundle

    file = sign_bundle(bundle, key)
    _emit(as_json, {"signature": str(file)}, lambda: click.echo(f"signed: {file}"))


@main.command("list")
@click.argument("what", type=click.Choice(["passes", "formats", "targets", "recipes", "calibration"]))
@_json_option
@_reported
def list_command(what: str, as_json: bool) -> None:
    """List what there is of one kind, a line each."""
    from compressor.cli.catalogue import catalogue

    entries = catalogue(what)

    def show() -> None:
        width = max(map(len, entries), default=0)
        for name, summary in entries.items():
            click.echo(f"{name:<{width}}  {summary}".rstrip())

    _emit(as_json, entries, show)


@main.command()
@click.argument("name")
@_json_option
@_reported
def show(name: str, as_json: bool) -> None:
    """Show a pass, format, target, recipe or calibration set in full."""
    from compressor.cli.catalogue import describe

    kind, text = describe(name)
    _emit(as_json, {"name": name, "kind": kind, "text": text}, lambda: click.echo(text))


@main.group()
def cache() -> None:
    """Show or empty the cache of finished blocks, in COMPRESS_CACHE_DIR or the user's cache folder."""


@cache.command("list")
@_json_option
@_reported
def cache_list(as_json: bool) -> None:
    """List the finished blocks, the most recently used first."""
    from compressor.cli.catalogue import cached
    from compressor.cli.show_run import show_inspection

    content = cached()
    _emit(as_json, content, lambda: show_inspection(content))


@cache.command("prune")
@click.option("--older-than", type=click.FloatRange(0), default=0.0, metavar="DAYS", help="Keep what was used since.")
@_json_option
@_reported
def cache_prune(older_than: float, as_json: bool) -> None:
    """Remove finished blocks, and what killed runs left; runs that use one keep it."""
    from compressor.pipeline.segment_cache import Results

    removed = Results().prune(older_than)
    content = {"removed_blocks": len(removed), "removed_bytes": sum(entry.size_bytes for entry in removed)}
    _emit(as_json, content, lambda: click.echo(f"removed {len(removed)} blocks, {content['removed_bytes']} bytes"))
