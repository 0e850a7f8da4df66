"""Write the page about several bundles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compressor.report.comparison import Cell, Comparison, Row, evidence
from compressor.report.page.charts import Bar, Dot, bars, scatter
from compressor.report.page.document import page
from compressor.report.page.elements import Content, Html, element, joined, name, table

_GROUPS = {"size": "Size", "quality": "Quality", "speed": "Speed"}
_MOST_FORMATS = 300


def comparison_page(comparison: Comparison) -> str:
    """Return the page of one file about bundles side by side, HTML."""
    bundles = comparison.bundles
    headings = ("", *comparison.labels)
    found: list[tuple[str, Content]] = [("Sizes and quality at a glance", _charts(comparison))]
    for group, heading in _GROUPS.items():
        rows = [row for row in comparison.rows if row.group == group]
        cells = [(row.name, *(_figure(cell, row.form) for cell in row.cells)) for row in rows]
        machines = [("measured on", *(_machine(one.machine) for one in bundles))] if group == "speed" and rows else []
        found.append((heading, table(headings, [*cells, *machines]) if rows else None))
    reasons = [element("li", element("bdi", reason)) for reason in comparison.reasons()]
    found.append(("* does not compare with the first bundle's", element("ul", reasons) if reasons else None))
    counted = [("kernels", *(", ".join(f"{n} {how}" for how, n in evidence(one).items()) for one in bundles))]
    found.append(("Kernels, by how they were checked", table(headings, counted)))
    found.append(("Formats that differ", _formats(comparison, headings)))
    return page(f"{len(bundles)} bundles side by side", None, found)


def _figure(cell: Cell, form: str) -> Content:
    between = cell.between(form)
    return [cell.figure(form), element("span", between, class_="below") if between else None]


def _machine(machine: tuple[str, int] | None) -> Html:
    return joined("not known" if machine is None else f"{machine[0]}, {machine[1]} threads")


def _row(comparison: Comparison, key: str) -> Row | None:
    return next((row for row in comparison.rows if row.key == key), None)


def _charts(comparison: Comparison) -> Content:
    paths = comparison.labels
    sizes = [
        Bar(path, one.manifest["weight_bytes"] / 1e6, f"{one.manifest['weight_bytes'] / 1e6:.2f} MB")
        for path, one in zip(paths, comparison.bundles, strict=True)
    ]
    charts = [bars("weights", "bytes of weights, MB", sizes, "{:g}".format, ("bundle", "weights"))]
    bits, lost = _row(comparison, "bits_a_weight"), _row(comparison, "kl_divergence")
    if bits is not None and lost is not None:
        dots = _dots(paths, bits, lost)
        x, y = ("bits a weight", "{:.3g}".format), ("KL divergence, nats", "{:.3g}".format)
        if len(dots) > 1:
            charts.append(scatter("what is lost against bits a weight", x, y, dots, ("bundle", x[0], y[0])))
    return element("div", charts, class_="charts")


def _dots(paths: Sequence[str], bits: Row, lost: Row) -> list[Dot]:
    """Return bundles whose figures compare with the first one's."""
    return [
        Dot(size.value, kl.value, path, caption=path if len(path) <= 18 else f"…{path[-17:]}")
        for path, size, kl in zip(paths, bits.cells, lost.cells, strict=True)
        if size.value is not None and kl.value is not None and math.isfinite(kl.value) and not kl.why_not
    ]


def _formats(comparison: Comparison, headings: Sequence[str]) -> Content:
    told = element("p", f"{comparison.alike} linears have the same format in all bundles.")
    if not comparison.formats:
        return told
    rows = [
        (name(f"{site} ({count})" if count > 1 else site), *(fmt or "no such linear" for fmt in formats))
        for site, count, formats in comparison.formats[:_MOST_FORMATS]
    ]
    more = len(comparison.formats) - len(rows)
    rest = element("p", f"{more} more rows are in the output of --json") if more else None
    return joined([told, table(("linear", *headings[1:]), rows, left=[*range(len(headings))]), rest])
