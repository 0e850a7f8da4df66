"""Write exports, and load them with their clients."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from families import DECODERS, save
from missing import skip_or_fail
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.export.exchange.export import Export, Loading
from compressor.export.exchange.job import export_graph

TOLERANCE = 1e-5  # of the largest output: sums in another order
FLOATS = Loading()


def saved(folder: Path, name: str, **sizes: Any) -> GraphModule:
    """Save a model of a family, of other sizes where they are given, and capture it."""
    cls, known = DECODERS[name]
    save(folder, cls, {**known, **sizes}, True)
    return capture(folder)


def written(graph: GraphModule, export: Export, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return export_graph(graph, export.plan(graph), folder, folder, check=False).content()


def by_transformers(folder: Path, loading: Loading = FLOATS) -> torch.Tensor:
    """Return what transformers computes for the first tokens of the vocabulary."""
    has_client()
    more = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if loading.dequantize else {}
    dtype = getattr(torch, loading.dtype)
    cls = transformers.AutoModelForCausalLM
    model, told = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **more)
    assert not any(told.values()), told
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits[0].float()
    return found


def has_client() -> None:
    if find_spec("compressed_tensors") is None:
        skip_or_fail("compressed-tensors is not installed")
