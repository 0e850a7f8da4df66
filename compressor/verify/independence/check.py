"""Prove that no output of one batch entry depends on another entry's input, or name the node that breaks it.

This is an abstract interpretation: the graph runs once on fake tensors, and each value is labelled as shared, as
holding one entry at each place along one dimension, or as mixed (:mod:`compressor.verify.independence.labels`).  No
weight is read.
The analysis is sound: an operator without a rule or a definition counts as mixing the entries.  It follows
"Architectural backdoors: information flow proves that one batch entry cannot influence another";
docs/batch_independence.md says what the proof covers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves

from compressor.capture.export import quiet_fake_tensors
from compressor.errors import CompressorError, first_line
from compressor.graph.model import ModelInfo
from compressor.graph.provenance import module_path
from compressor.verify.independence.flow import Flow, Sizes
from compressor.verify.independence.labels import ONE, SHARED, Entries, Mixed, same_size, size_of, sizes_of

_BATCH = "batch"  # name of the torch.export.Dim along which the entries of a plain module's input lie


@dataclass(frozen=True)
class Leak:
    """A node at which entries meet, or cannot be proven to stay apart."""

    node: str
    operator: str
    reason: str  # in words
    module: str  # path of the module that the node comes from; empty if unknown
    line: str  # "file:line" of the model's code; empty if unknown

    def __str__(self) -> str:
        where = ", ".join(part for part in (f"in {self.module}" if self.module else "", self.line) if part)
        return f"{self.node} ({self.operator}{', ' if where else ''}{where}): {self.reason}"


@dataclass(frozen=True)
class Independence:
    """Result of the proof for one graph."""

    independent: bool
    leaks: tuple[Leak, ...]  # the first nodes at which entries meet and that reach an output; empty iff independent

    def __str__(self) -> str:
        if self.independent:
            return "independent: no output of one batch entry depends on another's input"
        more = f" (and {len(self.leaks) - 1} more)" if len(self.leaks) > 1 else ""
        return f"not independent: {self.leaks[0]}{more}"


def check_independence(graph: GraphModule) -> Independence:
    """Follow every batch entry through a captured graph, dense or compressed.

    The entries lie along dimension 0 of a decoder's ids, caches and source, and of an encoder's ids and mask; a
    decoder's position and keep are shared by all. In a plain module they lie along the dimension whose ``Dim`` is
    named ``batch`` in ``dynamic_shapes``, inputs without one being shared; where none has that name, along dimension
    0 of every tensor.

    Raises:
        CompressorError: the graph is not a captured one, or no input has a batch dimension.
    """
    info: ModelInfo = graph.meta["model"]
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if any("val" not in node.meta for node in placeholders):
        raise CompressorError(
            f"{info.name}: the graph's inputs have no recorded shapes; capture it with compressor.capture.capture"
        )
    sizes = Sizes()
    with FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True) as mode:
        inputs = _general_inputs([node.meta["val"] for node in placeholders], sizes)
    dims = _entry_dims(graph, info, inputs)
    first = next(((x, dim) for x, dim in zip(inputs, dims, strict=True) if dim is not None), None)
    if first is None:
        raise CompressorError(
            f"{info.name}: no input is a tensor with a batch dimension; there are no entries to keep apart"
        )
    flow = Flow(size_of(first[0].shape[first[1]]), sizes)
    env: dict[Node, Any] = {}
    for node, value, dim in zip(placeholders, inputs, dims, strict=True):
        flow.node, env[node] = node, value
        if dim is None or not isinstance(value, Tensor):
            flow.mark(value, SHARED)
        elif same_size(size_of(value.shape[dim]), flow.batch):
            flow.mark(value, Entries(dim))
        else:
            reason = f"dimension {dim} has {value.shape[dim]} places and the batch {flow.batch}; name batch dimensions"
            flow.mark(value, flow.mixed(f"{reason} {_BATCH!r} in dynamic_shapes"))
    found = _run(graph, flow, mode, env)
    leaks = tuple(_leak(node, flow.reasons[node.name]) for node in graph.graph.nodes if node.name in found)
    return Independence(not leaks, leaks)


def _run(graph: GraphModule, flow: Flow, mode: FakeTensorMode, env: dict[Node, Any]) -> set[str]:
    """Run the graph on fake tensors and return the names of the nodes where entries meet on the way to an output."""
    interpreter = fx.Interpreter(graph, garbage_collect_values=False)
    interpreter.env = env
    stored: dict[str, Any] = {}
    with torch.no_grad(), mode, enable_python_dispatcher(), quiet_fake_tensors():
        for node in graph.graph.nodes:
            flow.node = node
            if node.op == "output":
                return flow.escaped | _outputs(node, flow, env)
            if node.op == "get_attr":
                if node.target not in stored:
                    stored[node.target] = _fake(interpreter.fetch_attr(node.target))
                env[node] = flow.mark(stored[node.target], SHARED)
            elif node.op != "placeholder":
                try:
                    with flow:
                        env[node] = interpreter.run_node(node)
                except Exception as error:  # any error of PyTorch that needs data
                    line = first_line(error, "")
                    flow.escape(f"it cannot be followed without data ({type(error).__name__}: {line})")
                    return flow.escaped
            if flow.sizes.replacements:
                merged = ", ".join(f"{old} = {new}" for old, new in flow.sizes.replacements.items())
                flow.escape(f"it holds only for sizes with {merged}")
                return flow.escaped
    raise CompressorError("the graph has no output")


def _outputs(node: Node, flow: Flow, env: dict[Node, Any]) -> set[str]:
    found: set[str] = set()
    for source in node.all_input_nodes:
        for value in tree_leaves(env[source]):
            label = flow.label(value) if isinstance(value, Tensor) else SHARED
            if isinstance(label, Mixed):
                found |= label.nodes
            elif isinstance(label, Entries) and not _plain(value, label, flow.batch):
                flow.node = source
                reason = (
                    f"as an output, {list(value.shape)} does not hold one entry after another along its batch dimension"
                )
                found |= flow.mixed(reason).nodes
    return found


def _plain(value: Tensor, label: Entries, batch: sympy.Expr) -> bool:
    """Return whether readers find the entries: in order, along the only dimension whose size depends on the batch, or
    else along the first.
    """
    sizes = sizes_of(value)
    varying = [dim for dim, size in enumerate(sizes) if size.free_symbols & batch.free_symbols]
    return label.outer == ONE and label.dim == (varying[0] if len(varying) == 1 else 0)


def _fake(value: Any) -> Any:
    """Return a tensor of the same shape, strides and dtype without data."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _general_inputs(recorded: list[Any], sizes: ShapeEnv) -> list[Any]:
    """Make fake inputs of the recorded shapes over new symbols whose example values are distinct."""
    symbols: dict[sympy.Symbol, tuple[sympy.Expr, int]] = {}

    def renew(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        for old in sorted(size.node.expr.free_symbols, key=str):
            if old not in symbols:
                hint = int(_values(size.node.shape_env)[old])
                while hint < 2 or hint in {taken for _, taken in symbols.values()}:
                    hint = int(sympy.nextprime(max(hint, 10)))
                new = sizes.create_symbol(
                    hint, ConstantSource(f"size_{len(symbols)}"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
                )
                symbols[old] = new, hint
        expression = size.node.expr.xreplace({old: new for old, (new, _) in symbols.items()})
        hint = int(size.node.expr.xreplace({old: sympy.Integer(hint) for old, (_, hint) in symbols.items()}))
        return sizes.create_symintnode(expression, hint=hint)

    return [
        torch.empty([renew(size) for size in value.shape], dtype=value.dtype)
        if isinstance(value, Tensor)
        else renew(value)
        for value in recorded
    ]


def _values(sizes: ShapeEnv) -> Any:
    """Return the symbols' example values; PyTorch 2.13 renamed the table."""
    return sizes.backed_var_to_val if hasattr(sizes, "backed_var_to_val") else sizes.var_to_val


def _entry_dims(graph: GraphModule, info: ModelInfo, inputs: list[Any]) -> list[int | None]:
    """Return, for each input, the dimension along which the entries lie, or None where the input is shared."""
    if info.generates:
        return [0, None, None, *[0] * (len(inputs) - 3)]
    if info.kind == "encoder":
        return [0] * len(inputs)
    args, shapes = graph.meta["inputs"]
    named = list(_named(args, shapes))
    if any(dim is not None for dim in named):
        return named
    return [0 if isinstance(value, Tensor) and value.dim() else None for value in inputs]


def _named(value: Any, spec: Any) -> Iterator[int | None]:
    """Yield, for each leaf of the arguments, its dimension named ``batch`` in ``dynamic_shapes`` (of the same
    structure), or None.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _named(part, spec.get(key) if isinstance(spec, dict) else None)
    elif isinstance(value, (list, tuple)):
        parts = spec if isinstance(spec, (list, tuple)) else [None] * len(value)
        for part, own in zip(value, parts, strict=True):
            yield from _named(part, own)
    else:
        dims = spec.items() if isinstance(spec, dict) else enumerate(spec or ())
        yield next((dim for dim, size in dims if getattr(size, "__name__", "") == _BATCH), None)


def _leak(node: Node, reason: str) -> Leak:
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(PurePath(file), line) for file, line in frames if "torch" not in PurePath(file).parts]
    line = f"{own[-1][0].name}:{own[-1][1]}" if own else ""
    return Leak(node.name, str(node.target), reason, module_path(node), line)
