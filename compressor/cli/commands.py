"""The ``compress`` command: parse, call, print.

Exit codes: 0 done, 1 anything else, 2 bad usage or recipe, 3 a gate failed, 4 verification failed, 5 too
little memory or disk, 128 and the number of a signal that ended it.
Results go to stdout (one JSON object with ``--json``), progress and messages to stderr.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
from pathlib import Path
from typing import Any

import click

from compressor.cli import signals
from compressor.cli.bundles import COMMANDS
from compressor.cli.catalogue import KINDS, catalogue, describe, names_of
from compressor.cli.groups.cache import cache
from compressor.cli.groups.convert import convert
from compressor.cli.groups.device import device
from compressor.cli.groups.evaluate import evaluate, lm_eval
from compressor.cli.groups.init import init
from compressor.cli.invocation import (
    Commands,
    F,
    emit,
    executor_option,
    json_option,
    reported,
    threads_option,
)
from compressor.errors import GateError
from compressor.host.modules import loading
from compressor.host.threads import wait_passively

_RECIPES, _TARGETS = names_of("recipes"), names_of("targets")
_RECIPE_OPTIONS = (
    click.argument("recipe", shell_complete=_RECIPES),
    click.option("--model", help="Hugging Face folder or id, in place of the recipe's."),
    click.option("--target", help="Target, in place of the recipe's.", shell_complete=_TARGETS),
    click.option("-o", "--output", help="Folder of the bundle."),
    click.option(
        "--device", metavar="DEVICE", help="Of the target arm: rpc://HOST:PORT/KEY to time and check there, or a name."
    ),
    click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override, e.g. passes.gptq.group_size=64."
    ),
)


def _recipe_options(command: F) -> F:
    """Name a recipe, and what replaces parts of it: the arguments of :func:`compressor.recipe.recipe.load_recipe`."""
    for option in reversed(_RECIPE_OPTIONS):
        command = option(command)
    return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="compressor")
def main() -> None:
    """Compress PyTorch models: recipe in, bundle out, measured.

    Exit codes: 0 done, 2 bad usage or recipe, 3 a gate failed, 4 verification failed, 5 too little memory or
    disk, 1 anything else.
    """
    wait_passively()
    gc.set_threshold(10_000)  # modules and graphs come by the hundred thousand and stay: a seventh of a start is saved
    atexit.register(gc.freeze)  # the process ends: to look for cycles in all that it has loaded takes two seconds


@main.command()
@_recipe_options
@click.option(
    "--dump",
    type=click.Path(path_type=Path),
    help="Write the graph after each pass and phase, and each rule with its reasons, here.",
)
@click.option("--locked", is_flag=True, help="Repeat the run of the lock; refuse when anything changed.")
@click.option(
    "--lock", type=click.Path(path_type=Path), help="The lock, or a bundle: read if --locked, else written as a file."
)
@click.option("--time-passes", is_flag=True, help="Show the time and bytes of each pass.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here: a test case for each gate.")
@click.option("--report", type=click.Path(path_type=Path), help="Write here what --json prints.")
@executor_option
@threads_option
@json_option
@reported
def run(
    recipe: str,
    dump: Path | None,
    locked: bool,
    lock: Path | None,
    time_passes: bool,
    junit: Path | None,
    report: Path | None,
    executor: str | None,
    threads: int | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Run RECIPE (a file, or a shipped recipe's name): compress, generate kernels, measure, write the bundle."""
    from compressor.cli.progress import progress
    from compressor.cli.show_run import show_outcome
    from compressor.recipe.recipe import load_recipe
    from compressor.report.content import outcome_content
    from compressor.report.recorder import recording

    failed: GateError | None = None
    with recording(recipe, junit, report, changes["output"]) as recorder, signals.restored():
        with loading():  # passes import PyTorch
            loaded = load_recipe(recipe, **changes)
        recorder.begin(loaded.output)
        from compressor.run.lock import LOCK_NAME, check_place, read_lock, save_lock

        former = read_lock(lock or Path(LOCK_NAME)) if locked else None
        if lock is not None and not locked:
            check_place(lock)
        with progress() as reporter:
            with loading():
                from compressor.executor.named import make_executor
                from compressor.run.job import run_recipe

            try:
                with make_executor(executor) as jobs:
                    outcome = run_recipe(
                        loaded, reporter=reporter, dump=dump, threads=threads, locked=former, executor=jobs
                    )
            except GateError as error:
                if error.outcome is None:  # nothing was made: the plan knew
                    raise
                outcome, failed = error.outcome, error
        if lock is not None and not locked and failed is None:
            save_lock(outcome.bundle, lock)
        emit(as_json, outcome_content(outcome), lambda: show_outcome(outcome, time_passes))
        recorder.end(outcome)
    if failed is not None:
        raise failed


@main.command("plan")
@_recipe_options
@click.option("--probe", is_flag=True, help="Measure this machine anew; else it is measured once and remembered.")
@json_option
@reported
def plan_command(recipe: str, probe: bool, as_json: bool, **changes: Any) -> None:
    """Tell what running RECIPE would do and cost, before any weight is read: bytes, memory, disk, time, speed bounds.

    Exit code 5 when memory or disk will not do.
    """
    from compressor.recipe.recipe import load_recipe

    with loading():  # passes import PyTorch
        loaded = load_recipe(recipe, **changes)
    from compressor.cli.progress import progress
    from compressor.cli.show_plan import show_plan

    with loading():
        from compressor.plan.plan import check_plan, make_plan

    with progress() as reporter:
        plan = make_plan(loaded, measure=probe, reporter=reporter)
    emit(as_json, plan.to_json(), lambda: show_plan(plan))
    check_plan(plan, loaded.gates)


@main.command()
@click.argument("model")
@click.option("--target", default="x86", show_default=True, help="Target of the code.", shell_complete=_TARGETS)
@click.option("--budget", required=True, metavar="KIND=AMOUNT", help="weight_bytes=4MB, or latency=0.6 of dense.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the bundle.")
@click.option("--calibration", default="python_docs", show_default=True, help="Text or images that passes use.")
@click.option(
    "--evaluation",
    help="Text or images that candidates differ on [default: python_docs_heldout; images that calibration leaves].",
)
@executor_option
@threads_option
@json_option
@reported
def auto(
    model: str,
    target: str,
    budget: str,
    output: Path,
    calibration: str,
    evaluation: str | None,
    executor: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Choose a recipe for MODEL within a budget, write it as OUTPUT.yaml, and run it.

    Candidates are formats, formats by layer, and fewer or narrower layers; that which predicts most like the dense
    model is taken.
    """
    from compressor.cli.progress import progress
    from compressor.cli.show_run import show_outcome, show_tried
    from compressor.executor.named import make_executor
    from compressor.recipe.recipe import load_recipe
    from compressor.report.content import outcome_content
    from compressor.run.automatic.candidates import read_budget

    limit = read_budget(budget)
    with signals.restored(), progress() as reporter, make_executor(executor) as jobs:
        with loading():
            from compressor.run.automatic.job import choose_recipe
            from compressor.run.job import run_recipe

        data = calibration, evaluation
        place, tried = choose_recipe(model, target, limit, output, data, jobs, reporter)
        outcome = run_recipe(load_recipe(str(place)), output, reporter=reporter, threads=threads, executor=jobs)

    def show() -> None:
        show_tried(tried)
        show_outcome(outcome, False)

    candidates = [one.content() for one in tried]
    emit(as_json, {"recipe": str(place), "candidates": candidates, **outcome_content(outcome)}, show)


@main.command()
@click.argument("recipe", required=False, shell_complete=_RECIPES)
@click.option("--model", help="Hugging Face folder or id, in place of the recipe's.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override, e.g. target.cuda.arch=sm_90.")
@click.option(
    "--export-batch",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compile all candidates into this new folder.",
)
@click.option(
    "--import-results", type=click.Path(path_type=Path), metavar="FILE", help="Take home what a batch measured."
)
@click.option("--batch", type=click.Path(path_type=Path), help="The results' batch, if it was not exported here.")
@click.option("--partial", is_flag=True, help="Take what was measured of a batch that did not come to its end.")
@click.option(
    "--database", type=click.Path(path_type=Path), help="Where results go [default: the user's database, in the cache]."
)
@json_option
@reported
def tune(
    recipe: str | None,
    export_batch: Path | None,
    import_results: Path | None,
    batch: Path | None,
    partial: bool,
    database: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Measure schedules of RECIPE's kernels on another machine, with a GPU that this one lacks.

    --export-batch DIR makes a folder to copy there, where `python run.py` times what is in it; --import-results FILE
    takes the file that it writes, and later runs choose the fastest schedules.
    """
    from compressor.cli.progress import progress
    from compressor.cli.show_run import show_batch, show_imported

    if (export_batch is None) == (import_results is None):
        raise click.UsageError("give either --export-batch DIR or --import-results FILE")
    if import_results is not None:
        from compressor.run.tune import import_results as take

        if recipe is not None or changes["model"] or changes["overrides"]:
            raise click.UsageError("--import-results takes no recipe: the batch knows its kernels")
        imported = take(import_results, batch, partial, database)
        emit(as_json, dataclasses.asdict(imported), lambda: show_imported(imported))
        return
    if recipe is None or export_batch is None or batch is not None or partial or database is not None:
        raise click.UsageError("--export-batch takes a RECIPE; --batch, --partial and --database are for an import")
    from compressor.recipe.recipe import load_recipe

    loaded = load_recipe(recipe, **changes)
    from compressor.run.tune import export_batch as export

    with progress() as reporter:
        made = export(loaded, export_batch, reporter)
    emit(as_json, dataclasses.asdict(made), lambda: show_batch(made))


@main.command("list")
@click.argument("what", type=click.Choice(list(KINDS)))
@json_option
@reported
def list_command(what: str, as_json: bool) -> None:
    """List what there is of one kind, a line each."""
    entries = catalogue(what)

    def show() -> None:
        width = max(map(len, entries), default=0)
        for name, summary in entries.items():
            click.echo(f"{name:<{width}}  {summary}".rstrip())

    emit(as_json, entries, show)


@main.command()
@click.argument("name", shell_complete=names_of("passes", "targets", "exports", "recipes", "calibration", "formats"))
@json_option
@reported
def show(name: str, as_json: bool) -> None:
    """Show a pass, format, target, export, recipe or calibration set in full."""
    found = describe(name)
    emit(as_json, found, lambda: click.echo(found["text"]))


for _command in (*COMMANDS, cache, convert, device, evaluate, init, lm_eval):
    main.add_command(_command)
