"""Products by way of bfloat16: how far off they are, that threads do not matter, and who may use them.

On a CPU without AMX these products are those of float32, and the bounds hold all the more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.graph.sites import linear_sites
from compressor.numerics.products import bfloat16 as precision
from compressor.numerics.products.bfloat16 import bfloat16_products, is_coarse
from compressor.passes.gptq import Gptq, gptq_quantize
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "columns", "inputs"), [(256, 64, 128), (300, 172, 501), (2048, 512, 256), (7, 1, 33)])
def test_products_are_near_and_the_same_on_any_threads(rows: int, columns: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, inputs, generator=generator), torch.randn(columns, inputs, generator=generator)
    exact, seen = x.double() @ w.double().t(), list[Tensor]()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        with bfloat16_products():
            seen.append(linear(x, w))
        with bfloat16_products(wanted=False):
            assert float((linear(x, w) - exact).norm() / exact.norm()) < 1e-6
    assert float((seen[0] - exact).norm() / exact.norm()) < 4e-3
    assert all(torch.equal(y, seen[0]) for y in seen)


def test_what_was_set_comes_back() -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), bfloat16_products():
        raise ZeroDivisionError
    assert matmul.fp32_precision == before


def test_formats_of_four_bits_and_fewer_are_coarse() -> None:
    coarse = [Format.parse(name) for name in ("W4A16_G128", "BAL2A8", "NVFP4", "LUT3", "BIP1A16")]
    assert is_coarse(coarse)
    assert not any(is_coarse([*coarse, Format.parse(name)]) for name in ("W5A16_G128", "FP6_E3M2", "W8A8", "BIP8A8"))


@pytest.fixture(scope="module")
def model(random_llama: Callable[..., transformers.LlamaForCausalLM]) -> transformers.LlamaForCausalLM:
    return random_llama(initializer_range=0.3)


def ids() -> Tensor:
    return torch.randint(60, (8, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["W4A16_G32", "W2A16_G32"])
def test_gptq_loses_as_little_on_rounded_statistics(model: transformers.LlamaForCausalLM, name: str) -> None:
    graph, fmt = capture(model), Format.parse(name)
    sites = linear_sites(graph)
    # A statistic's value is its own memory: it is freed when the next one comes.
    exact, rounded = (
        {
            site.name: h.value.clone()
            for group, h in CalibrationRun(graph, ids(), sites, Hessian, CalibrationOptions(rounded=r)).groups()
            for site in group
        }
        for r in (False, True)
    )
    for site in sites:
        weight, hessian = graph.get_parameter(site.weight_name).detach().float(), exact[site.name].double()
        torch.testing.assert_close(rounded[site.name], exact[site.name], rtol=0, atol=2e-2 * float(hessian.max()))
        found = [gptq_quantize(weight, h, fmt)[0] for h in (exact[site.name], rounded[site.name])]
        lost = [float((((e := weight.double() - dequantize(p)) @ hessian) * e).sum()) for p in found]
        assert lost[1] < 1.03 * lost[0]


@pytest.mark.parametrize(("scheme", "expected"), [("W4A16_G32", True), ("W8A16_G32", False), ("W6A16_G32", False)])
def test_only_coarse_formats_are_calibrated_so(
    model: transformers.LlamaForCausalLM, scheme: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(precision, "_has_amx", lambda: bool(asked.append(True)))
    ctx = Context(samples=Samples(ids(), torch.empty(0), "", "by chance"))
    Pipeline([Gptq(scheme, "up_proj")]).run(capture(model), ctx)
    assert bool(asked) is expected and len(ctx.records) == 2
