"""The pass keep_codes: layouts of other tools are stored with exactly their values, and other weights are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_files import block_values, random_blocks
from quantized_checkpoints import LAYOUTS
from torch import nn

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph, weight_bytes
from compressor.graph.rewrite import packed_weight
from compressor.graph.sites import packed_sites
from compressor.passes.keep_codes import KeepCodes
from compressor.pipeline.context import Context


def two_linears(layout: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(96, 64, bias=False), nn.ReLU(), nn.Linear(64, 96, bias=False))
    for index in (0, 2):
        values = LAYOUTS[layout][0](np.random.default_rng(index), *model[index].weight.shape)[1]
        model[index].weight = nn.Parameter(torch.from_numpy(values).float())
    return model.eval()


@pytest.mark.parametrize(
    ("layout", "options", "stored"),
    [
        ("gptq", {}, "W4A16_ASYM_G32"),
        ("awq", {}, "W4A16_ASYM_G32"),
        ("ct-pack", {"schemes": ("W4A16_G32", "W4A8_ASYM_G32")}, "W4A8_ASYM_G32"),
        ("ct-pack-channel", {"schemes": ("W2A16", "W3A16_C", "W8A16")}, "W3A16_C"),
        ("ct-int", {"schemes": ("W8A8_ASYM",)}, "W8A8_ASYM"),
        ("ct-naive", {}, "W8A16"),
        ("ct-mxfp4", {}, "MXFP4"),
        ("ct-mxfp8", {"schemes": ("MXFP8_E4M3",)}, "MXFP8_E4M3"),
    ],
)
def test_weights_keep_their_values_bit_for_bit(layout: str, options: dict[str, tuple[str, ...]], stored: str) -> None:
    model, step, ctx = two_linears(layout), KeepCodes(**options), Context()
    graph = capture(model, torch.zeros(2, 96))
    planned = step.plan(capture(model, torch.zeros(2, 96), weights=False), Context())
    step.run(graph, ctx)
    assert [(record.format, record.error) for record in ctx.records] == [(stored, 0.0)] * 2
    assert all(plan.bytes_after >= record.bytes_after for plan, record in zip(planned, ctx.records, strict=True))
    for site, linear in zip(packed_sites(graph), (model[0], model[2]), strict=True):
        assert torch.equal(dequantize(packed_weight(graph, site)), linear.weight)


@pytest.mark.parametrize(("kind", "stored"), [("Q4_0", "W4A16_G32"), ("Q8_0", "W8A16_G32")])
def test_blocks_of_gguf_are_kept(kind: str, stored: str) -> None:
    raw = random_blocks(np.random.default_rng(0), kind, 64 * 3)
    values = torch.tensor([block_values(kind, block.tobytes()) for block in raw]).view(64, 96)
    model = nn.Sequential(nn.Linear(96, 64, bias=False))
    model[0].weight = nn.Parameter(values)
    graph = KeepCodes().run(capture(model, torch.zeros(2, 96)), ctx := Context())
    assert ctx.records[0].format == stored
    assert torch.equal(dequantize(packed_weight(graph, packed_sites(graph)[0])), values)


def test_linears_on_no_grid_are_all_named_and_the_dense_graph_is_not_returned() -> None:
    model = two_linears("gptq-v2-3-bits")  # groups of columns that are not neighbours
    with pytest.raises(UsageError, match=r"2 of 2 linears .*: 0, 2; give the checkpoint's own scheme .* `ignore`"):
        KeepCodes().run(capture(model, torch.zeros(2, 96)), Context())


def test_a_dense_linear_is_left_to_another_pass() -> None:
    model = two_linears("awq")
    model[2].weight.data.normal_(generator=torch.Generator().manual_seed(0))
    graph = capture(model, torch.zeros(2, 96))
    with pytest.raises(UsageError, match=r"1 of 2 linears .*: 2; "):
        KeepCodes().run(clone_graph(graph), Context())
    before = weight_bytes(graph)
    KeepCodes(ignore="2").run(graph, ctx := Context())
    (record,) = ctx.records
    assert record.site == "0" and weight_bytes(graph) == before - record.bytes_before + record.bytes_after


@pytest.mark.parametrize("scheme", ["NVFP4", "LUT3", "NF4_G64", "W8A8_STATIC", "W4A16_G128_S0.45", "BIP2A8_G128"])
def test_formats_whose_codes_cannot_be_found_again(scheme: str) -> None:
    with pytest.raises(UsageError, match="cannot be found again"):
        KeepCodes(schemes=("W4A16_G128", scheme))
