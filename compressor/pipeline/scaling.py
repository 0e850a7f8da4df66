"""Scale the input channels of linears, and fold the inverse into the operators in front of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Inputs
from compressor.graph.folding import CannotFold, ScaleTarget, find_scale_target
from compressor.graph.provenance import describe
from compressor.graph.sites import EXPERT, Site
from compressor.numerics.products.deterministic import few_bits
from compressor.pipeline.context import Context
from compressor.pipeline.sites import error_context
from compressor.progress import Task

ChooseScale: TypeAlias = Callable[[Inputs, Sequence[Tensor], ScaleTarget], Tensor]
"""(statistics of the inputs, weights float32 [out, in] of all linears that read them, target) -> scale float64 [in],
positive.
"""


def scale_groups(
    graph: GraphModule, ctx: Context, pass_name: str, sites: Sequence[Site], task: Task, choose: ChooseScale
) -> dict[str, Tensor]:
    """Scale the inputs of every group of sites that share them, on calibration samples; the graph's function does not
    change.

    Args:
        task: progress of the pass; advances by one for each site.
    Returns:
        Mean square of each site's scaled inputs, float64 [in], by site name.
    """
    ids = ctx.calibration(pass_name).ids
    squares = {}
    options = CalibrationOptions(true_sequential=False, spill=ctx.spill)
    for group, inputs in CalibrationRun(graph, ids, sites, Inputs, options).groups():
        weights = [graph.get_parameter(site.weight_name).detach().float() for site in group]
        with error_context(group[0]):
            scale = scale_inputs(graph, ctx, pass_name, group, partial(choose, inputs, weights))
        for site in group:
            squares[site.name] = inputs.mean_square / (1.0 if scale is None else scale.double().square())
        task.advance(len(group))
    return squares


def scale_inputs(
    graph: GraphModule, ctx: Context, pass_name: str, group: Sequence[Site], choose: Callable[[ScaleTarget], Tensor]
) -> Tensor | None:
    """Scale the input channels of a group of sites that read the same tensor, if the scale can be folded in front of
    them.

    Args:
        choose: target -> scale float64 [in], positive.
    Returns:
        The scale as applied, float32 [in], or None if it cannot be folded. Notes say so, and name copied norms.
    """
    if group[0].module_class == EXPERT:
        weight = group[0].name.rpartition(".")[0]
        note = f"{pass_name}: {weight}: inputs of experts are not scaled: each reads chosen rows"
        ctx.notes += [] if note in ctx.notes else [note]
        return None
    names = ", ".join(site.name for site in group)
    try:
        target, readers = find_scale_target(graph, group[0].input)
    except CannotFold as reason:
        ctx.notes.append(f"{pass_name}: {names}: inputs are not scaled: {reason}")
        return None
    scale = few_bits(target.shared(choose(target))).float()
    target.apply(graph, readers, scale)
    if target.copied is not None:
        other = next(user for user in target.copied.users)
        norm = f"{describe(target.copied)}, which is also read by {describe(other)}"
        ctx.notes.append(f"{pass_name}: {names}: inputs are scaled in a copy of {norm}")
    return scale
