"""Measure what a recipe's target makes of graphs, for passes that choose by it: time, and memory of activations.

Each graph to time becomes a bundle as any other, and all are timed in turns, so that what slows this machine slows all.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.fx import GraphModule

from compressor.codegen.backend import make_backend
from compressor.codegen.lowering.live_bytes import live_bytes
from compressor.errors import UsageError
from compressor.export.bundle import write_bundle
from compressor.export.facts import run_facts
from compressor.pipeline.context import Context
from compressor.plan.prices import machine_prices
from compressor.plan.roofline import PROMPT_TOKENS, bound_ms
from compressor.progress import Reporter
from compressor.recipe.recipe import Recipe
from compressor.run.native import NativeBackend
from compressor.runtime import load

_ROUNDS, _STEPS = 40, 12
"""Rounds in which each takes its turn, and the steps of a turn, the first of which is not counted."""
_LEAST_ROUNDS, _LONG_S = 15, 60.0
"""Rounds that are run however long they take, and the seconds after which the others are left out."""


class Steps:
    """Time one step of decoders, in the middle of a text, or one image of networks of images
    (:attr:`compressor.pipeline.context.Context.step_seconds`).

    Args:
        recipe: says the target and how schedules are chosen.
        threads: that kernels run on; None takes the physical cores.
    """

    def __init__(self, recipe: Recipe, threads: int | None, reporter: Reporter) -> None:
        self._recipe, self._threads, self._reporter = recipe, threads, reporter

    def __call__(self, graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
        """Return seconds of a step of each, and in words how they were found.

        They are measured where this machine executes the target's kernels at their own speed; else they are bounds:
        the larger of reading all bytes and computing all products, on this machine.
        """
        backend: object = make_backend(self._recipe.target.build(), self._threads)
        if isinstance(backend, NativeBackend) and backend.runs_here and backend.timed and not backend.launcher:
            with_what = f"with {_context(graphs[0])} tokens of context" if _generates(graphs[0]) else "one at a time"
            return self._measure(graphs), f"measured on this machine, {with_what}"
        prices = machine_prices()
        bounds = [bound_ms(graph, prices) / 1e3 for graph in graphs]
        return bounds, "bounds of a roofline, for the target's kernels do not run at their own speed here"

    def _measure(self, graphs: Sequence[GraphModule]) -> list[float]:
        with ExitStack() as stack, self._reporter.task("time candidates", len(graphs)) as task:
            turns = []
            for number, graph in enumerate(graphs):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / str(number)
                folder.mkdir()
                turns.append(self._started(graph, folder))
                task.advance()
            return _in_turns(turns, _rounds(graphs[0]))

    def _started(self, graph: GraphModule, folder: Path) -> Callable[[], Any]:
        """Make a bundle and return what runs one step of it behind a text, or one image."""
        backend = make_backend(self._recipe.target.build(), self._threads)
        backend.compile(graph, self._recipe.tune, None, lambda _isa: None)
        write_bundle(folder, backend.write(folder, graph, False), run_facts(graph, self._recipe, Context(), 0))
        bundle = load(folder, threads=self._threads)
        if not _generates(graph):
            shapes: Any = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]
            sizes = [1 if not isinstance(size, int) else size for size in shapes[0]]
            return partial(bundle.run, np.random.default_rng(0).standard_normal(sizes, dtype=np.float32))
        prompt = _context(graph)
        session = bundle.session(capacity=prompt + _rounds(graph) * _STEPS)
        ids = np.random.default_rng(0).integers(0, graph.meta["model"].vocab_size, (1, prompt), dtype=np.int64)
        session.step(ids)
        return partial(session.step, np.ones((1, 1), np.int64))


class Peaks:
    """Count bytes that are held at once (:attr:`compressor.pipeline.context.Context.peak_bytes`).

    Args:
        recipe: says the target.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __call__(self, graph: GraphModule, with_inputs: bool) -> int:
        """Return the most bytes of activations that a graph's program for the target holds at once, of one image.

        Raises:
            UsageError: the target's programs are not those of a CPU.
        """
        target = self._recipe.target.build()
        backend: object = make_backend(target)
        if not isinstance(backend, NativeBackend) or backend.isa.archs:
            raise UsageError(
                f"peak_memory: activations are counted in programs for CPUs alone, and the target is "
                f"{self._recipe.target.name}; limit latency, weight_bytes or parameters"
            )
        return live_bytes(graph, target, with_inputs)


def _generates(graph: GraphModule) -> bool:
    return bool(graph.meta["model"].generates)


def _rounds(graph: GraphModule) -> int:
    """Return the rounds that fit into half of a model's positions, if it states a limit."""
    positions = graph.meta["model"].max_positions
    return max(1, min(_ROUNDS, positions // 2 // _STEPS)) if positions else _ROUNDS


def _context(graph: GraphModule) -> int:
    """Return the tokens in front of the steps that are timed, as the speed of bundles is measured."""
    positions = graph.meta["model"].max_positions
    return max(1, min(PROMPT_TOKENS, positions - _rounds(graph) * _STEPS)) if positions else PROMPT_TOKENS


def _in_turns(turns: Iterable[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the seconds of a step of each; they take turns.

    Other processes and other guests of the machine only ever add to a step, and come and go within seconds.  So the
    best step of each turn is compared with that of the first one in the same round, and the median is taken of rounds.
    """
    runs, best, begin = list(turns), list[list[float]](), time.perf_counter()
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and time.perf_counter() - begin > _LONG_S:
            break
        best.append([_best_step(run) for run in runs])
    found = np.array(best)
    level = float(np.median(found[:, 0]))
    return [level * float(share) for share in np.median(found / found[:, :1], axis=0)]


def _best_step(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest step of a turn."""
    run()  # another one's weights are in the caches
    seconds = []
    for _ in range(_STEPS - 1):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
