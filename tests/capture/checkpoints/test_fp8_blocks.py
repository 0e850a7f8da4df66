"""FP8: blocks that do not divide a weight, one scale a row or a tensor, E8M0 scales, and how values are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import float8
from stored_tensors import dense_weight

from compressor.capture.checkpoints.fp8_blocks import fp8_weights


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    out=st.integers(1, 40), inputs=st.integers(1, 40), rows=st.sampled_from((1, 8, 16, 128)),
    columns=st.sampled_from((1, 8, 16, 128)), name=st.sampled_from(("weight_scale_inv", "weight_scale")),
)  # fmt: skip
def test_blocks(out: int, inputs: int, rows: int, columns: int, name: str) -> None:
    """Scales in bfloat16 give exact values; those in float32 the nearest to the exact ones."""
    for dtype in (torch.bfloat16, torch.float32):
        tensors, values = float8(np.random.default_rng(out), out, inputs, block=(rows, columns), name=name, dtype=dtype)
        found = dense_weight(fp8_weights, tensors, {"weight_block_size": [rows, columns]}).numpy()
        assert np.array_equal(found, values.astype(np.float32))
        assert dtype == torch.float32 or np.array_equal(found.astype(np.float64), values)


@pytest.mark.parametrize(("shape", "block"), [((), (12, 64)), ((1,), (12, 64)), ((12,), (1, 64)), ((12, 1), (1, 64))])
def test_one_scale_a_tensor_or_a_row(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    tensors, values = float8(np.random.default_rng(0), 12, 64, block=block, dtype=torch.bfloat16)
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"].reshape(shape)
    assert np.array_equal(dense_weight(fp8_weights, tensors, {}).double().numpy(), values)


def test_scales_that_are_powers_of_two() -> None:
    weight = torch.tensor([[448.0, -0.001953125]]).to(torch.float8_e4m3fn)  # the largest and the smallest
    for scale in (torch.tensor([[124]], dtype=torch.uint8), torch.tensor([[0.125]]).to(torch.float8_e8m0fnu)):
        config: dict[str, Any] = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
        found = dense_weight(fp8_weights, {"weight": weight, "weight_scale_inv": scale}, config)
        assert found.tolist() == [[56.0, -0.000244140625]]


def test_e5m2() -> None:
    tensors = {"weight": torch.tensor([[3.5, -57344.0]]).to(torch.float8_e5m2), "weight_scale": torch.tensor(2.0)}
    assert dense_weight(fp8_weights, tensors, {"fmt": "e5m2"}).tolist() == [[7.0, -114688.0]]
