"""Turn a Relax program into data: parameters, scratch buffers, kernels, and the steps that a run-time dispatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax, tirx

from compressor.codegen.web.converters.linears import Dispatch
from compressor.codegen.web.elementwise import Generated
from compressor.codegen.web.kernel import Expression
from compressor.errors import VerificationError

WGSL_BYTES = {"float32": 4, "int32": 4, "uint32": 4}
"""Bytes of the types that WGSL can store."""
WASM_BYTES = {**WGSL_BYTES, "int64": 8, "uint16": 2, "float16": 2, "int8": 1, "uint8": 1, "bool": 1}
_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "Min": "min", "Max": "max"}


class ProgramWriter:
    """Writer that walks each entry function once.

    Attributes:
        kernels: records by name, in order of first use.
        steps: of the last entry, ``{"kernels": names, "buffers": references, "sizes": expressions}`` each; a reference
            is ``input:name``, ``parameter:name``, ``constant:name`` or ``scratch:number``.
        scratch: of the last entry, bytes of each scratch buffer, as an expression.
        constants: arrays that the program itself holds.
        details: fields of each kernel in the manifest.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        calls: Mapping[str, Sequence[Dispatch]],
        generate: Callable[[tirx.PrimFunc, str], Generated],
        stored: Mapping[str, int],
        constant: str = "constant",
    ) -> None:
        """Make a writer.

        Args:
            calls: dispatches by the names of ``call_dps_packed``.
            generate: makes a kernel of a function.
            stored: bytes of the types that kernels can store.
            constant: prefix of the names of the program's own arrays.
        """
        self.kernels: dict[str, Mapping[str, Any]] = {}
        self.details: dict[str, dict[str, Any]] = {}
        self.steps: list[dict[str, Any]] = []
        self.scratch: list[Expression] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self._mod, self._calls, self._generate, self._stored = mod, calls, generate, stored
        self._constant = constant
        self._generated: dict[str, Generated] = {}
        self._places: dict[Any, list[str]] = {}  # variable -> references, several for a tuple
        self._free: dict[str, list[int]] = {}  # size as text -> scratch buffers
        self._names: dict[str, str] = {}  # symbolic size -> its name in the program

    def write(
        self, entry: str, names: Mapping[str, str], references: Sequence[str]
    ) -> list[tuple[str, list[Expression]]]:
        """Walk an entry function, and return reference and shape of each of its outputs.

        Args:
            names: symbolic sizes of its inputs -> their names in the program.
            references: reference of each of its parameters.
        """
        main = self._mod[entry]
        self.steps, self.scratch, self._free = [], [], {}
        self._names = dict(names)
        self._places = {p: [r] for p, r in zip(main.params, references, strict=True)}
        bindings = [binding for block in main.body.blocks for binding in block.bindings]
        result = main.body.body
        if bindings and bindings[-1].var == result and isinstance(bindings[-1].value, relax.Tuple):
            result = bindings.pop().value
        last = self._last_uses(bindings, result)
        for i, binding in enumerate(bindings):
            self._bind(binding)
            for var in last.get(i, ()):
                self._release(var)
        results = list(_variables(result, constants=True))
        return [(self._reference(out), [self._expression(n) for n in out.ty.shape]) for out in results]

    def _last_uses(self, bindings: Sequence[Any], result: Any) -> dict[int, list[Any]]:
        """Compute liveness: for each binding, the scratch buffers that it reads last; a view extends the life of its
        base.
        """
        roots: dict[Any, Any] = {}
        last: dict[Any, int] = {}
        for i, binding in enumerate(bindings):
            used = list(_variables(binding.value))
            shows = used[0] if used and self._is_view(binding.value) else binding.var
            roots[binding.var] = roots.get(shows, shows)
            for var in (*used, binding.var):
                last[roots.get(var, var)] = i
        for var in _variables(result):
            last.pop(roots.get(var, var), None)
        found: dict[int, list[Any]] = {}
        for var, i in last.items():
            found.setdefault(i, []).append(var)
        return found

    @staticmethod
    def _is_view(value: Any) -> bool:
        op = getattr(getattr(value, "op", None), "name", "")
        return isinstance(value, tvm.ir.Var | relax.TupleGetItem) or op in ("relax.reshape", "relax.memory.view")

    def _bind(self, binding: Any) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.TupleGetItem):
            self._places[var] = [self._places[value.tuple_value][value.index]]
            return
        if self._is_view(value):
            self._places[var] = [self._reference(next(iter(_variables(value, constants=True))))]
            return
        op = getattr(getattr(value, "op", None), "name", "")
        if op == "relax.call_dps_packed":
            self._call(value.args[0].global_symbol, list(value.args[1].fields), var)
        elif op in ("relax.call_tir", "relax.call_tir_inplace"):
            outputs = getattr(value.attrs, "inplace_indices", None) or [-1] * len(_types(var))
            self._call_generated(value.args[0], list(value.args[1].fields), var, [int(i) for i in outputs])
        else:
            raise VerificationError(
                f"lowering for browsers: {op or type(value).__name__} of {var.name} has no kernel; report it with the "
                "output of --dump"
            )

    def _call(self, name: str, operands: list[Any], out: Any) -> None:
        references = [self._reference(x) for x in operands] + self._allocate(out, [-1] * len(_types(out)), [])
        shapes = [list(x.ty.shape) for x in operands]
        for dispatch in self._calls[name]:
            for kernel in dispatch.kernels:
                self.kernels.setdefault(kernel.name, kernel.record())
                self.details.setdefault(kernel.name, {"family": kernel.family, **kernel.details})
            sizes = [self._expression(size) for size in dispatch.sizes(shapes)]
            buffers = [references[i] for i in dispatch.operands]
            self._step([kernel.name for kernel in dispatch.kernels], buffers, sizes)

    def _call_generated(self, function: Any, operands: list[Any], out: Any, outputs: list[int]) -> None:
        """Write a call of a generated kernel.

        Args:
            outputs: for each output -1 if it is a new buffer, else the index of the operand that the kernel writes to.
        """
        name = function.name_hint
        if name not in self._generated:
            self._generated[name] = self._generate(self._mod[function], name)
            self.kernels[name] = self._generated[name].record
            self.details[name] = {"family": "elementwise"}
        made = self._generated[name]
        tensors = [isinstance(x.ty, relax.TensorType) for x in operands]  # others are numbers, which are not bound
        references = [self._reference(x) if is_tensor else "" for x, is_tensor in zip(operands, tensors, strict=True)]
        given = [list(x.ty.shape) if is_tensor else [x] for x, is_tensor in zip(operands, tensors, strict=True)]
        places = self._allocate(out, outputs, references)
        for place, kind, index in zip(places, _types(out), outputs, strict=True):
            if index < 0:
                references.append(place)
                given.append(list(kind.shape))
        known: dict[str, Expression] = {}
        for parameter, shape in zip(made.parameters, given, strict=True):
            for size, actual in zip(parameter, shape, strict=True):
                if isinstance(size, tvm.ir.Var):
                    known[size.name] = self._expression(actual)
        sizes = [expression(size, known) for size in made.sizes]
        self._step([name], [references[i] for i in made.operands], sizes)

    def _step(self, kernels: list[str], buffers: list[str], sizes: list[Expression]) -> None:
        self.steps.append({"kernels": kernels, "buffers": buffers, "sizes": sizes})

    def _reference(self, value: Any) -> str:
        if isinstance(value, tvm.ir.GenericConst):
            array = value.value.numpy()
            array = array.astype("int32") if array.dtype == "int64" and "int64" not in self._stored else array
            name = next(
                (n for n, a in self.constants.items() if np.array_equal(a, array) and a.dtype == array.dtype), ""
            )
            if not name:
                name = f"{self._constant}_{len(self.constants)}"
                self.constants[name] = array
            return f"constant:{name}"
        (place,) = self._places[value]
        return place

    def _allocate(self, out: Any, outputs: Sequence[int], operands: Sequence[str]) -> list[str]:
        """Return the references of a call's outputs: new scratch buffers, or the operands that it writes to."""
        pairs = zip(_types(out), outputs, strict=True)
        self._places[out] = [operands[i] if i >= 0 else self._take(kind, out.name) for kind, i in pairs]
        return self._places[out]

    def _take(self, kind: relax.TensorType, name: str) -> str:
        dtype = str(kind.dtype)
        if dtype not in self._stored:
            raise VerificationError(
                f"lowering for browsers: {name} has type {dtype}, which kernels cannot store there; the target takes "
                f"{', '.join(self._stored)}"
            )
        size: Expression = self._stored[dtype]
        for n in kind.shape:
            size = _folded("*", size, self._expression(n))
        free = self._free.setdefault(str(size), [])
        if not free:
            self.scratch.append(size)
            free.append(len(self.scratch) - 1)
        return f"scratch:{free.pop()}"

    def _release(self, var: Any) -> None:
        for place in self._places.get(var, ()):
            if place.startswith("scratch:"):
                number = int(place.removeprefix("scratch:"))
                self._free[str(self.scratch[number])].append(number)

    def _expression(self, value: Any) -> Expression:
        return expression(value, self._names)


def expression(value: Any, names: Mapping[str, Expression]) -> Expression:
    """Convert a TVM size to data; ``names`` are its variables."""
    if isinstance(value, int):
        return value
    if isinstance(value, tirx.IntImm):
        return int(value)
    if isinstance(value, tvm.ir.Var):
        return names[value.name]
    if type(value).__name__ == "Cast":
        return expression(value.value, names)
    operator = _OPERATORS.get(type(value).__name__)
    if operator is None and getattr(getattr(value, "op", None), "name", "") == "tirx.shift_left":
        return _folded("*", expression(value.args[0], names), 2 ** int(value.args[1]))
    if operator is None and getattr(getattr(value, "op", None), "name", "") == "tirx.shift_right":
        return _folded("//", expression(value.args[0], names), 2 ** int(value.args[1]))
    if operator is None:
        raise VerificationError(f"lowering for browsers: the size {value} ({type(value).__name__}) cannot be expressed")
    return _folded(operator, expression(value.a, names), expression(value.b, names))


def _folded(operator: str, left: Expression, right: Expression) -> Expression:
    if isinstance(left, int) and isinstance(right, int) and operator in ("+", "-", "*"):
        return {"+": left + right, "-": left - right, "*": left * right}[operator]
    if operator == "*" and 1 in (left, right):
        return right if left == 1 else left
    return [operator, left, right]


def _types(var: Any) -> list[relax.TensorType]:
    """Return the types of a call's results."""
    return list(var.ty.fields) if isinstance(var.ty, relax.TupleType) else [var.ty]


def _variables(value: Any, *, constants: bool = False) -> Any:
    """Yield the tensors, and tuples of tensors, that a bound value reads, in order."""
    is_tensor = isinstance(value, tvm.ir.Var) and isinstance(value.ty, relax.TensorType | relax.TupleType)
    if is_tensor or (constants and isinstance(value, tvm.ir.GenericConst)):
        yield value
    elif isinstance(value, relax.TupleGetItem):
        yield from _variables(value.tuple_value)
    elif isinstance(value, relax.Tuple):
        for part in value.fields:
            yield from _variables(part, constants=constants)
    elif isinstance(value, tvm.ir.Call):
        for part in value.args:
            yield from _variables(part, constants=constants)
