"""Let prompts stop behind early layers: later layers take keys and values from there, and run the wanted tokens alone.

SwiftKV (Qiao et al. 2024, arXiv 2410.03960).  Of a prompt only the last token's logits are wanted, and a later layer is
read by other tokens through its keys and values alone.  Made from the residual stream behind the early layers, these
cost two linears for each token, or, where neighbouring layers share them, two for a group.

    all tokens     early layers -> x -> norm -> keys, values of layer n, n + 1, ...
    wanted tokens                  '-> layer n -> layer n + 1 -> ... -> logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.kept_tokens.change import Change, stop_prompts
from compressor.graph.kept_tokens.layers import CannotKeep, attention_weights
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import Site
from compressor.numerics.products.deterministic import total
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_untouched
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.settings import TeacherOptions
from compressor.training.teacher import TaughtPass, towards
from compressor.training.trainable import TrainableGraph


@dataclass(frozen=True, kw_only=True)
class SwiftKv(TeacherOptions, TaughtPass, Pass):
    """Compute keys and values of later layers behind an early one, so that prompt tokens stop there.

    Queries, keys and values of later layers, and the one norm in front of the latter, are trained to predict what the
    model did before; everything else stays.  A share of the samples is held out; the weights with the smallest loss
    there are kept, the first ones included.  Passes that prune or pack come behind.

    Attributes:
        after: layers with attention that all tokens run: how many, or, below 1, their share, rounded down.
        share: neighbouring later layers that share keys and values, made with the mean of their weights (AcrossKV); 1
            shares none.
        hidden: weight in the loss of the hidden state's error in front of the last two layers, relative to its size.
        steps: of the optimiser; 0 trains nothing.
    """

    after: int | float = 0.5
    share: int = 1
    temperature: float = 2.0
    hidden: float = 1.0
    steps: int = 400
    batch: int = 4
    evaluate_every: int = 50

    needs_dense: ClassVar[bool] = False  # the model as this pass finds it teaches
    may_train_nothing: ClassVar[bool] = True
    teaches_itself: ClassVar[bool] = True

    def __post_init__(self) -> None:
        is_share = isinstance(self.after, float)
        if not 0 < self.after <= (1 if is_share else 10**9):
            what = "a share of the layers, above 0.0 and at most 1.0" if is_share else "a number of layers from 1"
            raise UsageError(f"swift_kv: after {self.after} is not {what}")
        if not 1 <= self.share <= 10**9:
            raise UsageError(f"swift_kv: share {self.share} is not a whole number from 1")
        super().__post_init__()

    @property
    def less_memory(self) -> list[str]:
        """Return what takes less memory."""
        return [super().less_memory[0], "raise `after`"]

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse models whose later layers cannot run kept tokens alone, and what training refuses."""
        if graph.meta["model"].leaves_early:
            raise UsageError("swift_kv: tokens run fewer blocks by early_exit or skip_decode; leave one of them out")
        changed = clone_graph(graph)
        if self._change(changed, Context()) is not None and self.steps:
            super().requires(changed, ctx)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Change the graph as :meth:`run` will, without training."""
        return plan_untouched(graph) if self._change(graph, ctx) is None else super().plan(graph, ctx)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Change the graph, and train it towards what it was."""
        teacher = clone_graph(graph)
        twins = dict(zip(graph.graph.nodes, teacher.graph.nodes, strict=True))
        if (change := self._change(graph, ctx)) is None:
            return graph
        compared = [] if change.stream is None else [(change.copies[change.stream], twins[change.stream])]

        def taught(
            graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
        ) -> tuple[TrainableGraph, Objective]:
            student = TrainableGraph(graph, names, [own for own, _ in compared], device)
            model = TrainableGraph(teacher, (), [theirs for _, theirs in compared], device)
            return student, towards(student.info, model, self.temperature, self.hidden if compared else 0.0)

        if self.steps:
            self.run_prepared(graph, ctx, taught)
        self._record(graph, ctx, change, teacher)
        return graph

    def chosen(self, graph: GraphModule) -> tuple[list[Site], list[str]]:
        """Return the linears of later layers' queries, keys and values, and all parameters to train."""
        return attention_weights(graph)

    def replace(self, graph: GraphModule, ctx: Context, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> None:
        """Put trained weights in the place of the old ones; :meth:`run` records them with what else has changed."""
        for name, value in tensors.items():
            set_parameter(graph, name, value)

    def _change(self, graph: GraphModule, ctx: Context) -> Change | None:
        try:
            change = stop_prompts(graph, self.after, self.share)
        except CannotKeep as error:
            raise UsageError(f"swift_kv: {error}") from error
        ctx.notes.append(f"swift_kv: {'all layers run all tokens: nothing changes' if change is None else change.said}")
        return change

    def _record(self, graph: GraphModule, ctx: Context, change: Change, before: GraphModule) -> None:
        """Record each linear of the later layers that is trained, merged into another one, or reads another tensor."""
        for group in change.groups:
            for layer in group:
                pairs = [(layer.keys, group[0].keys), (layer.values, group[0].values)]
                if self.steps:
                    pairs += [(site, site) for site in layer.queries]
                for site, now in pairs:
                    old, new = before.get_parameter(site.weight_name), graph.get_parameter(now.weight_name)
                    size, norm = old.numel() * old.element_size(), float(total(old.double().square()))
                    error = float(total((new.double() - old.double()).square())) / norm if norm else 0.0
                    note = "" if now is site else f"gone: {now.name} makes what it made"
                    left = size if now is site else 0
                    record = SiteRecord(
                        site.name, self.name, "", size, left, float(f"{error:.6g}"), "weight", note=note
                    )
                    ctx.records.append(record)
