"""What tests of several passes measure in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor


@pytest.fixture(scope="module")
def two_blocks() -> Callable[..., tuple[Tensor, Tensor, Any]]:
    """``two_blocks(*passes)`` runs them on the reference model; its logits before and after, [8, 64, V], the context.

    Their targets are to be the 14 linears of the first two blocks.
    """
    import torch
    from captures import capture_once

    from compressor.data.text import load_samples
    from compressor.graph.model import clone_graph
    from compressor.host.resources import resource
    from compressor.pipeline.context import Context
    from compressor.pipeline.pipeline import Pipeline
    from compressor.recipe.recipe import load_text_spec

    model = resource("models") / "reference"
    spec = load_text_spec("python_docs").model_copy(update={"samples": 8, "sequence_length": 64})
    samples, dense = load_samples(spec, model, 2048), capture_once(model)
    info, position = dense.meta["model"], torch.arange(64)
    caches = [[torch.zeros(8, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
    inputs = (samples.ids, position, position, *caches)
    with torch.no_grad():
        before = dense(*inputs)[0]

    def run(*steps: Any) -> tuple[Tensor, Tensor, Context]:
        ctx = Context(samples=samples)
        graph = Pipeline(steps).run(clone_graph(dense), ctx)
        assert len(ctx.records) == 14
        with torch.no_grad():
            return before, graph(*inputs)[0], ctx

    return run
