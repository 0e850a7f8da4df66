"""Write the sections about a model and its quality: asked and got, dense against compressed, gates, sites, formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from compressor.report.figures import COMPARED, STATED, data_label, figure, interval_text, label, ratio
from compressor.report.page.charts import Range, ranges
from compressor.report.page.elements import Content, Html, element, folded, joined, name, pairs, table
from compressor.report.page.heat_map import heat_map
from compressor.report.sites import bits_a_weight, dense_bits, totals

_LONGEST_RECIPE = 20_000  # characters; texts may stand in a recipe
_QUALITY = ("kl_divergence", "top1_agreement", "accuracy", "word_error_rate", "embedding_cosine")
_SPEEDS = ("decode_tokens_per_s", "prefill_tokens_per_s", "latency_ms")
_RATIOS = {
    "prefill_tokens_per_s": "prefill",
    "decode_tokens_per_s": "decode",
    "first_token_ms": "first token",
    "latency_ms": "a forward call",
}
"""Figures of speed that have a ratio to the dense model's, and their names."""


def tiles(outcome: Mapping[str, Any], manifest: Mapping[str, Any]) -> Html:
    """Return the few figures that a reader looks for first."""
    found: list[tuple[str, str, str]] = []
    before, after = manifest.get("dense_weight_bytes"), manifest.get("weight_bytes")
    if after:
        found.append(("weights", figure(after, "bytes"), f"{ratio(after, before)} of {figure(before or 0, 'bytes')}"))
    if (bits := bits_a_weight(manifest)) is not None:
        found.append(("bits a weight", f"{bits:.2f}", "all that is stored, for each parameter of the dense model"))
    for what, key, form in (*STATED, *COMPARED):
        if key in _QUALITY and (value := outcome.get(key)) is not None:
            found.append((what, _shown(value, form), interval_text(outcome, key, form)))
    for what, key, form in COMPARED:
        if key in _SPEEDS and outcome.get(key) and not (key == "latency_ms" and "decode_tokens_per_s" in outcome):
            dense = outcome.get(f"dense_{key}")
            found.append((what, figure(outcome[key], form), f"{ratio(outcome[key], dense)} dense" if dense else ""))
    shown = [
        element("div", element("span", what), element("b", value), element("span", more), class_="tile")
        for what, value, more in found
    ]
    return element("div", shown, class_="tiles")


def asked_and_got(outcome: Mapping[str, Any], manifest: Mapping[str, Any]) -> Html | None:
    """Return the recipe beside what it gave."""
    recipe, model = manifest.get("recipe") or {}, manifest.get("model", {})
    if not recipe:
        return None
    passes = [element("li", _pass(entry)) for entry in recipe.get("passes") or []]
    target = recipe.get("target")
    asked: list[tuple[str, Content]] = [
        ("model", name(str(recipe.get("model") or model.get("name", "")))),
        ("architecture", name(str(model.get("architecture", "")))),
        ("passes", element("ul", passes) if passes else "none"),
        ("target", name(_one_line(target))),
        ("calibrated on", name(data_label(recipe.get("calibration")) or "nothing")),
        ("evaluated on", name(data_label(recipe.get("evaluation")))),
    ]
    formats = ", ".join(manifest.get("formats", [])) or "dense"
    scored = [f"{outcome[key]:,} {key}" for key in ("tokens", "texts", "images", "sounds") if outcome.get(key)]
    asked += [("formats", name(formats)), ("scored", ", ".join(scored) or "nothing")]
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    cut = "\n... (the rest is in manifest.json)" if len(text) > _LONGEST_RECIPE else ""
    whole = folded("the recipe, with all defaults", element("pre", text[:_LONGEST_RECIPE] + cut))
    return joined([pairs([(key, value) for key, value in asked if value]), whole])


def _pass(entry: object) -> Content:
    if not isinstance(entry, Mapping) or len(entry) != 1:
        return name(_one_line(entry))
    ((pass_name, options),) = entry.items()
    known = options if isinstance(options, Mapping) else {}
    shown = [f"{key} {_one_line(known[key])}" for key in ("scheme", "sparsity", "ratio", "budget") if known.get(key)]
    return name(f"{pass_name}{': ' if shown else ''}{', '.join(shown)}")


def _one_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_one_line(item)}" for key, item in value.items() if item is not None)[:300]
    return str(value)[:300]


def compared(outcome: Mapping[str, Any], manifest: Mapping[str, Any]) -> Html | None:
    """Return dense against compressed as a table, and ratios of speed as a chart."""
    rows = []
    for what, key, form in COMPARED:
        ours, dense = outcome.get(key), outcome.get(f"dense_{key}")
        if ours is not None:
            by = ratio(ours, dense) if _is_number(ours) and _is_number(dense) else ""
            rows.append((what, "" if dense is None else _shown(dense, form), _shown(ours, form), by))
    stated = [
        (what, _shown(outcome[key], form), interval_text(outcome, key, form))
        for what, key, form in STATED
        if outcome.get(key) is not None
    ]
    if (bits := bits_a_weight(manifest)) is not None:
        stated.append(("bits a weight", f"{bits:.3f}", ""))
    if not rows and not stated:
        return None
    parts: list[Content] = [table(("", "dense", "compressed", "ratio"), rows)] if rows else []
    parts += [table(("", "figure", "95% confidence"), stated)] if stated else []
    parts.append(_speed(outcome))
    return element("div", parts, class_="charts")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _shown(value: Any, form: str) -> str:
    """Write a figure; one that no number of JSON stands for comes as text, such as "inf"."""
    return figure(value, form) if _is_number(value) else str(value)


def _speed(outcome: Mapping[str, Any]) -> Content:
    timings = outcome.get("timings") or {}
    found, rows = timings.get("ratios", {}), []
    for key, what in _RATIOS.items():
        if key not in found or (key == "latency_ms" and "decode_tokens_per_s" in found):
            continue  # a decoder's latency is that of its decode steps
        middle, ends = found[key]["median"], found[key].get("interval")
        if key.endswith("_ms"):  # less is faster
            middle, ends = 1 / middle, ends and (1 / ends[1], 1 / ends[0])
        text = f"{middle:.3g}x" + (f" ({ends[0]:.3g}x to {ends[1]:.3g}x)" if ends else "")
        rows.append(Range(what, middle, (ends[0], ends[1]) if ends else None, text))
    if not rows:
        return None
    threads = outcome.get("threads")
    against = f"speed against the dense model in PyTorch eager float32, {threads} threads"
    headings = ("", "median (95% confidence)")
    return ranges(against, "times as fast as the dense model", rows, lambda x: f"{x:g}x", headings)


def gates(outcome: Mapping[str, Any], _: Mapping[str, Any]) -> Html | None:
    """Return how each gate went."""
    results: Sequence[Mapping[str, Any]] = outcome.get("gate_results") or []
    rows = []
    for result in results:
        verdict = element(
            "span", "passed" if result["passed"] else "FAILED", class_="good" if result["passed"] else "bad"
        )
        rows.append((label(result["metric"]), result["expected"], result["found"], verdict))
    if not rows:
        return None
    return table(("figure", "expected", "found", "result"), rows, left=(0, 1, 2, 3))


def notes(outcome: Mapping[str, Any], _: Mapping[str, Any]) -> Html | None:
    """Return what deserves attention; the user's folder is nobody's business, and reports are passed on."""
    texts = [str(note).replace(str(Path.home()), "~") for note in outcome.get("notes") or []]
    about: dict[str, list[str]] = {}
    for site in outcome.get("sites") or []:
        if site.get("note"):
            about.setdefault(site["note"], []).append(site["site"])
    for note, names in about.items():
        more = f" and {len(names) - 2} more linears" if len(names) > 2 else ""
        texts.append(f"{', '.join(names[:2])}{more}: {note}")
    return element("ul", [element("li", element("bdi", text)) for text in texts]) if texts else None


def sites(outcome: Mapping[str, Any], manifest: Mapping[str, Any]) -> Html | None:
    """Return the heat map of sites and the totals of formats."""
    records = manifest.get("sites") or outcome.get("sites") or []
    bits = dense_bits(manifest)
    if not records or bits is None:
        return None
    rows = [
        (
            name(row["format"]),
            f"{row['linears']:,}",
            figure(row["bytes_before"], "bytes"),
            figure(row["bytes_after"], "bytes"),
            f"{bits * row['bytes_after'] / row['bytes_before']:.3f}" if row["bytes_before"] else "",
        )
        for row in totals(records)
    ]
    headings = ("format", "linears", "before", "after", "bits each")
    return element("div", table(headings, rows, caption="by format"), heat_map(records, bits), class_="charts")
