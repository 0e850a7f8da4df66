"""compressed-tensors: widths, strategies, old layouts, and which group a module belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import bit_stream, compressed, float8, nvfp4, packed_integers, plain_integers, whole_codes
from stored_tensors import dense_weight, stored
from torch import Tensor

from compressor.capture.checkpoints.compressed_tensors.config_groups import compressed_tensors_weights
from compressor.errors import UsageError


def integers(bits: int, size: int, zeros: bool = False) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    return compressed("pack-quantized", num_bits=bits, type="int", symmetric=not zeros, **strategy)


def read(tensors: dict[str, Tensor], config: dict[str, Any]) -> np.ndarray:
    return dense_weight(compressed_tensors_weights, tensors, config).double().numpy()


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    bits=st.integers(1, 8), size=st.sampled_from((8, 32, 64, -1)), zeros=st.booleans(), ordered=st.booleans(),
    inputs=st.sampled_from((64, 160)), outputs=st.sampled_from((1, 7, 33)), seed=st.integers(0, 9),
)  # fmt: skip
def test_packed_integers(
    bits: int, size: int, zeros: bool, ordered: bool, inputs: int, outputs: int, seed: int
) -> None:
    ordered = ordered and size != -1
    inputs = inputs if 8 % bits == 0 or inputs == 160 else 160  # fewer leave it open whether words have gaps
    rng = np.random.default_rng(seed)
    tensors, values = packed_integers(rng, outputs, inputs, bits=bits, size=size, zeros=zeros, ordered=ordered)
    assert np.array_equal(read(tensors, integers(bits, size, zeros)), values)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_with_gaps_of_older_versions(bits: int) -> None:
    rng = np.random.default_rng(0)
    found = [
        (read(tensors, integers(bits, 32, zeros=True)), values, tensors["weight_packed"].shape[1])
        for pack in (bit_stream, whole_codes)
        for tensors, values in (packed_integers(rng, 40, 320, bits=bits, zeros=True, pack=pack),)
    ]
    assert all(np.array_equal(read_values, values) for read_values, values, _ in found)
    assert found[0][2] < found[1][2]


def test_words_that_may_have_gaps_or_not_are_refused() -> None:
    small, _ = packed_integers(np.random.default_rng(0), 8, 20, bits=3, size=20)
    with pytest.raises(UsageError, match="may be packed with or without gaps: both take 2 words"):
        read(small, integers(3, 20))


@pytest.mark.parametrize(
    ("strategy", "block"),
    [
        ({"strategy": "tensor"}, (12, 64)),
        ({"strategy": "channel"}, (1, 64)),
        ({"strategy": "group", "group_size": 16}, (1, 16)),
        ({"strategy": "block", "block_structure": [8, 24]}, (8, 24)),
    ],
)
@pytest.mark.parametrize("kind", ["int", "float"])
def test_one_element_a_weight(kind: str, strategy: dict[str, Any], block: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    if kind == "float":
        tensors, values = float8(rng, 12, 64, block=block, name="weight_scale", dtype=torch.bfloat16)
        config = compressed("float-quantized", num_bits=8, type="float", symmetric=True, **strategy)
    else:
        tensors, values = plain_integers(rng, 12, 64, block=block, zeros=True)
        config = compressed("int-quantized", num_bits=8, type="int", symmetric=False, **strategy)
    assert np.array_equal(read(tensors, config), values)


def test_the_global_scale_divides() -> None:
    tensors = {
        "weight_packed": torch.full((1, 8), 0x77, dtype=torch.uint8),
        "weight_scale": torch.tensor([[448.0]]).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([448.0 * 6 / 3.0]),  # the largest weight is 3
    }
    config = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    assert read(tensors, config).tolist() == [[3.0] * 16]
    many, values = nvfp4(np.random.default_rng(0), 16, 64)
    assert np.array_equal(read(many, config).astype(np.float32), values.astype(np.float32))


def test_an_index_of_groups_that_is_not_in_use() -> None:
    tensors, values = packed_integers(np.random.default_rng(0), 8, 64, size=16)
    tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    assert np.array_equal(read(tensors, integers(4, 16)), values)


def test_groups_by_name_pattern_and_class() -> None:
    rng = np.random.default_rng(0)
    made = {
        "model.down": packed_integers(rng, 8, 64, bits=8, size=64),
        "model.up": packed_integers(rng, 8, 64, bits=4, size=16),
        "model.head": plain_integers(rng, 8, 64, block=(1, 64)),
    }
    tensors = {f"{name}.{part}": t for name, (parts, _) in made.items() for part, t in parts.items()}
    config = integers(4, 16)
    groups = config["config_groups"]
    groups["named"] = {"targets": ["model.down"], "weights": {"num_bits": 8, "strategy": "channel"}}
    groups["pattern"] = {"targets": ["re:.*head$"], "format": "int-quantized",
                         "weights": {"num_bits": 8, "strategy": "channel"}}  # fmt: skip
    groups["caches"] = {"targets": ["re:.*attn$"], "weights": None, "output_activations": {"num_bits": 8}}
    config |= {"ignore": ["lm_head", "re:.*gate$"]}
    source = stored(tensors, module="")
    weights = compressed_tensors_weights(source, config)
    for name, (_, values) in made.items():
        weight = weights[f"{name}.weight"]
        found = weight.dequantize(**{part: source.values(key) for part, key in weight.parts.items()})
        assert np.array_equal(found.double().numpy(), values), name


def test_symmetric_weights_may_store_zeros_and_nothing_else() -> None:
    tensors, values = plain_integers(np.random.default_rng(0), 4, 8, block=(1, 8))
    config = compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
    tensors["weight_zero_point"] = torch.zeros(4, 1, dtype=torch.int8)
    assert np.array_equal(read(tensors, config), values)
    tensors["weight_zero_point"][2] = 1
    with pytest.raises(UsageError, match="weight_zero_point has values other than 0, and the weights are symmetric"):
        read(tensors, config)
