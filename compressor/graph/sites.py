"""What passes read from and write to a captured graph: linear sites, ties, segments, replacement.

A captured graph is a :class:`torch.fx.GraphModule` of call_function nodes over ``get_attr`` parameters (see
:mod:`compressor.capture.capture`).  Everything here comes from the dataflow, nothing from a table of architectures.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node

import compressor.ops.linear  # noqa: F401  (registers the operators)
from compressor.formats.cache import DENSE_CACHE
from compressor.formats.packing import PackedWeight

_DENSE = torch.ops.compressor.dense_linear.default
_PACKED = torch.ops.compressor.packed_linear.default
_LONGEST_PATTERN = 1000
_MATCH_SECONDS = 5.0


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a captured model; ``graph.meta["model"]``.  Sizes are 0 where they have no meaning."""

    kind: Literal["decoder", "encoder", "module"]
    name: str  # folder name, hub id or class name
    architecture: str  # class name
    vocab_size: int = 0
    layers: int = 0  # attention layers, one cache entry each
    kv_heads: int = 0
    head_dim: int = 0
    cache_format: str = DENSE_CACHE  # of keys and values
    max_positions: int = 0  # 0: no limit stated
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    source: Path | None = None  # the folder, which also holds the tokenizer
    config_sha256: str = ""
    parameters: int = 0  # distinct numbers in the graph's parameters, ties counted once


@dataclass(frozen=True)
class Site:
    """A linear in the graph."""

    name: str  # module name, "model.layers.0.self_attn.q_proj"; "@2", ... when a module is called again
    node: Node
    input: Node
    module_class: str  # "Linear", "Conv1D", ...
    weight_name: str
    bias_name: str | None
    in_features: int
    out_features: int
    tied: bool  # the weight has other users


def linear_sites(graph: GraphModule) -> list[Site]:
    """Dense linears whose weight is a parameter, in dataflow order."""
    sites, seen = [], dict[str, int]()
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target is not _DENSE or not _is_attribute(node.args[1]):
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
                module_class=module_class,
                weight_name=weight.target,
                bias_name=bias.target if _is_attribute(bias) else None,
                in_features=in_features,
                out_features=out_features,
                tied=len(weight.users) > 1,
            )
        )
    return sites


def packed_sites(graph: GraphModule) -> list[Site]:
    """Linears whose weight is packed, in dataflow order; ``weight_name`` is that of the codes."""
    sites = []
    for node in graph.graph.find_nodes(op="call_function", target=_PACKED, sort=True):
        args: Any = node.args
        x, (codes, *_), bias, _, in_features, out_features = args
        name = codes.target.removesuffix(".codes")
        module_class = _owner(node, f"{name}.weight")[1]
        bias_name = bias.target if _is_attribute(bias) else None
        sites.append(Site(name, node, x, module_class, codes.target, bias_name, in_features, out_features, False))
    return sites


def _is_attribute(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


def _owner(node: Node, weight_name: str) -> tuple[str, str]:
    """Name and class of the module that is this linear; for a functional call, named after its weight."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path, class_path = stack[-1] if stack else ("", "")
    module_class = (class_path if isinstance(class_path, str) else class_path.__name__).rpartition(".")[2]
    leaf = module_class.endswith(("Linear", "Conv1D"))
    if path and (leaf or weight_name == f"{path}.weight"):
        return path, module_class
    return weight_name.removesuffix(".weight"), module_class


def group_by_input(sites: Iterable[Site]) -> list[list[Site]]:
    """Sites that read the same tensor, together (they share calibration statistics); order is kept."""
    groups: dict[Node, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.input, []).append(site)
    return list(groups.values())


def match_sites(
    sites: Sequence[Site], targets: str | Sequence[str], ignore: str | Sequence[str] = ()
) -> tuple[list[Site], list[str]]:
    """Sites that a target names and no ignore pattern does, and the patterns that matched nothing.

    A pattern is a class name (``Linear``, which covers transformers' transposed ``Conv1D`` too), a module name
    or a dotted beginning or end of one (``model.layers.0``, ``q_proj``), or ``re:`` and a regular expression that
    matches from the name's beginning, as in llm-compressor.

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
    if pattern == site.module_class or (pattern == "Linear" and site.module_class == "Conv1D"):
        return True
    name = site.name.partition("@")[0]
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def set_parameter(graph: GraphModule, name: str, value: Tensor) -> None:
    """Create or replace a parameter (no gradient) under a dotted name, and the modules on the way."""
    path, _, leaf = name.rpartition(".")
    module: nn.Module = graph
    for part in path.split(".") if path else []:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    setattr(module, leaf, nn.Parameter(value, requires_grad=False))


def replace_linear(graph: GraphModule, site: Site, packed: PackedWeight) -> None:
    """Make a site use a packed weight, stored as parameters ``<site>.codes``, ``<site>.scales``...

    The module's code stays as it is until the caller is done and calls ``graph.recompile()``: torch.fx keeps the source
    of every version, and one for each linear would take more memory than the weights.

    The dense weight goes when nothing else uses it.  The site's node is gone afterwards.  Other sites can still be
    replaced, but the ``input`` of one that reads this node's output directly is stale: list the sites again.

    Raises:
        ValueError: the packed weight has another shape.
    """
    if packed.shape != (site.out_features, site.in_features):
        raise ValueError(f"{site.name} is {site.out_features} x {site.in_features}, the packed weight {packed.shape}")
    old = site.node
    weight, bias = cast(Node, old.args[1]), old.args[2]
    with graph.graph.inserting_before(old):
        new = call_packed(graph, site.name, cast(Node, old.args[0]), packed, bias)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    graph.graph.erase_node(old)
    if not weight.users:
        graph.graph.erase_node(weight)
        _delete_parameter(graph, site.weight_name)


def call_packed(graph: GraphModule, name: str, x: Node, packed: PackedWeight, bias: Any) -> Node:
    """A packed linear at the graph's point of insertion, and its parameters ``<name>.codes``, ``<name>.scales``..."""
    stored = []
    for part, value in packed.parts.items():
        set_parameter(graph, f"{name}.{part}", value)
        stored.append(graph.graph.get_attr(f"{name}.{part}"))
    out_features, in_features = packed.shape
    return graph.graph.call_function(_PACKED, (x, stored, bias, packed.format.name, in_features, out_features))


def drop_dead_parameters(graph: GraphModule) -> list[str]:
    """Remove nodes without users and then parameters and buffers that no node reads; their names."""
    graph.graph.eliminate_dead_code()
    for node in list(graph.graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.graph.erase_node(node)
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    held = [*graph.named_parameters(remove_duplicate=False), *graph.named_buffers(remove_duplicate=False)]
    dead = [name for name, _ in held if name not in used]
    for name in dead:
        _delete_parameter(graph, name)
    graph.recompile()
    return dead


def _delete_parameter(graph: GraphModule, name: str) -> None:
    path, _, leaf = name.rpartition(".")
    delattr(graph.get_submodule(path), leaf)
    while path and not list(graph.get_submodule(path).parameters()) and not list(graph.get_submodule(path).buffers()):
        path, _, leaf = path.rpartition(".")
        delattr(graph.get_submodule(path), leaf)


def weight_bytes(graph: GraphModule) -> int:
    """Bytes of the graph's parameters as they are stored, each counted once; buffers are not weights."""
    return sum(parameter.numel() * parameter.element_size() for parameter in graph.parameters())


def ties(graph: GraphModule) -> dict[str, list[Node]]:
    """Parameters with more than one user, and those users in order."""
    return {
        node.target: list(node.users) for node in graph.graph.nodes if node.op == "get_attr" and len(node.users) > 1
    }


@dataclass(frozen=True)
class Segment:
    """A stretch of the graph between two points where one token-dependent tensor is all that is live."""

    nodes: tuple[Node, ...]  # token-dependent nodes, in order
    sites: tuple[Site, ...]  # dense
    packed: tuple[Site, ...]
    entry: Node | None  # the live tensor at its beginning; None for the first
    exit: Node | None  # the live tensor at its end; None for the last


def segments(graph: GraphModule) -> list[Segment]:
    """Cut the graph into the shortest stretches that hold a linear, dense or packed, each.

    Values that depend on positions, shapes and parameters alone (:func:`shared_nodes`) are available
    everywhere and do not count as live; nor do graph inputs, nor values that only the output reads (new keys
    and values).  Running the segments in order with :func:`run_nodes` is running the graph.
    """
    nodes = _token_nodes(graph)
    index = {node: i for i, node in enumerate(nodes)}
    last_use = [max((index[user] for user in node.users if user in index), default=i) for i, node in enumerate(nodes)]
    sites = {site.node: site for site in linear_sites(graph)}
    packed = {site.node: site for site in packed_sites(graph)}
    # Packed linears count too, so that the cuts stay where they were as a pass replaces one site after another.
    linears = [i for i, node in enumerate(nodes) if node in sites or node in packed]
    result: list[Segment] = []
    live: set[int] = set()
    begin, entry = 0, None
    for i in range(linears[-1] if linears else 0):  # what follows the last linear belongs to its segment
        live = {j for j in (*live, i) if last_use[j] > i}
        if len(live) != 1 or not any(begin <= j <= i for j in linears):
            continue
        exit_node = nodes[next(iter(live))]
        if not isinstance(exit_node.meta.get("val"), Tensor | None):
            continue  # a tuple of tensors is not one tensor
        result.append(_segment(nodes[begin : i + 1], sites, packed, entry, exit_node))
        begin, entry = i + 1, exit_node
    result.append(_segment(nodes[begin:], sites, packed, entry, None))
    return result


def _segment(
    nodes: list[Node],
    sites: dict[Node, Site],
    packed: dict[Node, Site],
    entry: Node | None,
    exit_node: Node | None,
) -> Segment:
    dense, done = (tuple(found[node] for node in nodes if node in found) for found in (sites, packed))
    return Segment(tuple(nodes), dense, done, entry, exit_node)


def shared_nodes(graph: GraphModule) -> list[Node]:
    """Nodes that no segment holds: parameters and values that depend on positions and shapes only, in order."""
    inside = set(_token_nodes(graph))
    return [n for n in graph.graph.nodes if n.op not in ("placeholder", "output") and n not in inside]


def run_nodes(graph: GraphModule, nodes: Iterable[Node], env: MutableMapping[Node, Any]) -> None:
    """Evaluate nodes in order; ``env`` gives their inputs and takes their values (without gradients)."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.env = cast(dict[Node, Any], env)
    with torch.no_grad():
        for node in nodes:
            env[node] = interpreter.run_node(node)


def twin(graph: GraphModule) -> GraphModule:
    """A second graph over the same parameters: rewriting one leaves the other as it is."""
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    nodes.set_codegen(graph.graph._codegen)
    copied = GraphModule(graph, nodes, class_name=type(graph).__name__)
    copied.meta.update(graph.meta)
    return copied


def _token_nodes(graph: GraphModule) -> list[Node]:
    """Nodes whose values depend on the tokens (for a plain module: on any input), but not on its shape alone."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    roots = {node for node in inputs if node.target == "ids"} or set(inputs)
    found: dict[Node, None] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is torch.ops.aten.sym_size.int and node.args[0].op == "placeholder":
            continue
        if any(source in found or source in roots for source in node.all_input_nodes):
            found[node] = None
    return list(found)
