"""Run passes over an FX graph in order, with observers that look at it before the first and after each.

A pass is a frozen dataclass whose fields are its keys in a recipe (:mod:`compressor.registry`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from compressor.pipeline.context import Context, StageRecord
from compressor.registry import PASSES

if TYPE_CHECKING:
    from torch.fx import GraphModule


@runtime_checkable
class Pass(Protocol):
    """One rewriting of the graph; implement it as a frozen dataclass whose fields are its options.

    One that compares with the graph before the first linear was packed has ``needs_dense: ClassVar[bool] = True`` and
    finds it in ``Context.dense``.
    """

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Return the rewritten graph, which runs in PyTorch; the given one may be changed in place."""


Observer: TypeAlias = "Callable[[int, str, GraphModule, Context], None]"
"""Called after capture and after every pass with (index, name, graph, context); raises to stop the run."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order, and the observers that look at the graph before the first and after each of them.

    Every stage is timed and its weights counted, in ``Context.stages``.
    """

    passes: Sequence[Pass]
    observers: Sequence[Observer] = ()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Run all passes; errors of a pass are raised as they are."""
        self._finish(0, "capture", 0.0, graph, ctx)
        for index, step in enumerate(self.passes, start=1):
            begin, blocks, reused = time.perf_counter(), ctx.blocks, ctx.reused
            self._remember(index, graph, ctx)
            graph = step.run(graph, ctx)
            graph.recompile()  # for passes that leave it to us
            seconds = time.perf_counter() - begin
            self._finish(index, PASSES.name_of(step), seconds, graph, ctx, ctx.blocks - blocks, ctx.reused - reused)
            if ctx.results is not None:
                ctx.state = _next_state(ctx, step, graph)
        ctx.dense = None
        return graph

    def _remember(self, index: int, graph: GraphModule, ctx: Context) -> None:
        """Keep the graph as long as it is dense and this pass or a later one will compare with it."""
        from compressor.graph.model import twin

        if not any(getattr(step, "needs_dense", False) for step in self.passes[index - 1 :]):
            ctx.dense = None  # weights that passes made are in memory
        elif not ctx.records:
            ctx.dense = twin(graph)

    def _finish(
        self, index: int, name: str, seconds: float, graph: GraphModule, ctx: Context, blocks: int = 0, reused: int = 0
    ) -> None:
        from compressor.graph.model import weight_bytes

        ctx.stages.append(StageRecord(index, name, seconds, weight_bytes(graph), blocks, reused))
        for observe in self.observers:
            observe(index, name, graph, ctx)


def _next_state(ctx: Context, step: Pass, graph: GraphModule) -> str:
    """The digest after a pass: of what it was asked to do on which samples, or, if it is not ours, of what it left."""
    from compressor.host.digests import digest, tensors_sha256

    if PASSES.owns(step):
        learnt_from = None if ctx.samples is None else ctx.samples.sha256
        return digest(ctx.state, PASSES.name_of(step), dataclasses.asdict(step), learnt_from)  # type: ignore[call-overload]
    held = [*graph.named_parameters(), *graph.named_buffers()]
    return digest(str(graph.graph), tensors_sha256(held))
