"""Write a batch of candidates: a folder that times them on a machine with a GPU, without anything of this package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import UsageError
from compressor.export.native import copy_tvm_runtime
from compressor.export.publish import publishing
from compressor.host.cache import cache_folder, replace_file
from compressor.host.digests import file_sha256
from compressor.host.resources import resource, runtime_files
from compressor.host.wheels import tvm_runtime
from compressor.version import installed_versions

BATCH = "batch.json"
MOST_BYTES = 64 << 20
_RUNNER = ("run.py", "gpu_timing.py")


@dataclass(frozen=True)
class Batch:
    """What a batch holds.

    Attributes:
        folder: where it is.
        digest: of ``batch.json``, which has the digests of all other files: results name it.
        kernels, candidates: how many.
        size_bytes: of all files.
        archs: GPUs that it has machine code for.
    """

    folder: Path
    digest: str
    kernels: int
    candidates: int
    size_bytes: int
    archs: tuple[str, ...]


@contextmanager
def writing_batch(folder: Path) -> Iterator[Path]:
    """Make a folder with the runner in it, which takes the place of ``folder`` if the block ends well.

    Raises:
        UsageError: ``folder`` is there and not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is not empty; name a new folder for the batch")
    with publishing(folder) as partial:
        for name, source in runtime_files().items():
            if name.startswith("compressor_runtime/"):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, partial / name)
        for name in _RUNNER:
            shutil.copyfile(resource("export") / "tuning" / name, partial / name)
        copy_tvm_runtime(partial / "lib", tvm_runtime("x86_64"), ["libtvm_runtime.so", "libtvm_runtime_cuda.so"])
        (partial / "kernels").mkdir()
        yield partial


def finish_batch(
    partial: Path, folder: Path, kernels: list[Mapping[str, Any]], kernels_digest: str, archs: tuple[str, ...]
) -> Batch:
    """Write what the folder ``partial`` holds into its ``batch.json``, and a copy into the cache for the import.

    Raises:
        UsageError: it is larger than a batch may be.
    """
    files = {path.relative_to(partial).as_posix(): path for path in sorted(partial.rglob("*")) if path.is_file()}
    size = sum(path.stat().st_size for path in files.values())
    if size > MOST_BYTES:
        raise UsageError(
            f"{folder}: the candidates take {size / 1e6:.0f} MB, and a batch may have {MOST_BYTES / 1e6:.0f}; export "
            "for one GPU only (--set target.cuda.arch=sm_90), or a model with fewer shapes"
        )
    content = {
        "format": "compressor tuning batch",
        "schema_version": 1,
        "kernels_digest": kernels_digest,
        "archs": list(archs),
        "apache-tvm-ffi": installed_versions()["apache-tvm-ffi"],
        "files": {name: file_sha256(path) for name, path in files.items()},
        "kernels": kernels,
    }
    (partial / BATCH).write_text(json.dumps(content, indent=1), encoding="utf-8")
    digest = file_sha256(partial / BATCH)
    kept = exported(digest)
    kept.parent.mkdir(parents=True, exist_ok=True)
    replace_file(kept, (partial / BATCH).read_bytes())
    candidates = sum(len(kernel["candidates"]) for kernel in kernels)
    return Batch(folder, digest, len(kernels), candidates, size, archs)


def exported(digest: str) -> Path:
    """Return where the ``batch.json`` of a batch that was exported here is kept."""
    return cache_folder() / "batches" / f"{digest}.json"
