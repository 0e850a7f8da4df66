"""Write the sections about costs and kernels: passes, plan, searches, drafts, roofline, kernels, provenance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.report.figures import figure, label, quantity
from compressor.report.page.charts import Bar, Dot, Line, bars, legend, scatter
from compressor.report.page.elements import Content, Html, element, folded, joined, name, pairs, table

_MOST_KERNELS = 200
_GIGA = 1e9
_SLOPES = {"peak_read_byte": "memory", "cached_read_byte": "caches"}
_TOPS = {"peak_flop": "floats", "peak_int8_op": "int8"}
"""Prices whose inverses are roofs (:data:`compressor.plan.prices.UNITS`), and the names of these."""
_OF_KERNELS = ("name", "evidence", "format", "registers", "spill_bytes", "shared_bytes", "schedule_chosen")


def passes(outcome: Mapping[str, Any], _: Mapping[str, Any]) -> Html | None:
    """Return bytes after each pass, and the time that it took."""
    stages: Sequence[Mapping[str, Any]] = outcome.get("passes") or []
    if not stages or "weight_bytes" not in stages[0]:
        return None
    sizes = [
        Bar(_numbered(stage), stage["weight_bytes"] / 1e6, figure(stage["weight_bytes"], "bytes"), _kind(stage))
        for stage in stages
    ]
    times = [Bar(_numbered(stage), stage["seconds"], f"{stage['seconds']:.2f} s", _kind(stage)) for stage in stages[1:]]
    charts = [bars("weights after each pass", "bytes of weights, MB", sizes, "{:g}".format, ("pass", "weights"))]
    if times:
        charts.append(bars("time of each pass", "seconds", times, "{:g}".format, ("pass", "time")))
    reused = sum(stage.get("reused", 0) for stage in stages)
    total = sum(stage.get("blocks", 0) for stage in stages)
    kept = f"{reused} of {total} blocks came from the cache of an earlier run." if reused else None
    return joined([element("div", charts, class_="charts"), element("p", kept, class_="soft") if kept else None])


def _numbered(stage: Mapping[str, Any]) -> str:
    return f"{stage['index']}. {stage['name']}" if stage["index"] else "as captured"


def _kind(stage: Mapping[str, Any]) -> str:
    return "ours" if stage["index"] else "dense"


def plan(outcome: Mapping[str, Any], _: Mapping[str, Any]) -> Html | None:
    """Return the plan's figures beside the measured ones."""
    found: Mapping[str, Mapping[str, float]] = outcome.get("predictions") or {}
    if not found:
        return None
    rows, times = [], []
    for key, entry in found.items():
        form = "bytes" if key.endswith("bytes") else "{:.1f} s"
        predicted, measured = entry["predicted"], entry["measured"]
        shown = f"{predicted / measured:.2f}" if measured else ""
        rows.append((label(key), figure(predicted, form), figure(measured, form), shown))
        if form != "bytes" and key != "seconds":
            times.append(Bar(label(key), measured, f"{measured:.1f} s", mark=predicted))
    parts: list[Content] = [table(("", "predicted", "measured", "ratio"), rows)]
    if times:
        headings = ("stage", "measured", "predicted, s")
        parts.append(
            bars("time of each stage; the dashed line is the plan", "seconds", times, "{:.3g}".format, headings)
        )
    return element("div", parts, class_="charts")


def search(outcome: Mapping[str, Any], _: Mapping[str, Any]) -> Html | None:
    """Return each search's choices: cost against what is lost, and which no other beats."""
    charts = [_front(front) for front in outcome.get("fronts") or [] if front.get("points")]
    return element("div", charts, class_="charts") if charts else None


def _front(front: Mapping[str, Any]) -> Html:
    points = sorted(front["points"], key=lambda one: (one["chosen"], one["front"]))
    dots = [
        Dot(
            one["cost"],
            one["score"],
            f"{'built: ' if one['chosen'] else ''}{', '.join(dict.fromkeys(map(str, one.get('choice') or ())))}"[:120],
            "built" if one["chosen"] else "front" if one["front"] else "behind",
        )
        for one in points
    ]
    x = (f"{label(front['measure'])}{front['unit']}", "{:.4g}".format)
    y = (label(front["score"]), "{:.3g}".format)
    best = sorted((one["cost"], one["score"]) for one in points if one["front"])
    meaning = legend([("built", "built"), ("front", "no other beats it"), ("behind", "behind")])
    title = f"{y[0]} against {x[0]}"
    lines = [Line(best)] if len(best) > 1 else []
    return scatter(title, x, y, dots, ("choice", x[0], y[0]), lines=lines, captions=meaning)


def drafts(_: Mapping[str, Any], manifest: Mapping[str, Any]) -> Html | None:
    """Return what a bundle says of drafts."""
    model = manifest.get("model", {})
    if not model.get("speculate"):
        return None
    rows: list[tuple[str, Content]] = [("drafts by default", name(str(model["speculate"])))]
    rows += [(label(key), quantity(key, value)) for key, value in (model.get("lossy") or {}).items()]
    rows += [("left out by drafts", name(", ".join(map(str, model["skips"]))[:400]))] if model.get("skips") else []
    entries = ", ".join(manifest.get("entries") or ["main"])
    return pairs([*rows, ("entries", name(entries))])


def roofline(
    rooflines: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], outcome: Mapping[str, Any]
) -> Html | None:
    """Return bounds by layer and the measured speed on a roofline, each phase's.

    Args:
        rooflines: fields of :class:`compressor.plan.roofline.Roofline`.
        peaks: seconds of a unit of work (:data:`compressor.plan.prices.UNITS`).
    """
    charts = [_phase(one, peaks, outcome) for one in rooflines if one.get("layers")]
    return element("div", charts, class_="charts") if charts else None


def _phase(one: Mapping[str, Any], peaks: Mapping[str, float], outcome: Mapping[str, Any]) -> Html:
    phase, layers = one["phase"], one["layers"]
    dots = [
        Dot(
            layer["ops"] / max(1, layer["bytes"]),
            layer["ops"] / (layer["ms"] / 1e3) / _GIGA,
            f"{layer['name'] or 'other operators'} ({layer['count']}): at best",
            "bound",
        )
        for layer in layers
        if layer["ops"] > 0 and layer["ms"] > 0
    ]
    ops = sum(layer["count"] * layer["ops"] for layer in layers)
    size = sum(layer["count"] * layer["bytes"] for layer in layers)
    speed = outcome.get(f"{phase}_tokens_per_s") or _by_latency(one, outcome)
    if speed and ops:
        seconds = one["tokens"] / speed
        dots.append(Dot(ops / size, ops / seconds / _GIGA, f"{phase}: measured", "ours", "measured"))
    share = f", measured {one['ms'] / 1e3 / (one['tokens'] / speed):.2g}x of that" if speed else ""
    title = f"{phase} of {one['tokens']}: at best {one['ms']:.3g} ms, {one['tokens_per_s']:,.0f} tokens/s{share}"
    meaning = legend([("bound", "layers, at best"), ("ours", "the whole phase, measured")])
    x, y = ("operations a byte", _power), ("G operations/s", _power)
    return scatter(title, x, y, dots, ("layers", x[0], y[0]), lines=_roofs(dots, peaks), log=True, captions=meaning)


def _by_latency(one: Mapping[str, Any], outcome: Mapping[str, Any]) -> float | None:
    latency = outcome.get("latency_ms")
    return 1e3 * one["tokens"] / latency if one["phase"] == "forward" and latency else None


def _roofs(dots: Sequence[Dot], peaks: Mapping[str, float]) -> list[Line]:
    """Return the roofs of memory and of the caches, each up to the peak of products of floats and of int8."""
    known = {key: 1 / seconds / _GIGA for key, seconds in peaks.items() if seconds > 0}
    if not dots or "peak_read_byte" not in known:
        return []
    least, most = min(dot.x for dot in dots) / 2, max(dot.x for dot in dots) * 8
    tops = {title: known[key] for key, title in _TOPS.items() if key in known}
    highest = max(tops.values(), default=math.inf)
    slopes = [
        Line([(least, least * known[key]), (min(most, highest / known[key]), min(highest, most * known[key]))], title)
        for key, title in _SLOPES.items()
        if key in known
    ]
    fastest = max(known[key] for key in _SLOPES if key in known)
    return slopes + [
        Line([(max(least, top / fastest), top), (most, top)], title, "above end" if top == highest else "below end")
        for title, top in tops.items()
        if top / fastest < most / 2
    ]


def _power(value: float) -> str:
    """Write a power of ten without an exponent where it is short."""
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:.2g}"


def kernels(outcome: Mapping[str, Any], manifest: Mapping[str, Any]) -> Html | None:
    """Return the checks, and how each kernel was checked."""
    found: Sequence[Mapping[str, Any]] = manifest.get("kernels") or []
    checks: Sequence[Mapping[str, Any]] = outcome.get("checks") or []
    if not found and not checks:
        return None
    verdicts = {True: ("passed", "good"), False: ("FAILED", "bad"), None: ("not checked", "warn")}
    rows = [
        (
            check["name"],
            element("span", verdicts[check["passed"]][0], class_=verdicts[check["passed"]][1]),
            check["detail"],
        )
        for check in checks
    ]
    count = Counter(str(kernel.get("evidence")) for kernel in found)
    told = ", ".join(f"{number} {evidence}" for evidence, number in count.most_common())
    keys = [key for key in _OF_KERNELS if any(kernel.get(key) is not None for kernel in found)]
    listed = [[_cell(key, kernel.get(key)) for key in keys] for kernel in found[:_MOST_KERNELS]]
    cut = f" ({_MOST_KERNELS} of them are listed here)" if len(found) > _MOST_KERNELS else ""
    text = [number for number, key in enumerate(keys) if key in ("name", "evidence", "format", "schedule_chosen")]
    return joined(
        [
            element("p", f"Of {len(found)} kernels: {told}{cut}."),
            table(("check", "result", "found"), rows, left=(0, 1, 2)) if rows else None,
            folded("each kernel", table([label(key) for key in keys], listed, left=text)) if keys else None,
        ]
    )


def _cell(key: str, value: object) -> Content:
    return name(str(value)) if key == "name" else quantity(key, value)


def provenance(machine: Mapping[str, Any], manifest: Mapping[str, Any], manifest_sha256: str) -> Html:
    """Return what the bundle follows from: versions, data, machine, hashes."""
    calibration = manifest.get("calibration") or {}
    rows: list[tuple[str, Content]] = [("processor", name(str(machine.get("cpu") or "unknown")))]
    rows += [(package, name(str(version))) for package, version in (manifest.get("versions") or {}).items()]
    rows += [(f"calibration, {label(key)}", name(str(value))) for key, value in calibration.items()]
    rows += [("seed", str(manifest.get("recipe", {}).get("seed")))] if "seed" in manifest.get("recipe", {}) else []
    rows += [("files", f"{len(manifest.get('files') or {})}, {figure(manifest.get('bundle_bytes') or 0, 'bytes')}")]
    rows.append(("SHA-256 of manifest.json", name(manifest_sha256)))
    told = "compress.lock names all that the bundle follows from; manifest.json has the hash of every file."
    return joined([pairs(rows), element("p", told, class_="soft")])
