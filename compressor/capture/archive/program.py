"""Build a module from the JSON of an exported program: PyTorch's ATen operators and sums of sizes, nothing else.

Names of the program become names in generated Python code, so each is checked to be a name before it is used.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim
from torch.fx import GraphModule

from compressor.capture.archive.reader import Archive, read_archive, scalar_type
from compressor.errors import CaptureError

_SIZES = {
    f"_operator.{name}": getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "neg")
}  # arithmetic of symbolic sizes
_WORDS = frozenset({"none", "tanh", "same", "valid", "constant", "reflect", "replicate", "circular", "floor", "trunc"})
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
_PLAIN = {"as_int": int, "as_float": float, "as_bool": bool}
_SYMBOL = re.compile(r"(?:Symbol\('(\w+)'.*\)|([su]\d+))", re.ASCII)
_DOTTED = re.compile(r"\w+(\.\w+)*", re.ASCII)
_LARGEST_EXAMPLE = 1 << 28  # elements


def archive_module(path: Path) -> tuple[GraphModule, tuple[Tensor, ...], Any]:
    """Return the module of a ``.pt2`` archive, an example of its inputs by chance, and its ``dynamic_shapes``.

    Args:
        path: as for :func:`compressor.capture.archive.reader.read_archive`.
    Raises:
        CaptureError: it cannot be read without running code from it, or holds what a graph cannot: other operators than
            ATen's, nested inputs, state that it writes.
    """
    archive = read_archive(path)
    try:
        return _Program(archive).module()
    except CaptureError as error:
        raise CaptureError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise CaptureError(
            f"{path}: not a program as torch.export writes it ({error!r:.160}); export the module again"
        ) from error


class _Program:
    """A program on its way to a graph."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.content: Mapping[str, Any] = archive.program["graph_module"]
        self.nodes: dict[str, fx.Node] = {}
        self.graph = fx.Graph()

    def module(self) -> tuple[GraphModule, tuple[Tensor, ...], Any]:
        call = self.content["module_call_graph"][0]["signature"]
        inputs = self._inputs(call)
        for entry in self.content["graph"]["nodes"]:
            self._node(entry)
        self.graph.output(self._outputs(json.loads(call["out_spec"])[1]))
        self.graph.lint()
        used = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        root: dict[str, Any] = {name: self.archive.tensors[name] for name in sorted(used)}
        module = GraphModule(root, self.graph, class_name=self._class_name())
        examples, shapes = zip(*(self._example(name) for name in inputs), strict=True)
        return module, examples, shapes

    def _inputs(self, call: Mapping[str, Any]) -> list[str]:
        """Add placeholders and parameters; returns the names of the tensors that the program takes."""
        structure = json.loads(call["in_spec"])[1]
        positional, named = structure["children_spec"]
        flat = positional["type"] == "builtins.tuple" and all(x["type"] is None for x in positional["children_spec"])
        if not flat or named["children_spec"]:
            raise CaptureError("takes inputs by keyword or in lists; wanted: tensors, one argument each")
        taken: list[str] = []
        specs = self.content["signature"]["input_specs"]
        for spec in sorted(specs, key=lambda spec: "user_input" not in spec):
            ((kind, entry),) = spec.items()
            if kind == "user_input":
                name = entry["arg"]["as_tensor"]["name"]
                if not name.isidentifier() or iskeyword(name):
                    raise ValueError(f"argument {name!r:.40}")
                taken.append(name)
                self.nodes[name] = self.graph.placeholder(name)
            elif kind in ("parameter", "buffer", "tensor_constant"):
                target = entry[f"{kind}_name"]
                if not _DOTTED.fullmatch(target) or target not in self.archive.tensors:
                    raise ValueError(f"{kind} {target!r:.60}")
                self.nodes[entry["arg"]["name"]] = self.graph.create_node("get_attr", target)
            else:
                raise CaptureError(f"takes a {kind}, which a graph cannot hold")
        return taken

    def _node(self, entry: Mapping[str, Any]) -> None:
        """Add one call, and the parts of its result."""
        target = entry["target"]
        function = _SIZES.get(target) or _aten(target)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        known = function._schema.arguments if isinstance(function, torch._ops.OpOverload) else None
        for given in entry["inputs"]:
            value = self._argument(given["arg"])
            place = None if known is None else next(i for i, one in enumerate(known) if one.name == given["name"])
            if place is None or (place == len(args) and not kwargs and known and not known[place].kwarg_only):
                args.append(value)
            else:
                kwargs[given["name"]] = value
        node = self.graph.call_function(function, tuple(args), kwargs)
        node.meta = self._provenance(entry.get("metadata") or {})
        outputs = entry["outputs"]
        if len(outputs) == 1 and "as_tensors" not in outputs[0]:
            self.nodes[_result(outputs[0])] = node
            return
        parts = outputs[0]["as_tensors"] if len(outputs) == 1 else outputs
        for number, part in enumerate(parts):
            item = self.graph.call_function(operator.getitem, (node, number))
            item.meta = dict(node.meta)
            self.nodes[part["name"] if "name" in part else _result(part)] = item

    def _argument(self, arg: Mapping[str, Any]) -> Any:
        """Return an argument's value: a node, a number, a type, or a list of them."""
        ((kind, value),) = arg.items()
        if kind in ("as_none", "as_layout"):
            return None
        if kind in _PLAIN:
            return _plain(value, _PLAIN[kind])
        if kind.removesuffix("s") in _PLAIN:
            return [_plain(one, _PLAIN[kind.removesuffix("s")]) for one in value]
        if kind == "as_tensor":
            return self.nodes[value["name"]]
        if kind == "as_tensors":
            return [self.nodes[one["name"]] for one in value]
        if kind == "as_sym_int":
            return self._size(value)
        if kind == "as_sym_ints":
            return [self._size(one) for one in value]
        if kind == "as_optional_tensors":
            return [self._argument(one) for one in value]
        if kind == "as_scalar_type":
            return scalar_type(value)
        if kind == "as_memory_format":
            return _FORMATS[value]
        if kind == "as_device" and value["type"] == "cpu":
            return torch.device("cpu")
        if kind == "as_string" and value in _WORDS:
            return value
        raise CaptureError(f"an operator takes {value!r:.60} ({kind}), which is not known to be harmless")

    def _size(self, value: Mapping[str, Any]) -> Any:
        return self.nodes[value["as_name"]] if "as_name" in value else _plain(value["as_int"], int)

    def _outputs(self, structure: Mapping[str, Any]) -> Any:
        """Return the nodes of the results in the structure that the module returns."""
        for spec in self.content["signature"]["output_specs"]:
            if "user_output" not in spec:
                raise CaptureError(
                    f"changes its state as it runs ({next(iter(spec))}); only pure functions are captured"
                )
        leaves = [self.nodes[entry["as_tensor"]["name"]] for entry in self.content["graph"]["outputs"]]
        kind, parts = structure["type"], structure["children_spec"]
        if kind is None:
            (leaf,) = leaves
            return leaf
        if any(part["type"] is not None for part in parts) or len(parts) != len(leaves):
            raise CaptureError("returns tensors in nested lists; wanted: one, a tuple, or a dictionary")
        if kind == "builtins.dict":
            return dict(zip(map(str, json.loads(structure["context"])), leaves, strict=True))
        if kind not in ("builtins.tuple", "builtins.list"):
            raise CaptureError(f"returns a {kind!r:.60}; wanted: a tensor, a tuple, or a dictionary")
        return tuple(leaves)

    def _example(self, name: str) -> tuple[Tensor, dict[int, Any]]:
        """Return an example of an input, and which of its sizes may vary."""
        meta = self.content["graph"]["tensor_values"][name]
        sizes, dims = list[int](), dict[int, Any]()
        for place, size in enumerate(meta["sizes"]):
            if "as_int" in size:
                sizes.append(_plain(size["as_int"], int))
                continue
            match = _SYMBOL.fullmatch(size["as_expr"]["expr_str"])
            if match is None:
                raise CaptureError(f"{name}: size {place} follows from others; export it with sizes that vary freely")
            symbol = match[1] or match[2]
            limits = self.archive.program["range_constraints"].get(symbol) or {}
            least, most = max(1, limits.get("min_val") or 1), limits.get("max_val")
            dims[place] = Dim(symbol, min=least, max=most)
            sizes.append(max(least, 2))
        count = 1
        for size in sizes:
            count *= size
        if not 0 < count <= _LARGEST_EXAMPLE:
            raise ValueError(f"{name}: {count} elements")
        dtype = scalar_type(meta["dtype"])
        if not dtype.is_floating_point:
            return torch.zeros(sizes, dtype=dtype), dims
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(dtype), dims

    def _provenance(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Return which modules a node comes from, as texts, and the lines of code."""
        stack: dict[str, tuple[str, str]] = {}
        for entry in filter(None, str(metadata.get("nn_module_stack") or "").split(";")):
            key, _, rest = entry.partition(",")
            path, _, name = rest.rpartition(",")
            stack[key] = (path, name)
        found: dict[str, Any] = {"nn_module_stack": stack} if stack else {}
        return found | ({"stack_trace": metadata["stack_trace"]} if metadata.get("stack_trace") else {})

    def _class_name(self) -> str:
        """Return the name of the class that was exported."""
        for node in self.graph.nodes:
            for path, name in node.meta.get("nn_module_stack", {}).values():
                last: str = name.rpartition(".")[2]
                if not path and last.isidentifier() and not iskeyword(last) and not last.startswith("_"):
                    return last
        return "Archive"


def _aten(target: str) -> torch._ops.OpOverload:
    """Return ATen's operator of that name.

    Raises:
        CaptureError: there is none.
    """
    match = re.fullmatch(r"torch\.ops\.aten\.(\w+)\.(\w+)", target, re.ASCII)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    found = getattr(packet, match[2], None) if match and isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload):
        raise CaptureError(f"calls {target!r:.80}, which is not an operator of ATen; export the module without it")
    return found


def _plain(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is not of type {kind.__name__}")
    return value


def _result(output: Mapping[str, Any]) -> str:
    """Return the name of a result, of a tensor or of a size."""
    ((kind, value),) = output.items()
    if kind == "as_sym_int":
        return str(value["as_name"])
    if kind != "as_tensor":
        raise CaptureError(f"an operator gives a {kind.removeprefix('as_')}, which a graph cannot hold")
    return str(value["name"])
