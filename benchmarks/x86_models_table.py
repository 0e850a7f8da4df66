"""Format the results of benchmarks/x86_models.py as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from x86_table import limits, lines_of, settings

_HEADING = """\
# Runtimes on x86: an encoder and a CNN

Made by `python benchmarks/x86_models.py`. Every runtime in its own process, all in turns: medians of milliseconds a
call, and in brackets the least and the most. `x`: how many times as fast as the fastest runtime that is not ours. Peak:
2 operations for each product of linears, convolutions and attention, over what `peak_int8.cpp` reaches between the runs
by the better instructions, in int8 also for those that compute in floats. RSS after the runs; load with files in the
system's cache; MB are 10^6 bytes, of weights those of the file that holds them. Cosine: of 200 texts' embeddings with
PyTorch's in float32, the mean and the least; accuracy: of 2,000 images.
"""


def table(result: dict[str, Any]) -> str:
    """Format one part per model and number of threads, then versions and settings."""
    parts = [_HEADING]
    for model in result.values():
        for threads, race in model["threads"].items():
            parts.append(_race(model, threads, race))
    for model in result.values():
        rows = {name: row for race in model["threads"].values() for name, row in race["runtimes"].items()}
        parts.append(settings(rows, f"Versions and settings: {model['title']}"))
    return "\n".join(parts)


def _race(model: dict[str, Any], threads: str, race: dict[str, Any]) -> str:
    batches = model["batches"]
    columns = ["runtime"]
    for batch in batches:
        columns += [f"batch {batch}, ms", "x", "of peak"]
    columns += ["RSS, MB", "peak RSS, MB", "load, s", "weights, MB", model["judged"]]
    rows: dict[str, Any] = {name: row for name, row in race["runtimes"].items() if f"batch_{batches[0]}_s" in row}
    fastest = {
        batch: min((_median(row, batch) for name, row in rows.items() if not _is_ours(name)), default=None)
        for batch in batches
    }
    peak = max(race["peak_int8_ops_per_s"].values(), default=0.0)
    lines = []
    for name, row in rows.items():
        cells = [f"**{name}**" if _is_ours(name) else name]
        for batch in batches:
            seconds, other = row[f"batch_{batch}_s"], fastest[batch]
            middle, rate = _median(row, batch), model["operations"][str(batch)] / _median(row, batch)
            cells += [
                f"{1e3 * middle:.2f} ({1e3 * min(seconds):.2f}-{1e3 * max(seconds):.2f})",
                f"{other / middle:.2f}" if other else "",
                f"{rate / peak:.1%}" if peak else "",
            ]
        cells += [
            f"{statistics.median(row['rss_bytes']) / 1e6:.0f}", f"{row['peak_rss_bytes'][0] / 1e6:.0f}",
            f"{statistics.median(row['load_s']):.2f}", f"{row['weight_bytes'] / 1e6:.2f}", _quality(row),
        ]  # fmt: skip
        lines.append(cells)
    machine = model["machine"]
    amx = "AMX" if machine["amx"] else "no AMX"
    measured = (
        f"{machine['cpu']}, {machine['cpus']} CPUs, {amx}; commit {machine['commit']}; "
        f"load average before {machine['load_average_before']:.2f}; {model['repeats']} repetitions; {limits(race)}"
    )
    heading = f"## {model['title']}: {threads} thread{'' if threads == '1' else 's'}\n\n{measured}\n"
    return "\n".join([heading, *lines_of(columns, lines, race["missing"])])


def _is_ours(name: str) -> bool:
    return name.startswith("ours")


def _median(row: dict[str, Any], batch: int) -> float:
    return float(statistics.median(row[f"batch_{batch}_s"]))


def _quality(row: dict[str, Any]) -> str:
    if "accuracy" in row:
        return f"{row['accuracy']:.2%}"
    return f"{row['cosine']:.4f}, {row['cosine_least']:.4f}" if "cosine" in row else ""
