from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from captures import capture_once
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.evaluate.quality import GraphLogits
from compressor.export import vectors as verify_vectors
from compressor.export.vectors import make_vectors
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight, dequantize
from compressor.graph.model import ModelInfo
from compressor.host.resources import resource
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context


def reference(scheme: str) -> GraphModule:
    return Rtn(scheme, ignore=("lm_head",)).run(capture_once(resource("models") / "reference"), Context())


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    return reference("W4A8_G32")


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(40, 3000), nn.Linear(3000, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        return hidden, self.second(hidden).sum(-1)


def test_a_module_s_outputs_are_those_of_the_module_in_float64() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Perceptron().eval().requires_grad_(False)
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    graph = Rtn("W8A16", targets="first").run(capture_once(module, (x,)), Context())
    stored = make_vectors(graph)
    parts = [graph.get_parameter(f"first.{part}") for part in ("codes", "scales")]
    weight = dequantize(PackedWeight.of(parts, Format.parse("W8A16"), (3000, 40)))
    exact = module.double()
    exact.first.weight = nn.Parameter(weight.double(), requires_grad=False)
    hidden, sums = exact(x.double())
    assert torch.equal(stored["input_0"], x)
    kept = hidden[stored["rows_0"]][:, stored["columns_0"]]
    assert kept.shape == (5, 1024) and len(set(stored["columns_0"].tolist())) == 1024
    torch.testing.assert_close(stored["output_0"].double(), kept, rtol=2.0**-16, atol=0)
    torch.testing.assert_close(stored["output_1"].double(), sums[None], rtol=2.0**-16, atol=0)
    assert stored["tolerance"].item() == 1e-3


def test_tolerance_allows_for_activations_on_the_boundary_of_their_rounding() -> None:
    """Nothing in front of the first linear is a product, and yet float32 rounds its activations otherwise."""
    pick = torch.Generator().manual_seed(0)
    x = (torch.randint(-9, 9, (3, 800), generator=pick) + 0.5) * (3.0 / 127)
    x[:, 0] = 3.0  # the largest, which makes the scale 3 / 127
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(800, 64).eval().requires_grad_(False)
    graph = Rtn("W8A8").run(capture_once(module, (x,)), Context())
    stored = make_vectors(graph)
    expected, got = stored["output_0"], graph(x)[:, stored["columns_0"]]
    error = float((got - expected).norm() / expected.norm())
    assert 5e-3 < error < stored["tolerance"].item()


def test_a_decoder_s_vectors_are_near_its_float32_outputs(graph: GraphModule) -> None:
    info: ModelInfo = graph.meta["model"]
    stored = make_vectors(graph)
    ids, tolerance = stored["ids"], stored["tolerance"].item()
    assert ids.shape == (2, 18) and stored["prompt"].tolist() == [16] and 0 <= ids.min() <= ids.max() < info.vocab_size
    logits = torch.as_tensor(GraphLogits(graph)(ids.numpy())).reshape(36, -1)
    expected, got = stored["output_0"], logits[:, stored["columns_0"]]
    assert (got - expected).norm() < tolerance * expected.norm()
    assert (logits.argmax(1) == stored["top_0"]).float().mean() > 0.9
    assert 2e-3 < tolerance < 0.2  # int8 activations: a last bit may decide a rounding
    assert sum(tensor.nbytes for tensor in stored.values()) < 200_000


def test_threads_do_not_change_a_bit(graph: GraphModule) -> None:
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(make_vectors(graph))
    finally:
        torch.set_num_threads(threads)
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_sums_in_another_order_would_not_change_a_bit(graph: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of a few float64 roundings stands for sums that are split otherwise; float32's would show."""
    ids = np.random.default_rng(0).integers(0, 500, (2, 8))

    def rounded(noise: float) -> Tensor:
        monkeypatch.setattr(verify_vectors, "_ROUNDING", noise)
        run = verify_vectors._Exact(graph, noisy_from=0).run
        return verify_vectors._rounded(torch.as_tensor(GraphLogits(graph, run)(ids)))

    assert torch.equal(rounded(0.0), rounded(2.0**-51))
    assert not torch.equal(rounded(0.0), rounded(2.0**-22))


def test_a_model_of_few_positions(graph: GraphModule) -> None:
    info = graph.meta["model"]
    for positions, shape, prompt in ((1, (2, 1), 1), (5, (2, 5), 3)):
        graph.meta["model"] = verify_vectors.ModelInfo(**{**vars(info), "max_positions": positions})
        try:
            stored = make_vectors(graph)
        finally:
            graph.meta["model"] = info
        assert stored["ids"].shape == shape and stored["prompt"].tolist() == [prompt]


@given(st.floats(width=32, allow_nan=False, allow_subnormal=False, min_value=-(2.0**99), max_value=2.0**99))
def test_rounding_keeps_16_bits(value: float) -> None:
    result = verify_vectors._rounded(torch.tensor([value], dtype=torch.float64))
    assert result.dtype == torch.float32
    assert abs(result.item() - value) <= 2.0**-16 * abs(value)
    assert (math.frexp(result.item())[0] * 2**16).is_integer()
