"""Collect the nodes and tensors of an ONNX graph while a compressed graph is walked.

Images lie with their channels last in our graphs, and first in ONNX.  A value that is known with the channels first is
turned only where somebody reads it the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.export.onnx_out.rules import arguments, load, operator_name, refuse
from compressor.export.onnx_out.stored import TensorStore, onnx_package
from compressor.graph.rewrite import held_tensor

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

MICROSOFT = "com.microsoft"
_KINDS = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float64: "DOUBLE",
    torch.int64: "INT64",
    torch.int32: "INT32",
    torch.int8: "INT8",
    torch.uint8: "UINT8",
    torch.bool: "BOOL",
}
Making = Callable[[], NDArray[Any]]


class Emitter:
    """An ONNX graph in the making.

    Args:
        graph: compressed.
        opset: version of the standard's operators.
        standard: only these are used, none of ONNX Runtime's own.
        accuracy: ``accuracy_level`` of MatMulNBits.
        dense: names of sites that are written dequantised.
        store: keeps tensors; None for a plan, which reads no weight.
    """

    def __init__(
        self,
        graph: GraphModule,
        opset: int,
        standard: bool,
        accuracy: int,
        dense: frozenset[str],
        store: TensorStore | None,
    ) -> None:
        self.graph, self.opset, self.standard, self.accuracy, self.dense = graph, opset, standard, accuracy, dense
        self._store, self._onnx = store, onnx_package()
        self.nodes: list[NodeProto] = []
        self.initializers: dict[str, TensorProto | None] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.memo: dict[Any, Any] = {}
        """Names of tensors that several nodes share, by what they are."""
        self.values: dict[Node, str] = {}
        self.channels_first: dict[Node, str] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0

    def add(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node of one result; its name."""
        return self.several(1, op, *inputs, domain=domain, **attributes)[0]

    def several(self, count: int, op: str, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node of several results; their names."""
        self._count += 1
        name = f"{op.lower()}_{self._count}"
        results = [name, *(f"{name}_{place}" for place in range(1, count))]
        self.nodes.append(
            self._onnx.helper.make_node(op, list(inputs), results, name=name, domain=domain, **attributes)
        )
        return results

    def constant(self, value: Any, dtype: type[np.generic] | str = np.int64) -> str:
        """Return the name of a small constant; equal ones are stored once."""
        array = np.asarray(value, dtype)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            kind = self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            self._constants[key] = self.tensor(f"constant_{len(self._constants)}", kind, array.shape, lambda: array)
        return self._constants[key]

    def tensor(self, name: str, kind: int | str, shape: Sequence[int], make: Making) -> str:
        """Store a tensor under a name, once; ``make`` gives its bytes, and is not called in plans."""
        if name not in self.initializers:
            number = kind if isinstance(kind, int) else int(getattr(self._onnx.TensorProto, kind))
            self.initializers[name] = (
                None if self._store is None else self._store.tensor(name, number, tuple(shape), make())
            )
        return name

    def count(self, weight: str, size_bytes: int, elements: int) -> None:
        """Add to the bytes that a weight takes."""
        self.sizes[weight] = self.sizes.get(weight, (0, 0))[0] + size_bytes, elements

    def parameter(self, node: Node) -> str:
        """Return the name of a parameter or buffer of the graph, stored as it is."""
        name = str(node.target)
        if name not in self.initializers:
            held = held_tensor(self.graph, name).detach()
            if held.dtype not in _KINDS:
                raise refuse(node, f"is stored as {held.dtype}, which is not written")
            self.tensor(name, _KINDS[held.dtype], held.shape, lambda: as_array(held))
            if held.dim() and held.is_floating_point():
                self.count(name, held.numel() * held.element_size(), held.numel())
        return name

    def of(self, value: Any, like: Any = None) -> str:
        """Return the tensor of an argument: of a node, or of a number.

        Args:
            like: a tensor whose type a number or another tensor takes; None leaves it.
        """
        if not isinstance(value, Node):
            dtype = torch.float32 if like is None else like.dtype
            return self.constant(value, _numpy(dtype))
        if value not in self.values:
            if value.op == "get_attr":
                return self._cast(self.parameter(value), value, like)
            self.values[value] = self.add("Transpose", self.channels_first[value], perm=[0, 2, 3, 1])
        return self._cast(self.values[value], value, like)

    def _cast(self, name: str, value: Node, like: Any) -> str:
        known = held_tensor(self.graph, str(value.target)) if value.op == "get_attr" else value.meta["val"]
        if like is None or (isinstance(known, Tensor) and known.dtype == like.dtype):
            return name
        return self.cast(name, like.dtype)

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """Convert a tensor to another type."""
        return self.add("Cast", name, to=int(getattr(self._onnx.TensorProto, _KINDS[dtype])))

    def size(self, value: Any) -> str:
        """Return a size, int64 [1]."""
        return self.of(value) if isinstance(value, Node) else self.constant([value])

    def shape(self, sizes: Sequence[Any]) -> str:
        """Return a shape, int64 [n], of numbers and of sizes that vary."""
        if not any(isinstance(size, Node) for size in sizes):
            return self.constant(list(sizes))
        return self.add("Concat", *(self.size(size) for size in sizes), axis=0)

    def dimension(self, name: str, axis: int) -> str:
        """Return the size of a tensor along an axis, int64 [1]."""
        key = "dimension", name, axis
        if key not in self.memo:
            self.memo[key] = self.add("Shape", name, start=axis, end=axis + 1)
        return str(self.memo[key])

    def walk(self) -> None:
        """Emit all calls.

        Raises:
            UsageError: a node has no rule, or its rule refuses it.
        """
        rules = load()
        for node in self.graph.graph.nodes:
            if node.op != "call_function" or node in self.values:
                continue
            name = operator_name(node)
            if name not in rules:
                raise refuse(node, "onnx has no rule for this operator; leave out the pass that made it")
            if (result := rules[name](self, node, *arguments(node))) is not None:
                self.values[node] = result


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's numbers; bfloat16 as the 16 bits that they are."""
    tensor = tensor.contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _numpy(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
