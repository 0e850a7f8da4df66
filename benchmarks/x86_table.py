"""Format the results of benchmarks/x86_llm.py as Markdown; benchmarks/x86_models_table.py shares parts of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_HEADING = """\
# Runtimes on x86: {model}

Made by `python benchmarks/x86_llm.py`. {cpu}, {cpus} CPUs, AMX {amx}; commit {commit}; load average before
{load:.2f}. Random weights, {body:,} in linears and {head:,} in the head; one sequence. Every runtime in its own
process, all in turns, {repeats} repetitions: medians, and in brackets the least and the most. Prefill from an empty
cache to the last position's logits; decode is the median of {steps} greedy tokens after {after}. RSS after the runs;
load with files in the system's cache; MB are 10^6 bytes. Bandwidth: bytes of weights a token reads, times tokens/s,
over the read bandwidth that our bundle measures between the runs. Peak: 2 operations a weight, over what
`peak_int8.cpp` reaches between the runs by {instructions}, in int8 also for those that compute in floats. Cosine: of
the logits behind the first prompt with PyTorch's in bfloat16: a sign that all compute the same model; weights being
random, it says nothing of quality.
"""
_COLUMNS = (
    "runtime", "prefill 128, tokens/s", "prefill 512, tokens/s", "decode, tokens/s", "of bandwidth", "of peak at 512",
    "RSS, MB", "peak RSS, MB", "load, s", "weights, MB", "cosine",
)  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Format one part per number of threads, then versions, settings, and the runtimes that are missing."""
    machine, weights = result["machine"], result["linear_weights"]
    heading = _HEADING.format(
        model=result["model"], cpu=machine["cpu"], cpus=machine["cpus"], amx="yes" if machine["amx"] else "no",
        commit=machine["commit"], load=machine["load_average_before"], body=weights["body"], head=weights["head"],
        repeats=result["repeats"], steps=result["steps"], after=result["decode_after"],
        instructions="AMX tiles" if machine["amx"] else "AVX512-VNNI",
    )  # fmt: skip
    parts = [heading]
    for threads, race in result["threads"].items():
        parts.append(_race(threads, race, result))
    rows = {name: row for race in result["threads"].values() for name, row in race["runtimes"].items()}
    if rows:
        parts.append(settings(rows, "Versions and settings"))
    return "\n".join(parts)


def limits(race: dict[str, Any]) -> str:
    """Describe the machine's limits with this many threads."""
    bandwidth, peaks = race["bandwidth_bytes_per_s"], race["peak_int8_ops_per_s"]
    known = [f"read bandwidth {bandwidth / 1e9:.1f} GB/s"] if bandwidth else []
    known += [f"int8 peak by {kind} {rate / 1e12:.2f} Top/s" for kind, rate in peaks.items() if rate]
    return "; ".join(known)


def lines_of(columns: Sequence[str], rows: Sequence[Sequence[str]], missing: Mapping[str, str]) -> list[str]:
    """Format a table's lines, and below it the missing runtimes and the reasons."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return [*lines, "", *(f"Missing: {name}: {why}\n" for name, why in missing.items())]


def settings(rows: Mapping[str, Any], title: str) -> str:
    """Describe how each runtime was set up."""
    return f"## {title}\n\n" + "".join(_about(name, row) for name, row in rows.items())


def _race(threads: str, race: dict[str, Any], result: dict[str, Any]) -> str:
    peak = max(race["peak_int8_ops_per_s"].values(), default=0.0)
    rows = [
        _line(name, row, race["bandwidth_bytes_per_s"], peak, result["linear_weights"])
        for name, row in race["runtimes"].items()
    ]
    heading = f"## {threads} thread{'' if threads == '1' else 's'}\n\n{limits(race)}\n"
    return "\n".join([heading, *lines_of(_COLUMNS, rows, race["missing"])])


def _line(name: str, row: dict[str, Any], bandwidth: float | None, peak: float, weights: dict[str, int]) -> list[str]:
    if "decode_s" not in row:
        return [name, *[""] * (len(_COLUMNS) - 1)]
    decode_s, prefill_s = statistics.median(row["decode_s"]), statistics.median(row["prefill_512_s"])
    operations = 2 * (512 * weights["body"] + weights["head"])
    return [
        f"**{name}**" if name.startswith("ours") else name,
        rates(128, row["prefill_128_s"]),
        rates(512, row["prefill_512_s"]),
        rates(1, row["decode_s"]),
        f"{row['bytes_per_token'] / decode_s / bandwidth:.0%}" if bandwidth else "",
        f"{operations / prefill_s / peak:.1%}" if peak else "",
        f"{statistics.median(row['rss_bytes']) / 1e6:.0f}",
        f"{row['peak_rss_bytes'][0] / 1e6:.0f}",
        f"{statistics.median(row['load_s']):.2f}",
        f"{row['weight_bytes'] / 1e6:.1f}",
        f"{row['cosine']:.4f}" if "cosine" in row else "",
    ]


def rates(tokens: int, seconds: Sequence[float]) -> str:
    """Return tokens per second: the median, the least and the most."""
    middle, least, most = (tokens / t for t in (statistics.median(seconds), max(seconds), min(seconds)))
    return f"{middle:.1f} ({least:.1f}-{most:.1f})"


def _about(name: str, row: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
    read = f"; reads {row['bytes_per_token'] / 1e6:.1f} MB a token" if "bytes_per_token" in row else ""
    return f"- {name}: {row['settings']}; {versions}{read}\n"
