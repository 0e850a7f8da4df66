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
from compressor_runtime.generation import next_tokens
from compressor_runtime.source.encoding import tokens_left, without
from compressor_runtime.source.features import source_of
from compressor_runtime.source.frames import collapsed
from compressor_runtime.source.wave_file import wave_samples

__all__ = [
    "Bundle",
    "BundleError",
    "DamagedBundleError",
    "RequestError",
    "Session",
    "TextStream",
    "check_files",
    "collapsed",
    "load",
    "next_tokens",
    "read_manifest",
    "source_of",
    "thread_count",
    "tokens_left",
    "wave_samples",
    "without",
]
