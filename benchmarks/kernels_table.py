"""Format the results of benchmarks/test_kernels_x86.py as Markdown.

    python benchmarks/kernels_table.py out.json [FILE.md]

FILE.md is benchmarks/results/kernels_x86.md where it is not given.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "kernels_x86.md"
_HEADING = """\
Made by `pytest --dist=no benchmarks/test_kernels_x86.py --benchmark-json out.json` and
`python benchmarks/kernels_table.py out.json`; what is measured, and how, is said in the first file. {cpu}, {threads};
{count} benchmarks on {date}, commit {commit}. Reading memory alone: {bandwidth:.1f} GB/s. Schedules are the defaults:
nothing was tuned. Shapes are rows x columns of the weight. Times are medians, the spread is the distance between
quartiles in percent of the median. Bytes are those of inputs, which a kernel reads at least once; where they are few,
or much is computed with each, their part of the bandwidth says nothing.
"""
_FAMILIES = ("packed linear", "dense linear", "attention", "RMS norm")
_COLUMNS = ("format", "shape", "tokens", "ISA", "time, µs", "spread", "MB read", "GB/s", "of the bandwidth", "Gop/s")


def table(results: dict[str, Any]) -> str:
    """Format the results of pytest-benchmark as Markdown."""
    rows = [row for row in results["benchmarks"] if "gb_per_s" in row["extra_info"]]
    if not rows:
        raise SystemExit("no benchmark of this file holds a bandwidth: was it made with --benchmark-disable?")
    infos = [row["extra_info"] for row in rows]
    threads = sorted({info["threads"] for info in infos})
    commit = results["commit_info"]
    heading = _HEADING.format(
        cpu=results["machine_info"]["cpu"].get("brand_raw", "unknown CPU"),
        threads=" or ".join(map(str, threads)) + (" thread" if threads == [1] else " threads"),
        count=len(rows),
        date=results["datetime"][:10],
        commit=str(commit.get("id", "unknown"))[:12] + (" with changes" if commit.get("dirty") else ""),
        bandwidth=infos[0]["read_bandwidth_gb_per_s"],
    )
    parts = [f"# Single kernels on x86\n\n{textwrap.fill(heading, 120, break_on_hyphens=False)}\n"]
    for family in _FAMILIES:
        lines = [_line(row) for row in rows if row["extra_info"]["family"] == family]
        if lines:
            parts.append(
                f"## {family[0].upper()}{family[1:]}\n\n{_cells(_COLUMNS)}{'|---' * len(_COLUMNS)}|\n{''.join(lines)}"
            )
    return "\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    info, stats = row["extra_info"], row["stats"]
    return _cells((
        info["format"],
        info["shape"],
        info["tokens"],
        info["isa"],
        f"{1e6 * stats['median']:,.1f}",
        f"{100 * stats['iqr'] / stats['median']:.0f}%",
        f"{info['bytes_read'] / 1e6:.2f}",
        f"{info['gb_per_s']:.2f}",
        f"{100 * info['bandwidth_fraction']:.0f}%",
        f"{info['gop_per_s']:,.1f}",
    ))  # fmt: skip


def _cells(values: tuple[Any, ...]) -> str:
    return f"| {' | '.join(map(str, values))} |\n"


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    destination = Path(sys.argv[2]) if len(sys.argv) == 3 else RESULTS
    destination.write_text(table(json.loads(Path(sys.argv[1]).read_text())))
    print(destination)
