"""LLM-FP4: the search against all combinations, the shifts' exactness, and what the pass is for."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from captures import capture_once
from torch import Tensor
from torch.fx import GraphModule

from compressor.data.text import Samples, load_samples
from compressor.errors import CompressorError, UsageError
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.formats.rounded_activations import round_activations
from compressor.formats.weights import Floats
from compressor.graph.sites import linear_sites
from compressor.host.resources import resource
from compressor.numerics.input_scales import range_cuts
from compressor.numerics.nearest import awq_quantize
from compressor.passes.llm_fp4 import LlmFp4, exponent_shifts, layouts, llm_fp4_quantize, shift_channels
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_text_spec

W4A4 = "FP4_E2M1_C_AFP4_E2M1_STATIC"


def heavy(seed: int, rows: int = 24, columns: int = 48) -> tuple[Tensor, Tensor]:
    """Make a weight and inputs with long tails, as FP4 has to deal with."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(96, columns, generator=rng) * torch.rand(96, columns, generator=rng).pow(3)
    return torch.randn(rows, columns, generator=rng).pow(3), x


def test_layouts_are_all_splits() -> None:
    assert [element.name for element in layouts(4, 0)] == ["E1M2", "E2M1", "E3M0"]
    assert [element.name for element in layouts(4, 1)] == ["E1M2", "E2M1"]
    assert [element.name for element in layouts(6, 0)] == ["E1M4", "E2M3", "E3M2", "E4M1", "E5M0"]
    assert all(element.bits == 8 for element in layouts(8, 0))


def test_shifts_are_powers_of_two_that_bring_ranges_together() -> None:
    absmax = torch.tensor([0.001, 0.5, 3.0, 700.0, 0.0], dtype=torch.float64)
    shifts = exponent_shifts(absmax, 1.0)
    assert bool((torch.frexp(shifts)[0] == 0.5).all()) and shifts[4] == 1
    left = (absmax / shifts)[:4]
    assert float(left.max() / left.min()) <= 2
    assert torch.equal(exponent_shifts(absmax, 0.0), torch.ones(5).double())
    assert torch.equal(exponent_shifts(torch.zeros(3), 1.0), torch.ones(3).double())


@pytest.mark.parametrize("scheme", [W4A4, "FP4_E1M2_G16_AFP6_E2M3_STATIC", "FP4_E2M1_C"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_search_is_near_the_best_of_all_combinations(scheme: str, seed: int) -> None:
    """All of it again in float64: every layout of the weight with every layout and range of the activations."""
    fmt, (weight, x) = Format.parse(scheme), heavy(seed)
    square, absmax = x.double().square().mean(0), float(x.abs().max())
    packed, error, rtn_error = llm_fp4_quantize(weight, x, square, absmax, fmt)
    exact = x.double() @ weight.double().t()

    def lost(seen: Tensor, dense: Tensor) -> float:
        return float((exact - seen.double() @ dense.double().t()).square().sum() / exact.square().sum())

    dense = [dequantize(awq_quantize(weight, square, replace(fmt, weights=Floats(e)))) for e in layouts(4, 0)]
    act, seen = fmt.activations, [x]
    if act is not None:
        sides = [replace(act, element=element) for element in layouts(act.bits, 1)]
        seen = [round_activations(x, side, step) for side in sides for step in range_cuts(absmax, side, 12)]
    best = min(lost(a, b) for a, b in itertools.product(seen, dense))
    assert error < 0.95 * rtn_error and best * (1 - 1e-5) <= error <= 1.03 * best
    own = round_activations(x, packed.format.activations, packed.parts.get("input_scale"))
    assert lost(own, dequantize(packed)) == pytest.approx(error, rel=1e-4)
    parts = list(packed.parts.values())
    out = torch.ops.compressor.packed_linear(x, parts, None, packed.format.name, *reversed(packed.shape))
    assert float((out - own @ dequantize(packed).t()).abs().max()) < 1e-5


def test_inputs_that_are_not_finite_are_refused() -> None:
    weight, x = heavy(0)
    x[3, 3] = float("nan")
    with pytest.raises(CompressorError, match="NaN"):
        llm_fp4_quantize(weight, x, x.square().mean(0), 1.0, Format.parse("FP4_E2M1_C"))


@pytest.fixture(scope="module")
def samples() -> Samples:
    spec = load_text_spec("python_docs").model_copy(update={"samples": 4, "sequence_length": 64})
    return load_samples(spec, resource("models") / "reference", 2048)


@pytest.fixture(scope="module")
def dense() -> GraphModule:
    return capture_once(resource("models") / "reference")


def hidden(graph: GraphModule, samples: Samples) -> Tensor:
    info = graph.meta["model"]
    caches = [[torch.zeros(4, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
    with torch.no_grad():
        result: Tensor = graph(samples.ids, torch.arange(64), torch.arange(64), *caches)[0]
    return result


def test_shifting_channels_changes_no_bit(dense: GraphModule, samples: Samples) -> None:
    graph, ctx = copy.deepcopy(dense), Context(samples=samples)
    sites = [site for site in linear_sites(graph) if site.name.startswith("model.layers.0.")]
    before = hidden(graph, samples)
    with ctx.reporter.task("shift", len(sites)) as task:
        shift_channels(graph, ctx, sites, Format.parse(W4A4), task)
    graph.recompile()
    assert torch.equal(hidden(graph, samples), before) and not ctx.notes
    weights = [(graph.get_parameter(site.weight_name), dense.get_parameter(site.weight_name)) for site in sites]
    assert sum(not torch.equal(shifted, weight.float()) for shifted, weight in weights) > 1


def test_the_pass_beats_rounding_at_every_linear(dense: GraphModule, samples: Samples) -> None:
    targets = r"re:model\.layers\.0\."
    graph, ctx = copy.deepcopy(dense), Context(samples=samples)
    before, step = hidden(graph, samples), LlmFp4("FP4_G128_AFP4_STATIC", targets=targets)
    graph = Pipeline([step]).run(graph, ctx)
    assert len(ctx.records) == 7 and {record.format for record in ctx.records} <= set(step.schemes)
    for record in ctx.records:
        assert record.rtn_error is not None and record.error < record.rtn_error, record.site
    assert float((hidden(graph, samples) - before).norm() / before.norm()) < 0.2


def test_what_the_search_cannot_serve_is_refused() -> None:
    for scheme in ("W4A16_G128", "MXFP4", "NF4", "NVFP4_ANVFP4"):
        with pytest.raises(UsageError, match="weights must be floats"):
            LlmFp4(scheme)
    for scheme in ("FP4_G128_AFP4", "FP4_G128_AMXFP4"):
        with pytest.raises(UsageError, match="_AFP4_STATIC"):
            LlmFp4(scheme)
    assert LlmFp4("FP4_G128").schemes == ["FP4_E1M2_G128", "FP4_E2M1_G128", "FP4_E3M0_G128"]
    assert len(LlmFp4("FP4_G128_AFP4_STATIC").schemes) == 6
