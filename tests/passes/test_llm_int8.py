"""LLM.int8(): which columns stay, equation 8 on a linear with outlier features, the pass and its notes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compressor.capture.capture import capture
from compressor.data.text import Samples, load_samples
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.model import clone_graph, weight_bytes
from compressor.host.resources import resource
from compressor.numerics.nearest import rtn_quantize
from compressor.ops.linear import packed_product
from compressor.passes.llm_int8 import LlmInt8, large_columns, llm_int8_quantize
from compressor.pipeline.context import Context
from compressor.recipe.recipe import load_text_spec
from compressor.runtime import load


def test_columns_come_in_eights_the_largest_first() -> None:
    absmax = torch.arange(20.0)
    assert large_columns(absmax, 17.0).tolist() == list(range(12, 20))
    assert large_columns(absmax, 11.0).tolist() == list(range(4, 20))
    assert large_columns(absmax, 20.0).tolist() == []
    assert large_columns(absmax, 0.5).tolist() == list(range(20))


def test_outlier_features_no_longer_spoil_the_rest() -> None:
    rng, fmt = torch.Generator().manual_seed(0), Format.parse("W8A8")
    x, weight = torch.randn(64, 128, generator=rng), torch.randn(48, 128, generator=rng)
    x[:, [5, 77]] *= 60
    dense = x @ weight.T
    columns = large_columns(x.abs().amax(0), 6.0)
    kept = llm_int8_quantize(weight, columns, fmt)
    assert {5, 77} <= set(columns.tolist()) and kept.format.name == "W8A8_F8"
    errors = [float((packed_product(x, p) - dense).norm() / dense.norm()) for p in (kept, rtn_quantize(weight, fmt))]
    assert errors[0] < 0.004 < errors[1] / 3


def test_the_pass_keeps_columns_where_inputs_are_large_and_says_where_none_are() -> None:
    model = resource("models") / "reference"
    spec = load_text_spec("python_docs").model_copy(update={"samples": 4, "sequence_length": 64})
    ctx = Context(samples=load_samples(spec, model, 2048))
    LlmInt8(threshold=10.0, targets=r"re:model\.layers\.0\.").run(capture(model), ctx)
    formats = {record.site.rpartition(".")[2]: record.format for record in ctx.records}
    assert formats["q_proj"] == formats["k_proj"] == "W8A8"
    assert formats["down_proj"].startswith("W8A8_F")
    assert any("q_proj" in note and "no input reaches 10" in note for note in ctx.notes)


def test_a_bundle_stores_the_columns_as_floats_and_its_kernel_reads_them(
    tmp_path: Path, write_module: Callable[[Any, Any, int, Path], Path]
) -> None:
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(128, 48)).eval().requires_grad_(False)
    x = torch.randn(64, 128, generator=rng)
    x[:, [5, 77]] *= 60
    expected = module.double()(x.double()).numpy()
    graph = capture(module.float(), (x[:4],))
    dense_bytes, errors = weight_bytes(graph), []
    for threshold, scheme in ((6.0, "W8A8_F8"), (1e4, "W8A8")):
        context, packed = Context(samples=Samples(x, x, "", "x")), clone_graph(graph)
        LlmInt8(threshold=threshold).run(packed, context)
        packed.recompile()
        folder = tmp_path / scheme
        folder.mkdir()
        bundle = load(write_module(packed, context, dense_bytes, folder), threads=1)
        (site,) = bundle.manifest["sites"]
        assert (site["format"], site["bytes_after"]) == (scheme, Format.parse(scheme).packed_bytes(48, 128))
        assert bundle.manifest["weight_bytes"] == site["bytes_after"] + 4 * 48  # and the bias: no dense copy
        got = np.concatenate([bundle.run(x[i : i + 4].numpy()) for i in range(0, 64, 4)])
        errors.append(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    assert errors[0] < 0.004 < errors[1] / 3


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="while running"):
        LlmInt8(scheme="W8A16")
    with pytest.raises(UsageError, match="threshold"):
        LlmInt8(threshold=0)
