"""Compressor: compression recipes as compiler pipelines.

A model becomes a graph, passes rewrite it, kernels read the compressed storage, and the resulting bundle runs without
PyTorch and without the compiler.  The public names are below; each is imported when it is first used, so that ``import
compressor`` is fast.
``compressor.capture.capture.capture`` turns a model into a graph.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from compressor.version import __version__ as __version__

if TYPE_CHECKING:
    from compressor.codegen.target import Target
    from compressor.errors import CompressorError
    from compressor.formats.format import Format
    from compressor.pipeline.context import Context
    from compressor.pipeline.pipeline import Pass, Pipeline
    from compressor.progress import LogReporter
    from compressor.recipe.recipe import Recipe
    from compressor.run.job import compress
    from compressor.runtime import Bundle, load

__all__ = [
    "Bundle",
    "CompressorError",
    "Context",
    "Format",
    "LogReporter",
    "Pass",
    "Pipeline",
    "Recipe",
    "Target",
    "compress",
    "load",
]

_HOMES = {
    "Bundle": "compressor.runtime",
    "CompressorError": "compressor.errors",
    "Context": "compressor.pipeline.pipeline",
    "Format": "compressor.formats.format",
    "LogReporter": "compressor.progress",
    "Pass": "compressor.pipeline.pipeline",
    "Pipeline": "compressor.pipeline.pipeline",
    "Recipe": "compressor.recipe.recipe",
    "Target": "compressor.codegen.target",
    "compress": "compressor.run.job",
    "load": "compressor.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'compressor' has no attribute {name!r}; it offers {', '.join(__all__)}")
    if name == "compress" and "torch" not in sys.modules:
        from compressor.host.threads import wait_passively

        wait_passively()  # before torch is imported
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
