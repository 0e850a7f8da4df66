"""Estimate what bundles of all kinds hold beside weights and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressor.graph.model import ModelInfo

# Fitted to bundles: the manifest, and a site with its parameters in the manifest and in the weights' header.
MANIFEST_BYTES, SITE_BYTES = 6_000, 430


def files_bytes(shipped: Sequence[Path], info: ModelInfo) -> int:
    """Count the bytes of shipped files and of the model's tokenizer."""
    tokenizer = [] if info.source is None else [info.source / "tokenizer.json"]
    return sum(path.stat().st_size for path in (*shipped, *tokenizer) if path.is_file())
