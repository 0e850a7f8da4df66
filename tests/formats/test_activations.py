"""Activations: names, rounding against ml_dtypes and against the weights' own grids, laws, calibrated scales."""

from __future__ import annotations

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
from captures import capture_once
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.text import Samples, load_samples
from compressor.errors import CompressorError, UsageError
from compressor.formats.activations import Activations
from compressor.formats.elements import Element
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import dequantize
from compressor.formats.rounded_activations import round_activations
from compressor.formats.weights import ChannelScales, Floats
from compressor.graph.sites import linear_sites
from compressor.host.resources import resource
from compressor.numerics.grids import round_to_grid, tensor_scale
from compressor.numerics.input_scales import input_error, range_cuts, search_input_scale
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.products.deterministic import few_bits
from compressor.numerics.scale_search import output_error
from compressor.passes.awq import Awq
from compressor.passes.gptq import Gptq
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.sites import compress_site
from compressor.recipe.recipe import load_text_spec

ORACLES = {
    "FP4_E2M1": ml_dtypes.float4_e2m1fn, "FP6_E2M3": ml_dtypes.float6_e2m3fn, "FP6_E3M2": ml_dtypes.float6_e3m2fn,
    "FP8_E4M3": ml_dtypes.float8_e4m3fn, "FP8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def activations(numbers: str, scales: str | None = None) -> Activations:
    found = Activations.parse(numbers, scales)
    assert found is not None
    return found


def rows(seed: int = 0, n: int = 40, columns: int = 70) -> Tensor:
    x = torch.randn(n, columns, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 3, n)[:, None]


# --- names


@pytest.mark.parametrize(("name", "canonical"), [
    ("W4A8_G128", "W4A8_G128"), ("w8a8_static", "W8A8_STATIC"), ("W4AFP8_G128", "W4AFP8_E4M3_G128"),
    ("W4A4_ASYM_G32_AG128", "W4A4_ASYM_G32_AG128"), ("FP8_AFP8", "FP8_E4M3_AFP8_E4M3"),
    ("NF4_AFP6", "NF4_G64_AFP6_E3M2"),
    ("FP4_AFP4_E1M2_STATIC", "FP4_E2M1_G128_AFP4_E1M2_STATIC"), ("MXFP4_AMXFP8_E4M3", "MXFP4_AMXFP8_E4M3"),
    ("FP8_G128_AFP8_AG128", "FP8_E4M3_G128_AFP8_E4M3_AG128"), ("NVFP4_ANVFP4", "NVFP4_ANVFP4"),
])  # fmt: skip
def test_names_and_formats_are_inverse(name: str, canonical: str) -> None:
    fmt = Format.parse(name)
    assert fmt.name == canonical and Format.parse(canonical) == fmt


@pytest.mark.parametrize(("name", "problem"), [
    ("W4A9", "A9"), ("W4A0", "A0"), ("W8A16_STATIC", "take no STATIC"), ("FP4_A8", "float activations"),
    ("MXFP4_AMXFP4_AG64", "take no AG64"), ("W4A8_AG24", "multiple of 16"), ("FP4_AFP4_E3M0", "mantissa"),
    ("W4A8_G96_AG64", "multiple of the other"), ("FP8_AFP9", "unknown"), ("W4A8_AG0", "groups of 0"),
])  # fmt: skip
def test_what_does_not_exist_is_refused(name: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Format.parse(name)


# --- rounding


@pytest.mark.parametrize("name", ORACLES)
@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), st.integers(-12, 3))
def test_floats_are_rounded_as_ml_dtypes_does(name: str, fractions: list[float], exponent: int) -> None:
    act = activations(name, "_STATIC")
    assert act.element is not None
    values = np.array([value for value in act.element.values if np.isfinite(value)], np.float32)
    x = np.concatenate([np.array(fractions, np.float32) * np.float32(act.max_value * 2.0**exponent), values])
    x = np.concatenate([x, (x[:-1] + x[1:]) / 2])  # ties as well
    expected = np.clip(x, -act.max_value, act.max_value).astype(ORACLES[name]).astype(np.float32)
    assert np.array_equal(round_activations(torch.from_numpy(x), act, torch.ones(1)).numpy(), expected)


@pytest.mark.parametrize("name", ["E1M2", "E2M2", "E3M3", "E5M1", "E1M6"])
def test_floats_of_any_split_are_those_of_the_table(name: str) -> None:
    element = Element.parse(name)
    assert element is not None
    fmt, x = Format(Floats(element), ChannelScales()), rows().clamp(-element.max_value, element.max_value)
    codes = round_to_grid(x, torch.ones(len(x)), None, fmt)
    expected = torch.tensor(element.values)[codes.int()]
    got = round_activations(x, Activations(element.bits, element, "tensor"), torch.ones(1))
    assert torch.equal(got, expected)


def test_blocks_are_those_of_the_weights() -> None:
    for name in ("MXFP4", "MXFP6_E2M3", "MXFP8_E5M2"):
        assert torch.equal(
            round_activations(rows(), activations(name)), dequantize(rtn_quantize(rows(), Format.parse(name)))
        )
    x, fmt = rows(), Format.parse("NVFP4")
    x = x / x.abs().amax(1, keepdim=True)  # a block below E4M3's smallest scale is zero here, and not in a weight
    got = round_activations(x, activations("NVFP4"), tensor_scale(x, fmt))
    expected = dequantize(rtn_quantize(x, fmt))
    assert float((got - expected).abs().max()) < 1e-6


@pytest.mark.parametrize(("numbers", "scales", "size"), [("4", None, 70), ("8", "_AG32", 32), ("FP8_E4M3", None, 70)])
def test_dynamic_scales_are_those_of_the_definition(numbers: str, scales: str | None, size: int) -> None:
    act, x = activations(numbers, scales), rows()
    got = round_activations(x, act)
    for begin in range(0, 70, size):
        group, rounded = x[:, begin : begin + size].double(), got[:, begin : begin + size].double()
        step = group.abs().amax(1, keepdim=True) / act.max_value
        grid = torch.arange(-act.max_value, act.max_value + 1).double() if act.element is None else None
        grid = torch.tensor([v for v in act.element.values if v == v]).double() if act.element is not None else grid
        assert grid is not None
        nearest = (group[..., None] / step[..., None] - grid).abs().amin(-1)
        assert torch.allclose((rounded - group).abs() / step, nearest, atol=2e-6 * act.max_value, rtol=0)


@pytest.mark.parametrize(("scales", "size"), [(None, 70), ("_AG32", 32)])
def test_of_one_bit_are_signs_times_the_mean_size(scales: str | None, size: int) -> None:
    act, x = activations("1", scales), rows()
    x[0, 3] = 0.0
    got = round_activations(x.double(), act)
    for begin in range(0, 70, size):
        group = x[:, begin : begin + size].double()
        expected = torch.where(group < 0, -1.0, 1.0) * group.abs().mean(1, keepdim=True)
        assert torch.allclose(got[:, begin : begin + size], expected, rtol=1e-12)
        cut = search_input_scale(group.float(), float(group.abs().max()), activations("1", "_STATIC"))
        assert input_error(group.float(), activations("1", "_STATIC"), cut) < float(group.square().sum())


@pytest.mark.parametrize("name", sorted({fmt.activations.numbers + fmt.activations.scales for fmt in FORMATS.values()
                                         if fmt.activations is not None}))  # fmt: skip
def test_tokens_do_not_see_each_other_and_nothing_overflows(name: str) -> None:
    cut = name.find("_STATIC") if "_STATIC" in name else name.find("_AG")
    act = activations(name[:cut], name[cut:]) if cut > 0 else activations(name)
    x, scale = rows(), torch.tensor([0.01]) if act.calibrated else None
    x[0], x[1], x[2], x[3, 5] = 0.0, 1e-40, 1e30, 1e20
    got = round_activations(x, act, scale)
    assert bool(torch.isfinite(got).all()) and not bool(got[:2].any())
    assert torch.equal(torch.cat([round_activations(row, act, scale) for row in x.split(1)]), got)
    wide = round_activations(x.double(), act, scale)  # as test vectors are made
    assert wide.dtype == torch.float64 and float((wide - got)[4:].abs().median()) < 1e-4


# --- calibrated scales


@pytest.mark.parametrize("name", ["4", "8", "FP4_E2M1", "FP8_E4M3"])
def test_one_outlier_does_not_set_the_range(name: str) -> None:
    act, x = activations(name, "_STATIC"), torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    x[100, 7] = 60.0
    absmax = float(x.abs().max())
    found = search_input_scale(x, absmax, act)
    widest, fine = range_cuts(absmax, act, 1)[0], [absmax / act.max_value * 2.0 ** (-k / 40) for k in range(240)]
    best = min(input_error(x, act, torch.tensor([scale])) for scale in fine)
    assert best <= input_error(x, act, found) * (1 + 1e-6) and input_error(x, act, found) <= 1.12 * best
    assert input_error(x, act, found) <= input_error(x, act, widest)
    if name == "4":
        assert input_error(x, act, found) < 0.3 * input_error(x, act, widest)


@pytest.mark.parametrize("name", ["4", "8", "FP4_E2M1"])
def test_the_outputs_error_decides_where_a_linear_is_given(name: str) -> None:
    act, generator = activations(name, "_STATIC"), torch.Generator().manual_seed(0)
    x = torch.randn(200, 20, generator=generator).relu() * (
        torch.rand(200, 1, generator=generator) < 0.2
    )  # mostly zero
    x[:, 0] *= 8  # the channel with the large inputs is the one that the linear reads most of
    weight = torch.randn(11, 20, generator=generator)
    weight[:, 0] *= 5

    def loss(scale: Tensor) -> float:
        return float(((x - round_activations(x, act, scale)).double() @ weight.double().t()).square().sum())

    absmax = float(x.max())
    widest = range_cuts(absmax, act, 1)[0]
    found = search_input_scale(x, absmax, act, weight)
    tried = [*range_cuts(absmax, act, 24), *(few_bits(widest * percent / 100) for percent in range(40, 122, 2))]
    assert loss(found) == pytest.approx(min(map(loss, tried)), rel=1e-4)
    assert loss(found) <= loss(search_input_scale(x, absmax, act)) * (1 + 1e-6)
    if name == "4":
        assert loss(found) < 0.9 * loss(search_input_scale(x, absmax, act))
    with pytest.raises(CompressorError, match="NaN or inf"):
        search_input_scale(x, float("nan"), act, weight)
    assert float(search_input_scale(torch.zeros(4, 20), 0.0, act, weight)) == 1.0


def test_inputs_that_are_not_finite_are_refused_and_none_at_all_give_one() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CompressorError, match="NaN or inf"):
            search_input_scale(rows(), bad, activations("8", "_STATIC"))
    assert float(search_input_scale(torch.zeros(4, 8), 0.0, activations("8", "_STATIC"))) == 1.0
    with pytest.raises(CompressorError, match="calibrated scale"):
        round_activations(rows(), activations("8", "_STATIC"))


@pytest.fixture(scope="module")
def samples() -> Samples:
    spec = load_text_spec("python_docs").model_copy(update={"samples": 4, "sequence_length": 64})
    return load_samples(spec, resource("models") / "reference", 2048)


TARGETS = r"re:model\.layers\.0\.self_attn\.[qk]_proj"


@pytest.fixture(scope="module")
def dense() -> GraphModule:
    return capture_once(resource("models") / "reference")


@pytest.mark.parametrize("make", [Rtn, Awq, Gptq])
def test_passes_store_calibrated_scales(make: type, dense: GraphModule, samples: Samples) -> None:
    ctx = Context(samples=samples)
    graph = Pipeline([make("W8A8_STATIC", targets=TARGETS)]).run(copy.deepcopy(dense), ctx)
    stored = {name: value for name, value in graph.named_parameters() if name.endswith("input_scale")}
    assert len(stored) == len(ctx.records) == 2 and len({float(value) for value in stored.values()}) == 1
    shapes = {site.name: (site.out_features, site.in_features) for site in linear_sites(dense)}
    fmt = Format.parse("W8A8_STATIC")
    for record, value in zip(ctx.records, stored.values(), strict=True):
        assert value.shape == (1,) and 0 < float(value) < 1
        assert record.format == "W8A8_STATIC" and record.bytes_after == fmt.packed_bytes(*shapes[record.site])


def test_without_samples_the_pass_says_what_for(dense: GraphModule) -> None:
    said = "rtn: needs calibration samples for the stored scales of W8A8_STATIC and the recipe has none; add `calibrat"
    with pytest.raises(UsageError, match=said):
        Rtn("W8A8_STATIC", targets=TARGETS).run(dense, Context())


def test_a_pass_that_does_not_calibrate_is_told(dense: GraphModule) -> None:
    graph = copy.deepcopy(dense)
    site = linear_sites(graph)[0]
    packed = rtn_quantize(graph.get_parameter(site.weight_name).detach().float(), Format.parse("W8A8_STATIC"))
    with pytest.raises(UsageError, match="calibrates no scale"):
        compress_site(graph, Context(), site, packed, "other", error=0.0)
    compress_site(graph, Context(), site, packed.with_input_scale(torch.ones(1)), "other", error=0.0)


def test_the_search_of_scales_goes_by_the_activations() -> None:
    x, weights = rows(n=64), [torch.randn(16, 70, generator=torch.Generator().manual_seed(1))]
    lost = [
        output_error(x, weights, torch.ones(70), Format.parse(name))
        for name in ("W8A16", "W8A8", "W8A4", "W8A8_STATIC")
    ]
    assert lost[0] < lost[1] < lost[2] and lost[1] < lost[3] < float("inf")
