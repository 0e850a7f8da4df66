"""The command `lm-eval`: a bundle by the tasks that others publish their figures of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compressor.cli.invocation import BUNDLE, folder_with, reported, threads_option

_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("lm-eval", context_settings=_PASSED_ON)
@click.option("--max-length", type=click.IntRange(2), help="Tokens of a window [default: the model's positions].")
@click.option("--stride", type=click.IntRange(1), help="Tokens between windows of a long text [default: a window].")
@threads_option
@click.argument("bundle", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE))
@click.argument("harness", metavar="--tasks NAMES [OPTIONS OF lm-eval]", nargs=-1, type=click.UNPROCESSED)
@reported
def lm_eval(bundle: Path, harness: tuple[str, ...], **options: Any) -> None:
    """Run tasks of EleutherAI's lm-eval on the decoder of BUNDLE, by its own kernels.

    Takes the extra `eval`.  What stands behind BUNDLE is lm-eval's: `compress lm-eval out/model --tasks lambada_openai
    --limit 100`.
    """
    from compressor.evaluate.harness.run import run_harness

    run_harness(bundle, {name: value for name, value in options.items() if value is not None}, harness)
