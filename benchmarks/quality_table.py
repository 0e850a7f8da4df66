"""The Markdown of benchmarks/quality.py."""

from __future__ import annotations

import math
from typing import Any

_HEADING = """\
# Quality by method and format: {model}

Made by `python benchmarks/quality.py {model}`. Dense perplexity {perplexity:.4f}. Calibrated on 64 samples of 256
tokens, evaluated on 16,384 tokens in windows of 256 with stride 128. Bits are stored bits a weight of the compressed
linears, counted on what is on the disk, with scales, zero points, indices and padding. Our perplexity is that of the
bundle's kernels, a peer's that of its dequantised weights in our float32 graph. Seconds and peak memory are of one
process with {threads}, from the loaded model to the compressed one, on a machine that others used too: CPU seconds
are the ones to compare. `lm_head` and embeddings stay dense everywhere.
"""
_COLUMNS = "| who | method | format | bits | perplexity | increase | KL | seconds | CPU s | peak RSS, MB |\n"


def table(model: str, dense: float, rows: list[dict[str, Any]]) -> str:
    """Rows by stored bits, the widths apart, each with how our best stands to the best peer."""
    threads = sorted({row["threads"] for row in rows})
    words = " or ".join(map(str, threads)) + (" thread" if threads == [1] else " threads")
    parts = [_HEADING.format(model=model, perplexity=dense, threads=words)]
    widths: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        widths.setdefault(math.floor(row["bits"]), []).append(row)
    for width in sorted(widths, reverse=True):
        group = sorted(widths[width], key=lambda row: row["perplexity"])
        body = "".join(_line(row, dense) for row in group)
        parts.append(f"## {width} to {width + 1} bits\n\n{_COLUMNS}{'|---' * 10}|\n{body}")
        parts.append(_verdict(group))
    settings = {row["who"]: row["version"] for row in rows if row["who"] != "ours"}
    if settings:
        parts.append("Peers: " + "; ".join(f"{who} {version}" for who, version in settings.items()) + ".\n")
        described = {(row["who"], row["method"]): row["settings"] for row in rows if row["who"] != "ours"}
        parts.append("".join(f"- {who} {method}: {text}\n" for (who, method), text in described.items()))
    return "\n".join(part for part in parts if part)


def _line(row: dict[str, Any], dense: float) -> str:
    who = f"**{row['who']}**" if row["who"] == "ours" else row["who"]
    return (
        f"| {who} | {row['method']} | {row['format']} | {row['bits']:.3f} | {row['perplexity']:.4f} | "
        f"{row['perplexity'] / dense - 1:+.2%} | {row['kl_divergence']:.5f} | {row['seconds']:.1f} | "
        f"{row['cpu_s']:.1f} | {row['peak_rss_bytes'] / 1e6:.0f} |\n"
    )


def _verdict(group: list[dict[str, Any]]) -> str:
    """Our best row of no more bits than the best peer's, if there are both."""
    peers = [row for row in group if row["who"] != "ours"]
    if not peers:
        return ""
    best = peers[0]
    ours = [row for row in group if row["who"] == "ours" and row["bits"] <= best["bits"] + 5e-4]
    peer = f"{best['who']} {best['method']} {best['format']} ({best['bits']:.3f} bits, {best['perplexity']:.4f})"
    if not ours:
        return f"Best peer: {peer}; no row of ours with as few bits.\n"
    mine = ours[0]
    verdict = "ahead" if mine["perplexity"] < best["perplexity"] else "behind"
    return (
        f"Best peer: {peer}; ours within its bits: {mine['method']} {mine['format']} ({mine['bits']:.3f} bits, "
        f"{mine['perplexity']:.4f}): {verdict}.\n"
    )
