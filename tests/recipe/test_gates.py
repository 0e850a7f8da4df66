"""Gates: what may be written, what holds, what is decided, and how it is said."""

from __future__ import annotations

import json
import math

import pytest

from compressor.errors import RecipeError
from compressor.evaluate.gates import GateResult, check_gates, decided
from compressor.evaluate.timing import Timing
from compressor.recipe.gates import ASKED_FOR, METRICS, QUALITY, Gate, is_measured


def check(metric: str, text: object, metrics: dict[str, float], timings: dict[str, Timing] | None = None) -> GateResult:
    (result,) = check_gates([Gate.parse(metric, text)], metrics, timings)
    return result


def steady(figure: float, repeats: int = 7) -> Timing:
    """Repeats within 3% of the figure, which is their median."""
    return Timing(tuple(figure * (1 + 0.01 * (i - (repeats - 1) / 2)) for i in range(repeats)), looks=3)


@pytest.mark.parametrize(
    ("metric", "text", "passes", "fails"),
    [
        ("perplexity_increase", "<= 2%", 0.02, 0.0201),
        ("top1_agreement", ">= 98%", 0.98, 0.97),
        ("embedding_cosine_min", "> 0.99", 0.999, 0.99),
        ("kernel_error", "< 1e-4", 1e-5, 1e-4),
        ("weight_bytes", "<= 120MB", 120_000_000, 120_000_001),
        ("bytes_per_token", "<= 1 KiB", 1024, 1025),
        ("latency_ms", "<= 12ms", 12.0, 12.1),
        ("latency_ms", "<= 12", 12.0, 12.1),
        ("first_token_ms", "< 0.5s", 499.0, 500.0),
        ("load_s", "<= 1500ms", 1.5, 1.6),
        ("batch_independent", True, True, False),
        ("batch_independent", "false", False, True),
    ],
)
def test_units(metric: str, text: object, passes: float, fails: float) -> None:
    assert check(metric, text, {metric: passes}).passed
    failed = check(metric, text, {metric: fails})
    assert not failed.passed and failed.measured == fails and failed.decided


@pytest.mark.parametrize("metric", [name for name, metric in METRICS.items() if metric.dense])
def test_relative_to_dense(metric: str) -> None:
    for ours, passed in ((11.0, True), (13.0, False)):
        assert check(metric, "<= 1.2x dense", {metric: ours, f"dense_{metric}": 10.0}).passed is passed
    alone = check(metric, "<= 1.2x dense", {metric: 11.0})
    assert not alone.passed and str(alone) == f"{metric}: expected <= 1.2x dense, not measured"


@pytest.mark.parametrize(
    ("metric", "text", "message"),
    [
        ("bundle_bytes", "<= 1x dense", "unit 'x dense' does not fit bundle_bytes; units: none, B, kB, KB"),
        ("load_s", "<= 1x dense", "unit 'x dense' does not fit load_s; units: none, s, ms"),
        ("latency_ms", "<= 3%", "unit '%' does not fit latency_ms; units: none, ms, s, x dense"),
        ("latency_ms", "12ms", "'12ms' is not a condition; write <=, >=, < or >, a number and a unit"),
        (
            "batch_independent",
            "<= 1",
            "'<= 1' is not a condition; batch_independent is a yes or no: write true or false",
        ),
        ("batch_independent", 1, "1 is not a condition"),
        ("weight_bytes", True, "True is not a condition"),
    ],
)
def test_what_is_no_condition(metric: str, text: object, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Gate.parse(metric, text)
    assert message in str(caught.value)


def test_an_unknown_metric_is_answered_with_all_names_and_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        Gate.parse("decode_token_per_s", ">= 3")
    said = str(caught.value)
    assert said.startswith("unknown metric; nearest: decode_tokens_per_s; there are: ")
    assert said.rpartition("there are: ")[2].split(", ") == sorted(METRICS)


def test_a_gate_reads_what_it_writes() -> None:
    for metric, known in METRICS.items():
        texts = [f"<= 1.5{unit}" for unit in known.units] if known.units is not None else ["true", "false"]
        for text in [*texts, *(["> 2x dense"] if known.dense else [])]:
            gate = Gate.parse(metric, text)
            assert str(gate) == text and Gate.parse(metric, str(gate)) == gate


def test_every_metric_of_quality_needs_text_and_every_timing_repeats() -> None:
    of_text = {"perplexity", "perplexity_increase", "kl_divergence", "top1_agreement"}
    of_text |= {"embedding_cosine", "embedding_cosine_min"}
    of_speech = {f"{unit}_error_{figure}" for unit in ("word", "character") for figure in ("rate", "increase")}
    assert of_text | of_speech | {"accuracy", "accuracy_drop", *ASKED_FOR} == QUALITY
    assert all(is_measured(name, "decoder", False) and not is_measured(name, "seq2seq", False) for name in ASKED_FOR)
    assert all(is_measured(name, "seq2seq", True) and not is_measured(name, "seq2seq", False) for name in of_speech)
    assert is_measured("load_s", "seq2seq", False) and not is_measured("load_s", "seq2seq", True)
    timings = {name for name, metric in METRICS.items() if metric.timing}
    assert timings == {"latency_ms", "first_token_ms", "load_s", "prefill_tokens_per_s", "decode_tokens_per_s"}


# --- what is said


@pytest.mark.parametrize(
    ("metric", "text", "measured", "said"),
    [
        ("perplexity_increase", "<= 2%", 0.041, "perplexity_increase: expected <= 2%, measured 4.1%"),
        ("perplexity_increase", "<= 2%", 0.0200004, "perplexity_increase: expected <= 2%, measured 2.00004%"),
        ("perplexity_increase", "<= 2%", math.nan, "perplexity_increase: expected <= 2%, measured nan%"),
        ("weight_bytes", "<= 120MB", 131_200_000, "weight_bytes: expected <= 120MB, measured 131.2MB"),
        ("weight_bytes", "<= 120MB", 120_000_001, "weight_bytes: expected <= 120MB, measured 120.000001MB"),
        ("bundle_bytes", "< 1000", 1_234_567, "bundle_bytes: expected < 1000, measured 1234567"),
        ("batch_independent", True, False, "batch_independent: expected true, measured false"),
        ("kernel_error", "<= 0.001%", 2e-5, "kernel_error: expected <= 0.001%, measured 0.002%"),
    ],
)
def test_expected_and_measured_in_the_unit_as_written(metric: str, text: object, measured: float, said: str) -> None:
    result = check(metric, text, {metric: measured})
    assert not result.passed and str(result) == said


def test_both_figures_behind_a_ratio_are_named() -> None:
    result = check("weight_bytes", "<= 0.4x dense", {"weight_bytes": 45, "dense_weight_bytes": 100})
    assert str(result) == "weight_bytes: expected <= 0.4x dense, measured 0.45x dense (45 against 100)"
    assert result.content() == {
        "metric": "weight_bytes", "expected": "<= 0.4x dense", "measured": 45, "passed": False,
        "found": "measured 0.45x dense (45 against 100)", "dense": 100, "ratio": 0.45,
    }  # fmt: skip


# --- timings


def test_a_timing_is_decided_when_its_interval_lies_on_one_side() -> None:
    for figure, passed in ((11.0, True), (13.0, False)):
        result = check("latency_ms", "<= 12ms", {"latency_ms": figure}, {"latency_ms": steady(figure)})
        assert (result.passed, result.decided) == (passed, True)
    assert str(result) == ("latency_ms: expected <= 12ms, measured 13ms; 12.61 to 13.39ms at 95% confidence, 7 repeats")
    content = json.loads(json.dumps(result.content()))
    assert content["interval"] == pytest.approx([12.61, 13.39])
    assert (content["confidence"], content["repeats"], content["decided"]) == (0.95, 7, True)


@pytest.mark.parametrize(("figure", "passed"), [(11.9, True), (12.1, False)])
def test_the_median_decides_what_stays_undecided_and_says_so(figure: float, passed: bool) -> None:
    result = check("latency_ms", "<= 12ms", {"latency_ms": figure}, {"latency_ms": steady(figure)})
    assert (result.passed, result.decided) == (passed, False)
    assert "; undecided at 95% after 7 repeats, " in str(result) and str(result).endswith("ms: median")
    assert result.content()["decided"] is False


def test_too_few_repeats_decide_nothing() -> None:
    result = check("load_s", "<= 2", {"load_s": 1.0}, {"load_s": steady(1.0, 3)})
    assert result.passed and not result.decided
    assert str(result).endswith("measured 1; undecided at 95% after 3 repeats, too few for an interval: median")


def test_a_timing_relative_to_dense_is_held_against_the_ratios_of_the_pairs() -> None:
    """Both are noisy, their ratio is not: separate medians and intervals would say less, and something else."""
    drift = (1.0, 3.0, 0.5, 2.0, 1.5, 0.9, 0.7)
    ours, dense = (Timing(tuple(figure * slow for slow in drift), looks=3) for figure in (12.6, 10.0))
    timings = {"decode_tokens_per_s": ours, "dense_decode_tokens_per_s": dense}
    figures = {name: timing.median for name, timing in timings.items()}
    result = check("decode_tokens_per_s", ">= 1.25x dense", figures, timings)
    assert result.passed and result.decided and result.figure == pytest.approx(1.26)
    assert str(result).startswith(
        "decode_tokens_per_s: expected >= 1.25x dense, measured 1.26x dense (12.6 against 10); 1.26 to 1.26x dense at"
    )
    ends = ours.interval
    assert ends is not None and ends[0] < 1.25 * 10 < ends[1]  # which alone would leave it open


def test_an_interval_that_touches_the_limit() -> None:
    gate = Gate.parse("latency_ms", "<= 10")
    assert decided(gate, Timing((8.0, 9.0, 10.0, 9.5, 9.1, 9.2, 9.3)))  # 10 passes
    assert not decided(Gate.parse("latency_ms", "< 10"), Timing((8.0, 9.0, 10.0, 9.5, 9.1, 9.2, 9.3)))
