"""The embedding table packed: bytes, perplexity and speed of the reference model, with its linears in W4A16_G128.

    python benchmarks/embedding.py [--rounds 5] [--json]

Runs the quickstart with its table dense (float16), in W8A16 as it ships, and in 4 bits, then times the bundles by
turns (``compress bench``, 128 tokens of prompt, 64 new ones, medians of the rounds).  Perplexities are of the bundles'
kernels on the held-out text.  The bound of a decoding speed is the memory's bandwidth over the bytes that a token
reads; the whole model fits the caches of this machine, so that speeds stay far from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPTQ = "{gptq: {scheme: W4A16_G128, ignore: [lm_head]}}"
TABLES = {"float16": "", "W8A16": "W8A16", "W4A16_G64": "W4A16_G64", "W4A16_G32": "W4A16_G32", "NF4_G64": "NF4_G64"}


def compress(*arguments: str) -> dict[str, Any]:
    """Run ``compress ... --json`` and return its object."""
    command = [str(Path(sys.executable).with_name("compress")), *arguments, "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, scheme in TABLES.items():
            passes = f"[{GPTQ}{f', {{embedding: {{scheme: {scheme}}}}}' if scheme else ''}]"
            run = compress("run", "quickstart", "-o", f"{scratch}/{name}", "--set", f"passes={passes}")
            keys = ("weight_bytes", "perplexity", "dense_perplexity", "dense_weight_bytes", "bytes_per_token")
            rows[name] = {key: run[key] for key in keys} | {"decode": [], "prefill": []}
        for _ in range(options.rounds):
            for name, row in rows.items():
                found = compress("bench", f"{scratch}/{name}", "--repeats", "3")
                row["decode"].append(found["decode_tokens_per_s"])
                row["prefill"].append(found["prefill_tokens_per_s"])
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    first = rows["float16"]
    print("| table | weight bytes | of the dense model | perplexity | by the table | decode | prefill |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        ratios = {
            key: statistics.median(a / b for a, b in zip(row[key], first[key], strict=True))
            for key in ("decode", "prefill")
        }
        print(
            f"| {name} | {row['weight_bytes']:,} | 1/{row['dense_weight_bytes'] / row['weight_bytes']:.2f} | "
            f"{row['perplexity']:.4f} | {row['perplexity'] / first['perplexity'] - 1:+.3%} | "
            f"{statistics.median(row['decode']):,.0f} ({ratios['decode']:.2f}x) | "
            f"{statistics.median(row['prefill']):,.0f} ({ratios['prefill']:.2f}x) |"
        )


if __name__ == "__main__":
    main()
