"""Skipped inputs on two blocks of the reference model: shares, the limit of none, order of errors, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.functional import mse_loss

from compressor.errors import UsageError
from compressor.passes.activation_sparse import ActivationSparse
from compressor.passes.rtn import Rtn

BLOCKS = "re:model.layers.[01].*"
PACK = Rtn("W8A16", BLOCKS)


@pytest.fixture(scope="module")
def errors(two_blocks: Any) -> Any:
    found: dict[tuple[Any, ...], float] = {}

    def error(*options: Any, **more: Any) -> float:
        key = (*options, *more.items())
        if key not in found:
            steps = (PACK, ActivationSparse(*options, BLOCKS, **more)) if options else (PACK,)
            before, after, ctx = two_blocks(*steps)
            found[key] = float(mse_loss(after, before))
            if options:
                shares = [float(record.note.split()[1].rstrip("%")) / 100 for record in ctx.records]
                assert {record.format for record in ctx.records} == {"W8A16_SKIP"}
                assert min(shares) >= 0 and max(shares) <= 0.97
        return found[key]

    return error


def test_little_is_lost_and_more_of_more(errors: Any) -> None:
    packed, some, half = errors(), errors(0.2), errors(0.5)
    assert packed < some < half


def test_greedy_shares_lose_less(errors: Any) -> None:
    assert errors(0.5) < errors(0.5, allocate="uniform")


@pytest.mark.parametrize("sparsity", [0.0, -0.1, 0.96, 1.0, float("nan")])
def test_shares_that_are_none(sparsity: float) -> None:
    with pytest.raises(UsageError, match="more than 0, at most"):
        ActivationSparse(sparsity)


@pytest.mark.parametrize(("steps", "what"), [
    ((ActivationSparse(0.4, BLOCKS),), "no linear is packed"),
    ((Rtn("W8A8", BLOCKS), ActivationSparse(0.4, BLOCKS)), "q_proj is stored as W8A8: .*A16"),
    ((Rtn("W4A16_ASYM_G32", BLOCKS), ActivationSparse(0.4, BLOCKS)), "symmetric integers"),
    ((PACK, ActivationSparse(0.4, BLOCKS), ActivationSparse(0.4, BLOCKS)), "skips inputs already"),
])  # fmt: skip
def test_refusals(steps: Any, what: str, two_blocks: Any) -> None:
    with pytest.raises(UsageError, match=what):
        two_blocks(*steps)
