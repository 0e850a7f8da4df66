"""Build one WebAssembly module of TIR functions: plain functions of addresses and sizes, without TVM's runtime.

Functions for which WebAssembly has no instructions, and which would need a C library, are arithmetic here: sine and
cosine, logarithms, powers, and the conversion of float16.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.ir.instrument import pass_instrument
from tvm_ffi import structural_map

from compressor.codegen.isa import Isa
from compressor.codegen.machine_code.objects import kernel_objects
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.web.elementwise import Generated
from compressor.codegen.web.intrinsics import logarithm, power, sine
from compressor.errors import ToolchainError, VerificationError

_LATER = ("tirx.AnnotateEntryFunc", "tirx.MakePackedAPI", "tirx.FP8StorageLegalize", "tirx.BF16StorageLegalize")
IMPORTS = (
    "TVMBackendAllocWorkspace",
    "TVMBackendFreeWorkspace",
    "TVMBackendParallelLaunch",
    "TVMFFIEnvModRegisterSystemLibSymbol",
)
"""Functions that a module imports from its host beside the memory: allocate and free a buffer, and call a function of
its table for each task of a loop; the last one is never called.
"""
_CPU = 1
_STACK_BYTES, _MOST_BYTES = 1 << 18, 1 << 32
_HALF_SHIFT = 2.0**112
"""Ratio of a float16's value to that of its shifted bits read as float32: 2^(127 - 15), from the exponents' biases."""


def wasm_target(isa: Isa) -> tvm.target.Target:
    """Return TVM's target for WebAssembly."""
    fields = {"kind": "llvm", "mtriple": "wasm32-unknown-unknown", "mcpu": isa.mcpu}
    return tvm.target.Target({**fields, "mattr": list(isa.mattr)})


def find_linker() -> list[str]:
    """Return the command that links WebAssembly.

    Raises:
        ToolchainError: there is no linker.
    """
    if path := shutil.which("wasm-ld"):
        return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "wasm-ld"]
    raise ToolchainError(
        "no linker for WebAssembly: wasm-ld is not on PATH and the package ziglang is not installed; install one, for "
        "instance `apt-get install lld` or `pip install 'compressor[zig]'`, or do without it: target: {webgpu: {wasm: "
        "false}}"
    )


class WasmModule:
    """Collector of functions; ``link`` makes the module."""

    def __init__(self, isa: Isa) -> None:
        self._isa = isa
        self._functions: dict[str, tirx.PrimFunc] = {}

    def add(self, func: tirx.PrimFunc, name: str) -> Generated:
        """Add a function, and return how it is called: its buffers in their order, then its sizes."""
        self._functions[name] = _plain(func, name)
        operands = tuple(i for i, p in enumerate(func.params) if isinstance(p.ty, tirx.BufferType))
        sizes = _sizes(func)
        return Generated(name, {"sizes": [n.name for n in sizes]}, operands, tuple(sizes), _shapes(func))

    def link(self) -> bytes:
        """Link the module, which imports ``memory`` and the functions that allocate the kernels' own buffers.

        Raises:
            ToolchainError: there is no linker.
            VerificationError: the linker failed, such as on a function that nothing provides.
        """
        with tempfile.TemporaryDirectory() as folder:
            objects = kernel_objects(self._functions, wasm_target(self._isa), self._generated, Path(folder))
            output = Path(folder) / "kernels.wasm"
            # Exporting __wasm_call_ctors keeps the linker from calling it: it would register functions with TVM.
            exports = [f"--export={name}" for name in (*self._functions, "__heap_base", "__wasm_call_ctors")]
            options = [
                "--no-entry",
                "--import-memory",
                f"--max-memory={_MOST_BYTES}",
                "--export-table",  # tasks of loops are called through it, on threads whose stacks the host sets
                "--export=__stack_pointer",
                "--gc-sections",
                "--strip-all",
                "-z",
                f"stack-size={_STACK_BYTES}",
            ]
            imports = Path(folder) / "imports"
            imports.write_text("\n".join(IMPORTS), encoding="utf-8")
            options.append(f"--allow-undefined-file={imports}")
            command = [*find_linker(), *options, *exports, *map(str, objects.values()), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise VerificationError(f"linking WebAssembly failed: {done.stderr.strip()}; report it")
            return output.read_bytes()

    def _generated(self, name: str, func: tirx.PrimFunc) -> tvm.runtime.Module:
        """Generate a function's code."""
        target = wasm_target(self._isa)
        mod = tirx.transform.BindTarget(target)(tvm.IRModule({name: func}))
        lower, finish, _ = tirx.get_tir_pipeline(PIPELINE)
        with target, tvm.transform.PassContext(instruments=[_KeepParameters()]):
            mod = lower(mod)
        mod = tvm.IRModule({var: _opened(f) for var, f in mod.functions.items()}).with_attr("system_lib_prefix", "")
        return tvm.get_global_func("target.build.llvm")(finish()(mod), target)


def memory_flag(module: bytes) -> int:
    """Return the offset of the byte in a linked module that says that its memory has a limit, 1; 3 means shared as
    well.

    By changing that byte one module serves both (specification of WebAssembly, 5.3.9 and 5.5.5, and the threads
    proposal).

    Raises:
        VerificationError: the module imports no such memory.
    """
    name = b"\x03env\x06memory\x02"
    at = module.find(name) + len(name)
    if module.count(name) != 1 or module[at] != 1:
        raise VerificationError("linking WebAssembly: the module imports no memory with a limit; report it")
    return at


@pass_instrument
class _KeepParameters:
    """Skip the passes that pack arguments, so that functions keep their buffers as parameters."""

    def should_run(self, _mod: Any, info: Any) -> bool:
        return info.name not in _LATER


def _plain(func: tirx.PrimFunc, name: str) -> tirx.PrimFunc:
    """Replace everything that would call a C library."""
    body = structural_map(func.body, [(tvm.ir.Call, _arithmetic), (tirx.Cast, _from_half)])
    return func.with_body(body).with_attr("global_symbol", name).with_attr("tirx.noalias", True)


def _arithmetic(call: Any) -> Any:
    """Replace a call of sine, cosine, logarithm or power by arithmetic."""
    name = getattr(call.op, "name", "")
    if name == "tirx.log":
        return logarithm(call.args[0])
    if name in ("tirx.sin", "tirx.cos"):
        return sine(call.args[0], int(name == "tirx.cos"))
    product = power(call) if name == "tirx.pow" else None
    return call if product is None else product


def _from_half(cast: Any) -> Any:
    """Convert a float16 to float32: shift its fields into place, and correct the exponent bias by a product.

    This is exact for subnormals, too; infinities and NaN, which are never stored, are not handled.
    """
    kind = str(cast.value.ty.dtype)
    if not kind.startswith("float16"):
        return cast
    lanes = int(kind.partition("x")[2] or 1)
    suffix = kind.removeprefix("float16")

    def number(value: int) -> Any:
        return tirx.Broadcast(tirx.const(value, "int32"), lanes) if lanes > 1 else tirx.const(value, "int32")

    bits = tirx.Cast(f"int32{suffix}", tirx.reinterpret(f"int16{suffix}", cast.value))
    rest = tirx.shift_left(tirx.bitwise_and(bits, number(0x7FFF)), number(13))
    sign = tirx.bitwise_and(bits, number(-0x80000000))  # the 16 bits were widened with their sign
    value = tirx.reinterpret(f"float32{suffix}", tirx.bitwise_or(rest, sign))
    factor = tirx.const(_HALF_SHIFT, "float32")
    return value * (tirx.Broadcast(factor, lanes) if lanes > 1 else factor)


def _opened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Make addresses and 32-bit numbers the parameters, and bind buffers and sizes to them at the start."""
    addresses, numbers, bound = [], [], []
    for size in _sizes(func):
        numbers.append(tvm.ir.Var(f"{size.name}_given", tvm.ir.PrimType("int32")))
        bound.append(tirx.Bind(size, tirx.Cast(str(size.ty.dtype), numbers[-1])))
    for param in func.params:
        if isinstance(param.ty, tirx.BufferType):
            kind = tvm.ir.PointerType(tvm.ir.PrimType(str(param.ty.dtype)), "global")
            addresses.append(tvm.ir.Var(f"{param.name}_address", kind))
            bound.append(tirx.DeclBuffer(param, data=addresses[-1]))
    body = func.body
    for key, value in (("device_id", 0), ("device_type", _CPU)):  # device of its own buffers
        body = tirx.AttrStmt(tvm.ir.StringImm("default"), key, tirx.const(value, "int32"), body)
    done = tirx.stmt.Return(tirx.const(0, "int32"))  # -1 if its own buffers cannot be allocated
    params = [*addresses, *numbers]
    statements = tirx.SeqStmt([*bound, body, done])
    return tirx.PrimFunc(params, statements, tvm.ir.PrimType("int32"), func.attrs)


def _shapes(func: tirx.PrimFunc) -> tuple[tuple[Any, ...], ...]:
    """Return each parameter's shape, or a scalar parameter itself."""
    return tuple(tuple(p.ty.shape) if isinstance(p.ty, tirx.BufferType) else (p,) for p in func.params)


def _sizes(func: tirx.PrimFunc) -> list[Any]:
    """Return the symbolic sizes of a function, in order of first occurrence."""
    return list({n.name: n for shape in _shapes(func) for n in shape if isinstance(n, tvm.ir.Var)}.values())
