"""Pack random weights as other tools store them, element by element from each layout's definition.

Each function returns the stored tensors of one linear by their last name, and its values in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed: TypeAlias = tuple[dict[str, Tensor], NDArray[np.float64]]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def bit_stream(codes: Sequence[int], bits: int) -> list[int]:
    """Write codes one after another into a number, lowest bits first, and cut it into int32 words."""
    stream = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    words = -(-len(codes) * bits // 32)
    return np.frombuffer(stream.to_bytes(4 * words, "little"), np.int32).tolist()


def whole_codes(codes: Sequence[int], bits: int) -> list[int]:
    """Write as many codes as fit into each word, as compressed-tensors did before 0.17."""
    each = 32 // bits
    return [word for i in range(0, len(codes), each) for word in bit_stream([*codes[i : i + each]], bits)[:1]]


def rows_of_words(codes: NDArray[Any], bits: int, pack: Callable[..., list[int]] = bit_stream) -> Tensor:
    return torch.tensor([pack(row.tolist(), bits) for row in codes], dtype=torch.int32)


def float_tensor(values: NDArray[Any], dtype: torch.dtype) -> tuple[Tensor, NDArray[np.float64]]:
    """Round to a type; returns the tensor and what it holds."""
    tensor = torch.from_numpy(np.asarray(values, np.float32)).to(dtype)
    return tensor, tensor.double().numpy()


def scales_like(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, NDArray[Any]]:
    return float_tensor(rng.uniform(0.01, 0.04, shape), dtype)


def gptq(
    rng: np.random.Generator, out: int, inputs: int, *, bits: int = 4, size: int = 32, version: int = 1,
    ordered: bool = False,
) -> Packed:  # fmt: skip
    codes, groups = rng.integers(0, 2**bits, (out, inputs)), -(-inputs // size)
    zeros = rng.integers(0, 2**bits, (groups, out))
    scales, factors = scales_like(rng, (groups, out), torch.float16)
    group = np.arange(inputs) // size
    if ordered:
        group = rng.permutation(group)
    stored_zeros = (zeros - 1) % 2**bits if version == 1 else zeros
    tensors = {
        "qweight": rows_of_words(codes, bits).t().contiguous(),
        "qzeros": rows_of_words(stored_zeros, bits),
        "scales": scales,
        "g_idx": torch.from_numpy(group.astype(np.int32)),
    }
    values = [[(codes[o, i] - zeros[group[i], o]) * factors[group[i], o] for i in range(inputs)] for o in range(out)]
    return tensors, np.array(values)


def awq(rng: np.random.Generator, out: int, inputs: int, *, size: int = 32) -> Packed:
    codes, zeros = rng.integers(0, 16, (inputs, out)), rng.integers(0, 16, (inputs // size, out))
    scales, factors = scales_like(rng, (inputs // size, out), torch.float16)

    def words(rows: NDArray[Any]) -> Tensor:  # AutoAWQ: WQLinear_GEMM.from_linear
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return rows_of_words(rows.reshape(len(rows), -1, 8)[..., order].reshape(rows.shape), 4)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    values = [[(codes[i, o] - zeros[i // size, o]) * factors[i // size, o] for i in range(inputs)] for o in range(out)]
    return tensors, np.array(values)


def blocks_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def each_scaled(codes: NDArray[Any], factors: NDArray[Any], block: tuple[int, int]) -> NDArray[np.float64]:
    rows, columns = codes.shape
    return np.array(
        [[codes[o, i] * factors[o // block[0], i // block[1]] for i in range(columns)] for o in range(rows)], np.float64
    )


def float8(
    rng: np.random.Generator, out: int, inputs: int, *, block: tuple[int, int], name: str = "weight_scale_inv",
    dtype: torch.dtype = torch.float32,
) -> Packed:  # fmt: skip
    codes, values = float_tensor(rng.normal(0, 2, (out, inputs)), torch.float8_e4m3fn)
    scales, factors = scales_like(rng, blocks_of((out, inputs), block), dtype)
    return {"weight": codes, name: scales}, each_scaled(values, factors, block)


def plain_integers(
    rng: np.random.Generator, out: int, inputs: int, *, block: tuple[int, int], zeros: bool = False
) -> Packed:
    codes, shape = rng.integers(-128, 128, (out, inputs)), blocks_of((out, inputs), block)
    shifts = rng.integers(-128, 128, shape) if zeros else np.zeros(shape, np.int64)
    scales, factors = scales_like(rng, shape, torch.bfloat16)
    tensors = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales}
    if zeros:
        tensors["weight_zero_point"] = torch.from_numpy(shifts.astype(np.int8))
    shifted = codes - each_scaled(np.ones_like(codes), shifts, block)
    return tensors, each_scaled(shifted, factors, block)


def packed_integers(
    rng: np.random.Generator, out: int, inputs: int, *, bits: int = 4, size: int = 32, zeros: bool = False,
    pack: Callable[..., list[int]] = bit_stream, ordered: bool = False,
) -> Packed:  # fmt: skip
    """``size`` is that of groups; -1: one scale a row."""
    size = inputs if size == -1 else size
    codes, groups, half = rng.integers(0, 2**bits, (out, inputs)), -(-inputs // size), 2 ** (bits - 1)
    scales, factors = scales_like(rng, (out, groups), torch.bfloat16)
    tensors = {
        "weight_packed": rows_of_words(codes, bits, pack),
        "weight_scale": scales,
        "weight_shape": torch.tensor([out, inputs]),
    }
    shifts = np.full((out, groups), half)
    if zeros:
        shifts = rng.integers(0, 2**bits, (out, groups))
        tensors["weight_zero_point"] = rows_of_words(shifts.T, bits, pack).t().contiguous()
    group = np.arange(inputs) // size
    if ordered:
        group = rng.permutation(group)
        tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
    values = [[(codes[o, i] - shifts[o, group[i]]) * factors[o, group[i]] for i in range(inputs)] for o in range(out)]
    return tensors, np.array(values)


def pairs_of_nibbles(codes: NDArray[Any]) -> Tensor:
    return torch.from_numpy((codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8))


def nvfp4(rng: np.random.Generator, out: int, inputs: int) -> Packed:
    codes = rng.integers(0, 16, (out, inputs))
    scales, factors = float_tensor(rng.uniform(10, 448, (out, inputs // 16)), torch.float8_e4m3fn)
    divisor = torch.tensor([12345.678])
    tensors = {"weight_packed": pairs_of_nibbles(codes), "weight_scale": scales, "weight_global_scale": divisor}
    return tensors, each_scaled(np.array(FP4)[codes], factors, (1, 16)) / divisor.double().numpy()


def mxfp4(rng: np.random.Generator, out: int, inputs: int) -> Packed:
    codes, exponents = rng.integers(0, 16, (out, inputs)), rng.integers(115, 124, (out, inputs // 32))
    tensors = {"weight_packed": pairs_of_nibbles(codes), "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
    return tensors, each_scaled(np.array(FP4)[codes], 2.0 ** (exponents - 127), (1, 32))


def mxfp8(rng: np.random.Generator, out: int, inputs: int) -> Packed:
    codes, values = float_tensor(rng.normal(0, 2, (out, inputs)), torch.float8_e4m3fn)
    exponents = rng.integers(115, 124, (out, inputs // 32))
    tensors = {"weight": codes, "weight_scale": torch.from_numpy(exponents.astype(np.uint8))}
    return tensors, each_scaled(values, 2.0 ** (exponents - 127), (1, 32))


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors with one group for all linears but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}  # fmt: skip


LAYOUTS: dict[str, tuple[Callable[..., Packed], dict[str, Any]]] = {
    "fp8": (lambda rng, out, inputs: float8(rng, out, inputs, block=(32, 48)),
            {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}),
    "fp8-tensor": (lambda rng, out, inputs: float8(rng, out, inputs, block=(out, inputs), name="weight_scale"),
                   {"quant_method": "fp8", "activation_scheme": "static"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
                    "checkpoint_format": "gptq"}),
    "gptq-v2-3-bits": (lambda *a: gptq(*a, bits=3, version=2, ordered=True),
                       {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True,
                        "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "GEMM"}),
    "ct-pack": (lambda *a: packed_integers(*a, zeros=True),
                compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)),
    "ct-pack-channel": (lambda *a: packed_integers(*a, bits=3, size=-1),
                        compressed("pack-quantized", num_bits=3, type="int", symmetric=True, strategy="channel")),
    "ct-int": (lambda rng, out, inputs: plain_integers(rng, out, inputs, block=(1, inputs), zeros=True),
               compressed("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel")),
    "ct-float": (lambda rng, out, inputs: float8(rng, out, inputs, block=(32, 32), name="weight_scale"),
                 compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="block",
                            block_structure=[32, 32])),
    "ct-naive": (lambda rng, out, inputs: plain_integers(rng, out, inputs, block=(out, inputs)),
                 compressed("naive-quantized", num_bits=8, type="int", symmetric=True, strategy="tensor")),
    "ct-nvfp4": (nvfp4, compressed("nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True,
                                   strategy="tensor_group", group_size=16)),
    "ct-mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group",
                                   group_size=32)),
    "ct-mxfp8": (mxfp8, compressed("mxfp8-quantized", num_bits=8, type="float", symmetric=True, strategy="group",
                                   group_size=32)),
}  # fmt: skip
"""A name -> how one linear is packed, and the quantization_config that says so."""


def store_quantized(folder: Path, layout: str) -> None:
    """Put random codes of a layout in the place of a saved Llama's projections."""
    pack, quantization = LAYOUTS[layout]
    rng, stored = np.random.default_rng(0), load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        packed, _ = pack(rng, *stored.pop(name).shape)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
