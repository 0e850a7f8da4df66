"""Find the operator that a per-channel input scale can be folded into (SmoothQuant, AWQ), if there is one.

``x -> x / s`` together with ``W -> W diag(s)`` leaves every output unchanged (Xiao et al. 2023, SmoothQuant, arXiv
2211.10438, eq. 3).  The division is free if the operator that produces ``x`` has a parameter for each of its channels.
That is read from the dataflow: a norm's weight, a linear's rows, either factor of a product, and through attention the
rows of the values' linear, whose heads several heads of ``x`` may share.
A convolution's patches contain each channel several times.  Where a residual stream goes through its norms (post-norm),
the stream reads a norm's output too, and the linears get a copy of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.provenance import describe
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import Site, linear_sites

_OPS, _ATEN = torch.ops.compressor, torch.ops.aten
_NORMS = (_OPS.rms_norm.default, _ATEN.layer_norm.default)
_ATTENTION = (_OPS.cached_attention.default, _OPS.kept_attention.default, _OPS.masked_attention.default)
_COPY = "_scaled"  # ends the names of a copied norm's parameters
_SHAPES = (_ATEN.view.default, _ATEN.reshape.default)


@dataclass(frozen=True)
class ScaleTarget:
    """Parameters that an input scale of linears is folded into; their first dimension consists of the channels that the
    linears read.

    Attributes:
        parameters: names; each is divided by the scale.
        copied: the norm that they belong to, if other nodes than linears read it: a copy takes the scale, for the
            linears.
        shares: (runs, repeats of each, length of one) if several channels of the tensor come from one: key-value heads,
            heads that share each and head width; or 1, pixels of a patch and channels.  None otherwise.
    """

    parameters: tuple[str, ...]
    shares: tuple[int, int, int] | None = None
    copied: Node | None = None

    def shared(self, scale: Tensor) -> Tensor:
        """Return the scale, float [in], with the largest value for all channels that come from one."""
        if self.shares is None:
            return scale
        runs, repeat, width = self.shares
        return scale.view(runs, repeat, width).amax(1, keepdim=True).expand(-1, repeat, -1).reshape(-1)

    def _own(self, scale: Tensor) -> Tensor:
        if self.shares is None:
            return scale
        runs, repeat, width = self.shares
        return scale.view(runs, repeat, width)[:, 0].reshape(-1)

    def apply(self, graph: GraphModule, group: Sequence[Site], scale: Tensor) -> None:
        """Divide the parameters by ``scale``, float32 [in], and multiply the columns of the group's weights by it.

        The parameters are float32 afterwards: scaling a shorter float would change the function.
        """
        own = self._own(scale)
        for name in self.parameters:
            value = graph.get_parameter(name).detach().float()
            stored = name if self.copied is None else name + _COPY
            set_parameter(graph, stored, value / own.view(-1, *[1] * (value.dim() - 1)))
        if self.copied is not None:
            _read_copy(graph, self.copied, group)
        for site in group:
            set_parameter(graph, site.weight_name, graph.get_parameter(site.weight_name).detach().float() * scale)


class CannotFold(Exception):
    """A scale cannot be folded; the message says why."""


def find_scale_target(graph: GraphModule, x: Node) -> tuple[ScaleTarget, list[Site]]:
    """Return the target for a scale of a tensor that linears read, and the linears among its readers.

    Raises:
        CannotFold: there is none; says why.
    """
    readers = [site for site in linear_sites(graph) if site.input is x]
    others = [user for user in x.users if user not in {site.node for site in readers}]
    if others and x.target not in _NORMS:
        raise CannotFold(f"its input is also read by {describe(others[0])}")
    if tied := [site for site in readers if site.tied]:
        raise CannotFold(f"the weight of {tied[0].name} is tied")
    target = _scale_target(x)
    return replace(target, copied=x) if others else target, readers


def _read_copy(graph: GraphModule, norm: Node, group: Sequence[Site]) -> None:
    """Let linears read a copy of a norm, whose parameters have the original names with a suffix."""
    with graph.graph.inserting_before(norm.next):
        copies = {
            source: graph.graph.get_attr(f"{source.target}{_COPY}")
            for source in norm.all_input_nodes
            if source.op == "get_attr"
        }
        copy = graph.graph.node_copy(norm, lambda source: copies.get(source, source))
    for site in group:
        site.node.replace_input_with(norm, copy)


def _scale_target(node: Node) -> ScaleTarget:
    args: Any = node.args
    if node.op != "call_function":
        raise CannotFold("its input is the model's")
    if node.target in _NORMS:
        weight, bias = (args[1], None) if node.target is _NORMS[0] else (*args[2:4], None, None)[:2]
        return ScaleTarget(_names(node, weight, bias))
    if node.target is _OPS.dense_linear.default:
        return ScaleTarget(_names(node, args[1], args[2]))
    picks_rows = node.target is _ATEN.index.Tensor and len(args[1]) < node.meta["val"].dim()
    if node.target is _ATEN.relu.default or picks_rows:  # relu(x / s) = relu(x) / s for s > 0
        return _scale_target(_only(args[0]))
    if node.target is _ATEN.mul.Tensor:
        reasons = []
        for factor in args[:2]:
            try:
                if isinstance(factor, Node):
                    return _scale_target(_only(factor))
            except CannotFold as reason:
                reasons.append(str(reason))
        raise CannotFold(" and ".join(reasons) or "its input is a product without a linear or a norm")
    if node.target is _OPS.patches.default:
        return _through_patches(node)
    if is_attention(node):
        return _through_attention(_only(args[0]))
    raise CannotFold(f"its input comes from {describe(node)}")


def is_attention(x: Node) -> bool:
    """Return whether a tensor is the output of attention, its heads side by side."""
    return x.target in _SHAPES and isinstance(x.args[0], Node) and x.args[0].target in _ATTENTION


def _through_patches(patches: Node) -> ScaleTarget:
    """Return the target for the channels of the images; their zero padding has any scale."""
    args: Any = patches.args
    inner = _scale_target(_only(args[0]))
    if inner.shares is not None:
        raise CannotFold(f"the channels of {describe(patches)} in front of it come from shared heads")
    rows, columns = args[1]
    return ScaleTarget(inner.parameters, (1, rows * columns, int(args[0].meta["val"].shape[-1])))


def _through_attention(attention: Node) -> ScaleTarget:
    """Return the target in the linear behind the values: ``transpose(view(linear, [..., heads, width]), 1, 2)``.

    The values also leave the graph for the cache: that is the bundle's own, and scaled alike.
    """
    q, values = _node(attention.args[0]), _node(attention.args[2])
    if others := [user for user in values.users if user is not attention and user.op != "output"]:
        raise CannotFold(f"attention's values are also read by {describe(others[0])}")
    view = _node(values.args[0]) if values.target is _ATEN.transpose.int and values.args[1:] == (1, 2) else values
    linear = _node(_only(view).args[0]) if view.target in _SHAPES else view
    if linear.target is not _OPS.dense_linear.default:
        raise CannotFold(f"attention's values come from {describe(linear)}")
    parameters = _scale_target(_only(linear)).parameters
    heads, (_, kv_heads, _, width) = q.meta["val"].shape[1], values.meta["val"].shape
    return ScaleTarget(parameters, (int(kv_heads), int(heads) // int(kv_heads), int(width)))


def _node(value: Any) -> Node:
    assert isinstance(value, Node)
    return value


def _only(node: Node) -> Node:
    if len(node.users) > 1:
        raise CannotFold(f"{describe(node)} in front of it has other readers")
    return node


def _names(node: Node, *values: Any) -> tuple[str, ...]:
    names = []
    for value in values:
        if value is None:
            continue
        if not isinstance(value, Node) or value.op != "get_attr":
            raise CannotFold(f"{describe(node)} in front of it computes its weight")
        if len(value.users) > 1:
            raise CannotFold(f"{value.target} in front of it is shared")
        names.append(str(value.target))
    if not names:
        raise CannotFold(f"{describe(node)} in front of it has no weight")
    return tuple(names)
