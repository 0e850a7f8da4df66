"""Prune channels wherever the dataflow lets them go: rows of all that write them, columns of all that read them.

    conv [c, ...] -> depthwise [c, taps] -> conv [:, c]        a channel goes from all of its weights, or from none
    a [c, ...], b [c, ...]  ->  a + b  ->  conv [:, c]         also from a stream that several write and many read

The graph stays dense, with smaller linears and convolutions, so that every pass, format and kernel behind it works on
fewer weights.  Which channels are one is read from the dataflow (:mod:`compressor.graph.dependencies.channels`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, TrainingNeeds
from compressor.pipeline.site_plan import SitePlan
from compressor.pipeline.structured.widths import (
    Measure,
    Widths,
    choose_counts,
    find_widths,
    plan_widths,
    remove_widths,
    same_share,
)
from compressor.recipe.gates import parse_amount
from compressor.training.saliency import SALIENCY_SAMPLES, ChannelImportance, channel_scores, check_saliency


@dataclass(frozen=True)
class ChannelPrune(Pass):
    """Remove channels under a budget, and refit what reads the others by least squares.  Give exactly one budget.

    A ratio of channels removes about 1 - (1 - ratio)^2 of what linears between two pruned families cost, so give
    ``parameters``, ``macs`` or ``weight_bytes`` where these are meant.

    Attributes:
        ratio: share of each family's channels to remove, above 0 and below 1.
        parameters: share of the model's numbers that may be left.
        macs: share of the products of its linears and convolutions that may be left.
        weight_bytes: bytes of all the model's parameters after this pass; a number, or text such as ``4 MB``.
        allocate: ``global`` removes the least important channels of all families, in units of each family's mean;
            ``uniform`` the same share of each.
        importance: ``activation`` goes by the size of a channel's contribution to what reads it, ``magnitude`` by the
            weights that read it alone, ``taylor`` by what the loss of 64 samples at most changes by without it, to
            first order: of next tokens, or of the class that the model predicts.
        refit: whether what reads the channels is refitted to the outputs that it had.
        multiple: what is left of a family is rounded up to a multiple of this, which kernels like.
        least: share of each family that stays in any case.
        targets: class names, module names or ``re:`` patterns of linears and convolutions whose channels are removed.
        ignore: patterns of linears and convolutions whose channels stay.
    """

    inexact = (
        "decides the width of each layer as it runs, and config.json has one number for all of them: give "
        "channel_prune `allocate: uniform`"
    )

    ratio: float | None = None
    parameters: float | None = None
    macs: float | None = None
    weight_bytes: float | str | None = None
    allocate: Literal["global", "uniform"] = "global"
    importance: ChannelImportance = "activation"
    refit: bool = True
    multiple: int = 1
    least: float = 0.1
    targets: str | tuple[str, ...] = "re:.*"
    ignore: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        budgets = ("ratio", "parameters", "macs", "weight_bytes")
        given = [name for name in budgets if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise UsageError(f"channel_prune: give exactly one budget of {', '.join(budgets)}; found {found}")
        for name in ("ratio", "parameters", "macs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise UsageError(f"channel_prune: {name} {value:g} is not between 0 and 1; 0.5 is half")
        if self.weight_bytes is not None and parse_amount("weight_bytes", self.weight_bytes) <= 0:
            raise UsageError(f"channel_prune: weight_bytes {self.weight_bytes}: give a number above 0")
        if not 1 <= self.multiple <= 4096:
            raise UsageError(f"channel_prune: multiple {self.multiple} is not between 1 and 4096")
        if not 0 <= self.least < 1 - (self.ratio or 0):
            raise UsageError(f"channel_prune: least {self.least:g} is not between 0 and what the budget leaves")

    @property
    def runs_samples(self) -> bool:
        """True where channels are ranked by their activations."""
        return self.importance == "activation"

    def plans_sizes(self, graph: GraphModule) -> bool:
        """Return whether each family loses the same share: False where the channels of all of them compete."""
        return self.allocate != "global"

    @property
    def training(self) -> TrainingNeeds | None:
        """Return what gradients take, where channels are ranked by them."""
        return TrainingNeeds(SALIENCY_SAMPLES, 1, False) if self.importance == "taylor" else None

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse a model without such channels, or a budget that they cannot meet."""
        self._counts(graph, widths := self._widths(graph), _unranked(widths), False)
        if self.importance == "taylor":
            check_saliency("channel_prune", graph)

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Remove the channels; each reader's record has its relative squared error."""
        widths = self._widths(graph)
        scores = channel_scores("channel_prune", graph, ctx, widths, self.importance)
        counts = self._counts(graph, widths, scores, self.allocate == "global")
        chosen = [torch.argsort(s, stable=True)[:n].sort().values for s, n in zip(scores, counts, strict=True)]
        return remove_widths(graph, ctx, "channel_prune", self, self.refit, widths, chosen)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan as if all families lost the same share, on a graph without weights."""
        widths = self._widths(graph)
        counts = self._counts(graph, widths, _unranked(widths), False)
        if self.allocate == "global":
            ctx.notes.append(
                "channel_prune: planned as if all families lost the same share; the run decides by importance, within "
                "the same budget"
            )
        return plan_widths(graph, widths, [torch.arange(count) for count in counts], self.refit)

    def _widths(self, graph: GraphModule) -> Widths:
        return find_widths(graph, "channel_prune", self.targets, self.ignore)

    def _counts(self, graph: GraphModule, widths: Widths, scores: list[Tensor], is_global: bool) -> list[int]:
        """Return how many channels of each family go.

        Raises:
            UsageError: nothing would go, a family would lose its last channel, or all that can go is not enough.
        """
        if self.ratio is not None and not is_global:
            return same_share("channel_prune", widths, self.ratio, self.multiple)
        return choose_counts(
            "channel_prune", graph, widths, scores, *self._budget, self.multiple, self.least, is_global
        )

    @property
    def _budget(self) -> tuple[Measure, float]:
        """What the budget counts, and a share of it, or bytes."""
        if self.weight_bytes is not None:
            return "weight_bytes", parse_amount("weight_bytes", self.weight_bytes)
        if self.ratio is not None:
            return "channels", 1 - self.ratio
        return ("parameters", self.parameters) if self.parameters is not None else ("macs", self.macs or 0.0)


def _unranked(widths: Widths) -> list[Tensor]:
    return [torch.zeros(family.count) for family in widths.families]
