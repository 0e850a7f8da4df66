"""Writes bundles: manifest, kernels, weights, tokenizer, run-time.  A bundle appears whole or not at all."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor import __version__
from compressor.errors import CompressorError, ToolchainError, UsageError
from compressor.host.cache import partial_folder
from compressor.host.resources import resource

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.export.web import WebParts

_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "tokenizers", "torch", "transformers")
_EXCHANGE = 2  # renameat2's RENAME_EXCHANGE: two names swap what they name, in one step
_HERE = -100  # AT_FDCWD


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


@dataclass(frozen=True)
class BundleParts:
    """What a bundle is made of.  Everything here must be the same in two runs with the same inputs."""

    graph: nn.Module  # the parameters, by name; they may be memory-mapped, or views
    parameters: Sequence[str]  # names, in the order in which the library's entry takes them
    library: Path  # the kernels, linked
    vectors: Mapping[str, Tensor]  # inputs and expected outputs, see compressor.export.vectors
    model: Mapping[str, Any]  # fields of ModelInfo; `source` is left out
    recipe: Mapping[str, Any]  # after defaults and overrides
    sites: Sequence[Mapping[str, Any]]  # site, format, bytes_before, bytes_after, ...
    kernels: Sequence[Mapping[str, Any]]  # name, evidence, ...
    cpu_features: Sequence[str]  # of the library, as in /proc/cpuinfo
    dense_weight_bytes: int
    calibration: Mapping[str, Any] | None = None  # source, samples, tokens and SHA-256 of what was calibrated on
    tokenizer: Path | None = None  # folder of the model; None for a model without text
    lock: str | None = None  # text of compress.lock
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


@contextmanager
def publishing(destination: Path) -> Iterator[Path]:
    """A new folder beside ``destination`` that takes its place when the block ends well, and vanishes otherwise.

    What the block wrote is on the disk before it gets its name.  A bundle that was there stays whole until then.
    """
    check_destination(destination)
    destination = destination.absolute()
    with ExitStack() as stack:
        with explaining_failed_writes(destination):
            partial = stack.enter_context(partial_folder(destination.parent, destination.name))
        yield partial
        with explaining_failed_writes(destination):
            for file in sorted(partial.rglob("*"), reverse=True):
                _flush(file)
            _flush(partial)
            _take_place(partial, destination)
            _flush(destination.parent)


@contextmanager
def explaining_failed_writes(destination: Path) -> Iterator[None]:
    """Errors of the system become one that says what to do."""
    try:
        yield
    except OSError as error:
        raise CompressorError(
            f"{destination}: cannot be written: {error}; free some space or choose another folder"
        ) from error


def check_destination(destination: Path) -> None:
    """Raise a UsageError unless a bundle can be written to ``destination``: for a check before hours of work."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UsageError(f"{destination}: is no folder; choose another name for the bundle")
    if destination.is_dir() and any(destination.iterdir()) and not _is_bundle(destination):
        raise UsageError(f"{destination}: holds something else than a bundle; choose another name, or an empty folder")
    parent = next(folder for folder in destination.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{destination}: cannot be written, {parent} is no folder that you may write to")


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


def stored_parameter(graph: nn.Module, name: str) -> nn.Parameter:
    """A parameter that the kernels take; raises CompressorError when the graph lacks it."""
    try:
        return graph.get_parameter(name)
    except AttributeError as error:
        raise CompressorError(f"the kernels need the parameter {name}, which the graph does not have") from error


def write_origin(folder: Path, parts: BundleParts | WebParts) -> None:
    """The tokenizer and the lock, where there are any."""
    if parts.tokenizer is not None:
        write_tokenizer(parts.tokenizer, folder / "tokenizer.json", parts.model.get("vocab_size", 0))
    if parts.lock is not None:
        (folder / "compress.lock").write_text(parts.lock, encoding="utf-8")


def described(parts: BundleParts | WebParts) -> dict[str, Any]:
    """The fields that manifests of all kinds have."""
    return {
        "kind": parts.model["kind"],
        "model": {key: value for key, value in parts.model.items() if key not in ("kind", "source")},
        "recipe": parts.recipe,
        "calibration": parts.calibration,
        "formats": sorted({site["format"] for site in parts.sites if site.get("format")}),
        "sites": list(parts.sites),
        "kernels": list(parts.kernels),
        "versions": installed_versions(),
        "dense_weight_bytes": parts.dense_weight_bytes,
    }


def write_measurements(bundle: Path, measurements: Mapping[str, Any]) -> None:
    """Keep measured figures beside the manifest: they differ from run to run, so they stand outside the hashes."""
    partial = bundle / f".measurements.{secrets.token_hex(4)}.partial"
    try:
        partial.write_bytes(_json(measurements))
        _flush(partial)
        partial.replace(bundle / "measurements.json")
    except OSError as error:
        raise CompressorError(f"{bundle}: measurements.json cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def write_tokenizer(source: Path, file: Path, vocab_size: int) -> None:
    """Copy the tokenizer of a model folder as tokenizer.json, converted through transformers if it has an older form.

    Raises:
        CompressorError: there is none, or it makes ids that a model of ``vocab_size`` (0: unknown) does not know.
    """
    from tokenizers import Tokenizer

    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", file)
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            tokenizer.backend_tokenizer.save(str(file))
        except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
            raise CompressorError(
                f"{source}: no tokenizer.json, and no tokenizer that transformers can convert to one ({error}); "
                "put the model's tokenizer files beside its weights"
            ) from error
    try:
        largest = max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False).values(), default=0)
    except Exception as error:  # tokenizers raises nothing more precise
        raise CompressorError(f"{source / 'tokenizer.json'}: not a tokenizer: {error}") from error
    if vocab_size and largest >= vocab_size:  # added tokens may lie beyond: some models never see theirs
        raise CompressorError(
            f"{source}: the tokenizer makes ids up to {largest}, the model knows {vocab_size}; "
            "give the tokenizer that belongs to this model"
        )


def installed_versions() -> dict[str, str]:
    """Versions of Python, the machine's architecture, and the packages that decide what a bundle is like."""
    own = {"compressor": __version__, "machine": platform.machine(), "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}


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


def listing(folder: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Every file in ``folder`` with its size and SHA-256, not computed again if ``known``, and those of its pieces."""
    from compressor_runtime import PIECE_BYTES, available_cores, sha256

    listing: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(available_cores()) as pool:
        for file in (file for file in folder.rglob("*") if file.is_file()):
            name, size_bytes = file.relative_to(folder).as_posix(), file.stat().st_size
            listing[name] = {"bytes": size_bytes, "sha256": known.get(name) or sha256(file)}
            if size_bytes > PIECE_BYTES:
                starts = range(0, size_bytes, PIECE_BYTES)
                ends = (start + PIECE_BYTES for start in starts)
                listing[name]["pieces"] = list(pool.map(sha256, repeat(file), starts, ends))
    return listing


def with_total(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON with ``bundle_bytes``: all files and the manifest itself, measurements not included."""
    files_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
    text, total = b"", -1
    while total != files_bytes + len(text):  # the number is part of the text that it counts
        total = files_bytes + len(text)
        text = _json({**manifest, "bundle_bytes": total})
    return text


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _is_bundle(folder: Path) -> bool:
    from compressor_runtime import BrowserBundleError, BundleError, read_manifest

    try:
        read_manifest(folder)
    except BrowserBundleError:
        return True
    except BundleError:
        return False
    return True


def _take_place(partial: Path, destination: Path) -> None:
    """Rename a folder over another one; afterwards ``partial`` names what was there, if anything was."""
    if not destination.exists():
        partial.rename(destination)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_HERE, os.fsencode(partial), _HERE, os.fsencode(destination), _EXCHANGE) == 0:
        return
    # A file system that cannot exchange names: between these two steps there is no bundle at the destination.
    former = partial.with_suffix(".former")
    destination.rename(former)
    try:
        partial.rename(destination)
    except OSError:
        former.rename(destination)
        raise
    former.rename(partial)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
