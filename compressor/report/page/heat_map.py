"""Show sites by layer: a table whose cells say bits, and whose colours say errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.report.figures import figure
from compressor.report.page.charts import legend
from compressor.report.page.elements import Html, element, folded, name, table
from compressor.report.sites import NUMBER, last_records

_COLOURS = 6
_MOST_ROWS, _MOST_COLUMNS, _MOST_LISTED = 200, 24, 300
Cell = list[dict[str, Any]]


def heat_map(sites: Sequence[Mapping[str, Any]], dense_bits: float) -> Html:
    """Return the table of sites by layer, and a list of all, or of the first where there are many.

    Several sites in one cell, such as a layer's experts, show their mean of bits and their largest error.

    Args:
        sites: records as in a manifest.
        dense_bits: that a weight takes in the dense model.
    """
    records = last_records(sites)
    cells: dict[str, dict[str, Cell]] = {}
    for record in records:
        found = NUMBER.search(record["site"])
        if found is not None:
            column = NUMBER.sub("*", record["site"])
            cells.setdefault(found[0], {}).setdefault(column, []).append(record)
    errors = sorted(record["error"] for record in records if _is_error(record["error"]))
    parts = [_by_layer(cells, errors, dense_bits)] if cells and errors else []
    return element("div", *parts, _listed(records, dense_bits))


def _is_error(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _by_layer(cells: Mapping[str, Mapping[str, Cell]], errors: Sequence[float], dense_bits: float) -> Html:
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    shown, layers = columns[:_MOST_COLUMNS], sorted(cells, key=int)[:_MOST_ROWS]
    cut = _shared(shown)
    ends = _ends(errors)
    head = [element("th", "layer", class_="left", scope="col")]
    head += [element("th", name(column[cut:].replace("*.", "")), scope="col") for column in shown]
    body = []
    for layer in layers:
        row = [_cell(cells[layer].get(column, []), ends, dense_bits) for column in shown]
        body.append(element("tr", element("th", layer, class_="left", scope="row"), row))
    caption = element(
        "caption", "bits a weight, by layer and linear; the more a colour stands out, the larger the error"
    )
    whole = element("table", caption, element("thead", element("tr", head)), element("tbody", body))
    left_out = (len(columns) - len(shown), len(cells) - len(layers))
    more = f"{left_out[0]} more kinds of linears and {left_out[1]} more layers are in manifest.json. "
    return element(
        "div",
        element("div", whole, class_="wide heat", tabindex="0", role="group", aria_label="errors and bits by layer"),
        element("p", "Relative squared error, without unit: ", class_="legend"),
        legend([(f"h{number}", f"up to {end:.2g}") for number, end in enumerate(ends)]),
        element("p", more, class_="soft") if any(left_out) else None,
    )


def _shared(columns: Sequence[str]) -> int:
    """Return how many characters of dotted names, up to a dot, are the same in all."""
    parts = [column.split(".")[:-1] for column in columns]
    count = 0
    while all(len(part) > count and part[count] == parts[0][count] for part in parts):
        count += 1
    return sum(len(part) + 1 for part in parts[0][:count])


def _ends(errors: Sequence[float]) -> list[float]:
    """Return the largest error of each colour: equal ratios from the smallest to the largest."""
    least, most = errors[0], errors[-1]
    count = _COLOURS if most > 1.05 * least else 1
    return [least * (most / least) ** ((number + 1) / count) for number in range(count)]


def _cell(records: Cell, ends: Sequence[float], dense_bits: float) -> Html:
    if not records:
        return element("td", "", class_="none")
    before = sum(record["bytes_before"] for record in records)
    bits = dense_bits * sum(record["bytes_after"] for record in records) / before if before else 0.0
    error = max((record["error"] for record in records if _is_error(record["error"])), default=0.0)
    colour = next((number for number, end in enumerate(ends) if error <= end * (1 + 1e-9)), len(ends) - 1)
    first = records[0]
    many = f" and {len(records) - 1} more" if len(records) > 1 else ""
    what = f"{first['site']}{many}: {first['format'] or 'dense'}, {bits:.2f} bits, error {error:.2g}"
    return element("td", f"{bits:.2f}", class_=f"h{colour}" if error else "none", title=what)


def _listed(records: Sequence[Mapping[str, Any]], dense_bits: float) -> Html:
    rows = [
        (
            name(record["site"]),
            record["format"] or "dense",
            record["pass_name"],
            figure(record["bytes_before"], "bytes"),
            figure(record["bytes_after"], "bytes"),
            f"{dense_bits * record['bytes_after'] / record['bytes_before']:.2f}" if record["bytes_before"] else "",
            f"{record['error']:.2g}" if isinstance(record["error"], int | float) else str(record["error"]),
            record.get("error_of", ""),
        )
        for record in records[:_MOST_LISTED]
    ]
    headings = ("linear", "format", "last pass", "before", "after", "bits a weight", "error", "error of")
    rest = len(records) - len(rows)
    cut = element("p", f"{rest} more are in manifest.json", class_="soft") if rest else None
    return folded(f"all {len(records)} linears", table(headings, rows, left=(0, 1, 2, 7)), cut)
