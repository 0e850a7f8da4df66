"""GPTQ: versions of zero points, widths, the order of inputs, and bytes worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import gptq
from stored_tensors import dense_weight

from compressor.capture.checkpoints.gptq_words import gptq_weights


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    bits=st.sampled_from((2, 3, 4, 8)), version=st.sampled_from((1, 2)), ordered=st.booleans(),
    inputs=st.sampled_from((32, 64, 96)), size=st.sampled_from((16, 32, 64, -1)), seed=st.integers(0, 9),
)  # fmt: skip
def test_values_are_exact(bits: int, version: int, ordered: bool, inputs: int, size: int, seed: int) -> None:
    given_size = inputs if size == -1 else size
    tensors, values = gptq(
        np.random.default_rng(seed), 32, inputs, bits=bits, size=given_size, version=version, ordered=ordered
    )
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered,
              "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}  # fmt: skip
    assert np.array_equal(dense_weight(gptq_weights, tensors, config).double().numpy(), values)


@pytest.mark.parametrize(("version", "word"), [("gptq", 0x77777777), ("gptq_v2", -0x77777778)])
def test_symmetric_zero_points_by_hand(version: str, word: int) -> None:
    """Symmetric 4 bits: v1 stores 7 (0x77777777), v2 stores 8 (0x88888888); code 9 is one step above zero."""
    tensors = {
        "qweight": torch.full((1, 8), 0x00000009, dtype=torch.int32),  # input 0 has code 9, the others 0
        "qzeros": torch.tensor([[word]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    config = {"bits": 4, "group_size": 8, "desc_act": False, "checkpoint_format": version}
    assert dense_weight(gptq_weights, tensors, config).tolist() == [[0.5] + [-4.0] * 7] * 8


def test_a_zero_point_of_0_is_15_in_version_1() -> None:
    """It is stored modulo 2^bits: AutoGPTQ masks after it adds 1."""
    tensors = {
        "qweight": torch.full((1, 8), 0x33333333, dtype=torch.int32),
        "qzeros": torch.tensor([[-1]], dtype=torch.int32),
        "scales": torch.ones((1, 8), dtype=torch.float16),
    }
    assert dense_weight(gptq_weights, tensors, {"bits": 4, "group_size": 8}).unique().tolist() == [3.0]
