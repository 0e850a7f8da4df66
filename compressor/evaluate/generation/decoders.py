"""Measure a decoder in every way that an evaluation asks for: on text, on its own text, on text that it has seen."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from torch import Tensor

from compressor.data.text import load_evaluation
from compressor.errors import UsageError
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.generation.continuations import Continue, measure_continuations
from compressor.evaluate.quality import GraphLogits, Logits, measure_pieces, measure_quality
from compressor.graph.kinds.encoder_decoder import SampleInputs
from compressor.progress import Reporter
from compressor.recipe.data_spec import EvaluationSpec


def measure_decoder(
    logits: Logits,
    continued: Continue,
    tokens: Tensor,
    spec: EvaluationSpec,
    positions: int,
    *,
    dense: GraphLogits | None = None,
    in_domain: Tensor | None = None,
    reporter: Reporter,
) -> EvalResult:
    """Measure what ``spec`` asks for.

    Args:
        logits, continued: the model, as it reads text and as it writes it.
        tokens: int64 [n], the evaluation's text.
        positions: of the model, 0 without a limit.
        dense: the model to compare with, run in PyTorch.
        in_domain: int64 [windows, length] of the text that the model was calibrated on, for ``overfit_gap``.
    Raises:
        UsageError: there is nothing to score, or no dense model for what compares with one.
    """
    if spec.temperatures and dense is None:
        raise UsageError("evaluation.temperatures: predictions are compared with the dense model's; name it: --dense")
    window, stride = evaluation_window(spec, positions, reporter)
    heat = spec.temperatures or ()
    found = measure_quality(
        logits, tokens, window=window, stride=stride, dense=dense, temperatures=heat, reporter=reporter
    )
    found = measure_continuations(
        found, continued, tokens, spec.continuations, positions, dense=dense, reporter=reporter
    )
    return found if in_domain is None else measure_overfit(found, logits, in_domain, dense, reporter)


def measure_overfit(
    result: EvalResult, logits: Logits, windows: Tensor, dense: Logits | None, reporter: Reporter
) -> EvalResult:
    """Add how much less a model loses on text that it was calibrated on: ``overfit_gap``, in nats a token.

    gap = (L_compressed - L_dense) on ``result``'s text - (L_compressed - L_dense) on the windows, L the mean negative
    log-likelihood of a token: the part of the loss that the calibration hides.  The two texts are independent, so that
    the half-widths of their intervals add in squares.

    Args:
        result: of the evaluation's text, against ``dense``.
        windows: int64 [windows, length], of the calibration's text.
    Raises:
        UsageError: there is no dense model.
    """
    if dense is None:
        raise UsageError("overfit_gap: losses are compared with the dense model's; name it: --dense")
    seen = measure_pieces(logits, [(row[:-1], row[1:]) for row in windows], dense=dense, reporter=reporter)
    (gap, low, high), (seen_gap, seen_low, seen_high) = _increase(result), _increase(seen)
    middle, ends = gap - seen_gap, result.intervals
    below, above = math.hypot(gap - low, seen_high - seen_gap), math.hypot(high - gap, seen_gap - seen_low)
    return dataclasses.replace(
        result, overfit_gap=middle, intervals={**ends, "overfit_gap": (middle - below, middle + above)}
    )


def _increase(result: EvalResult) -> tuple[float, float, float]:
    """Return the increase of the loss, in nats, and the ends of its interval."""
    assert result.perplexity_increase is not None
    low, high = (math.log1p(end) for end in result.intervals["perplexity_increase"])
    return math.log1p(result.perplexity_increase), low, high


def evaluation_window(spec: EvaluationSpec, positions: int, reporter: Reporter) -> tuple[int, int]:
    """Return the window and stride to evaluate with, limited to the model's positions."""
    if not positions or spec.window <= positions:
        return spec.window, spec.stride
    reporter.note(f"evaluation: windows of {positions} tokens, the model's positions, with stride {positions // 2}")
    return positions, max(1, positions // 2)


def even_rows(samples: SampleInputs, count: int) -> Tensor:
    """Return at most so many of a decoder's samples, int64 [count, length], at even distances."""
    assert isinstance(samples, Tensor)
    return samples[:: max(1, len(samples) // count)][:count]


def seen_windows(
    spec: EvaluationSpec, in_domain: EvaluationSpec | None, folder: Path, vocab_size: int, positions: int
) -> Tensor | None:
    """Read the text that a model was calibrated on, int64 [windows, length]; None where none is named.

    Args:
        spec: of the evaluation.
        in_domain: of the calibration's text.
        folder: with the tokenizer.
    Raises:
        UsageError: the evaluation counts windows of a text that is not named, or the text cannot be read.
    """
    if in_domain is None:
        if spec.in_domain is None:
            return None
        raise UsageError("evaluation.in_domain: counts windows of a recipe's calibration; name its text: --in-domain")
    tokens, _ = load_evaluation(in_domain, None, folder, vocab_size)
    return cut(tokens, min(in_domain.window, positions or in_domain.window))


def cut(tokens: Tensor, length: int) -> Tensor:
    """Cut a text into windows, int64 [windows, length]; what is left over is dropped, unless it is all there is."""
    length = min(length, len(tokens))
    return tokens[: len(tokens) // length * length].view(-1, length)
