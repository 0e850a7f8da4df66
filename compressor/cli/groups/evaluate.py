"""The commands `eval` and `lm-eval`: quality by our own figures, and by the tasks of others."""

from __future__ import annotations

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
    shipped_model,
    threads_option,
)
from compressor.host.modules import loading

_PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("eval")
@click.argument("path", type=click.Path(path_type=Path), callback=folder_with(*BUNDLE_OR_MODEL))
@click.option(
    "--data",
    default="python_docs_heldout",
    show_default=True,
    help="A set's name, a .yaml spec, a text file, images, a folder of sounds.",
)
@click.option("--tokens", type=click.IntRange(2), help="Tokens to evaluate on [default: the set's].")
@click.option("--dense", help="Hugging Face folder or id to compare with: KL divergence, top-1 agreement, embeddings.")
@click.option("--in-domain", metavar="DATA", help="What it was calibrated on, for `overfit_gap`; takes --dense.")
@threads_option
@json_option
@reported
def evaluate(
    path: Path,
    data: str,
    tokens: int | None,
    dense: str | None,
    in_domain: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure the quality of PATH: a bundle (its own kernels) or a Hugging Face folder.

    Of a decoder the perplexity; of an encoder the cosine of its embeddings with those of the model after --dense; of
    an image classifier the accuracy; of a model of speech the word errors.
    """
    from compressor.cli.progress import progress
    from compressor.cli.show_run import show_metrics
    from compressor.recipe.recipe import load_text_spec

    spec = load_text_spec(data, evaluation=True)
    if tokens is not None:
        spec = spec.model_copy(update={"tokens": tokens})
    seen = None if in_domain is None else load_text_spec(in_domain, evaluation=True)
    with progress() as reporter:
        with loading():
            from compressor.evaluate.models import evaluate_path

        reference = None if dense is None else shipped_model(dense)
        metrics = evaluate_path(path, spec, dense=reference, in_domain=seen, threads=threads, reporter=reporter)
    emit(as_json, metrics, lambda: show_metrics(str(path), metrics))


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
