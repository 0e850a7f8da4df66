"""Load and run bundles from Python: re-export the module that is also shipped inside each bundle."""

from __future__ import annotations

from compressor_runtime import (
    Bundle,
    BundleError,
    DamagedBundleError,
    RequestError,
    Session,
    TextStream,
    check_files,
    load,
    read_manifest,
)
from compressor_runtime.cpu import thread_count

__all__ = [
    "Bundle",
    "BundleError",
    "DamagedBundleError",
    "RequestError",
    "Session",
    "TextStream",
    "check_files",
    "load",
    "read_manifest",
    "thread_count",
]
