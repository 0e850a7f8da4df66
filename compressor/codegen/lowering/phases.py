"""List the phases from the imported program to what the virtual machine runs, and check the stored bytes after each."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_equal, structural_walk

from compressor.codegen.lowering.elementwise import ScheduleElementwise
from compressor.errors import CompressorError, VerificationError, first_line

_CONSTANT_BYTES_ALLOWED = 1 << 16
"""Rotary frequencies and the like may be constants; weights may not."""

_SHAPES = "shape_func"
"""What ``VMShapeLower`` calls its functions, with a number behind it."""
_PROBE = "read_bandwidth"
"""The function with which a bundle measures the memory it runs on."""


@contextmanager
def error_context(phase: str) -> Iterator[None]:
    """Turn errors of TVM into a VerificationError that names the phase; leave ours as they are."""
    try:
        yield
    except CompressorError:
        raise
    except Exception as error:  # TVM's importer and its passes raise whatever they stumble over
        reason = first_line(error)
        raise VerificationError(
            f"lowering, phase {phase}: TVM cannot lower this model: {reason}; report it with the output of --dump"
        ) from error


def phases() -> list[tuple[str, tvm.transform.Pass]]:
    """List the phases from the imported program to what the virtual machine runs.

    TVM's default list folds constants, which would evaluate packed weights back to dense ones; this one does not.
    """
    t = relax.transform
    return [
        ("bundle_parameters", t.BundleModelParams()),
        ("legalize", t.LegalizeOps()),
        ("annotate", t.AnnotateTIROpPattern()),
        ("fuse_ops", t.FuseOps()),
        ("fuse_tir", t.FuseTIR()),
        ("rewrite_reshapes", t.RewriteDataflowReshape()),  # before schedules hide that they only copy
        ("drop_dead_code", t.DeadCodeElimination()),  # the kernels of reshapes that are views now, above all
        ("schedule_elementwise", ScheduleElementwise()),
        ("leave_dataflow", t.ToNonDataflow()),
        ("drop_purity", t.RemovePurityChecking()),
        ("call_kernels", t.CallTIRRewrite()),
        ("plan_memory", t.StaticPlanBlockMemory()),
        ("allocate", t.LowerAllocTensor()),
        ("free", t.KillAfterLastUse()),
        ("lower_builtins", t.LowerRuntimeBuiltin()),
        ("compute_values", t.ComputePrimValue()),
        ("lower_shapes", t.VMShapeLower()),
        ("order_shapes", OrderShapeStores()),
        ("name_globals", t.AttachGlobalSymbol()),
    ]


def run_phases(
    mod: tvm.IRModule,
    steps: Sequence[tuple[str, tvm.transform.Pass]],
    dense_elements: int | None,
    activations: Collection[int],
    dump: Callable[[str, str], None] | None,
) -> tvm.IRModule:
    """Run phases on an imported program, and :func:`check_storage` before them and after each."""
    check_storage(mod, "import", dense_elements, activations)
    shown: dict[str, Any] = {}
    for name, phase in steps:
        with error_context(name):
            mod = phase(mod)
        check_storage(mod, name, dense_elements, activations)
        if dump is not None:
            dump(name, _listing(mod, shown))
    return mod


def _listing(mod: tvm.IRModule, shown: dict[str, Any]) -> str:
    """Return a program as text, without kernels that stand unchanged in the text of an earlier phase.

    Args:
        shown: kernels of earlier texts by name, which this one's are added to.
    """
    names = {var.name_hint: function for var, function in mod.functions.items()}
    kernels = {name: function for name, function in names.items() if isinstance(function, tirx.PrimFunc)}
    same = sorted(name for name, kernel in kernels.items() if name in shown and kernel.same_as(shown[name]))
    shown.update(kernels)
    text: str = tvm.IRModule({name: function for name, function in names.items() if name not in same}).script()
    return text + "".join(f"\n# {name}: as before this phase" for name in same)


def check_storage(mod: tvm.IRModule, phase: str, dense_elements: int | None, activations: Collection[int] = ()) -> None:
    """Assert that a phase did not undo the compression ("what is claimed is stored").

    Constants must stay small, and nothing of fixed shape may be computed that has as many elements as the smallest
    packed weight has when dense: activations have symbolic shapes, so that would be a weight.

    Args:
        dense_elements: elements of the smallest packed weight; None when nothing is packed.
        activations: numbers of elements that may occur nevertheless, because the captured graph itself has values of
            that fixed size.
    Raises:
        VerificationError: names the phase and the tensor.
    """
    constant_bytes = 0
    materialised: list[str] = []

    def visit_constant(node: Any) -> None:
        nonlocal constant_bytes
        if isinstance(node.value, tvm.runtime.Tensor):
            constant_bytes += node.value.numpy().nbytes

    def visit_binding(node: Any) -> None:
        if dense_elements is None or not isinstance(node.value, tvm.ir.Call):
            return
        shape = getattr(node.var.ty, "shape", None)
        if shape is None or not all(isinstance(n, tvm.tirx.IntImm) for n in shape):
            return
        sizes = [int(n) for n in shape]
        if prod(sizes) >= dense_elements and prod(sizes) not in activations:
            materialised.append(f"{node.var.name} {sizes}")

    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function) and gvar.name_hint != _PROBE:
            structural_walk(func, [(tvm.ir.GenericConst, visit_constant), (relax.VarBinding, visit_binding)])
    if constant_bytes > _CONSTANT_BYTES_ALLOWED:
        raise VerificationError(
            f"lowering, phase {phase}: {constant_bytes} bytes of constants (allowed: {_CONSTANT_BYTES_ALLOWED}); "
            "weights were folded into the program"
        )
    if materialised:
        raise VerificationError(
            f"lowering, phase {phase}: a dense weight is computed at run time: {', '.join(materialised)}"
        )


@tvm.transform.module_pass(opt_level=0, name="OrderShapeStores")
class OrderShapeStores:
    """Make one program of what ``VMShapeLower`` writes in any order, from a hash map: functions that compute sizes.

    Each of their statements stores one size in a slot of its own, computed from slots that are filled before the
    function is called, so that any order is right.  Functions that are equal once they are sorted become one, as those
    have that were equal before, and the others are numbered anew.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        """Sort by slot; functions of any other form stay as they are."""
        functions, kept = dict(mod.functions.items()), list[tuple[tvm.ir.GlobalVar, tirx.PrimFunc]]()
        named = {int(gvar.name_hint.removeprefix(_SHAPES) or 0): gvar for gvar in functions if _computes_sizes(gvar)}
        replaced: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
        for _, gvar in sorted(named.items()):
            func = _sorted(functions.pop(gvar).without_attr("global_symbol"))
            known = next((new for new, other in kept if structural_equal(func, other)), None)
            if known is None:
                known = tvm.ir.GlobalVar(f"{_SHAPES}{len(kept) or ''}")
                relax.expr._update_type(known, gvar.ty)
                kept.append((known, func))
            replaced[gvar] = known
        rename = _Renamed(replaced)
        changed = {
            gvar: rename.visit_expr(func) if isinstance(func, relax.Function) else func
            for gvar, func in functions.items()
        }
        return tvm.IRModule({**changed, **dict(kept)}, attrs=mod.attrs)


def _computes_sizes(gvar: tvm.ir.GlobalVar) -> bool:
    return re.fullmatch(rf"{_SHAPES}\d*", gvar.name_hint) is not None


def _sorted(func: tirx.PrimFunc) -> tirx.PrimFunc:
    body = func.body
    if not (isinstance(body, tirx.SeqStmt) and all(isinstance(stmt, tirx.BufferStore) for stmt in body.seq)):
        return func
    return func.with_body(tirx.SeqStmt(sorted(body.seq, key=lambda store: int(store.indices[0]))))


@relax.expr_functor.mutator
class _Renamed(relax.PyExprMutator):  # type: ignore[misc]
    """Call functions by other names."""

    def __init__(self, names: Mapping[tvm.ir.GlobalVar, tvm.ir.GlobalVar]) -> None:
        super().__init__()
        self.names = names

    def visit_global_var_(self, op: tvm.ir.GlobalVar) -> tvm.ir.GlobalVar:
        """Return the variable of the function that is left."""
        return self.names.get(op, op)
