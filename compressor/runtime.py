"""Loads and runs bundles from Python: the module that is also shipped inside each of them."""

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
]
