"""Lay bundles side by side: sizes, quality, speed, kernels, and formats that differ.

Figures compare with the first bundle's that has them, quality of the same model on the same text, speed on the same
processor and threads; others are marked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import UsageError
from compressor.report.figures import COMPARED, STATED, figure
from compressor.report.sites import NUMBER, bits_a_weight, last_records

_LOCK = "compress.lock"
_LARGEST_LOCK = 16 << 20
_SIZES = ("weight_bytes", "bundle_bytes", "cache_bytes_per_token")
_SPEED = (
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "first_token_ms",
    "latency_ms",
    "peak_rss_bytes",
    "bandwidth_fraction",
)
_BETWEEN_MODELS = ("perplexity", "accuracy", "word_error_rate", "character_error_rate")
"""Figures of quality that say something beside another dense model's."""
_UNKNOWN = "not known"


@dataclass(frozen=True)
class BundleFigures:
    """Hold what a bundle says of itself.

    Attributes:
        path: as it was given.
        manifest: of whatever kind of bundle.
        measured: figures by their JSON names; empty where nothing was measured.
        text: of what quality was measured on, its digest, window and stride; None where the bundle does not say.
        model: digests of the dense model's files; None likewise.
        machine: processor and threads that speed was measured on; None likewise.
    """

    path: str
    manifest: Mapping[str, Any]
    measured: Mapping[str, Any]
    text: object
    model: object
    machine: tuple[str, int] | None


@dataclass(frozen=True)
class Cell:
    """Hold one bundle's figure.

    Attributes:
        value: None where it was not measured.
        interval: ends at 95% confidence; None where there are none.
        spread: of repeats, (most - least) / median.
        why_not: reason that it does not compare with the first bundle's; empty where it does.
    """

    value: float | None
    interval: tuple[float, float] | None = None
    spread: float | None = None
    why_not: str = ""

    def shown(self, form: str) -> str:
        """Write it for people, in one line."""
        between = self.between(form)
        return f"{self.figure(form)} ({between})" if between else self.figure(form)

    def figure(self, form: str) -> str:
        """Write the figure, with a star where it does not compare."""
        if self.value is None:
            return "not measured"
        return f"{figure(self.value, form)}{' *' if self.why_not else ''}"

    def between(self, form: str) -> str:
        """Write the ends of the interval, or the spread; empty where neither is known."""
        bare = form if form == "bytes" else form[: form.find("}") + 1]
        if self.interval is not None:
            return " to ".join(figure(end, bare) for end in self.interval)
        return "" if self.spread is None else f"spread {self.spread:.0%}"


@dataclass(frozen=True)
class Row:
    """Hold one figure of all bundles."""

    key: str
    name: str
    form: str
    group: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Comparison:
    """Hold bundles side by side.

    Attributes:
        formats: of sites whose formats differ, the name (with ``*`` for numbers), how many, and the format of each
            bundle; None where a bundle has no such site.
        alike: sites that have the same format in all.
    """

    bundles: Sequence[BundleFigures]
    rows: Sequence[Row]
    formats: Sequence[tuple[str, int, Sequence[str | None]]]
    alike: int

    def content(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "bundles": [
                {
                    "path": one.path,
                    "model": one.manifest["model"].get("name"),
                    "formats": one.manifest.get("formats") or [],
                    "kernels": evidence(one),
                    "cpu": one.machine and one.machine[0],
                    "threads": one.machine and one.machine[1],
                }
                for one in self.bundles
            ],
            "figures": {row.key: [vars(cell) for cell in row.cells] for row in self.rows},
            "sites_alike": self.alike,
            "sites_that_differ": [{"site": name, "count": n, "formats": list(f)} for name, n, f in self.formats],
            "not_comparable": self.reasons(),
        }

    def reasons(self) -> list[str]:
        """Say of each bundle which figures do not compare with the first one's, and why."""
        found: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            for label, cell in zip(self.labels, row.cells, strict=True):
                if cell.why_not:
                    found.setdefault((label, cell.why_not), []).append(row.name)
        return [f"{label}: {'; '.join(names)}: {why}" for (label, why), names in found.items()]

    @property
    def labels(self) -> list[str]:
        """Names of the bundles' folders, or their paths where two have the same name."""
        names = [Path(one.path).resolve().name for one in self.bundles]
        return names if len(set(names)) == len(names) else [one.path for one in self.bundles]


def compare_bundles(paths: Sequence[str]) -> Comparison:
    """Read bundles and lay them side by side.

    Raises:
        UsageError: fewer than two, something that is not a bundle, or a damaged one.
    """
    if len(paths) < 2:
        raise UsageError("compare: give two bundles or more, the folders that `compress run` wrote")
    bundles = [_read(path) for path in paths]
    rows = [row for row in _rows(bundles) if any(cell.value is not None for cell in row.cells)]
    formats, alike = _formats(bundles)
    return Comparison(bundles, rows, formats, alike)


def evidence(bundle: BundleFigures) -> dict[str, int]:
    """Return how many kernels were checked in which way."""
    return dict(Counter(str(kernel["evidence"]) for kernel in bundle.manifest["kernels"]).most_common())


def _read(path: str) -> BundleFigures:
    from compressor_runtime.errors import BundleError
    from compressor_runtime.manifest import any_manifest, field, items, read_measurements

    root = Path(path)
    try:
        manifest, measured = any_manifest(root), read_measurements(root)
        for key in ("weight_bytes", "dense_weight_bytes", "bundle_bytes"):
            field(manifest, key, int)
        field(manifest, "model", dict)
        field(manifest, "recipe", dict)
        known = all(type(site.get(key)) is kind for site in items(manifest, "sites", dict) for key, kind in _OF_SITES)
        known &= all(type(kernel.get("evidence")) is str for kernel in items(manifest, "kernels", dict))
        items(manifest, "formats", str)
    except BundleError as error:
        raise UsageError(f"{path}: {error}" if path not in str(error) else str(error)) from error
    if not known:
        raise UsageError(f"{path}: manifest.json: `sites` or `kernels` lack something; copy the bundle again")
    lock = _lock(root / _LOCK)
    text = lock.get("evaluation") and (lock["evaluation"], measured.get("window"), measured.get("stride"))
    on = (measured.get("cpu"), measured.get("threads"))
    machine = (on[0], on[1]) if isinstance(on[0], str) and isinstance(on[1], int) else None
    return BundleFigures(path, manifest, measured, text or None, lock.get("model") or None, machine)


_OF_SITES = (("site", str), ("format", str), ("bytes_before", int), ("bytes_after", int))


def _lock(file: Path) -> Mapping[str, Any]:
    """Return a bundle's lock; empty where it has none that can be read, and then nothing is known of its data."""
    try:
        found = json.loads(file.read_bytes()) if file.stat().st_size <= _LARGEST_LOCK else None
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(bundles: Sequence[BundleFigures]) -> list[Row]:
    def size(key: str) -> Callable[[BundleFigures], float | None]:
        return lambda one: _number(one.manifest.get(key, one.manifest["model"].get(key)))

    forms = {key: (name, form) for name, key, form in (*COMPARED, *STATED)}
    rows = [Row(key, *forms[key], "size", [Cell(size(key)(one)) for one in bundles]) for key in _SIZES]
    rows.insert(
        1, Row("bits_a_weight", "bits a weight", "{:.3f}", "size", [Cell(bits_a_weight(b.manifest)) for b in bundles])
    )
    for key, (name, form) in forms.items():
        if key in _SIZES:
            continue
        group = "speed" if key in _SPEED or key == "bytes_per_token" else "quality"
        rows.append(Row(key, name, form, group, _cells(key, group, bundles)))
    order = ("size", "quality", "speed")
    return sorted(rows, key=lambda row: order.index(row.group))


def _cells(key: str, group: str, bundles: Sequence[BundleFigures]) -> list[Cell]:
    having = [one for one in bundles if _number(one.measured.get(key)) is not None]
    return [_cell(key, group, one, having[0]) if one in having else Cell(None) for one in bundles]


def _cell(key: str, group: str, one: BundleFigures, first: BundleFigures) -> Cell:
    ends = one.measured.get(f"{key}_interval")
    timings = one.measured.get("timings")
    timed = timings.get("figures", {}).get(key) if isinstance(timings, dict) else None
    ends = timed.get("interval") if isinstance(timed, dict) else ends
    interval = (ends[0], ends[1]) if isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends)) else None
    spread = _number(one.measured.get(f"{re.sub('_(tokens_per_s|ms)$', '', key)}_spread"))
    why_not = "" if one is first else _why_not(key, group, one, first)
    return Cell(_number(one.measured[key]), interval, spread, why_not)


def _why_not(key: str, group: str, one: BundleFigures, first: BundleFigures) -> str:
    """Return why a bundle's figure does not compare with the first one's; empty where it does."""
    if group == "speed":
        if key == "bytes_per_token":
            return ""
        basis: Sequence[object] = (first.machine, one.machine)
        what = "machine or number of threads"
    else:
        basis, what = (first.text, one.text), "text"
    if None in basis:
        return f"{what} {_UNKNOWN}"
    if basis[0] != basis[1]:
        return f"another {what}"
    if group == "quality" and key not in _BETWEEN_MODELS:
        if first.model is None or one.model is None:
            return f"dense model {_UNKNOWN}"
        return "" if first.model == one.model else "another dense model"
    return ""


def _formats(bundles: Sequence[BundleFigures]) -> tuple[list[tuple[str, int, list[str | None]]], int]:
    """Return sites whose formats differ, those with names alike together, and how many have the same in all."""
    by_site = [{r["site"]: r["format"] or "dense" for r in last_records(one.manifest["sites"])} for one in bundles]
    different: dict[tuple[str, tuple[str | None, ...]], list[str]] = {}
    alike = 0
    for site in dict.fromkeys(name for sites in by_site for name in sites):
        formats = tuple(sites.get(site) for sites in by_site)
        if len(set(formats)) == 1:
            alike += 1
        else:
            different.setdefault((NUMBER.sub("*", site), formats), []).append(site)
    rows = [(sites[0] if len(sites) == 1 else name, sites, formats) for (name, formats), sites in different.items()]
    return [(name, len(sites), list(formats)) for name, sites, formats in rows], alike


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """Return a figure, also one that JSON has no number for, such as "inf"; None for anything else."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    return value if _is_number(value) else None
