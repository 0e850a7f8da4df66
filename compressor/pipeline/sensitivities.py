"""Measure how far the model's outputs move when one linear is rounded: one job a linear, for any executor.

hidden states -> [segment with the rounded linear -> ... -> outputs] -> divergence from the dense outputs
                  a program, which runs here or in another process
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.programs import Program, run_program
from compressor.calibration.segment_runner import SegmentRunner, run_outputs, split_samples
from compressor.calibration.statistics import Inputs
from compressor.calibration.suffixes import write_suffix
from compressor.formats.format import Format
from compressor.formats.packing import dequantize, meta_packed
from compressor.graph.kinds.encoder_decoder import SampleInputs
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import replace_linear
from compressor.graph.segments import Segment, segments
from compressor.graph.sites import Site, linear_sites
from compressor.host.tensor_files import release
from compressor.numerics.nearest import awq_quantize
from compressor.numerics.products.deterministic import total
from compressor.pipeline.context import Context
from compressor.pipeline.input_scales import calibrate_inputs
from compressor.pipeline.sites import error_context
from compressor.progress import Silent

TOKENS = 2048
"""Tokens that sensitivities are measured on."""
_JOB = f"{__name__}:site_costs"


def sensitivities(
    graph: GraphModule, ctx: Context, ids: SampleInputs, sites: Sequence[Site], formats: Sequence[Format]
) -> dict[str, list[float]]:
    """Return the costs of rounding each site alone to each format, in dataflow order.

    The cost is the divergence of the model's outputs: for a decoder KL(dense || rounded) per token, in nats; otherwise
    the squared error of the outputs relative to their squared norm.  It is measured for the first format, and
    extrapolated to the others in proportion to the squared error of the linear's outputs, for inputs of the measured
    mean squares.

    Args:
        ids: as for :class:`compressor.calibration.calibrate.CalibrationRun`; the first 2,048 tokens, or pixels,
            or the first sound, are used.
        formats: the smallest first.
    """
    few = split_samples(graph, ids, TOKENS)[0]
    (dense,) = run_outputs(SegmentRunner(graph, [few]), Silent())
    squares = {
        site.name: inputs.mean_square
        for group, inputs in CalibrationRun(
            graph, few if isinstance(few, Tensor) else [few], sites, Inputs, CalibrationOptions(true_sequential=False)
        ).groups()
        for site in group
    }
    steps = calibrate_inputs(graph, ctx, "mixed_precision", {site.name: formats[0] for site in sites})
    common = {"formats": [fmt.name for fmt in formats], "dense": dense, "generates": graph.meta["model"].generates}
    order: list[str] = []

    def jobs() -> Iterator[dict[str, Any]]:
        for site, rest in _suffixes(graph, SegmentRunner(graph, [few], ctx.spill), sites, formats[0]):
            order.append(site.name)
            weight = graph.get_parameter(site.weight_name).detach()
            of_site = {"weight": weight, "squares": squares[site.name], "input_scale": steps.get(site.name)}
            yield {"site": site.name, **of_site, **rest, **common}
            release([weight, *rest["held"].values()])

    with ctx.reporter.task("sensitivity", len(sites)) as task:
        costs = ctx.executor.run(_JOB, jobs(), task, ctx.reporter)
    return dict(zip(order, costs, strict=True))


def _suffixes(
    graph: GraphModule, run: SegmentRunner, sites: Sequence[Site], fmt: Format
) -> Iterator[tuple[Site, dict[str, Any]]]:
    """Yield each site with the rest of the graph behind its segment's entry, in which it is packed without storage."""
    names = {site.name for site in sites}
    for index, segment in enumerate(segments(graph)):
        chosen = [site for site in segment.sites if site.name in names]
        # Executors may read them once the stream has gone on, which writes into its own.
        hidden = [None if one is None else one.clone() for one in run.hidden] if chosen else []
        for site in chosen:
            changed = clone_graph(graph)
            mine = next(one for one in linear_sites(changed) if one.name == site.name)
            empty = meta_packed(site.out_features, site.in_features, fmt)
            replace_linear(changed, mine, empty)
            reads = {node.target: node.name for node in changed.graph.find_nodes(op="get_attr")}
            stored = {part: reads[f"{site.name}.{part}"] for part in empty.parts}
            first, *others = segments(changed)[index:]
            nodes = [node for one in (first, *others) for node in one.nodes]
            probe = SegmentRunner(changed, run.batches)
            probe.hidden, probe.memory = list(hidden), list(run.memory)
            rest = write_suffix(probe, Segment(tuple(nodes), (), (), first.entry, None))
            rest["held"] = {name: value for name, value in rest["held"].items() if name not in stored.values()}
            yield site, {**rest, "parts": stored}
        if segment.exit is not None:
            run.advance(segment)


def site_costs(
    site: str,
    weight: Tensor,
    squares: Tensor,
    input_scale: Tensor | None,
    formats: Sequence[str],
    parts: Mapping[str, str],
    program: Program,
    output: str,
    held: Mapping[str, Tensor],
    batches: Sequence[Mapping[str, Any]],
    dense: Tensor,
    generates: bool,
) -> list[float]:
    """Return the costs of rounding one linear to each format, with four digits: the last ones depend on threads.

    Args:
        site: its name, for errors.
        weight: [out, in].
        squares: means of its inputs' squares, [in].
        input_scale: of static activations, float32 [1].
        formats: names, the measured one first.
        parts: nodes of the program that read the packed weight, by part.
        program, output, held, batches: of :func:`compressor.calibration.suffixes.write_suffix`, for one batch.
        dense: outputs of the dense model.
        generates: outputs are logits.
    """
    weight = weight.float()
    with error_context(site):
        rounded = [awq_quantize(weight, squares, Format.parse(name)) for name in formats]
    errors = [float((dequantize(w) - weight).double().square().sum(0) @ squares) for w in rounded]
    packed = rounded[0].with_input_scale(input_scale)
    stored = {parts[part]: value for part, value in packed.parts.items()}
    (batch,) = batches
    measured = divergence(dense, run_program(program, {**held, **stored, **batch}, output), generates)
    scale = measured / errors[0] if errors[0] > 0 else 0.0
    return [float(f"{scale * error:.4g}") for error in errors]


def divergence(dense: Tensor, other: Tensor, generates: bool) -> float:
    """Return KL(dense || other) of logits, nats per token, or the squared error relative to the dense squared norm."""
    if generates:
        p, q = (torch.log_softmax(x.double(), dim=-1) for x in (dense, other))
        return max(0.0, float(total((p.exp() * (p - q)).sum(-1)) / p[..., 0].numel()))
    return float(total((other - dense).double().square()) / total(dense.double().square()).clamp(min=1e-30))
