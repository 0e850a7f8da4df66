"""Measure what a recipe's target makes of graphs, for passes that choose by it: time, and memory of activations.

Each graph to time becomes a bundle as any other, and all are timed in turns, so that what slows this machine slows all.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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

_STEPS = 12
"""Steps of a turn, the first of which is not counted: another one's weights are in the caches."""
_ROUNDS, _SECONDS = 40, 2.0
"""Rounds that are run at least, and seconds for each that takes its turn in them."""
_LEAST_ROUNDS, _LONG_S = 15, 60.0
"""Rounds that are run however long they take, and the seconds after which the others are left out."""


@dataclass(frozen=True)
class Turn:
    """Hold the calls that time one graph.

    Attributes:
        rewind: called before the first step of a turn: every turn has the same tokens in front of it.
        step: one step, or one image.
    """

    rewind: Callable[[], object]
    step: Callable[[], object]


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
            return in_turns(turns)

    def _started(self, graph: GraphModule, folder: Path) -> Turn:
        """Make a bundle and return what runs one step of it behind a text, or one image."""
        backend = make_backend(self._recipe.target.build(), self._threads)
        backend.compile(graph, self._recipe.tune, None, lambda _isa: None)
        write_bundle(folder, backend.write(folder, graph, False), run_facts(graph, self._recipe, Context(), 0))
        bundle = load(folder, threads=self._threads)
        if not _generates(graph):
            shapes: Any = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder")]
            sizes = [1 if not isinstance(size, int) else size for size in shapes[0]]
            image = np.random.default_rng(0).standard_normal(sizes, dtype=np.float32)
            return Turn(lambda: None, partial(bundle.run, image))
        prompt, token = _context(graph), np.ones((1, 1), np.int64)
        session = bundle.session(capacity=prompt + _STEPS)
        ids = np.random.default_rng(0).integers(0, graph.meta["model"].vocab_size, (1, prompt), dtype=np.int64)
        session.step(ids)

        def rewind() -> None:
            session.position = 0 if graph.meta["model"].states else prompt
            if not session.position:  # recurrent layers keep no earlier state
                session.step(ids)

        return Turn(rewind, partial(session.step, token))


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


def _context(graph: GraphModule) -> int:
    """Return the tokens in front of the steps that are timed, as the speed of bundles is measured."""
    positions = graph.meta["model"].max_positions
    return max(1, min(PROMPT_TOKENS, positions - _STEPS)) if positions else PROMPT_TOKENS


def in_turns(turns: Sequence[Turn]) -> list[float]:
    """Return the seconds of a step of each; they take turns.

    Other processes and other guests of the machine come and go within seconds, and change its speed.  So the median
    step of each turn is compared with that of the first one in the same round, and the median is taken of rounds
    (docs/decisions/0147-times-by-rounds.md).
    """
    rounds, begin = list[list[float]](), time.perf_counter()
    while True:
        rounds.append([_median_step(turn) for turn in turns])
        taken, count = time.perf_counter() - begin, len(rounds)
        if count >= _LEAST_ROUNDS and (taken > _LONG_S or (count >= _ROUNDS and taken > _SECONDS * len(turns))):
            break
    found = np.array(rounds)
    level = float(np.median(found[:, 0]))
    return [level * float(share) for share in np.median(found / found[:, :1], axis=0)]


def _median_step(turn: Turn) -> float:
    """Return the seconds of the median step of a turn."""
    turn.rewind()
    turn.step()
    seconds = []
    for _ in range(_STEPS - 1):
        begin = time.perf_counter()
        turn.step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
