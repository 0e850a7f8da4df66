"""SmoothQuant: the formula, the law (the function stays), and what it is for (outliers in activations)."""

from __future__ import annotations

import pytest
import torch
from captures import capture_once
from torch import Tensor

from compressor.calibration.statistics import Inputs
from compressor.data.text import Samples, load_samples
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.sites import linear_sites
from compressor.host.resources import resource
from compressor.numerics.scale_search import output_error
from compressor.passes.rtn import Rtn
from compressor.passes.smoothquant import Smoothquant, smooth_scale
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_text_spec


def outliers(seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Make inputs with two channels fifty times as large as the others, and two weights that read them."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 64, generator=rng)
    x[:, [3, 40]] *= 50
    return x, [torch.randn(48, 64, generator=rng), torch.randn(16, 64, generator=rng)]


def test_the_scale_is_equation_4() -> None:
    x, weights = outliers()
    for alpha in (0.0, 0.3, 1.0):
        scale = smooth_scale(x.abs().amax(0), weights, alpha)
        for j in range(64):
            top = max(float(weight[:, j].abs().max()) for weight in weights)
            assert float(scale[j]) == pytest.approx(float(x[:, j].abs().max()) ** alpha / top ** (1 - alpha))
    x[:, 5] = 0
    weights[0][:, 7] = weights[1][:, 7] = 0
    scale = smooth_scale(x.abs().amax(0), weights, 0.5)
    assert scale[5] == scale[7] == 1 and bool(torch.isfinite(scale).all())


def test_smoothing_helps_where_activations_have_outliers() -> None:
    x, weights = outliers()
    fmt = Format.parse("W8A8")
    plain = output_error(x, weights, torch.ones(64), fmt)
    smoothed = output_error(x, weights, smooth_scale(x.abs().amax(0), weights, 0.5).float(), fmt)
    assert smoothed < plain / 8


def test_statistics_are_those_of_all_rows() -> None:
    x, _ = outliers()
    inputs = Inputs(64)
    for part in (x[:100], x[100:101], x[101:]):
        inputs.add(part, part)
    assert torch.equal(inputs.absmax, x.abs().amax(0).double())
    assert torch.allclose(inputs.mean_abs, x.abs().double().mean(0))
    assert torch.allclose(inputs.mean_square, x.double().square().mean(0))
    assert inputs.tokens == 256 and {tuple(row) for row in inputs.rows.tolist()} <= {tuple(row) for row in x.tolist()}


@pytest.fixture(scope="module")
def samples() -> Samples:
    spec = load_text_spec("python_docs").model_copy(update={"samples": 4, "sequence_length": 64})
    return load_samples(spec, resource("models") / "reference", 2048)


@pytest.mark.parametrize("alpha", [0.5, "search"])
def test_the_pass_keeps_the_function_and_a_later_pass_quantises(alpha: float, samples: Samples) -> None:
    def hidden(graph: torch.fx.GraphModule) -> Tensor:
        info = graph.meta["model"]
        caches = [[torch.zeros(4, info.kv_heads, 1, info.head_dim)] * info.layers] * 2
        with torch.no_grad():
            result: Tensor = graph(samples.ids, torch.arange(64), torch.arange(64), *caches)[0]
        return result

    model, targets = resource("models") / "reference", r"re:model\.layers\.[01]\."
    graph = capture_once(model)
    before = hidden(graph)
    ctx = Context(samples=samples)
    graph = Pipeline([Smoothquant(alpha=alpha, targets=targets)]).run(graph, ctx)
    assert not ctx.notes and not ctx.records
    assert float((hidden(graph) - before).norm() / before.norm()) < 1e-5
    Pipeline([Rtn("W8A8", targets=targets)]).run(graph, ctx)
    assert len(ctx.records) == 14 and len(linear_sites(graph)) == 35 + 1 - 14
    assert float((hidden(graph) - before).norm() / before.norm()) < 0.03


def test_what_cannot_be_smoothed_is_noted(samples: Samples) -> None:
    ctx = Context(samples=samples)
    Pipeline([Smoothquant(targets="lm_head")]).run(capture_once(resource("models") / "reference"), ctx)
    (note,) = ctx.notes
    assert note.startswith("smoothquant: ") and "not scaled" in note and "tied" in note


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match=r"alpha 1\.5"):
        Smoothquant(alpha=1.5)
    with pytest.raises(UsageError, match="nearest"):
        Smoothquant(scheme="W8")
