"""Generate code for CPUs, each kernel an object file of its own, and take from the store what was generated before.

    TIR of a kernel, target, versions  --SHA-256-->  object in the store, or: TIR passes, LLVM  -->  object

Kernels are generated on all cores: TVM lets go of Python's lock while it works.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import tvm
from compressor_runtime import available_cores
from tvm import relax, tirx
from tvm.relax import vm_build

from compressor.codegen.machine_code.store import ObjectStore
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.version import installed_versions

_MOST_THREADS = 8
"""Kernels that are generated at once: each takes memory for its own module of LLVM."""


def build_executable(mod: tvm.IRModule, target: tvm.target.Target, store: ObjectStore | None = None) -> Any:
    """Return TVM's executable of a module that has been through all phases.

    The oracle is :func:`tvm.compile`, which generates all kernels as one object.

    Args:
        store: of objects; None takes that of the cache folder.
    """
    attributes: Mapping[str, Any] = mod.attrs or {}
    builder = relax.ExecBuilder()
    rest = vm_build._vmcodegen(builder, mod)  # relax.build takes no code that is there already
    kernels = {var.name_hint: func for var, func in rest.functions.items() if isinstance(func, tirx.PrimFunc)}

    def make(name: str, func: tirx.PrimFunc) -> Any:
        return tirx.build(tvm.IRModule({name: func}), target, pipeline=PIPELINE)

    with tempfile.TemporaryDirectory() as scratch:
        found = kernel_objects(kernels, target, make, Path(scratch), store)
        libraries = [tvm.runtime.load_static_library(str(path), [name]) for name, path in found.items()]
    constants = dict(attributes.get("const_name_to_constant", {}))
    return vm_build._vmlink(builder, target, ext_libs=libraries, params=constants)


def kernel_objects(
    kernels: Mapping[str, tirx.PrimFunc],
    target: tvm.target.Target,
    make: Callable[[str, tirx.PrimFunc], Any],
    folder: Path,
    store: ObjectStore | None = None,
) -> dict[str, Path]:
    """Write the object file of each kernel, and return where it is.

    Args:
        kernels: by name.
        make: a kernel's name and TIR -> TVM's module of its code; called for kernels that the store lacks, in threads.
        folder: for the files.
        store: None takes that of the cache folder.
    """
    store = store or ObjectStore()
    source = hashlib.sha256(Path(inspect.getfile(make)).read_bytes()).hexdigest()
    given, made = f"{target.export()}\n{source}\n{_versions()}\n", list[str]()

    def write(number: int, name: str) -> Path:
        key = hashlib.sha256((given + tvm.ir.save_json(kernels[name])).encode()).hexdigest()
        path = folder / f"{number}.o"
        if (known := store.find(key)) is not None:
            path.write_bytes(known)
            return path
        make(name, kernels[name]).write_to_file(str(path), "o")
        made.append(name)
        with suppress(OSError):  # without room for it, the next run generates it again, to the same bytes
            store.keep(key, path.read_bytes())
        return path

    with ThreadPoolExecutor(min(available_cores(), _MOST_THREADS)) as threads:
        paths = list(threads.map(write, range(len(kernels)), kernels))
    if made:
        store.trim()
    return dict(zip(kernels, paths, strict=True))


@functools.cache
def _versions() -> str:
    """Return what a kernel's code depends on beside its TIR and its target: TVM, LLVM, and the passes of our own."""
    own = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
    llvm = tvm.target.codegen.llvm_version_major()
    return f"TVM {installed_versions()['apache-tvm']}, LLVM {llvm}, {own}"
