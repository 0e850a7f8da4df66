"""Run a Compressor bundle: load it, check it, step the model, generate text.

This package is shipped in every bundle and needs numpy, apache-tvm-ffi and (for text) tokenizers, neither PyTorch
nor the compiler.  From Python: ``load("bundle").generate("Once upon")``; from a shell, in a bundle's folder:
``python compressor_runtime.py --prompt "Once upon"``.

Invariant: imports nothing of Compressor, so that one text serves installations, checkouts and bundles.
"""

from __future__ import annotations

from compressor_runtime.bundle import Bundle, load
from compressor_runtime.check import PIECE_BYTES, check_files, sha256
from compressor_runtime.command import main
from compressor_runtime.cpu import allow_tiles, available_cores, check_cpu, choose_library, missing_features
from compressor_runtime.errors import BrowserBundleError, BundleError, DamagedBundleError, RequestError
from compressor_runtime.generation import Generation, TextStream, choose
from compressor_runtime.manifest import CUDA_SCHEMA_VERSION, SCHEMA_VERSION, read_manifest
from compressor_runtime.session import Session
from compressor_runtime.tensors import read_safetensors
from compressor_runtime.vm import configure_threads

__all__ = [
    "CUDA_SCHEMA_VERSION",
    "PIECE_BYTES",
    "SCHEMA_VERSION",
    "BrowserBundleError",
    "Bundle",
    "BundleError",
    "DamagedBundleError",
    "Generation",
    "RequestError",
    "Session",
    "TextStream",
    "allow_tiles",
    "available_cores",
    "check_cpu",
    "check_files",
    "choose",
    "choose_library",
    "configure_threads",
    "load",
    "main",
    "missing_features",
    "read_manifest",
    "read_safetensors",
    "sha256",
]
