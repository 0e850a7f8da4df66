"""MXFP4 of gpt-oss against transformers' own reader, and blocks by hand."""

from __future__ import annotations

import pytest
import torch
from stored_tensors import dense_weight, stored

from compressor.capture.checkpoints.mxfp4_experts import mxfp4_weights
from compressor.errors import UsageError

pytest.importorskip("transformers")


def test_values_are_those_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (3, 6, 2), generator=generator, dtype=torch.uint8)
    found = dense_weight(mxfp4_weights, {"up_blocks": blocks, "up_scales": scales}, {}, "layer.up")
    assert found.shape == (3, 64, 6) and torch.equal(found, convert_moe_packed_tensors(blocks, scales))


def test_a_block_by_hand() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0] = 0xF2  # 1.0, then -6.0
    found = dense_weight(mxfp4_weights, {"w_blocks": blocks, "w_scales": torch.full((1, 1, 1), 129, dtype=torch.uint8)},
                         {}, "layer.w")  # fmt: skip
    assert found.dtype == torch.bfloat16 and found[0, :3, 0].tolist() == [4.0, -24.0, 0.0]


def test_extreme_scales_stay_exact() -> None:
    blocks = torch.full((1, 1, 2, 16), 0x11, dtype=torch.uint8)  # 0.5
    scales = torch.tensor([[[0, 254]]], dtype=torch.uint8)
    found = dense_weight(mxfp4_weights, {"w_blocks": blocks, "w_scales": scales}, {}, "layer.w").double()[0, :, 0]
    assert found[0] == 2.0**-128 and found[32] == 2.0**126


def test_blocks_and_scales_that_do_not_fit() -> None:
    blocks = torch.zeros(1, 4, 2, 16, dtype=torch.uint8)
    with pytest.raises(UsageError, match=r"layer.w_scales has shape \[1, 4, 3\], and .* asks for \[1, 4, 2\]"):
        mxfp4_weights(stored({"w_blocks": blocks, "w_scales": torch.zeros(1, 4, 3, dtype=torch.uint8)}), {})
    with pytest.raises(UsageError, match=r"layer\.w_blocks is missing"):
        mxfp4_weights(stored({"w_scales": torch.zeros(1, 4, 2, dtype=torch.uint8)}), {})
