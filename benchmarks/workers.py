"""Time of one and of two workers of a local pool, in turns: sensitivities of linears of the reference model.

    python benchmarks/workers.py [--turns 2]

Wall time is of no worth on a machine with other work, so processor time of this process and of each worker stands
beside it.  Workers have one thread each.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from compressor.capture.capture import capture
from compressor.data.text import load_samples
from compressor.executor.pool import LocalPool
from compressor.formats.format import Format
from compressor.graph.sites import linear_sites, match_sites
from compressor.host.resources import resource
from compressor.pipeline.context import Context
from compressor.pipeline.sensitivities import sensitivities
from compressor.recipe.recipe import load_text_spec

_FORMATS = [Format.parse(name) for name in ("W2A16_G64", "W4A16_G128", "W8A16")]
_SITES = r"re:model\.layers\."


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, by Linux's /proc."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2)
    turns = parser.parse_args().turns
    model = resource("models") / "reference"
    spec = load_text_spec("python_docs").model_copy(update={"samples": 64, "sequence_length": 256})
    ids, graph = load_samples(spec, model, 2048).ids, capture(model)
    sites = match_sites(linear_sites(graph), _SITES)[0]
    torch.set_num_threads(1)
    pools = {workers: LocalPool(workers) for workers in (1, 2)}
    found: dict[str, list[float]] = {}
    for turn in range(turns + 1):  # the first one starts the processes
        for workers, pool in pools.items():
            pool._threads = 1
            pids = [child._process.pid for child in pool._children]
            before, mine, start = [cpu_seconds(pid) for pid in pids], time.process_time(), time.perf_counter()
            costs = sensitivities(graph, Context(executor=pool), ids, sites, _FORMATS)
            wall, parent = time.perf_counter() - start, time.process_time() - mine
            if (found := found or costs) != costs:
                raise SystemExit(f"{workers} workers give other sensitivities")
            if turn:
                spent = ", ".join(f"{cpu_seconds(pid) - b:.2f}" for pid, b in zip(pids, before, strict=True))
                load = os.getloadavg()[0]
                print(f"{workers} workers: {wall:.1f} s; processor: {parent:.2f} s here, {spent} s; load {load:.1f}")
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
