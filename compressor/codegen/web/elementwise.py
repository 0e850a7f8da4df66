"""Generate WGSL by TVM for operators without our own kernels: elementwise chains, copies, gathers, small reductions.

Each function runs one thread per element; a reduction is a loop in its thread.  TVM splits host from device code; sizes
and launch dimensions are read from the host code and become data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.ir.instrument import pass_instrument
from tvm_ffi import structural_map

import compressor.codegen.web.intrinsics  # noqa: F401  (registers how functions are computed)
from compressor.codegen.web.kernel import LARGEST_GRID
from compressor.errors import VerificationError

_THREADS = 256
_NOT_STORED = ("i8", "u8", "bool", "i64", "u64", "f64")
"""Types that WGSL cannot store, some of which TVM writes nevertheless."""
_FUNCTIONS = {
    name: f"""fn {name}(a: f32, b: f32) -> f32 {{
  let of_numbers = select(b, a, a {sign} b);
  let or_b = select(of_numbers, b, (bitcast<u32>(b) & 0x7fffffffu) > 0x7f800000u);
  return select(or_b, a, (bitcast<u32>(a) & 0x7fffffffu) > 0x7f800000u);
}}
"""
    for name, sign in {"larger": ">", "smaller": "<"}.items()
} | {"infinity": "fn infinity() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }\n"}
"""The larger and the smaller of two float32, NaN where one of them is; and infinity, of which WGSL has no constant."""
_HOST_ONLY = ("tirx.MakePackedAPI", "tirx.FP8StorageLegalize", "tirx.BF16StorageLegalize")


@dataclass(frozen=True)
class Generated:
    """A kernel that TVM generated.

    Attributes:
        record: as :meth:`compressor.codegen.web.kernel.Kernel.record`.
        operands: for each binding, the index of the function's parameter.
        sizes: the kernel's numbers, as expressions in the sizes of the parameters' shapes.
        parameters: shapes of the parameters; a scalar parameter has itself as its shape.
    """

    name: str
    record: Mapping[str, Any]
    operands: tuple[int, ...]
    sizes: tuple[Any, ...]
    parameters: tuple[tuple[Any, ...], ...]


@pass_instrument
class _KeepHost:
    """Skip the passes that lower host code, so that it keeps its kernel calls."""

    def should_run(self, _mod: Any, info: Any) -> bool:
        return info.name not in _HOST_ONLY


def generate(func: tirx.PrimFunc, name: str, target: tvm.target.Target) -> Generated:
    """Generate the kernel of a function without threads.

    Raises:
        VerificationError: the function needs several kernels or more than its parameters, or stores a type that WGSL
            cannot.
    """
    mod = tvm.IRModule({name: _schedule(func).with_attr("global_symbol", name)})
    mod = tirx.transform.ForceNarrowIndexToInt32()(tirx.transform.BindTarget(target)(mod))
    lower, _, finish = tirx.get_default_tir_pipeline(target)
    with target, tvm.transform.PassContext(instruments=[_KeepHost()]):
        mod = lower(mod)
    device = {var: f for var, f in mod.functions.items() if f.attrs.get("calling_conv") == 2}
    (host,) = (f for var, f in mod.functions.items() if var not in device)
    launch = _launch(host, name)
    ready = finish()(tvm.IRModule(device))
    edits = [(tirx.FloatImm, _in_bits), (tirx.Max, _by_function("larger")), (tirx.Min, _by_function("smaller"))]
    exact = tvm.IRModule({var: f.with_body(structural_map(f.body, edits)) for var, f in ready.functions.items()})
    built = tvm.get_global_func("target.build.webgpu")(exact, target)
    places = {param.name: i for i, param in enumerate(host.params)}
    operands = [places[arg.args[0].name] for arg in launch.args[1:] if isinstance(arg, tvm.ir.Call) and _is_data(arg)]
    numbers = [
        _in_shapes(arg, host) for arg in launch.args[1 + len(operands) : -1]
    ]  # the last is the number of threads
    record = _record(built.inspect_source("wgsl"), name, len(operands), len(numbers))
    return Generated(name, record, tuple(operands), tuple(numbers), tuple(map(_shape, host.params)))


def _in_bits(constant: Any) -> Any:
    """Write a float32 constant by its bits if TVM, which prints seven digits, would print another number; call a
    function for infinity.
    """
    value = np.float32(constant.value)
    if str(constant.ty.dtype) == "float32" and np.isinf(value):
        infinity = tirx.call_pure_extern("float32", "infinity")
        return infinity if value > 0 else -infinity
    if str(constant.ty.dtype) != "float32" or not np.isfinite(value) or np.float32(f"{value:.6e}") == value:
        return constant
    return tirx.reinterpret("float32", tirx.const(int(value.view(np.int32)), "int32"))


def _by_function(name: str) -> Any:
    """Return an edit that calls a function of ``_FUNCTIONS``: of two float32, WGSL lets a device choose which NaN wins.

    A call writes each argument once; written out, nested ones would double the source each.
    """

    def edit(op: Any) -> Any:
        is_float = str(op.ty.dtype) == "float32"
        return tirx.call_pure_extern("float32", name, op.a, op.b) if is_float else op

    return edit


def _shape(parameter: Any) -> tuple[Any, ...]:
    """Return a parameter's shape, or a scalar parameter itself."""
    return tuple(parameter.ty.shape) if isinstance(parameter.ty, tirx.BufferType) else (parameter,)


def _schedule(func: tirx.PrimFunc) -> tirx.PrimFunc:
    sch = s_tir.Schedule(func)
    root = sch.get_sblock("root")
    for block in sch.get_child_blocks(root):
        with contextlib.suppress(s_tir.ScheduleError):  # outputs and reductions cannot be inlined
            sch.compute_inline(block)
    for block in sch.get_child_blocks(root):
        loops = sch.get_loops(block)
        kinds = [v.iter_type for v in sch.get(block).iter_vars]
        spatial = 0
        while spatial < min(len(loops), len(kinds)) and kinds[spatial] == tirx.IterVar.DataPar:
            spatial += 1
        outer = loops[:spatial] or [sch.add_unit_loop(block)]
        groups, threads = sch.split(sch.fuse(*outer) if len(outer) > 1 else outer[0], [None, _THREADS])
        sch.bind(groups, "blockIdx.x")
        sch.bind(threads, "threadIdx.x")
    return sch.mod["main"]


def _launch(host: tirx.PrimFunc, name: str) -> Any:
    """Return the kernel call in the host code, after checking that the rest only binds numbers."""
    statements = _statements(host.body)
    calls = [s.value for s in statements if isinstance(s, tirx.Evaluate) and _calls(s.value, "tirx.call_ffi_kernel")]
    strange = {type(s).__name__ for s in statements if not isinstance(s, tirx.Evaluate | tirx.Bind | tirx.DeclBuffer)}
    if len(calls) != 1 or strange or len({param.name for param in host.params}) != len(host.params):
        raise VerificationError(
            f"{name}: the target webgpu takes functions of one kernel that needs nothing but its parameters, this one "
            f"has {len(calls)} and needs {', '.join(sorted(strange)) or 'several outputs'}; report it with the output "
            "of --dump"
        )
    return calls[0]


def _statements(body: Any) -> list[Any]:
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _calls(value: Any, name: str) -> bool:
    return isinstance(value, tvm.ir.Call) and getattr(value.op, "name", None) == name


def _is_data(value: Any) -> bool:
    """Return whether a value is the address of a buffer."""
    return bool(value.args) and isinstance(value.args[0].ty, tirx.BufferType)


def _in_shapes(value: Any, host: tirx.PrimFunc) -> Any:
    """Substitute the host code's variables, so that a number is expressed in the shapes' sizes."""
    bound = {s.var: s.value for s in _statements(host.body) if isinstance(s, tirx.Bind)}

    def replace(var: Any) -> Any:
        found = next((v for known, v in bound.items() if known.same_as(var)), None)
        return var if found is None else structural_map(found, (tvm.ir.Var, replace))

    return structural_map(value, (tvm.ir.Var, replace))


def _record(source: str, name: str, buffers: int, sizes: int) -> dict[str, Any]:
    wrong = [kind for kind in _NOT_STORED if f"array<{kind}>" in source]
    if wrong:
        raise VerificationError(
            f"{name}: WGSL cannot store {', '.join(wrong)}, which this part of the model computes; the target webgpu "
            "takes float32 and int32"
        )
    folded = "blockIdx.z * gridDim.x + blockIdx.x > podArgs.packGridDimX"
    if folded not in source:
        raise VerificationError(f"{name}: TVM's WGSL does not check the grid as expected; report it")
    source = source.replace(folded, folded.replace(">", ">="))  # TVM's check lets one workgroup too many pass
    called = "".join(text for function, text in _FUNCTIONS.items() if f"{function}(" in source)
    access = ["write" if f"@binding({i}) var<storage, read_write>" in source else "read" for i in range(buffers)]
    return {
        "source": called + source,
        "entry": f"{name}_kernel",
        "buffers": access,
        "sizes": [*(f"n{i}" for i in range(sizes - 1)), "grid"],
        "constants": {},
        "groups": [["min", "grid", LARGEST_GRID], 1, ["ceil", "grid", LARGEST_GRID]],
    }
