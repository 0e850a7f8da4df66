"""List the linears of a captured graph that passes work on: sites, their groups, patterns and ties.

A captured graph is a :class:`torch.fx.GraphModule` of call_function nodes over ``get_attr`` parameters (see
:mod:`compressor.capture.capture`).  Everything here comes from the dataflow, nothing from a table of architectures.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx
from torch.fx import GraphModule, Node

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.graph.provenance import owner

_DENSE = torch.ops.compressor.dense_linear.default
_PACKED = torch.ops.compressor.packed_linear.default
_LOOKED_UP = torch.ops.compressor.packed_embedding.default
_ROWS = torch.ops.compressor.expert_rows.default
EXPERT, ROUTER = "Expert", "Router"
"""Classes of the linear of one expert, and of a linear that chooses experts."""
_DEPTHWISE = torch.ops.compressor.depthwise_linear.default
_PACKED_DEPTHWISE = torch.ops.compressor.packed_depthwise.default
PACKED_FORM: dict[Any, Any] = {_DENSE: _PACKED, _DEPTHWISE: _PACKED_DEPTHWISE}
"""Dense operator -> the operator of the same arguments whose weight is packed."""
_LONGEST_PATTERN = 1000
_MATCH_SECONDS = 5.0


@dataclass(frozen=True)
class Site:
    """A linear in the graph, or a depthwise convolution: each channel of it is a linear over its own taps."""

    name: str  # module name, "model.layers.0.self_attn.q_proj"; "@2", ... when a module is called again
    node: Node
    input: Node
    module_class: str  # "Linear", "Conv1D", "Expert", "Router", ...
    weight_name: str
    bias_name: str | None
    in_features: int
    out_features: int
    tied: bool  # the weight has other users

    @property
    def is_depthwise(self) -> bool:
        """Return whether each output reads its own channel alone: ``in_features`` counts taps."""
        return self.node.target in (_DEPTHWISE, _PACKED_DEPTHWISE)

    @property
    def input_width(self) -> int:
        """Return the columns of the input: those of the weight, or the taps of all channels."""
        return self.in_features * (self.out_features if self.is_depthwise else 1)


def linear_sites(graph: GraphModule) -> list[Site]:
    """List the dense linears whose weight is a parameter, in dataflow order."""
    return [site for site in weight_sites(graph) if not site.is_depthwise]


def weight_sites(graph: GraphModule) -> list[Site]:
    """List the dense linears and depthwise convolutions whose weight is a parameter, in dataflow order."""
    sites, seen, routers = [], dict[str, int](), _routers(graph)
    for node in graph.graph.nodes:
        if node.target in PACKED_FORM.values():  # counts among the calls of its module, so that names stay as they are
            called = node.args[1][0].target.removesuffix(".codes").partition("@")[0]
            seen[called] = seen.get(called, 0) + 1
        if node.op != "call_function" or node.target not in PACKED_FORM or not is_parameter(graph, node.args[1]):
            continue
        args: Any = node.args
        x, weight, bias = args
        name, module_class = _owner(node, weight.target)
        seen[name] = seen.get(name, 0) + 1
        out_features, in_features = graph.get_parameter(weight.target).shape
        sites.append(
            Site(
                name=name if seen[name] == 1 else f"{name}@{seen[name]}",
                node=node,
                input=x,
                module_class=ROUTER if node in routers else module_class,
                weight_name=weight.target,
                bias_name=bias.target if is_parameter(graph, bias) else None,
                in_features=in_features,
                out_features=out_features,
                tied=len(weight.users) > 1,
            )
        )
    return sites


def first_calls(sites: Sequence[Site]) -> list[Site]:
    """Return the sites without the later calls of modules whose first one is among them: they share its weight."""
    nodes = {again for site in sites for again in calls_again(site.node)}
    return [site for site in sites if site.node not in nodes]


def calls_again(node: Node) -> list[Node]:
    """Return the calls behind a linear's node in which its module is called again, with the same weight."""
    users = [user for user in cast(Node, node.args[1]).users if user.target is node.target]
    return sorted(user for user in users if user.args[1] is node.args[1] and owner(user) == owner(node) and user > node)


def _routers(graph: GraphModule) -> set[Node]:
    """Find the linears that choose experts: the last ones in front of the index of experts."""
    ahead = list({cast(Node, node.args[1]) for node in graph.graph.find_nodes(op="call_function", target=_ROWS)})
    seen, found = set(ahead), set[Node]()
    while ahead:
        node = ahead.pop()
        if node.target in (_DENSE, _PACKED):
            found.add(node)
            continue
        sources = [source for source in node.all_input_nodes if source not in seen]
        seen.update(sources)
        ahead += sources
    return found


def packed_sites(graph: GraphModule) -> list[Site]:
    """List the linears whose weight is packed, in dataflow order; ``weight_name`` is that of the codes."""
    return [site for site in packed_weight_sites(graph) if not site.is_depthwise]


def packed_weight_sites(graph: GraphModule) -> list[Site]:
    """As :func:`packed_sites`, with depthwise convolutions."""
    sites, seen = [], dict[str, int]()
    for node in graph.graph.nodes:
        if node.target not in (_PACKED, _PACKED_DEPTHWISE):
            continue
        args: Any = node.args
        x, (codes, *_), bias, _, in_features, out_features = args
        name = codes.target.removesuffix(".codes")
        owner_name, module_class = _owner(node, f"{name}.weight")
        if any(user.target is _LOOKED_UP for user in codes.users):
            name = owner_name  # the codes are named after the table
        seen[name] = seen.get(name, 0) + 1
        name = name if seen[name] == 1 else f"{name}@{seen[name]}"  # another call reads the same codes
        bias_name = bias.target if is_parameter(graph, bias) else None
        sites.append(Site(name, node, x, module_class, codes.target, bias_name, in_features, out_features, False))
    return sites


def is_parameter(graph: GraphModule, node: Any) -> bool:
    """Return whether a node reads a parameter, not a buffer: constants that a model computes with are not packed."""
    if not _is_attribute(node):
        return False
    path, _, leaf = node.target.rpartition(".")
    return leaf in graph.get_submodule(path)._parameters


def _is_attribute(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


def _owner(node: Node, weight_name: str) -> tuple[str, str]:
    """Return name and class of the module that is this linear; a functional call is named after its weight."""
    path, module_class = owner(node)
    leaf = module_class.endswith(("Linear", "Conv1D"))
    if path and (leaf or weight_name == f"{path}.weight"):
        return path, module_class
    # "_linear": packed parts are stored below the name, where no parameter may stand
    named = weight_name.removesuffix(".weight") if weight_name.endswith(".weight") else f"{weight_name}_linear"
    return named, module_class


def group_by_input(sites: Iterable[Site]) -> list[list[Site]]:
    """Group the sites that read the same tensor (they share calibration statistics); order is kept."""
    groups: dict[Node, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.input, []).append(site)
    return list(groups.values())


def family(site: Site) -> tuple[Node, ...]:
    """Return what a linear reads: its input, or what all experts of its weight pick their rows from."""
    args = site.input.args
    return cast("tuple[Node, ...]", args[:2]) if site.input.target is _ROWS else (site.input,)


def match_sites(
    sites: Sequence[Site], targets: str | Sequence[str], ignore: str | Sequence[str] = ()
) -> tuple[list[Site], list[str]]:
    """Return the sites that a target names and no ignore pattern does, and the patterns that matched nothing.

    A pattern is a class name (``Linear``, which covers transformers' transposed ``Conv1D`` and each ``Expert`` too, but
    no ``Router``), a module name or a dotted beginning or end of one (``model.layers.0``, ``q_proj``), or ``re:`` and a
    regular expression that matches from the name's beginning, as in llm-compressor.

    Raises:
        re.error: a regular expression does not compile, or takes seconds to match (some take years).
    """
    targets, ignore = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    hits = {pattern: _find(pattern, sites) for pattern in (*targets, *ignore)}
    wanted = {id(site) for pattern in targets for site in hits[pattern]}
    unwanted = {id(site) for pattern in ignore for site in hits[pattern]}
    matched = [site for site in sites if id(site) in wanted - unwanted]
    return matched, [pattern for pattern, found in hits.items() if not found]


def _find(pattern: str, sites: Sequence[Site]) -> list[Site]:
    if not pattern.startswith("re:"):
        return [site for site in sites if _matches(pattern, site)]
    import regex  # takes what `re` takes, and a time limit, which a pattern of somebody else's needs

    body = pattern.removeprefix("re:")
    if len(body) > _LONGEST_PATTERN:
        raise re.error(f"longer than {_LONGEST_PATTERN} characters", f"{body[:80]}...")
    try:
        re.compile(body)
        expression, end = regex.compile(body), time.monotonic() + _MATCH_SECONDS
        return [s for s in sites if expression.match(s.name, timeout=max(1e-3, end - time.monotonic()))]
    except TimeoutError:
        raise re.error(f"takes over {_MATCH_SECONDS:.0f} s to match; avoid repeats within repeats", body) from None
    except (OverflowError, RecursionError, regex.error) as error:
        raise re.error(str(error), body) from error


def _matches(pattern: str, site: Site) -> bool:
    if pattern == site.module_class or (pattern == "Linear" and site.module_class in ("Conv1D", EXPERT)):
        return True
    name = site.name.partition("@")[0]
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def ties(graph: GraphModule) -> dict[str, list[Node]]:
    """Return the parameters with more than one user, and those users in order."""
    return {
        node.target: list(node.users) for node in graph.graph.nodes if node.op == "get_attr" and len(node.users) > 1
    }


def run_nodes(graph: GraphModule, nodes: Iterable[Node], env: MutableMapping[Node, Any]) -> None:
    """Evaluate nodes in order; ``env`` gives their inputs and takes their values (without gradients)."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.env = cast(dict[Node, Any], env)
    with torch.no_grad():
        for node in nodes:
            env[node] = interpreter.run_node(node)
