"""Run passes over an FX graph in order, with observers before the first pass and after each.

A pass is a frozen dataclass whose fields are its keys in a recipe (:mod:`compressor.registry`).
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.pipeline.context import Context, StageRecord
from compressor.registry import PASSES

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compressor.pipeline.site_plan import SitePlan


class Pass(ABC):
    """One rewriting of the graph; extend it with a frozen dataclass whose fields are its options in a recipe.

    Only :meth:`run` is required.  Everything else that a run asks of a pass is declared here, with a default.

    Attributes:
        scheme_format: class that parses the names under an option ``scheme``.
        choosing_options: options that only choose the linears; they are not part of a finished segment's cache key.
        costly_options: switches that take memory or time, which advice for a run that does not fit turns off.
        inexact: what it decides as it runs where :meth:`plans_sizes` is false, and what to do about it, for messages.
        needs_dense: whether it compares with the graph before the first linear was packed, ``Context.dense``.
    """

    scheme_format: ClassVar[Any] = Format
    choosing_options: ClassVar[tuple[str, ...]] = ("targets", "ignore")
    costly_options: ClassVar[tuple[str, ...]] = ()
    inexact: ClassVar[str] = "decides the sizes of layers as it runs"
    needs_dense: ClassVar[bool] = False

    @abstractmethod
    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Return the rewritten graph, which runs in PyTorch; the given one may be changed in place."""

    def requires(self, graph: GraphModule, ctx: Context) -> None:  # noqa: B027 (most passes serve every graph)
        """Raise a UsageError that names the part of the graph that this pass cannot work on.

        All passes are asked before the first of them runs, on the graph that earlier passes will leave, without
        weights.
        """

    def plan(self, graph: GraphModule, ctx: Context) -> Sequence[SitePlan] | None:
        """Rewrite a graph without weights as :meth:`run` will, and return each linear's prediction.

        Returns:
            One plan per linear; None if the pass predicts nothing, and its cost is not in the plan.
        """
        return None

    @property
    def runs_samples(self) -> bool:
        """True if :meth:`run` takes the calibration samples through the graph beyond the runs that the plan's sites
        state.
        """
        return False

    def forward_samples(self, graph: GraphModule, samples: int) -> float:
        """Return how many samples :meth:`run` takes through a graph, each time counted, where :attr:`runs_samples` is
        true.

        Args:
            samples: that there are.
        """
        return samples

    def timed_graphs(self, graph: GraphModule) -> int:
        """Return how many graphs :meth:`run` makes kernels of, to time them."""
        return 0

    def plans_sizes(self, graph: GraphModule) -> bool:
        """Return whether :meth:`plan` leaves each layer of a graph, and as wide, as :meth:`run` will, whatever the
        samples.
        """
        return True

    @property
    def training(self) -> TrainingNeeds | None:
        """Return what :meth:`run` takes forwards and backwards, if it trains."""
        return None


@dataclass(frozen=True)
class TrainingNeeds:
    """Runs of the graph that a training takes.

    Attributes:
        samples: taken forwards and backwards, each time counted.
        batch: of them that run at once.
        has_teacher: whether the dense model runs on each as well.
        on_gpu: whether it takes them through a GPU, whose time and memory nothing foresees.
    """

    samples: int
    batch: int
    has_teacher: bool
    on_gpu: bool = False


Observer: TypeAlias = "Callable[[int, str, GraphModule, Context], None]"
"""Called after capture and after every pass with (index, name, graph, context); raises to stop the run."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in order, and the observers that see the graph before the first pass and after each.

    Every stage's time and weight bytes are recorded in ``Context.stages``.
    """

    passes: Sequence[Pass]
    observers: Sequence[Observer] = ()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Run all passes and return the graph.

        Raises:
            UsageError: something among them is not a pass, or does not return a graph.
            CompressorError: whatever a pass raises; other errors of a pass that is not ours as one that names its line.
        """
        passes = cast("object", self.passes)
        if not isinstance(passes, Sequence):
            raise UsageError(f"passes: {passes!r:.80}; give a list of passes")
        for given in passes:
            if not isinstance(given, Pass):
                advice = f"give one: {given.__name__}(...)" if isinstance(given, type) else "extend compressor.Pass"
                raise UsageError(f"{given!r:.80} among the passes is not a pass; {advice}")
        self._finish(0, "capture", 0.0, graph, ctx)
        for index, step in enumerate(self.passes, start=1):
            begin = time.perf_counter()
            blocks = ctx.blocks
            reused = ctx.reused
            self._remember(index, graph, ctx)
            graph = _rewritten(step, graph, ctx)
            seconds = time.perf_counter() - begin
            self._finish(index, PASSES.name_of(step), seconds, graph, ctx, ctx.blocks - blocks, ctx.reused - reused)
            if ctx.results is not None:
                ctx.state = _next_state(ctx, step, graph)
        ctx.dense = None
        return graph

    def _remember(self, index: int, graph: GraphModule, ctx: Context) -> None:
        """Keep the dense graph for as long as this pass or a later one needs it."""
        from compressor.graph.model import clone_graph

        if not any(step.needs_dense for step in self.passes[index - 1 :]):
            ctx.dense = None  # frees dense weights that passes made, which are in memory
        elif not ctx.records:
            ctx.dense = clone_graph(graph)

    def _finish(
        self, index: int, name: str, seconds: float, graph: GraphModule, ctx: Context, blocks: int = 0, reused: int = 0
    ) -> None:
        from compressor.graph.model import weight_bytes

        ctx.stages.append(StageRecord(index, name, seconds, weight_bytes(graph), blocks, reused))
        for observe in self.observers:
            observe(index, name, graph, ctx)


def _rewritten(step: Pass, graph: GraphModule, ctx: Context) -> GraphModule:
    from torch.fx import GraphModule

    try:
        result: object = step.run(graph, ctx)
    except CompressorError:
        raise
    except Exception as error:
        if PASSES.owns(step):
            raise
        raise CompressorError(f"{type(step).__name__}.run: {type(error).__name__}: {error}{_where(error)}") from error
    if not isinstance(result, GraphModule):
        raise UsageError(f"{type(step).__name__}.run returned {result!r:.80}; a pass returns the rewritten graph")
    result.meta = result.meta or graph.meta  # a new graph, as torch.fx makes it, has none
    result.recompile()  # passes need not recompile
    return result


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({frame.filename}:{frame.lineno})"


def _next_state(ctx: Context, step: Pass, graph: GraphModule) -> str:
    """Return the digest after a pass: of its options and samples, or of the resulting graph if the pass is not ours."""
    from compressor.host.digests import digest, tensors_sha256

    if PASSES.owns(step):
        learnt_from = None if ctx.samples is None else ctx.samples.sha256
        return digest(ctx.state, PASSES.name_of(step), dataclasses.asdict(step), learnt_from)  # type: ignore[call-overload]
    held = [*graph.named_parameters(), *graph.named_buffers()]
    return digest(str(graph.graph), tensors_sha256(held))
