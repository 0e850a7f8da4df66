"""Format the results of benchmarks/quality.py as Markdown."""

from __future__ import annotations

import re
from typing import Any

_HEADING = """\
# Quality by method and format: {model}

Made by `python benchmarks/quality.py {model}`. Dense perplexity {perplexity:.4f}. Calibrated on 64 samples of 256
tokens, evaluated on 16,384 tokens in windows of 256 with stride 128. Bits are stored bits a weight of the compressed
linears, counted on what is on the disk, with scales, zero points, indices and padding. Our perplexity is that of the
bundle's kernels, a peer's that of its dequantised weights in our float32 graph. Seconds and peak memory are of one
process with {threads}, from the loaded model to the compressed one, on a machine that others used too: CPU seconds
are the ones to compare. `lm_head` and embeddings stay dense everywhere. Another kind of CPU moves a row's perplexity
by up to 0.3% (0.8% at 2 bits), so within 0.3% nobody is called ahead.
"""
_LEVEL = 0.003
_COLUMNS = "| who | method | format | bits | perplexity | increase | KL | seconds | CPU s | peak RSS, MB |\n"


def table(model: str, rows: list[dict[str, Any]], wanted: int) -> str:
    """Rows by the width that they are named for, and how ours stand to the peers'; ``wanted`` rows make it whole."""
    dense = rows[0]["dense_perplexity"]
    threads = sorted({row["threads"] for row in rows})
    words = " or ".join(map(str, threads)) + (" thread" if threads == [1] else " threads")
    parts = [_HEADING.format(model=model, perplexity=dense, threads=words)]
    if len(rows) < wanted:
        parts.append(
            f"**Incomplete: {len(rows)} of {wanted} rows are measured; who is ahead holds among these only.**\n"
        )
    levels: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        levels.setdefault(_level(row["format"]), []).append(row)
    for zeros, width in sorted(levels, key=lambda level: (level[0], -level[1])):
        group = sorted(levels[zeros, width], key=lambda row: row["perplexity"])
        body = "".join(_line(row, dense) for row in group)
        parts.append(f"## {f'{zeros}% zeros' if zeros else f'{width} bits'}\n\n{_COLUMNS}{'|---' * 10}|\n{body}")
        ours = [row for row in rows if row["who"] == "ours"]
        parts.append(_verdict_on_zeros(group, ours) if zeros else _verdict(group, ours))
    versions = {row["who"]: row["version"] for row in rows if row["who"] != "ours"}
    if versions:
        parts.append("Peers: " + "; ".join(f"{who} {version}" for who, version in versions.items()) + ".\n")
        described = {(row["who"], row["method"]): row["settings"] for row in rows if row["who"] != "ours"}
        parts.append("".join(f"- {who} {method}: {text}\n" for (who, method), text in described.items()))
    return "\n".join(part for part in parts if part)


def _level(name: str) -> tuple[int, int]:
    """Return the percentage of zeros that a format is named for, or 0 and its width: its first number, or a budget."""
    if found := re.search(r"@(\d+)|_(\d):(\d)", name):
        percent, kept, of = found.groups()
        return int(percent) if percent else round(100 * (1 - int(kept) / int(of))), 0
    found = re.search(r"\d+", name)
    if found is None:
        raise ValueError(f"{name}: no width in the name of the format")
    return 0, int(found[0])


def _line(row: dict[str, Any], dense: float) -> str:
    who = f"**{row['who']}**" if row["who"] == "ours" else row["who"]
    return (
        f"| {who} | {row['method']} | {row['format']} | {row['bits']:.3f} | {row['perplexity']:.4f} | "
        f"{row['perplexity'] / dense - 1:+.2%} | {row['kl_divergence']:.5f} | {row['seconds']:.1f} | "
        f"{row['cpu_s']:.1f} | {row['peak_rss_bytes'] / 1e6:.0f} |\n"
    )


def _verdict_on_zeros(group: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """For each row of ours, our best row without zeros and with no more bits; for a peer's, our best with as many."""
    lines = []
    dense = [row for row in ours if not _level(row["format"])[0]]
    mine = [row for row in group if row["who"] == "ours"]
    for row in group:
        within = [other for other in dense if other["bits"] <= row["bits"] + 5e-4] if row["who"] == "ours" else mine
        if not within:
            lines.append(f"- {row['who']} {row['method']} {row['format']}: nothing of ours to compare with\n")
            continue
        other = min(within, key=lambda other: other["perplexity"])
        lead = other["perplexity"] / row["perplexity"] - 1
        ahead, behind = ("zeros pay", "fewer bits pay more") if row["who"] == "ours" else ("ours BEHIND", "ours ahead")
        verdict = "level" if abs(lead) <= _LEVEL else ahead if lead > 0 else behind
        lines.append(
            f"- {row['who']} {row['method']} {row['format']} ({row['bits']:.3f} bits, {row['perplexity']:.4f}) against "
            f"{other['method']} {other['format']} ({other['bits']:.3f} bits, {other['perplexity']:.4f}): {verdict}\n"
        )
    words = "Against our best format without zeros and with no more bits; peers against our best with as many zeros:"
    return f"{words}\n\n{''.join(lines)}"


def _verdict(group: list[dict[str, Any]], ours: list[dict[str, Any]]) -> str:
    """For each peer's row, best first, our best row of whatever width with no more stored bits."""
    lines = []
    for row in group:
        if row["who"] == "ours":
            continue
        peer = f"{row['who']} {row['method']} {row['format']}"
        within = [mine for mine in ours if mine["bits"] <= row["bits"] + 5e-4]
        if not within:
            lines.append(f"- {peer} ({row['bits']:.3f} bits): no row of ours with as few bits\n")
            continue
        mine = min(within, key=lambda mine: mine["perplexity"])
        lead = row["perplexity"] / mine["perplexity"] - 1
        verdict = "level" if abs(lead) <= _LEVEL else "ours ahead" if lead > 0 else "ours BEHIND"
        lines.append(
            f"- {peer} ({row['bits']:.3f} bits, {row['perplexity']:.4f}) against {mine['method']} {mine['format']} "
            f"({mine['bits']:.3f} bits, {mine['perplexity']:.4f}): {verdict}\n"
        )
    return "At no more stored bits:\n\n" + "".join(lines) if lines else ""
