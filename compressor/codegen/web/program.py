"""From a Relax program to data: parameters, scratch buffers, kernels, and the steps that a run-time dispatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax, tirx

from compressor.codegen.web.convert import Dispatch
from compressor.codegen.web.elementwise import Generated, generate
from compressor.codegen.web.kernel import Expression
from compressor.errors import VerificationError

_BYTES = {"float32": 4, "int32": 4, "uint32": 4}
_OPERATORS = {"Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "Min": "min", "Max": "max"}


class ProgramWriter:
    """Walks the entry function once.

    Attributes:
        kernels: records by name, in order of first use.
        steps: ``{"kernels": names, "buffers": references, "sizes": expressions}`` each; a reference is ``input:name``,
            ``parameter:name``, ``constant:name`` or ``scratch:number``.
        scratch: bytes of each scratch buffer, an expression.
        constants: arrays that the program itself holds.
        details: what the manifest says of each kernel.
    """

    def __init__(self, mod: tvm.IRModule, calls: Mapping[str, Sequence[Dispatch]], target: tvm.target.Target) -> None:
        self.kernels: dict[str, Mapping[str, Any]] = {}
        self.details: dict[str, dict[str, Any]] = {}
        self.steps: list[dict[str, Any]] = []
        self.scratch: list[Expression] = []
        self.constants: dict[str, NDArray[Any]] = {}
        self._mod, self._calls, self._target = mod, calls, target
        self._generated: dict[str, Generated] = {}
        self._places: dict[Any, str] = {}  # variable -> reference
        self._free: dict[str, list[int]] = {}  # size as text -> scratch buffers
        self._names: dict[str, str] = {}  # symbolic size -> its name in the program

    def write(self, names: Mapping[str, str], references: Sequence[str]) -> str:
        """Walk ``main``; returns where its output is.

        Args:
            names: symbolic sizes of its inputs -> their names in the program.
            references: what each of its parameters is called.
        """
        main = self._mod["main"]
        self._names = dict(names)
        self._places = {p: r for p, r in zip(main.params, references, strict=True)}
        bindings = [binding for block in main.body.blocks for binding in block.bindings]
        last = self._last_uses(bindings, main.body.body)
        for i, binding in enumerate(bindings):
            self._bind(binding)
            for var in last.get(i, ()):
                self._release(var)
        return self._reference(main.body.body)

    def _last_uses(self, bindings: Sequence[Any], result: Any) -> dict[int, list[Any]]:
        """After which binding each scratch buffer is read no more; views count for what they show."""
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
        return isinstance(value, tvm.ir.Var) or op in ("relax.reshape", "relax.memory.view")

    def _bind(self, binding: Any) -> None:
        var, value = binding.var, binding.value
        if self._is_view(value):
            self._places[var] = self._reference(next(iter(_variables(value, constants=True))))
            return
        op = getattr(getattr(value, "op", None), "name", "")
        if op == "relax.call_dps_packed":
            self._call(value.args[0].global_symbol, list(value.args[1].fields), var)
        elif op == "relax.call_tir" and isinstance(var.ty, relax.TensorType):
            self._call_generated(value.args[0], list(value.args[1].fields), var)
        else:
            raise VerificationError(
                f"lowering to WebGPU: {op or type(value).__name__} of {var.name} has no kernel; report it with the "
                "output of --dump"
            )

    def _call(self, name: str, operands: list[Any], out: Any) -> None:
        references = [self._reference(x) for x in operands] + [self._allocate(out)]
        shapes = [list(x.ty.shape) for x in operands]
        for dispatch in self._calls[name]:
            for kernel in dispatch.kernels:
                self.kernels.setdefault(kernel.name, kernel.record())
                self.details.setdefault(kernel.name, {"family": kernel.family, **kernel.details})
            sizes = [self._expression(size) for size in dispatch.sizes(shapes)]
            buffers = [references[i] for i in dispatch.operands]
            self._step([kernel.name for kernel in dispatch.kernels], buffers, sizes)

    def _call_generated(self, function: Any, operands: list[Any], out: Any) -> None:
        name = function.name_hint
        if name not in self._generated:
            self._generated[name] = generate(self._mod[function], name, self._target)
            self.kernels[name] = self._generated[name].record
            self.details[name] = {"family": "elementwise"}
        made = self._generated[name]
        tensors = [isinstance(x.ty, relax.TensorType) for x in operands]  # others are numbers, which no kernel binds
        references = [self._reference(x) if is_tensor else "" for x, is_tensor in zip(operands, tensors, strict=True)]
        references.append(self._allocate(out))
        given = [list(x.ty.shape) if is_tensor else [x] for x, is_tensor in zip(operands, tensors, strict=True)]
        given.append(list(out.ty.shape))
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
            array = array.astype("int32") if array.dtype == "int64" else array
            name = next(
                (n for n, a in self.constants.items() if np.array_equal(a, array) and a.dtype == array.dtype), ""
            )
            if not name:
                name = f"constant_{len(self.constants)}"
                self.constants[name] = array
            return f"constant:{name}"
        return self._places[value]

    def _allocate(self, out: Any) -> str:
        dtype = str(out.ty.dtype)
        if dtype not in _BYTES:
            raise VerificationError(
                f"lowering to WebGPU: {out.name} has type {dtype}, which WGSL cannot store; the target takes float32 "
                "and int32"
            )
        size: Expression = _BYTES[dtype]
        for n in out.ty.shape:
            size = _folded("*", size, self._expression(n))
        free = self._free.setdefault(str(size), [])
        if not free:
            self.scratch.append(size)
            free.append(len(self.scratch) - 1)
        self._places[out] = f"scratch:{free.pop()}"
        return self._places[out]

    def _release(self, var: Any) -> None:
        place = self._places.get(var, "")
        if place.startswith("scratch:"):
            number = int(place.removeprefix("scratch:"))
            self._free[str(self.scratch[number])].append(number)

    def _expression(self, value: Any) -> Expression:
        return expression(value, self._names)


def expression(value: Any, names: Mapping[str, Expression]) -> Expression:
    """A size of TVM's as data; ``names`` are its variables."""
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
        raise VerificationError(f"lowering to WebGPU: the size {value} ({type(value).__name__}) cannot be written down")
    return _folded(operator, expression(value.a, names), expression(value.b, names))


def _folded(operator: str, left: Expression, right: Expression) -> Expression:
    if isinstance(left, int) and isinstance(right, int) and operator in ("+", "-", "*"):
        return {"+": left + right, "-": left - right, "*": left * right}[operator]
    if operator == "*" and 1 in (left, right):
        return right if left == 1 else left
    return [operator, left, right]


def _variables(value: Any, *, constants: bool = False) -> Any:
    """Tensors that a bound value reads, in order."""
    is_tensor = isinstance(value, tvm.ir.Var) and isinstance(value.ty, relax.TensorType)
    if is_tensor or (constants and isinstance(value, tvm.ir.GenericConst)):
        yield value
    elif isinstance(value, relax.Tuple):
        for part in value.fields:
            yield from _variables(part, constants=constants)
    elif isinstance(value, tvm.ir.Call):
        for part in value.args:
            yield from _variables(part, constants=constants)
