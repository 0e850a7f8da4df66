"""Write the files of a bundle whose kernels are shared libraries: libraries, weights, vectors, run-time."""

from __future__ import annotations

import importlib.metadata
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.codegen.backend import Written
from compressor.errors import ToolchainError
from compressor.export.facts import stored_parameter
from compressor.export.publish import explaining_failed_writes
from compressor.host.resources import resource, runtime_files
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import Tensor, nn

_GPU_NEEDS = """
The kernels run on an NVIDIA GPU, in Linux on x86-64, with a driver of version 580 or later.  CUDA's run-time library
comes with the package nvidia-cuda-runtime, under NVIDIA's licence; it is not part of this folder.
"""


@dataclass(frozen=True)
class FasterLibrary:
    """The same kernels for an instruction set that fewer CPUs have."""

    path: Path
    isa: str
    cpu_features: Sequence[str]

    @property
    def name(self) -> str:
        """Its file in a bundle."""
        return f"model_{self.isa}.so"


@dataclass(frozen=True, kw_only=True)
class NativeParts:
    """Hold what a bundle with shared libraries is made of.

    Attributes:
        name: of the model, for the bundle's README.
        graph: the parameters, by name; they may be memory-mapped, or views.
        parameters: names, in the order in which ``main`` takes them, then those that only other entries take.
        library: the kernels, linked.
        vectors: inputs and expected outputs, see :mod:`compressor.export.vectors`.
        kernels: name, evidence, ... of each.
        cpu_features: that the library needs, as in /proc/cpuinfo.
        isa: name of the library's instruction set.
        faster: libraries for CPUs that have more, best first.
        entries: of each entry of a library that has several, the indices of its parameters.
        entry_bytes: memory that an entry of a batch takes; None where a batch must not be divided.
        parts: as of :class:`compressor.codegen.lowering.compile.Library`.
        archs: GPUs that the kernels run on, as nvcc names them; none of kernels for CPUs.
        tvm_runtime: folder of TVM's run-time libraries for the machines that the bundle is for; None where no wheel has
            them.
    """

    name: str
    graph: nn.Module
    parameters: Sequence[str]
    library: Path
    vectors: Mapping[str, Tensor]
    kernels: Sequence[Mapping[str, Any]]
    cpu_features: Sequence[str]
    isa: str = "native"
    faster: Sequence[FasterLibrary] = ()
    entry_bytes: Any = None
    entries: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parts: Sequence[Mapping[str, Any]] = ()
    archs: Sequence[str] = ()
    tvm_runtime: Path | None


def write_native(folder: Path, parts: NativeParts) -> Written:
    """Write libraries, weights, vectors, run-time and README into the empty ``folder``.

    Raises:
        CompressorError: a parameter is missing, or writing failed.
    """
    from compressor_runtime import CUDA_SCHEMA_VERSION, SCHEMA_VERSION

    from compressor.host.tensor_files import DTYPES, write_safetensors

    tensors = {name: stored_parameter(parts.graph, name) for name in parts.parameters}
    type_names = {dtype: name for name, dtype in DTYPES.items()}
    with explaining_failed_writes(folder):
        shutil.copyfile(parts.library, folder / "model.so")
        for library in parts.faster:
            shutil.copyfile(library.path, folder / library.name)
        _copy_runtime(folder, parts)
        written = {"weights.safetensors": tensors, "vectors.safetensors": parts.vectors}
        hashes = {name: write_safetensors(folder / name, content) for name, content in written.items()}
    listed = [*((x.isa, x.name, x.cpu_features) for x in parts.faster), (parts.isa, "model.so", parts.cpu_features)]
    fields = {
        "format": "compressor bundle",
        "schema_version": CUDA_SCHEMA_VERSION if parts.archs else SCHEMA_VERSION,
        "parameters": list(parts.parameters),
        "parameter_types": [
            {"dtype": type_names[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in parts.parameters
        ],
        "cpu_features": sorted(parts.cpu_features),
        "libraries": [{"isa": isa, "file": name, "cpu_features": sorted(needed)} for isa, name, needed in listed],
        "weight_bytes": sum(t.numel() * t.itemsize for t in tensors.values()),
    }
    if len(parts.entries) > 1:
        fields["entries"] = {name: list(indices) for name, indices in parts.entries.items()}
    if parts.archs:
        fields |= {"device": "cuda", "cuda_capabilities": list(parts.archs)}
    model = {} if parts.entry_bytes is None else {"entry_bytes": parts.entry_bytes}
    model |= {"parts": [dict(part) for part in parts.parts]} if parts.parts else {}
    return Written(fields, parts.kernels, hashes, model)


def _copy_runtime(folder: Path, parts: NativeParts) -> None:
    """Copy the run-time in Python, TVM's, and the README."""
    python, versions = resource("export") / "python", installed_versions()
    for name, source in runtime_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / name)
    names = ["libtvm_runtime.so", *(["libtvm_runtime_cuda.so"] if parts.archs else [])]
    if parts.tvm_runtime is not None:
        copy_tvm_runtime(folder / "lib", parts.tvm_runtime, names)
    readme = string.Template((python / "README-bundle.md").read_text(encoding="utf-8"))
    words = {
        "name": parts.name,
        "tvm_ffi": versions["apache-tvm-ffi"],
        "kernels_for": f"a CPU with: {', '.join(sorted(parts.cpu_features)) or 'no special features'}",
        "more_packages": "",
        "needs": "",
    }
    if parts.archs:
        words |= {
            "kernels_for": f"NVIDIA GPUs: {', '.join(parts.archs)}",
            "more_packages": " 'nvidia-cuda-runtime==13.0.*'",
            "needs": _GPU_NEEDS,
        }
    (folder / "README.md").write_text(readme.substitute(words), encoding="utf-8")


def copy_tvm_runtime(folder: Path, source: Path, names: Sequence[str]) -> None:
    """Copy TVM's run-time libraries from the folder ``source``, and its licence."""
    folder.mkdir()
    for name in names:
        if not (source / name).is_file():
            raise ToolchainError(f"{source / name}: not found; install the apache-tvm wheel that Compressor asks for")
        shutil.copyfile(source / name, folder / name)
    for entry in importlib.metadata.files("apache-tvm") or ():
        if entry.name in ("LICENSE", "NOTICE"):
            shutil.copyfile(str(entry.locate()), folder / f"{entry.name}-apache-tvm")
