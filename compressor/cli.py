"""The ``compress`` command: parse, call, print.

Exit codes: 0 done, 1 anything else, 2 bad usage or recipe, 3 a gate failed, 4 verification failed.
Results go to stdout (one JSON object with ``--json``), progress and messages to stderr.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from compressor.errors import CompressorError, GateError

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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="compressor")
def main() -> None:
    """Compress PyTorch models: recipe in, bundle out, measured.

    Exit codes: 0 done, 2 bad usage or recipe, 3 a gate failed, 4 verification failed, 1 anything else.
    """


@main.command()
@click.argument("recipe")
@click.option("--model", help="Hugging Face folder or id, in place of the recipe's.")
@click.option("--target", help="Target, in place of the recipe's.")
@click.option("-o", "--output", help="Folder of the bundle.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override, e.g. passes.gptq.group_size=64."
)
@click.option("--dump", type=click.Path(path_type=Path), help="Write the graph after each pass and phase here.")
@click.option("--time-passes", is_flag=True, help="Show the time and bytes of each pass.")
@_threads_option
@_json_option
@_reported
def run(
    recipe: str,
    model: str | None,
    target: str | None,
    output: str | None,
    overrides: Sequence[str],
    dump: Path | None,
    time_passes: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Run RECIPE (a file, or a shipped recipe's name): compress, generate kernels, measure, write the bundle."""
    from compressor.recipe import load_recipe
    from compressor.terminal import progress, show_outcome

    loaded = load_recipe(recipe, overrides, model=model, target=target, output=output)
    failed: GateError | None = None
    with progress() as reporter:
        from compressor.run import run_recipe

        try:
            outcome = run_recipe(loaded, reporter=reporter, dump=dump, threads=threads)
        except GateError as error:
            outcome, failed = error.outcome, error
    content = {
        "bundle": str(outcome.bundle),
        **outcome.metrics,
        "kernel_error": outcome.kernel_error,
        "gates": {str(result.gate.metric): result.passed for result in outcome.gates},
        "sites": list(outcome.sites),
        "passes": list(outcome.stages),
        "notes": list(outcome.notes),
    }
    _emit(as_json, content, lambda: show_outcome(outcome, time_passes))
    if failed is not None:
        raise failed


@main.command("eval")
@click.argument("path", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE_OR_MODEL))
@click.option(
    "--data", default="python_docs_heldout", show_default=True, help="A set's name, a .yaml spec or a text file."
)
@click.option("--tokens", type=click.IntRange(2), help="Tokens to evaluate on [default: the set's].")
@click.option("--dense", help="Hugging Face folder or id to compare with: KL divergence, top-1 agreement.")
@_threads_option
@_json_option
@_reported
def evaluate(path: Path, data: str, tokens: int | None, dense: str | None, threads: int | None, as_json: bool) -> None:
    """Measure the perplexity of PATH: a bundle (its own kernels) or a Hugging Face folder."""
    from compressor.recipe import load_text_spec
    from compressor.terminal import progress, show_metrics

    spec = load_text_spec(data, evaluation=True)
    if tokens is not None:
        spec = spec.model_copy(update={"tokens": tokens})
    with progress() as reporter:
        from compressor.run import evaluate_path

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


@main.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE_OR_MODEL))
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@_threads_option
@_json_option
@_reported
def bench_command(
    bundle: Path, prompt_tokens: int, new_tokens: int, repeats: int, threads: int | None, as_json: bool
) -> None:
    """Time BUNDLE (or a Hugging Face folder, in PyTorch float32) in a process of its own."""
    from compressor.bench import bench
    from compressor.terminal import show_metrics

    metrics = bench(bundle, threads=threads, prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats)
    _emit(as_json, metrics, lambda: show_metrics(str(bundle), metrics))


@main.command()
@click.argument("path", type=click.Path(path_type=Path), callback=_folder_with(*_BUNDLE_OR_MODEL))
@_json_option
@_reported
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in PATH: a bundle's formats, bytes and kernels, or the linears of a Hugging Face folder."""
    from compressor.inspection import inspect_path
    from compressor.terminal import show_inspection

    content = inspect_path(path)
    _emit(as_json, content, lambda: show_inspection(content))


@main.command("list")
@click.argument("what", type=click.Choice(["passes", "formats", "targets", "recipes", "calibration"]))
@_json_option
@_reported
def list_command(what: str, as_json: bool) -> None:
    """List what there is of one kind, a line each."""
    from compressor.inspection import catalogue

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
    from compressor.inspection import describe

    kind, text = describe(name)
    _emit(as_json, {"name": name, "kind": kind, "text": text}, lambda: click.echo(text))
