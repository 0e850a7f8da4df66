"""Operators with a state against their closed forms, in chunks, and with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import conv1d

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.ops.recurrence import TOKENS

OPS = torch.ops.compressor
BATCH, LENGTH = 2, 6


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape)), dtype=torch.float64)


def operands() -> dict[Any, dict[str, torch.Tensor]]:
    """Operands of each operator, from no tokens."""

    def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
        return normal(BATCH, LENGTH, *shape, seed=seed)

    return {
        OPS.causal_convolution: {
            "x": tokens(5), "weight": normal(5, 3), "bias": normal(5), "state": torch.zeros(BATCH, 2, 5).double(),
        },
        OPS.selective_scan: {
            "x": tokens(4, 3), "dt": tokens(4, 1).exp(), "a": -normal(4, 1, 1).exp(), "b": tokens(2, 5),
            "c": tokens(2, 5, seed=1), "state": torch.zeros(BATCH, 4, 5, 3).double(),
        },
        OPS.gated_delta_rule: {
            "q": tokens(2, 3), "k": tokens(2, 3, seed=1) / 2, "v": tokens(4, 5), "decay": -tokens(4, 1).exp(),
            "beta": tokens(4).sigmoid(), "state": torch.zeros(BATCH, 4, 3, 5).double(),
        },
        OPS.wkv: {
            "k": tokens(4), "v": tokens(4, seed=1), "decay": -normal(4).exp(), "first": normal(4, seed=2),
            "state": torch.zeros(BATCH, 3, 4).double(),
        },
    }  # fmt: skip


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    padded = torch.cat([state, x], dim=1).transpose(1, 2)
    return conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight)).transpose(1, 2)


def scanned(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Weigh every pair of tokens, with the decays between them (Dao and Gu 2024, eq. 3)."""
    b, c = (part.repeat_interleave(2, dim=2) for part in (b, c))
    rate = (dt[..., 0] * a.flatten()).cumsum(1)  # [B, S, H]
    between = (rate[:, :, None] - rate[:, None]).exp() * torch.ones(LENGTH, LENGTH).tril()[None, :, :, None]
    weights = torch.einsum("bthn,bshn->btsh", c, b) * between
    return torch.einsum("btsh,bshp->bthp", weights, dt * x)


def corrected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Multiply whole matrices in place of corrections: S becomes exp(g) (I - beta k k^T) S + beta k v^T (eq. 10)."""
    outputs = torch.empty_like(v)
    for entry in range(BATCH):
        for head in range(v.shape[2]):
            held, own = torch.zeros(3, 5).double(), head // 2
            for t in range(LENGTH):
                key, strength = k[entry, t, own, :, None], beta[entry, t, head]
                keep = torch.eye(3).double() - strength * key @ key.T
                held = decay[entry, t, head].exp() * keep @ held + strength * key @ v[entry, t, head][None]
                outputs[entry, t, head] = q[entry, t, own] @ held
    return outputs


def averaged(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Take a softmax over the tokens before, and the token itself (Peng et al. 2023, eq. 19)."""
    outputs = torch.empty_like(v)
    for t in range(LENGTH):
        back = torch.arange(t - 1, -1, -1)[None, :, None]
        exponents = torch.cat([back * decay + k[:, :t], (first + k[:, t])[:, None]], dim=1)
        outputs[:, t] = (exponents.softmax(1) * v[:, : t + 1]).sum(1)
    return outputs


ORACLES: dict[Any, Callable[..., torch.Tensor]] = {
    OPS.causal_convolution: convolved,
    OPS.selective_scan: scanned,
    OPS.gated_delta_rule: corrected,
    OPS.wkv: averaged,
}


@pytest.mark.parametrize("operator", ORACLES, ids=str)
def test_operator(operator: Any) -> None:
    given = operands()[operator]
    whole, last = operator(**given)
    torch.testing.assert_close(whole, ORACLES[operator](**given))
    pieces, begin, held = [], 0, given["state"]
    for count in (1, 3, 2):
        part = {n: x[:, begin : begin + count] if n in TOKENS[operator.default] else x for n, x in given.items()}
        y, held = operator(**{**part, "state": held})
        pieces.append(y)
        begin += count
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    torch.testing.assert_close(held, last)
    wanted = {name: x.clone().requires_grad_() for name, x in given.items() if name != "bias"}
    result = ORACLES[operator](**{**given, **wanted}).square().sum()
    expected = torch.autograd.grad(result, [x for n, x in wanted.items() if n != "state"])
    got = torch.autograd.grad(
        operator(**{**given, **wanted})[0].square().sum(), [x for n, x in wanted.items() if n != "state"]
    )
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.library.opcheck(
        operator, tuple(x.float() for x in given.values()), test_utils=("test_schema", "test_faketensor")
    )
