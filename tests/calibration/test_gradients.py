"""Squared gradients against those that transformers' own model has; the operators' gradients against differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from compressor.calibration.gradients import squared_gradients
from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import linear_sites
from compressor.numerics.nearest import rtn_quantize

OPS = torch.ops.compressor


@pytest.fixture(scope="module")
def model(random_llama: Callable[..., transformers.LlamaForCausalLM]) -> transformers.LlamaForCausalLM:
    return random_llama(hidden_size=32, intermediate_size=48, tie_word_embeddings=True)


def test_they_are_those_of_the_model_s_own_loss(model: transformers.LlamaForCausalLM) -> None:
    ids = torch.randint(60, (3, 12), generator=torch.Generator().manual_seed(0))
    expected: dict[str, Tensor] = {}
    for sample in ids:
        model.zero_grad()
        model(sample[None], labels=sample[None]).loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            expected[name] = expected.get(name, torch.zeros(())) + parameter.grad.square()
    model.zero_grad()
    graph = capture(model)
    sites = [site for site in linear_sites(graph) if site.name != "lm_head"]  # its weight is the embedding's too
    found = {}
    for site, square in squared_gradients(graph, ids, sites):
        found[site.name] = square
        # What is replaced behind does not change what is in front.
        replace_linear(graph, site, rtn_quantize(torch.zeros(square.shape), Format.parse("W8A16")))
    assert list(found) == [site.name for site in reversed(sites)]
    for name, square in found.items():
        torch.testing.assert_close(square, expected[f"{name}.weight"], rtol=1e-3, atol=1e-10)


def test_a_packed_linear_passes_gradients_on(model: transformers.LlamaForCausalLM) -> None:
    ids = torch.randint(60, (1, 8), generator=torch.Generator().manual_seed(0))
    graph = capture(model)
    site = next(site for site in linear_sites(graph) if site.name.endswith("1.mlp.down_proj"))
    packed = rtn_quantize(graph.get_parameter(site.weight_name).detach(), Format.parse("W8A16_G32"))
    first = next(site for site in linear_sites(graph) if site.name.endswith("0.mlp.down_proj"))
    ((_, dense),) = squared_gradients(graph, ids, [first])
    replace_linear(graph, site, packed)
    graph.recompile()
    first = next(site for site in linear_sites(graph) if site.name.endswith("0.mlp.down_proj"))
    ((_, near),) = squared_gradients(graph, ids, [first])
    assert 0 < float((near - dense).norm()) < 0.05 * float(dense.norm())


def test_the_operators_gradients_are_those_of_differences() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.rand(*shape, generator=rng, dtype=torch.float64) + 0.1 for shape in ((3, 6), (6,)))
    assert torch.autograd.gradcheck(
        lambda x, w: OPS.rms_norm(x, w, 1e-5), (x.requires_grad_(), weight.requires_grad_())
    )
    matrix, bias = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((2, 6), (2,)))
    assert torch.autograd.gradcheck(OPS.dense_linear, (x, matrix.requires_grad_(), bias.requires_grad_()))
    q, k, v = (torch.randn(1, heads, 3, 2, generator=rng, dtype=torch.float64) for heads in (4, 2, 2))
    empty, mask = torch.zeros(1, 2, 1, 2, dtype=torch.float64), torch.tensor([[1.0, 1.0, 0.0]])

    def cached(*qkv: Tensor) -> Tensor:
        return OPS.cached_attention(*qkv, empty, empty, torch.arange(3), 0.5, 2, 3.0, None)  # type: ignore[no-any-return]

    image = torch.randn(2, 5, 4, 3, generator=rng, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: OPS.patches(x, [3, 2], [2, 1], [1, 0], [1, 2]), (image,))
    inputs = tuple(value.requires_grad_() for value in (q, k, v))
    assert torch.autograd.gradcheck(cached, inputs)
    assert torch.autograd.gradcheck(lambda *qkv: OPS.masked_attention(*qkv, mask, 0.5), inputs)


def test_long_sums_have_the_same_bits_on_one_thread_and_on_two() -> None:
    rng, threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    x, weight, dy = (torch.randn(*shape, generator=rng) for shape in ((2048, 256), (2048, 256), (2048, 2048)))
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            inputs = (x.clone().requires_grad_(), weight.clone().requires_grad_())
            found.append(torch.autograd.grad(OPS.dense_linear(*inputs, None), inputs, dy))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_bad_input(model: transformers.LlamaForCausalLM) -> None:
    graph = capture(model)
    with pytest.raises(UsageError, match="at least two tokens"):
        next(squared_gradients(graph, torch.zeros(2, 1, dtype=torch.int64), linear_sites(graph)))
