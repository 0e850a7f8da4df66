"""FineQuant against its rule written out, what outliers do to it, and the pass on a tiny model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compressor.capture.capture import capture
from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.graph.model import clone_graph
from compressor.host.resources import resource
from compressor.numerics.nearest import rtn_quantize
from compressor.passes.finequant import Finequant, finequant_quantize, granularities
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline


def weight_with_outliers(every: int) -> Tensor:
    """[32, 256], normal, with one weight ten times as large in every so many columns."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight[:, ::every] *= 10
    return weight


def by_rule(weight: Tensor, scheme: str, threshold: float) -> str:
    """Choose the name of the format, from squared errors and bytes alone."""
    head, _, smallest = scheme.rpartition("_G")
    names = [f"{head}_C", *(f"{head}_G{size}" for size in (128, 64, 32, 16) if size >= int(smallest))]
    names[0] = Format.parse(names[0]).name
    sharpness, bits = [], []
    for name in names:
        fmt = Format.parse(name)
        error = (dequantize(rtn_quantize(weight, fmt)).double() - weight.double()).square().sum()
        sharpness.append(-0.5 * math.log2(float(error)))
        bits.append(8 * fmt.packed_bytes(*weight.shape) / weight.numel())
    chosen = 0
    while chosen + 1 < len(names) and (
        sharpness[chosen + 1] - sharpness[chosen] >= threshold * (bits[chosen + 1] - bits[chosen])
    ):
        chosen += 1
    return names[chosen]


@pytest.mark.parametrize("scheme", ["W4A16_G16", "W3A16_G32", "W2A16_ASYM_G32", "FP4_E2M1_G16", "W8A8_G16"])
def test_the_group_size_follows_the_rule(scheme: str) -> None:
    found = []
    for every in (256, 64, 20):
        for threshold in (0.0, 0.7, 1.0, 3.0, 100.0):
            weight = weight_with_outliers(every)
            packed = finequant_quantize(weight, Format.parse(scheme), threshold)
            assert packed.format.name == by_rule(weight, scheme, threshold)
            assert packed.nbytes == packed.format.packed_bytes(*weight.shape)
            expected = rtn_quantize(weight, packed.format)
            assert all(torch.equal(packed.parts[part], expected.parts[part]) for part in ("codes", "scales"))
            found.append(packed.format.group_size)
    assert len(set(found)) > 2


def test_outliers_ask_for_small_groups_and_even_weights_for_none() -> None:
    scheme = Format.parse("W4A16_G32")
    even = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)).sign()
    assert finequant_quantize(even, scheme).format.name == "W4A16_C"  # rows of one size: no error to lessen
    few = weight_with_outliers(256)  # in one group of each row
    assert finequant_quantize(few, scheme).format.group_size == 32
    zeros = finequant_quantize(torch.zeros(32, 256), scheme)
    assert zeros.format.name == "W4A16_C" and not dequantize(zeros).any()


def test_group_sizes_are_halved() -> None:
    assert [fmt.name for fmt in granularities(Format.parse("W4A16_G32"), 200)] == [
        "W4A16_C", "W4A16_G128", "W4A16_G64", "W4A16_G32"
    ]  # fmt: skip
    assert [fmt.name for fmt in granularities(Format.parse("W8A8_G64"), 64)] == ["W8A8"]


def test_the_pass_records_formats_and_plans_those_of_normal_weights() -> None:
    model, step = resource("models") / "reference", Finequant("W4A16_G32", targets="re:.*(o|down)_proj")
    graph, ctx = capture(model), Context()
    plans = {plan.site: plan for plan in step.plan(clone_graph(graph), Context()) if plan.format}
    Pipeline([step]).run(graph, ctx)
    formats = {record.format for record in ctx.records}
    assert len(ctx.records) == 10 and len(formats) > 1 and formats <= set(step.schemes)
    bits = 8 * sum(record.bytes_after for record in ctx.records) / (5 * 256 * 768)
    assert len(ctx.notes) == 1 and ctx.notes[0].startswith(f"finequant: {bits:.3f} bits a weight: ")
    assert list(plans) == [record.site for record in ctx.records]
    assert {plan.note for plan in plans.values()} == {"groups as for normally distributed weights"}
    assert sum(plan.bytes_after for plan in plans.values()) == pytest.approx(
        sum(record.bytes_after for record in ctx.records), rel=0.05
    )


def test_bad_input() -> None:
    with pytest.raises(CompressorError, match="NaN"):
        finequant_quantize(torch.full((2, 64), float("nan")), Format.parse("W4A16_G32"))
    for scheme in ("W4A16_C", "W8A8", "MXFP4", "NVFP4", "W4A16_G24"):
        with pytest.raises(UsageError, match="power of two"):
            Finequant(scheme)
    for threshold in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="threshold"):
            Finequant("W4A16_G32", threshold=threshold)
