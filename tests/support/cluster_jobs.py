"""What tests of executors run, and checks of a cluster as a program: ``python cluster_jobs.py FOLDER``.

The cluster is that of ``RAY_ADDRESS``, whose jobs must give the bits of this process, also where a worker is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import capture_once
from families import DECODERS, make
from packed_models import random_samples

from compressor.errors import UsageError
from compressor.executor.jobs import Arguments, Executor, InProcess
from compressor.executor.named import make_executor
from compressor.formats.format import Format
from compressor.graph.sites import linear_sites
from compressor.pipeline.context import Context
from compressor.pipeline.sensitivities import sensitivities
from compressor.progress import Reporter, Silent, Task


class Lines(Silent):
    """Count what is done, and keep what is told."""

    def __init__(self) -> None:
        self.done, self.told = 0, list[str]()

    def advance(self, amount: int = 1) -> None:
        self.done += amount

    def note(self, text: str) -> None:
        self.told.append(text)


def run(executor: Executor, name: str, arguments: list[dict[str, Any]]) -> tuple[list[Any], Lines]:
    seen = Lines()
    return executor.run(f"jobs_of_tests:{name}", iter(arguments), seen, seen), seen


def some_jobs() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    more = [weight[1:, ::2], torch.tensor([7], dtype=torch.int8), torch.ones(2, 2, dtype=torch.bfloat16)]
    return [{"values": weight, "again": more, "plus": 0.1 * number} for number in range(5)]


class Mortal(Executor):
    """Run jobs on another executor, the first of which ends its worker when it is nearly done."""

    def __init__(self, executor: Executor, mark: Path) -> None:
        self._executor, self._mark = executor, str(mark)

    def run(self, function: str, jobs: Iterable[Arguments], task: Task, reporter: Reporter) -> list[Any]:
        wrapped = ({"mark": self._mark, "function": function, "arguments": one} for one in jobs)
        return self._executor.run("jobs_of_tests:dies_once_in", wrapped, task, reporter)


def costs(executor: Executor) -> tuple[dict[str, list[float]], Lines]:
    """Return sensitivities of a small model's linears."""
    seen = Lines()
    graph, ctx = capture_once(make(*DECODERS["Llama"], True)), Context(executor=executor, reporter=seen)
    formats = [Format.parse(name) for name in ("W2A8_G16", "W8A16")]
    return sensitivities(graph, ctx, random_samples(97, 12).ids, linear_sites(graph), formats), seen


def check_cluster(folder: Path) -> None:
    """Run jobs on the cluster that answer, that end their worker and that refuse; then sensitivities."""
    expected, _ = run(InProcess(), "squares", some_jobs())
    with make_executor("ray") as executor:
        found, seen = run(executor, "squares", some_jobs())
        assert found == expected and seen.done == 5 and len(seen.told) == 5
        found, _ = run(executor, "dies_once", [{"mark": str(folder / "first"), "number": n} for n in range(4)])
        assert found == list(range(4)) and (folder / "first").is_file()
        with pytest.raises(UsageError, match="job one: is refused"):
            run(executor, "refuses", [{"number": n} for n in range(3)])
        assert costs(Mortal(executor, folder / "second"))[0] == costs(InProcess())[0]
        assert (folder / "second").is_file()


if __name__ == "__main__":
    check_cluster(Path(sys.argv[1]))
