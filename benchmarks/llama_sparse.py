"""Decode steps of an 852 M Llama whose linears leave 80 and 90% of their blocks out, against dense int8, by turns.

    python benchmarks/llama_sparse.py WORK_FOLDER [--sparsities 80,90] [--turns 15] [--threads 2] [--markdown FILE]

The checkpoint is the one of benchmarks/llama_852m.py: random weights, so that only time means something.  Of each tile
of 16 rows the columns with the largest weights are kept and rounded to the nearest; nothing is calibrated.  Bundles
that lie in WORK_FOLDER already are not made again; every one is checked in a fresh process before it is timed, as
`compress verify` does.  In a turn each bundle decodes 64 tokens after a prompt of 128; a ratio is the median over the
turns of the dense bundle's time over the row's.  The bound of a ratio is that of the bytes that a token reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bundles import lower
from llama_852m import make_model

from compressor.capture.capture import capture
from compressor.codegen.targets.x86 import X86
from compressor.evaluate.speed import Worker
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, leave_out
from compressor.graph.model import clone_graph
from compressor.host.machine import cpu_name
from compressor.numerics.nearest import rtn_quantize, weight_error
from compressor.numerics.sparsity.block_sparsity import largest_blocks
from compressor.pipeline.context import Context
from compressor.pipeline.sites import choose_sites, compress_site
from compressor.recipe.recipe import Recipe
from compressor.verify.smoke import smoke_test

DENSE = "W8A8"


def rounded(weight: Any, fmt: Format) -> PackedWeight:
    """Round a weight [out, in] to the nearest; of blocks that are left out, the largest are kept."""
    blocks = fmt.extra(ColumnBlocks)
    if blocks is None:
        return rtn_quantize(weight, fmt)
    kept = largest_blocks(weight, None, fmt.stored_columns(weight.shape[1]))  # [tiles, count]
    rows = kept.repeat_interleave(16, dim=0)[: len(weight)]
    return leave_out(rtn_quantize(weight.gather(1, rows), fmt.of_kept), kept, weight.shape[1], blocks)


def make_bundle(dense: Any, name: str, folder: Path, threads: int) -> None:
    """Write a bundle of a captured model with every linear in a format."""
    fmt, graph, context = Format.parse(name), clone_graph(dense), Context()
    for site in choose_sites(graph, "llama_sparse", fmt.of_kept, "Linear", ()):
        weight = graph.get_parameter(site.weight_name).detach().float()
        packed = rounded(weight, fmt)
        compress_site(graph, context, site, packed, "llama_sparse", error=weight_error(weight, packed))
    graph.recompile()
    passes = [{"rtn": {"scheme": fmt.of_kept.name, "targets": "Linear"}}]
    recipe = Recipe.from_dict({"model": str(folder), "passes": passes, "target": "x86"})
    part = folder.with_name(f"{folder.name}.part")  # an interrupted one is made again
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    lower(dense, graph, recipe, context, part, threads, "quick")
    part.rename(folder)


def race(folders: list[Path], turns: int, threads: int) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Return the milliseconds of a step by bundle and turn, and what each read."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(folder, threads=threads, prompt_tokens=128, new_tokens=64)) for folder in folders
        ]
        rounds = [[worker.repeat()["latency_ms"] for worker in workers] for _ in range(-2, turns)]
        return [list(times) for times in zip(*rounds[2:], strict=True)], [worker.finish() for worker in workers]


def main() -> None:
    """Make what is missing, check, race, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparsities", default="80,90")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16, help="fewer make another model, for trials")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    model = args.folder / f"llama-{args.layers}"
    if not (model / "config.json").exists():
        make_model(model, layers=args.layers)
    names = [DENSE, *(f"{DENSE}_B16x1@{sparsity}" for sparsity in args.sparsities.split(","))]
    folders = [args.folder / f"{model.name}-{name}" for name in names]
    missing = [(name, folder) for name, folder in zip(names, folders, strict=True) if not folder.is_dir()]
    dense = capture(str(model)) if missing else None
    for name, folder in missing:
        make_bundle(dense, name, folder, args.threads)
    errors = [smoke_test(folder, args.threads) for folder in folders]
    begin = os.getloadavg()[0]
    times, facts = race(folders, args.turns, args.threads)
    lines = [
        "# Decode steps of a Llama with blocks left out\n",
        f"`python benchmarks/llama_sparse.py WORK_FOLDER --turns {args.turns} --threads {args.threads}`\n",
        f"{cpu_name()}, {X86().resolve().name}, {args.threads} thread(s), {args.turns} turns, load average {begin:.2f} "
        f"before and {os.getloadavg()[0]:.2f} after.\n",
        "| linears | ms a step | times dense | bound | reached | MB a token | error of the kernels (at most) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, time, fact, error in zip(names, times, facts, errors, strict=True):
        ratio = statistics.median(base / own for base, own in zip(times[0], time, strict=True))
        bound = facts[0]["bytes_per_token"] / fact["bytes_per_token"]
        cells = [f"{statistics.median(time):.2f}", f"{ratio:.2f}", f"{bound:.2f}", f"{ratio / bound:.0%}"]
        cells += [f"{fact['bytes_per_token'] / 1e6:.1f}", f"{error.error:.2g} ({error.tolerance:.2g})"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
