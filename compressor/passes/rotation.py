"""Rotation: spread outliers over all channels, by orthogonal matrices inside the weights (Ashkboos et al. 2024).

    embedding -> x, {o, down}_proj -> + x    becomes   embedding R -> x R, R^T W -> + x R
    x -> norm(w) -> {q, k, v}_proj W         becomes   x R -> norm(1) -> W diag(w) R
    v_proj -> attention -> o_proj            becomes   values rotated head by head in v_proj, and back in o_proj

R is orthogonal: a Hadamard matrix with random signs.  Products with R are stored in the weights; an operator is added
only where a table or a head has to stay as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import CompressorError
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, meta_packed, pack
from compressor.graph.folding import CannotFold, find_scale_target, is_attention
from compressor.graph.provenance import describe
from compressor.graph.residual import Residual, find_residuals, norm_parameters
from compressor.graph.rewrite import drop_dead_parameters, insert_packed, set_parameter
from compressor.graph.sites import Site, group_by_input, linear_sites
from compressor.host.tensor_files import release
from compressor.numerics.products.hadamard import is_hadamard, random_signs, rotate
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.pipeline.site_plan import SitePlan, plan_rotated_sites
from compressor.pipeline.sites import choose_sites

_RMS_NORM = torch.ops.compressor.rms_norm.default
_SIGNS = Format.parse("W2A16_C")  # its codes 1 and 3 are -1 and 1


def pack_rotation(
    width: int, signs: Tensor, *, back: bool, centered: bool = False, device: torch.device | None = None
) -> tuple[PackedWeight, float]:
    """Pack the matrix of :func:`~compressor.numerics.products.hadamard.rotate`, or its inverse, as a weight with two
    bits per entry.

    Args:
        signs: float64 [width].
        back: make the inverse.
        centered: make the first channel zero, which without signs is the mean.
        device: ``meta`` for the shapes alone.
    Returns:
        The weight, [width, width], and the gain by which it multiplies beside rotating: its float16 scale times
        sqrt(width).
    """
    scale = torch.tensor(width**-0.5).half().float()
    gain = float(scale) * width**0.5
    if device is not None and device.type == "meta":
        return meta_packed(width, width, _SIGNS), gain
    R = rotate(torch.eye(width), signs, width)  # y = x R; a linear's weight is transposed
    codes = int(_SIGNS.zero_point) + torch.sign(R if back else R.t()).to(torch.int8)
    scales = scale.repeat(width, 1)
    if centered:
        scales[0] = 0
    return pack(codes.to(torch.uint8), scales, None, _SIGNS), gain


@dataclass(frozen=True)
class Rotation(Pass):
    """Rotate the channels of the residual stream, and the values of each attention head, inside the weights.

    The graph's function does not change; a later pass quantises.  Channels that no parameter can rotate stay as they
    are, and the run's report says why.  If only the stream's first or last parameter is fixed (an embedding that is
    tied or in half precision, a head that is ignored), a packed matrix of two bits per entry rotates there.

    Attributes:
        targets: class names, module names or ``re:`` patterns of the linears that may be changed.
        ignore: patterns of linears that stay as they are.
    """

    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Rotate all streams and heads that can be; signs come from ``ctx.seed``, in dataflow order."""
        chosen = {site.name for site in choose_sites(graph, "rotation", None, self.targets, self.ignore)}
        generator = torch.Generator().manual_seed(ctx.seed)
        streams = find_residuals(graph, lambda site: "" if site.name in chosen else f"{site.name} is left as it is")
        heads = [group for group in group_by_input(linear_sites(graph)) if is_attention(group[0].input)]
        left: dict[str, list[tuple[str, str]]] = {"the stream from": [], "the values that are read by": []}
        with ctx.reporter.task("rotation", len(streams) + len(heads)) as task:
            for found in streams:
                with _leaving(left["the stream from"], describe(found.begin)):
                    _rotate_stream(graph, ctx, found, generator)
                task.advance()
            for group in heads:
                with _leaving(left["the values that are read by"], group[0].name):
                    _rotate_values(graph, group, chosen, generator)
                task.advance()
        for what, places in left.items():
            if places:
                names = ", ".join(name for name, _ in places)
                reason = places[0][1]
                ctx.notes.append(f"rotation: not rotated: {what} {names}: {reason}{' (the first)' * (len(places) > 1)}")
        if not streams and not heads:
            ctx.notes.append("rotation: there is neither a residual stream nor attention: nothing is rotated")
        drop_dead_parameters(graph)  # biases of layer norms
        return graph

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Plan each linear on a graph without weights."""
        before = {site.name: graph.get_parameter(site.weight_name) for site in linear_sites(graph)}
        self.run(graph, ctx)
        return plan_rotated_sites(graph, before)


@contextmanager
def _leaving(left: list[tuple[str, str]], name: str) -> Iterator[None]:
    """Record the name and the reason where something cannot be rotated, and go on."""
    try:
        yield
    except CannotFold as reason:
        left.append((name, str(reason)))


def _rotate_stream(graph: GraphModule, ctx: Context, found: Residual, generator: torch.Generator) -> None:
    """Replace the stream x by gain * x R; norms divide by the gain again, and their epsilon is scaled to match."""
    ends = [end for end in (found.entry, found.exit) if end is not None]
    if found.reason:
        raise CannotFold(found.reason)
    if ends and not is_hadamard(found.width):
        raise CannotFold(f"no Hadamard matrix of {found.width} channels is known here; {ends[0][1]}")
    signs = random_signs(found.width, generator)
    gain = 1.0
    if found.centered:
        signs = torch.ones_like(signs)
    turn = partial(_turn, signs=signs, centered=found.centered)
    if found.entry is not None:
        packed, gain = pack_rotation(found.width, signs, back=False, centered=found.centered, device=_device(graph))
        _insert(graph, ctx, found.entry, found.entry[0], packed)
    if found.exit is not None:
        norm = found.exit[0]
        packed, back = pack_rotation(found.width, signs, back=True, device=_device(graph))
        _insert(graph, ctx, found.exit, norm.all_input_nodes[0], packed, norm)
        _scale_epsilon(norm, gain * back)
    for name in found.tables:
        _change(graph, name, lambda table: turn(table) * gain)
    for site in found.writers:
        _change(graph, site.weight_name, lambda weight: turn(weight.t()).t() * gain)
        if site.bias_name is not None:
            _change(graph, site.bias_name, lambda bias: turn(bias) * gain)
    for site, before in found.readers:
        weight, bias = (None, None) if before is None else norm_parameters(before)
        scale = 1 / gain if weight is None else _values(graph, weight)
        if bias is not None and site.bias_name is not None:
            shift = (_values(graph, site.weight_name) * _values(graph, bias)).sum(1)
            _change(graph, site.bias_name, lambda own: own + shift)  # noqa: B023
        _change(graph, site.weight_name, lambda weight: turn(weight.double() * scale))  # noqa: B023
    for norm in found.norms:
        _replace_norm(graph, norm, gain)


def _turn(x: Tensor, signs: Tensor, centered: bool) -> Tensor:
    """Rotate the last dimension; ``centered``, without signs, makes its first channel, which is the mean, zero."""
    y = rotate(x, signs, len(signs))
    if centered:
        y[..., 0] = 0
    return y


def _replace_norm(graph: GraphModule, norm: Node, gain: float) -> None:
    """Replace a norm by an RMS norm without weight; for a stream with mean zero that equals a layer norm."""
    weight, _ = norm_parameters(norm)
    assert weight is not None
    _change(graph, str(weight.target), torch.ones_like)
    _scale_epsilon(norm, gain)
    if norm.target is not _RMS_NORM:
        with graph.graph.inserting_before(norm):
            new = graph.graph.call_function(_RMS_NORM, (norm.args[0], weight, norm.args[4]))
        new.meta = dict(norm.meta)
        norm.replace_all_uses_with(new)
        graph.graph.erase_node(norm)


def _rotate_values(
    graph: GraphModule, group: Sequence[Site], chosen: Collection[str], generator: torch.Generator
) -> None:
    """Rotate each head's values by the rows that produce them, and rotate back by the columns that read them."""
    target, readers = find_scale_target(graph, group[0].input)
    assert target.shares is not None
    kv_heads, repeat, width = target.shares
    makers = [site for site in linear_sites(graph) if site.weight_name in target.parameters]
    if fixed := [site.name for site in (*makers, *readers) if site.name not in chosen]:
        raise CannotFold(f"{fixed[0]} is left as it is")
    signs = random_signs(kv_heads * width, generator)
    shared = signs.view(kv_heads, 1, width).expand(-1, repeat, -1).reshape(-1)
    for name in target.parameters:
        _change(graph, name, lambda rows: rotate(rows.movedim(0, -1), signs, width).movedim(-1, 0))
    for site in readers:
        _change(graph, site.weight_name, lambda weight: rotate(weight, shared, width))


def _insert(
    graph: GraphModule, ctx: Context, end: tuple[Node, str], x: Node, packed: PackedWeight, *users: Node
) -> None:
    name = next(name for i in itertools.count() if not hasattr(graph, name := f"rotation_{i}"))
    insert_packed(graph, name, x, packed, users)
    size = " x ".join(map(str, packed.shape))
    ctx.notes.append(
        f"rotation: a packed {size} matrix of {packed.nbytes:,} bytes rotates at {describe(end[0])}, since {end[1]}"
    )


def _values(graph: GraphModule, parameter: Node | str) -> Tensor:
    name = parameter if isinstance(parameter, str) else str(parameter.target)
    return graph.get_parameter(name).detach().double()


def _scale_epsilon(norm: Node, gain: float) -> None:
    """Scale a norm's epsilon to match an input that is multiplied by ``gain``."""
    place = 2 if norm.target is _RMS_NORM else 4
    epsilon: Any = norm.args[place]
    norm.update_arg(place, epsilon * gain**2)


def _device(graph: GraphModule) -> torch.device:
    return next(graph.parameters()).device


def _change(graph: GraphModule, name: str, function: Callable[[Tensor], Tensor]) -> None:
    """Replace a parameter by a float32 function of it: a shorter type would change the graph's function."""
    stored = graph.get_parameter(name).detach()
    value = function(stored).float().contiguous()
    if not value.is_meta and not bool(torch.isfinite(value).all()):
        raise CompressorError(f"rotation: {name} holds NaN or inf; check the checkpoint")
    set_parameter(graph, name, value)
    release([stored])
