"""Find the residual stream: the tensors that additions join, with everything that writes or reads them.

Every linear map of the channels that whatever writes applies and whatever reads undoes leaves the function as it is.
An orthogonal one passes RMS norms, whose weights belong to the linears behind them then; so it does layer norms, once
whatever writes leaves no mean behind (Ashkboos et al. 2024, SliceGPT, arXiv 2401.15024, section 3.1).  The stream is
found in the dataflow; what is not understood is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.graph.folding import CannotFold
from compressor.graph.provenance import describe
from compressor.graph.sites import Site, is_parameter, linear_sites

_OPS, _ATEN = torch.ops.compressor, torch.ops.aten
_LAYER_NORM, _RMS_NORM = _ATEN.layer_norm.default, _OPS.rms_norm.default
_SCALED = (_ATEN.mul.Tensor, _ATEN.div.Tensor)
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default)
_SIZES = (_ATEN.sym_size.int,)


@dataclass(frozen=True)
class Residual:
    """One stream, as far as parameters can take a map of its channels over.

    Attributes:
        begin: its first tensor.
        width: channels.
        writers: linears whose rows are channels.
        tables: parameters whose last dimension is channels: of embeddings, or added as they are.
        norms: RMS or layer norms whose readers are all in ``readers``.
        readers: linears whose columns are channels, each with the norm in front of it, if there is one.
        entry: what comes into the stream and has no parameter that can be changed, and why; None if there is nothing.
        exit: the norm in front of readers that cannot be changed, and why; None if there is none.
        centered: layer norms read it, and nothing else: what adds the same to all channels changes nothing.
        reason: why the stream has to stay as it is; the other fields say nothing then.
    """

    begin: Node
    width: int
    writers: tuple[Site, ...] = ()
    tables: tuple[str, ...] = ()
    norms: tuple[Node, ...] = ()
    readers: tuple[tuple[Site, Node | None], ...] = ()
    entry: tuple[Node, str] | None = None
    exit: tuple[Node, str] | None = None
    centered: bool = False
    reason: str = ""


def find_residuals(graph: GraphModule, refuse: Callable[[Site], str]) -> list[Residual]:
    """Find the residual streams that norms read, in dataflow order.

    Args:
        refuse: a linear -> why its weight must stay as it is; empty where it may change.
    """
    found: list[Residual] = []
    seen: set[Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in (_LAYER_NORM, _RMS_NORM) or node.args[0] in seen:
            continue
        members = _closure(node.args[0])
        if not any(is_sum(member) for member in members):
            continue
        seen |= members
        ordered = [member for member in graph.graph.nodes if member in members]
        width = int(node.meta["val"].shape[-1])
        try:
            found.append(_Reading(graph, refuse, ordered).result(width))
        except CannotFold as reason:
            found.append(Residual(ordered[0], width, reason=str(reason)))
    return found


def norm_parameters(norm: Node) -> tuple[Node | None, Node | None]:
    """Return a norm's weight and bias."""
    args: Any = norm.args
    return (args[1], None) if norm.target is not _LAYER_NORM else (*args[2:4], None, None)[:2]


def carried(node: Node) -> list[Node]:
    """Return the inputs whose channels a node passes on: a sum's, a scaled tensor's, a permuted tensor's."""
    args: Any = node.args
    if is_sum(node):
        return list(args[:2])
    scaled = node.target in _SCALED and len(args) == 2 and isinstance(args[1], int | float)
    picks_rows = node.target is _ATEN.index.Tensor and len(args[1]) < args[0].meta["val"].dim()
    keeps_rows = node.target in _VIEWS and _width(args[0]) == _width(node)
    if node.op == "call_function" and (scaled or picks_rows or keeps_rows or node.target is _ATEN.to.dtype):
        return [args[0]]
    return []


def is_sum(node: Node) -> bool:
    """Return whether a node adds two tensors of as many channels."""
    if node.target is not _ATEN.add.Tensor or node.kwargs or not all(isinstance(arg, Node) for arg in node.args):
        return False
    return all(_width(arg) == _width(node) for arg in node.args)


def _width(node: Any) -> Any:
    """Return the channels of a tensor; None of a value without any."""
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else None


def _closure(start: Node) -> set[Node]:
    members, ahead = set[Node](), [start]
    while ahead:
        node = ahead.pop()
        if node in members:
            continue
        members.add(node)
        ahead += [*carried(node), *(user for user in node.users if node in carried(user))]
    return members


class _Reading:
    """What the tensors of a stream are made of and used for."""

    def __init__(self, graph: GraphModule, refuse: Callable[[Site], str], ordered: Sequence[Node]) -> None:
        self.graph, self.refuse, self.ordered, self.members = graph, refuse, ordered, set(ordered)
        self.sites = {site.node: site for site in linear_sites(graph)}
        self.writers: list[Site] = []
        self.tables: list[str] = []

    def result(self, width: int) -> Residual:
        entries = self._entries()
        layer_norms = self.graph.graph.find_nodes(op="call_function", target=_LAYER_NORM)
        reading = [norm for norm in layer_norms if norm.args[0] in self.members]
        for norm in reading:
            if len(norm.args) < 5 or norm.args[1] != [width]:
                raise CannotFold(f"{describe(norm)} is over more than its channels, or of unknown epsilon")
        centered = bool(reading)
        norms, readers, exits = self._uses(centered)
        for what, places in (("comes in", entries), ("is read", exits)):
            if len(places) > 1:
                named = " and ".join(f"{describe(node)} ({why})" for node, why in places[:2])
                raise CannotFold(f"it {what} where no parameter can be rotated, more than once: {named}")
        entry, leave = (places[0] if places else None for places in (entries, exits))
        if entry is not None and entry[0].meta["val"].dtype != torch.float32:
            raise CannotFold(f"{describe(entry[0])} is not float32")
        made_of = (tuple(self.writers), tuple(self.tables))
        return Residual(self.ordered[0], width, *made_of, tuple(norms), tuple(readers), entry, leave, centered)

    def _entries(self) -> list[tuple[Node, str]]:
        """Find where a tensor that cannot be changed enters: as late as nothing else has been added to it."""
        fixed: dict[Node, str] = {}
        for node in self.ordered:
            sources = carried(node)
            if not sources:
                if reason := self._fixed(node):
                    fixed[node] = reason
            elif all(source in fixed and set(source.users) == {node} for source in sources):
                fixed[node] = fixed[sources[0]]
        return [(n, why) for n, why in fixed.items() if not any(u in fixed and n in carried(u) for u in n.users)]

    def _fixed(self, node: Node) -> str:
        """Return why the operator that makes a tensor cannot rotate it; empty, and remembered, where it can."""
        args: Any = node.args
        if node in self.sites:
            if not (reason := _fixed_weight(self.sites[node], self.refuse)):
                self.writers.append(self.sites[node])
            return reason
        is_table = node.target is _ATEN.embedding.default and args[0].op == "get_attr"
        table: Any = args[0] if is_table else node
        if table.op != "get_attr":
            return "it is not the output of a linear or an embedding"
        if len(table.users) > 1:
            return f"{table.target} is tied"
        if not is_parameter(self.graph, table):
            return f"{table.target} is a constant of the model"
        if (dtype := self.graph.get_parameter(table.target).dtype) != torch.float32:
            return f"{table.target} is stored as {str(dtype).removeprefix('torch.')}"
        self.tables.append(table.target)
        return ""

    def _uses(self, centered: bool) -> tuple[list[Node], list[tuple[Site, Node | None]], list[tuple[Node, str]]]:
        """Return the norms whose weight goes into their readers, the linears that read the stream, and other norms."""
        norms: list[Node] = []
        readers: list[tuple[Site, Node | None]] = []
        exits: list[tuple[Node, str]] = []
        for member in self.ordered:
            for user in member.users:
                if user in self.members or user.target in _SIZES:
                    continue
                if user.args[0] is not member or user.args.count(member) > 1:
                    raise CannotFold(f"it is also read by {describe(user)}")
                if user.target is _LAYER_NORM or (user.target is _RMS_NORM and not centered):
                    behind, reason = self._behind(user)
                    if reason:
                        exits.append((user, reason))
                    else:
                        norms.append(user)
                        readers += [(site, user) for site in behind]
                elif user in self.sites and not centered and not _fixed_weight(self.sites[user], self.refuse):
                    readers.append((self.sites[user], None))
                else:
                    raise CannotFold(f"it is also read by {describe(user)}")
        return norms, readers, exits

    def _behind(self, norm: Node) -> tuple[list[Site], str]:
        """Return the linears that read a norm, and why they cannot be changed; empty where they can."""
        weight, bias = norm_parameters(norm)
        if weight is None or any(p is not None and (p.op != "get_attr" or len(p.users) > 1) for p in (weight, bias)):
            return [], "its weight is computed or shared, or it has none"
        found: list[Site] = []
        ahead = list(norm.users)
        while ahead:
            user = ahead.pop(0)
            if user.target in (*_VIEWS, _ATEN.index.Tensor) and carried(user):
                ahead += user.users
            elif user not in self.sites or user.args.count(self.sites[user].input) > 1:
                return [], f"{describe(user)} reads it"
            elif reason := _fixed_weight(self.sites[user], self.refuse):
                return [], reason
            elif bias is not None and self.sites[user].bias_name is None:
                return [], f"{self.sites[user].name} has no bias that could take the norm's over"
            else:
                found.append(self.sites[user])
        return found, ""


def _fixed_weight(site: Site, refuse: Callable[[Site], str]) -> str:
    bias: Any = site.node.args[2]
    if site.tied:
        return f"the weight of {site.name} is tied"
    if bias is not None and (site.bias_name is None or len(bias.users) > 1):
        return f"the bias of {site.name} is computed or shared"
    return refuse(site)
