"""Weights of rows against transformers' own model and plain definitions; where there are no predictions, it is said."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.fx import GraphModule

from compressor.calibration.guided_rows import CONFIDENT, guided_rows, half_guided, positive_slopes
from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.graph.sites import group_by_input, linear_sites


def test_slopes_by_chance_have_the_curvature_of_the_divergence() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0, -3.0]], dtype=torch.float64)
    every = [torch.tensor([signs], dtype=torch.float64) for signs in itertools.product((-1, 1), repeat=5)]
    slopes = torch.cat([positive_slopes(logits, signs) for signs in every])
    p = torch.softmax(logits[0], 0)
    torch.testing.assert_close(slopes.t() @ slopes / len(every), torch.diag(p) - torch.outer(p, p), rtol=0, atol=1e-15)
    torch.testing.assert_close(
        torch.autograd.functional.hessian(lambda z: (p * (p.log() - torch.log_softmax(z, 0))).sum(), logits[0]),
        torch.diag(p) - torch.outer(p, p), rtol=0, atol=1e-15,
    )  # fmt: skip


def test_only_confident_predictions_count() -> None:
    logits = torch.zeros(2, int(2 / CONFIDENT))
    logits[1, 0] = 5
    slopes = positive_slopes(logits, torch.ones_like(logits))
    assert not slopes[0].any() and slopes[1].all()


def test_the_guided_and_the_local_loss_count_the_same() -> None:
    torch.testing.assert_close(half_guided(torch.tensor([0.0, 1.0, 5.0])), torch.tensor([0.5, 0.75, 1.75]))
    assert torch.equal(half_guided(torch.zeros(3)), torch.ones(3))


@pytest.fixture(scope="module")
def model(random_llama: Callable[..., transformers.LlamaForCausalLM]) -> transformers.LlamaForCausalLM:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return random_llama(vocab_size=12, hidden_size=16, intermediate_size=32, **heads, initializer_range=0.5)


@pytest.fixture(scope="module")
def graph(model: transformers.LlamaForCausalLM) -> GraphModule:
    return capture(model)


def test_weights_are_those_of_the_model_s_own_gradients(
    model: transformers.LlamaForCausalLM, graph: GraphModule
) -> None:
    ids = torch.randint(12, (3, 9), generator=torch.Generator().manual_seed(0))
    sites = linear_sites(graph)
    found = guided_rows(graph, ids, sites, seed=5)
    outputs: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    hooks = [
        modules[site.name].register_forward_hook(lambda _, __, y, name=site.name: outputs.__setitem__(name, y))  # type: ignore[misc]
        for site in sites
    ]
    generator, squares = torch.Generator().manual_seed(5), {site.name: [] for site in sites}  # type: ignore[var-annotated]
    for sample in ids:
        logits = model(sample[None]).logits
        signs = torch.randint(2, logits.shape, generator=generator) * 2 - 1
        gradients = torch.autograd.grad(
            (positive_slopes(logits.detach(), signs) * logits).sum(), list(outputs.values())
        )
        for name, gradient in zip(outputs, gradients, strict=True):
            squares[name].append(gradient[0].square().sum(1))
    for hook in hooks:
        hook.remove()
    for group in group_by_input(sites):
        weights = torch.stack([torch.cat(squares[site.name]) for site in group]).sum(0)
        for site in group:
            torch.testing.assert_close(found[site.name], 0.5 + 0.5 * weights / weights.mean(), rtol=1e-3, atol=1e-5)
            assert float(found[site.name].mean()) == pytest.approx(1, rel=1e-5) and found[site.name].std() > 0.05


def test_errors_that_the_weights_call_small_move_the_predictions_less(
    model: transformers.LlamaForCausalLM, graph: GraphModule
) -> None:
    ids = torch.randint(12, (1, 16), generator=torch.Generator().manual_seed(1))
    site = next(site for site in linear_sites(graph) if site.name == "model.layers.1.mlp.up_proj")
    weights = torch.stack([guided_rows(graph, ids, [site], seed)[site.name] for seed in range(20)]).mean(0)
    module = model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        p = torch.log_softmax(model(ids).logits.double(), -1)

    def divergence(row: int) -> float:
        """Of the model's predictions when the outputs of one row move by chance."""
        found = 0.0
        for seed in range(8):
            noise = torch.zeros(1, 16, site.out_features)
            noise[0, row] = 1e-2 * torch.randn(site.out_features, generator=torch.Generator().manual_seed(seed))
            hook = module.register_forward_hook(lambda _, __, y, noise=noise: y + noise)
            with torch.no_grad():
                q = torch.log_softmax(model(ids).logits.double(), -1)
            hook.remove()
            found += float((p.exp() * (p - q)).sum())
        return found

    rows = weights.argsort()
    low, high = (sum(divergence(int(row)) for row in part) for part in (rows[:5], rows[-5:]))
    assert low < 0.75 * high


def test_models_without_predictions_are_refused() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval().requires_grad_(False)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    graph = capture(module, (x,))
    with pytest.raises(UsageError, match="task_guided looks at predictions"):
        guided_rows(graph, x, linear_sites(graph), 0)


def test_convolutions_have_a_weight_for_each_patch() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(4, 5)
    module = nn.Sequential(*layers).eval().requires_grad_(False)
    x = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    graph = capture(module, (x[:2],))
    found = guided_rows(graph, x, linear_sites(graph), 3)
    assert {name: len(weights) for name, weights in found.items()} == {"0": 6 * 4, "2": 6, "4": 6}
    generator, slopes = torch.Generator().manual_seed(3), []
    for part in x.split(2):  # the fixed batch
        logits = module(part)
        slopes.append(positive_slopes(logits, torch.randint(2, logits.shape, generator=generator) * 2 - 1))
    y = layers[0](x).requires_grad_()
    (gradient,) = torch.autograd.grad((module[1:](y) * torch.cat(slopes)).sum(), y)
    weights = gradient.square().sum(1).flatten()  # [images, rows, columns] in the order of patches
    torch.testing.assert_close(found["0"], 0.5 + 0.5 * weights / weights.mean(), rtol=1e-4, atol=1e-6)
