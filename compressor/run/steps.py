"""Time steps of decoders on the kernels that a recipe's target ships, for passes that choose by time.

Each decoder becomes a bundle as any other, and all are timed in turns, so that what slows this machine slows all.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch.fx import GraphModule

from compressor.codegen.backend import make_backend
from compressor.export.bundle import write_bundle
from compressor.export.facts import run_facts
from compressor.pipeline.context import Context
from compressor.plan.prices import machine_prices
from compressor.plan.roofline import PROMPT_TOKENS, rooflines
from compressor.progress import Reporter
from compressor.recipe.recipe import Recipe
from compressor.run.native import NativeBackend
from compressor.runtime import load

_ROUNDS, _STEPS = 15, 12
"""Rounds in which each decoder takes its turn, and the steps of a turn, the first of which is not counted."""


class Steps:
    """Time one step of decoders, in the middle of a text (:attr:`compressor.pipeline.context.Context.step_seconds`).

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
        if isinstance(backend, NativeBackend) and backend.runs_here and backend.timed:
            return self._measure(graphs), f"measured on this machine, with {_context(graphs[0])} tokens of context"
        prices = machine_prices()
        bounds = [rooflines(graph, prices)[-1].ms / 1e3 for graph in graphs]
        return bounds, "bounds of a roofline, for the target's kernels do not run at their own speed here"

    def _measure(self, graphs: Sequence[GraphModule]) -> list[float]:
        with ExitStack() as stack, self._reporter.task("time candidates", len(graphs)) as task:
            sessions = []
            for number, graph in enumerate(graphs):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / str(number)
                folder.mkdir()
                sessions.append(self._started(graph, folder))
                task.advance()
            return _in_turns(sessions, _rounds(graphs[0]))

    def _started(self, graph: GraphModule, folder: Path) -> Any:
        """Make a bundle and return a session of it that has read a text."""
        backend = make_backend(self._recipe.target.build(), self._threads)
        backend.compile(graph, self._recipe.tune, None, lambda _isa: None)
        write_bundle(folder, backend.write(folder, graph, False), run_facts(graph, self._recipe, Context(), 0))
        prompt = _context(graph)
        session = load(folder, threads=self._threads).session(capacity=prompt + _rounds(graph) * _STEPS)
        ids = np.random.default_rng(0).integers(0, graph.meta["model"].vocab_size, (1, prompt), dtype=np.int64)
        session.step(ids)
        return session


def _rounds(graph: GraphModule) -> int:
    """Return the rounds that fit into half of a model's positions, if it states a limit."""
    positions = graph.meta["model"].max_positions
    return max(1, min(_ROUNDS, positions // 2 // _STEPS)) if positions else _ROUNDS


def _context(graph: GraphModule) -> int:
    """Return the tokens in front of the steps that are timed, as the speed of bundles is measured."""
    positions = graph.meta["model"].max_positions
    return max(1, min(PROMPT_TOKENS, positions - _rounds(graph) * _STEPS)) if positions else PROMPT_TOKENS


def _in_turns(sessions: Iterable[Any], rounds: int) -> list[float]:
    """Return the median step of each session, in seconds, which take turns."""
    token = np.ones((1, 1), np.int64)
    times = [(session, list[float]()) for session in sessions]
    for _ in range(rounds):
        for session, seconds in times:
            session.step(token)  # another one's weights are in the caches
            for _ in range(_STEPS - 1):
                begin = time.perf_counter()
                session.step(token)
                seconds.append(time.perf_counter() - begin)
    return [statistics.median(seconds) for _, seconds in times]
