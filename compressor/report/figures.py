"""Format figures and their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressor.recipe.sources import SOURCE_KEYS

_UNITS = {"_per_s": "/s", "_ms": ", ms", "_s": ", s"}
COMPARED = (
    ("perplexity", "perplexity", "{:.3f}"),
    ("accuracy", "accuracy", "{:.2%}"),
    ("word error rate", "word_error_rate", "{:.2%}"),
    ("character error rate", "character_error_rate", "{:.2%}"),
    ("repeated 4-grams", "repetition", "{:.2%}"),
    ("weights", "weight_bytes", "bytes"),
    ("keys and values a token", "cache_bytes_per_token", "bytes"),
    ("prefill, tokens/s", "prefill_tokens_per_s", "{:,.0f}"),
    ("decode, tokens/s", "decode_tokens_per_s", "{:,.1f}"),
    ("first token, ms", "first_token_ms", "{:,.1f}"),
    ("latency, ms", "latency_ms", "{:,.2f}"),
    ("peak memory", "peak_rss_bytes", "bytes"),
)
"""Name, JSON key and form of each figure that the dense model has as well, as ``dense_<key>``."""
STATED = (
    ("perplexity increase", "perplexity_increase", "{:+.2%}"),
    ("accuracy lost, points", "accuracy_drop", "{:.2%}"),
    ("word errors more, points", "word_error_increase", "{:+.2%}"),
    ("character errors more, points", "character_error_increase", "{:+.2%}"),
    ("top-1 agreement", "top1_agreement", "{:.2%}"),
    ("continuations as dense", "continuation_agreement", "{:.2%}"),
    ("KL divergence", "kl_divergence", "{:.4f} nats"),
    ("KL divergence, worst temperature", "swept_kl_divergence", "{:.4f} nats"),
    ("overfit gap", "overfit_gap", "{:+.4f} nats"),
    ("drafts are lossy, tolerance", "tolerance", "{:g}"),
    ("lossy texts as without tolerance", "lossless_agreement", "{:.2%}"),
    ("perplexity of lossy texts", "lossy_perplexity", "{:.3f}"),
    ("perplexity without tolerance", "lossless_perplexity", "{:.3f}"),
    ("cosine of embeddings, mean", "embedding_cosine", "{:.5f}"),
    ("cosine of embeddings, least", "embedding_cosine_min", "{:.5f}"),
    ("bundle", "bundle_bytes", "bytes"),
    ("bytes read per token", "bytes_per_token", "bytes"),
    ("of the memory bandwidth", "bandwidth_fraction", "{:.0%}"),
)
"""Name, JSON key and form of each figure of the compressed model alone."""


def label(key: str) -> str:
    """Write the name of a figure, as in the JSON output, for people."""
    for ending, unit in _UNITS.items():
        if key.endswith(ending):
            return key.removesuffix(ending).replace("_", " ") + unit
    return key.replace("_", " ")


def quantity(key: str, value: object) -> str:
    """Write the figure of that name: bytes with a unit, thousands with commas, no exponent where digits will do."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith(("bytes", "bytes_per_token", "bytes_before", "bytes_after")):
        return figure(value, "bytes")
    return f"{value:,.0f}" if isinstance(value, int) or 1e5 <= abs(value) < 1e15 else f"{value:.6g}"


def figure(value: float, form: str) -> str:
    """Write a number as text: bytes and operations ("ops") with a unit, anything else by its format."""
    if form not in ("bytes", "ops"):
        return form.format(value)
    unit = "B" if form == "bytes" else ""
    for prefix, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size and not (form == "bytes" and prefix == "T"):
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def ratio(ours: float, dense: float | None) -> str:
    """Write a ratio in two decimals, a small one in two digits; nothing where there is nothing to compare with."""
    if not dense:
        return ""
    ratio = ours / dense
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def data_label(spec: object) -> str:
    """Write the name of a set of data of a resolved recipe, or of its files; empty where there is none."""
    if not isinstance(spec, Mapping):
        return ""
    files = next((spec[key] for key in SOURCE_KEYS if spec.get(key)), "")
    named = ", ".join(map(str, files)) if isinstance(files, list) else str(files)
    return str(spec.get("name") or named or "text that calibration leaves")[:300]


def interval_text(metrics: Mapping[str, Any], key: str, form: str) -> str:
    """Write the ends of a figure's confidence interval, or nothing where there is none."""
    ends = metrics.get(f"{key}_interval")
    if ends and not all(isinstance(end, int | float) for end in ends):  # JSON has no number for it
        return " to ".join(map(str, ends))
    bare = form[: form.find("}") + 1] or form  # the unit stands beside the figure
    return f"{figure(ends[0], bare)} to {figure(ends[1], bare)}" if ends else ""
