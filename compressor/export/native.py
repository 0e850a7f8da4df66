"""Write the files of a bundle whose kernels are shared libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import ToolchainError
from compressor.export.facts import BundleFacts, described, stored_parameter, write_origin
from compressor.export.manifest import listing, with_total
from compressor.export.publish import explaining_failed_writes, publishing
from compressor.host.resources import resource
from compressor.version import installed_versions

if TYPE_CHECKING:
    from torch import Tensor


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
class BundleParts(BundleFacts):
    """What a bundle with shared libraries is made of."""

    library: Path  # the kernels, linked
    vectors: Mapping[str, Tensor]  # inputs and expected outputs, see compressor.export.vectors
    cpu_features: Sequence[str]  # of the library, as in /proc/cpuinfo
    isa: str = "native"  # name of the library's instruction set
    faster: Sequence[FasterLibrary] = ()  # for CPUs that have more, best first


def write_bundle(destination: Path, parts: BundleParts) -> Path:
    """Write a bundle to ``destination``, in place of a bundle that is there already; returns ``destination``.

    Raises:
        UsageError: the destination is something other than a bundle, or cannot be written to.
        CompressorError: the tokenizer or a parameter is missing, or writing failed; nothing is left behind.
    """
    with publishing(destination) as folder:
        fill_bundle(folder, parts)
    return destination


def fill_bundle(folder: Path, parts: BundleParts) -> None:
    """Write all files of a bundle into the empty ``folder``.

    Raises:
        CompressorError: a parameter or the tokenizer is missing, or writing failed.
    """
    with explaining_failed_writes(folder):
        _fill(folder, parts)


def _fill(folder: Path, parts: BundleParts) -> None:
    from compressor_runtime import SCHEMA_VERSION

    from compressor.host.tensor_files import DTYPES, write_safetensors

    tensors = {name: stored_parameter(parts.graph, name) for name in parts.parameters}
    type_names = {dtype: name for name, dtype in DTYPES.items()}
    python, versions = resource("export") / "python", installed_versions()
    shutil.copyfile(parts.library, folder / "model.so")
    for library in parts.faster:
        shutil.copyfile(library.path, folder / library.name)
    listed = [*((x.isa, x.name, x.cpu_features) for x in parts.faster), (parts.isa, "model.so", parts.cpu_features)]
    for name in ("compressor_runtime.py", "compressor_selfcheck.py"):
        shutil.copyfile(python / name, folder / name)
    _copy_tvm_runtime(folder / "lib")
    write_origin(folder, parts)
    readme = string.Template((python / "README-bundle.md").read_text(encoding="utf-8"))
    words = {
        "name": parts.model.get("name", "model"),
        "tvm_ffi": versions["apache-tvm-ffi"],
        "cpu_features": ", ".join(sorted(parts.cpu_features)) or "no special features",
    }
    (folder / "README.md").write_text(readme.substitute(words), encoding="utf-8")
    written = {"weights.safetensors": tensors, "vectors.safetensors": parts.vectors}
    hashes = {name: write_safetensors(folder / name, content) for name, content in written.items()}
    manifest = {
        "format": "compressor bundle",
        "schema_version": SCHEMA_VERSION,
        **described(parts),
        "parameters": list(parts.parameters),
        "parameter_types": [
            {"dtype": type_names[tensors[name].dtype], "shape": list(tensors[name].shape)} for name in parts.parameters
        ],
        "cpu_features": sorted(parts.cpu_features),
        "libraries": [{"isa": isa, "file": name, "cpu_features": sorted(needed)} for isa, name, needed in listed],
        "weight_bytes": sum(t.numel() * t.itemsize for t in tensors.values()),
        "files": listing(folder, hashes),
    }
    (folder / "manifest.json").write_bytes(with_total(manifest))


def _copy_tvm_runtime(folder: Path) -> None:
    """TVM's run-time library and its licence, found without importing TVM."""
    spec = importlib.util.find_spec("tvm")
    library = Path(spec.origin).parent / "lib" / "libtvm_runtime.so" if spec is not None and spec.origin else None
    if library is None or not library.is_file():
        raise ToolchainError(f"{library or 'tvm'}: not found; install the apache-tvm wheel that Compressor asks for")
    folder.mkdir()
    shutil.copyfile(library, folder / library.name)
    for entry in importlib.metadata.files("apache-tvm") or ():
        if entry.name in ("LICENSE", "NOTICE"):
            shutil.copyfile(str(entry.locate()), folder / f"{entry.name}-apache-tvm")
