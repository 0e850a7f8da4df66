"""AWQ: values, and the order of a word's nibbles by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quantized_checkpoints import awq
from stored_tensors import dense_weight

from compressor.capture.checkpoints.awq_words import awq_weights


@pytest.mark.parametrize(("inputs", "size"), [(64, 16), (96, 32), (32, 32)])
def test_values_are_exact(inputs: int, size: int) -> None:
    tensors, values = awq(np.random.default_rng(0), 24, inputs, size=size)
    config = {"bits": 4, "group_size": size, "zero_point": True}
    assert np.array_equal(dense_weight(awq_weights, tensors, config).double().numpy(), values)
    if inputs == size:
        assert np.array_equal(dense_weight(awq_weights, tensors, {"w_bit": 4, "q_group_size": -1}).numpy(), values)


def test_nibbles_by_hand() -> None:
    """From the lowest nibble, a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "qzeros": torch.tensor([[0]], dtype=torch.int32),
        "scales": torch.full((1, 8), 2.0, dtype=torch.float16),
    }
    found = dense_weight(awq_weights, tensors, {"bits": 4, "group_size": 1})
    assert found.flatten().tolist() == [2.0 * code for code in range(8)]
