"""Generate a CPU's code, each kernel an object file of its own, and take from the store what was generated before.

    TIR of a kernel, target, versions  --SHA-256-->  object in the store, or: TIR passes, LLVM  -->  object

Kernels are generated on all cores: TVM lets go of Python's lock while it works.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
from compressor_runtime import available_cores
from tvm import relax, tirx
from tvm.relax import vm_build

from compressor.codegen.machine_code.store import ObjectStore
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.version import installed_versions


def build_executable(mod: tvm.IRModule, target: tvm.target.Target, store: ObjectStore | None = None) -> Any:
    """Return TVM's executable of a module that has been through all phases.

    The oracle is :func:`tvm.compile`, which generates all kernels as one object.

    Args:
        store: of objects; None takes that of the cache folder.
    """
    store = store or ObjectStore()
    attributes: Mapping[str, Any] = mod.attrs or {}
    builder = relax.ExecBuilder()
    rest = vm_build._vmcodegen(builder, mod)  # relax.build takes no code that is there already
    kernels = {var.name_hint: func for var, func in rest.functions.items() if isinstance(func, tirx.PrimFunc)}
    given = f"{target.export()}\n{_versions()}\n"
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(available_cores()) as threads:

        def made(name: str, func: tirx.PrimFunc) -> tuple[Any, bool]:
            key, file = hashlib.sha256((given + tvm.ir.save_json(func)).encode()).hexdigest(), Path(scratch, name)
            known = store.find(key)
            if known is None:
                tirx.build(tvm.IRModule({name: func}), target, pipeline=PIPELINE).write_to_file(str(file), "o")
                _keep(store, key, file.read_bytes())
            else:
                file.write_bytes(known)
            return tvm.runtime.load_static_library(str(file), [name]), known is not None

        found = list(threads.map(made, kernels, kernels.values()))
    if not all(was_known for _, was_known in found):
        store.trim()
    libraries, constants = [library for library, _ in found], dict(attributes.get("const_name_to_constant", {}))
    return vm_build._vmlink(builder, target, ext_libs=libraries, params=constants)


def _keep(store: ObjectStore, key: str, content: bytes) -> None:
    """Store an object if there is room: the next run generates it again otherwise, to the same bytes."""
    try:
        store.keep(key, content)
    except OSError:
        return


@functools.cache
def _versions() -> str:
    """Return what a kernel's code depends on beside its TIR and its target: TVM, LLVM, and the passes of our own."""
    own = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
    llvm = tvm.target.codegen.llvm_version_major()
    return f"TVM {installed_versions()['apache-tvm']}, LLVM {llvm}, {own}"
