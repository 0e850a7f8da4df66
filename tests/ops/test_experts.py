"""Experts' operators against their plainest form, and taken apart against whole."""

from __future__ import annotations

import pytest
import torch

import compressor.ops  # noqa: F401  (registers the operators)

OPS = torch.ops.compressor
EXPERTS, EACH = 4, 2


def operands(own_rows: bool) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(3, generator=rng)[:EACH] for _ in range(5)])  # nobody takes the last
    index[2, 1] = -1
    x = torch.randn(5, EACH, 6, generator=rng) if own_rows else torch.randn(5, 6, generator=rng)
    return x, index, torch.randn(EXPERTS, 7, 6, generator=rng), torch.randn(EXPERTS, 7, generator=rng)


@pytest.mark.parametrize("own_rows", [False, True], ids=["shared", "own"])
def test_routed_linear(own_rows: bool) -> None:
    x, index, weight, bias = operands(own_rows)
    expected = torch.zeros(5, EACH, 7)
    for token in range(5):
        for place in range(EACH):
            if (expert := int(index[token, place])) >= 0:
                row = x[token, place] if own_rows else x[token]
                expected[token, place] = weight[expert] @ row + bias[expert]
    torch.testing.assert_close(OPS.routed_linear(x, index, weight, bias), expected)


@pytest.mark.parametrize("own_rows", [False, True], ids=["shared", "own"])
def test_taken_apart_it_computes_the_same_and_has_the_same_gradients(own_rows: bool) -> None:
    x, index, weight, bias = operands(own_rows)

    def apart(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = [OPS.expert_rows(x, index, e) for e in range(EXPERTS)]
        return OPS.join_experts(index, [OPS.dense_linear(r, weight[e], bias[e]) for e, r in enumerate(rows)])

    results = []
    for compute in (apart, lambda x, weight: OPS.routed_linear(x, index, weight, bias)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = compute(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_top_k_takes_the_first_of_equal_ones() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0], [float("nan"), 5.0, float("inf"), 5.0]])
    assert OPS.top_k(x, 3).tolist() == [[1, 2, 3], [0, 2, 1]]
