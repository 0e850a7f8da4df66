"""Functions in WebAssembly against the eager operators, through wasmtime."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from kernel_cases import OPS, check_special, pairs, random_packed, special_attention, special_norm, special_rows
from torch import Tensor
from tvm import te
from web_formats import SERVED, TOLERANCE, error

from compressor.codegen.kernels import dense as dense_linear
from compressor.codegen.kernels import embedding, experts, norm
from compressor.codegen.kernels.attention import cached as attention
from compressor.codegen.kernels.convolution.depthwise import depthwise
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import Epilogue, convolution
from compressor.codegen.kernels.experts import Routing
from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.kernels.top_k import top_k
from compressor.codegen.lowering.convolutions import fused_convolution
from compressor.codegen.lowering.elementwise import ScheduleElementwise
from compressor.codegen.web import wasm
from compressor.codegen.web.execute_wasm import WasmProgram
from compressor.codegen.web.simd128 import SIMD128
from compressor.errors import ToolchainError, VerificationError
from compressor.formats.format import Format

PIXEL = ((1, 1), (1, 1), (0, 0), (1, 1))
"""Kernel, stride, padding and dilation of a convolution of single pixels."""


@pytest.fixture(autouse=True)
def linker(require_tool: Callable[[str], Path]) -> None:
    require_tool("wasm-ld")


def bound(x: Tensor) -> np.ndarray:
    """Return a tensor as its buffer holds it."""
    x = x.contiguous()
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy()


def run(
    func: Any, operands: Sequence[Tensor | None], sizes: Sequence[int], out: Sequence[int], dtype: str = "float32"
) -> np.ndarray:
    """One function on operands (None is left out), the output last."""
    module = wasm.WasmModule(SIMD128)
    made = module.add(func, "kernel")
    given = [bound(x) for x in operands if x is not None]
    assert made.operands == tuple(range(len(given) + 1)) and len(made.sizes) == len(sizes)
    program = WasmProgram({"scratch": []}, module.link(), {})
    addresses = [*(program.upload(x) for x in given), program.empty(8 * int(np.prod(out)))]
    program.call("kernel", addresses, sizes)
    return program.read(addresses[-1], dtype, out)


def distinct() -> list[str]:
    """Return the formats that have something which no format before has; all pairs of these are tested on x86."""
    seen: set[Any] = set()
    found = []
    for name in SERVED:
        fmt = Format.parse(name)
        form = bool(fmt.group_size), bool(fmt.block_tiles), fmt.activations is not None
        new = {("weights", fmt.weights), ("scales", fmt.scale_type, *form), ("inputs", fmt.activations)} - seen
        seen |= new
        found += [name] if new else []
    return found


@pytest.mark.parametrize("name", distinct())
def test_packed_linear_of_every_format(name: str) -> None:
    pick, fmt = random.Random(zlib.crc32(name.encode())), Format.parse(name)
    rows, columns, tokens = pick.randint(17, 70), pick.randint(9, 200), pick.choice([1, 3])
    rng = torch.Generator().manual_seed(rows)
    packed, x = random_packed(fmt, rows, columns, rng), torch.randn(1, tokens, columns, generator=rng)
    x = torch.cat((x, special_rows(columns, rng)), dim=1)
    bias = torch.randn(rows, generator=rng) if pick.random() < 0.5 else None
    schedule = packed_linear.Schedule(1, 1, 2)  # small: what differs between formats is the same in all
    func = packed_linear.packed_linear(rows, columns, fmt, bias is not None, SIMD128, schedule)
    got = run(func, [x, *packed.parts.values(), bias], [1, x.shape[1]], (1, x.shape[1], rows))
    expected = OPS.packed_linear(x, list(packed.parts.values()), bias, name, columns, rows)
    assert error(got[:, :tokens], expected[:, :tokens]) < TOLERANCE, (rows, columns, tokens)
    check_special(
        torch.from_numpy(got)[:, tokens:], expected[:, tokens:], TOLERANCE, (name, rows, columns), x[:, tokens:]
    )


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "has_bias"), [(1, 3, True), (16, 64, False), (33, 101, True)])
def test_dense_linear(storage: torch.dtype, rows: int, columns: int, has_bias: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=rng).to(storage)
    bias = torch.randn(rows, generator=rng) if has_bias else None
    stored = {torch.bfloat16: "uint16"}.get(storage, str(storage).removeprefix("torch."))
    func = dense_linear.dense_linear(rows, columns, stored, has_bias, dense_linear.Schedule(4, 2, 2))
    for tokens in (1, 3):
        x = torch.randn(1, tokens, columns, generator=rng)
        got = run(func, [x, weight, bias], [1, tokens], (1, tokens, rows))
        assert error(got, OPS.dense_linear(x, weight, bias)) < TOLERANCE, tokens


@pytest.mark.parametrize("name", ["W4A16_G32", "W8A8_STATIC", "NVFP4", "dense"])
def test_routed_linear(name: str) -> None:
    """Some experts without a token, pairs without an expert, one token and several."""
    rng, each, own_rows = torch.Generator().manual_seed(1), 2, name in ("NVFP4", "dense")
    rows, columns, routing = 21, 70, Routing(4, each, own_rows)
    bias = torch.randn(4, rows, generator=rng) if own_rows else None
    if name == "dense":
        parts = [torch.randn(4, rows, columns, generator=rng).half()]
        func = experts.dense_routed_linear(routing, rows, columns, "float16", own_rows, 4)
    else:
        fmt = Format.parse(name)
        weights = [random_packed(fmt, rows, columns, rng) for _ in range(4)]
        if "input_scale" in weights[0].parts:
            weights = [w.with_input_scale(torch.tensor([0.02 + 0.01 * e])) for e, w in enumerate(weights)]
        parts = [torch.stack(tensors) for tensors in zip(*(w.parts.values() for w in weights), strict=True)]
        schedule = packed_linear.Schedule(1, 1, 2)
        func = experts.packed_routed_linear(routing, rows, columns, fmt, own_rows, SIMD128, schedule)
    for tokens in (1, 9):
        x = torch.randn(routing.inputs(tokens, columns), generator=rng)
        index = torch.tensor([[0, 3], [1, 0], [3, -1]])[torch.arange(tokens) % 3]  # the third expert is nobody's
        got = run(func, [x, index, *parts, bias], [tokens], (tokens, each, rows))
        if name == "dense":
            expected = OPS.routed_linear(x, index, parts[0], bias)
        else:
            expected = OPS.packed_routed_linear(x, index, parts, bias, name, columns, rows)
        assert error(got, expected) < TOLERANCE and not got[index.numpy() < 0].any(), tokens


def test_the_choice_of_experts() -> None:
    x = torch.randn(3, 13, generator=torch.Generator().manual_seed(4))
    x[1], x[2, 5] = x[1].round(), float("nan")  # of equal ones the first comes first
    assert np.array_equal(run(top_k(13, 4), [x], [3], (3, 4), "int64"), OPS.top_k(x, 4).numpy())


def test_every_float16_is_widened_exactly() -> None:
    """By the embedding, which widens rows of them; infinities and NaN are none that are stored."""
    table = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).reshape(4096, 16)
    table = torch.where(table.isfinite(), table, 0)
    func = embedding.embedding(4096, 16, "float16")
    got = run(func, [table, torch.arange(4096)[None]], [1, 4096], (1, 4096, 16))
    assert np.array_equal(got.view(np.int32), table.float().numpy()[None].view(np.int32))


@pytest.mark.parametrize(
    ("size", "channels", "rows", "numbers", "scheme"),
    [
        ((5, 7), 36, 40, PIXEL, "W8A8_STATIC"),
        ((5, 7), 36, 40, PIXEL, "W8A8_STATIC_B32x4@30"),
        ((9, 12), 20, 37, ((3, 3), (2, 2), (1, 1), (1, 1)), "W8A8_STATIC_B32x4@50"),
        ((9, 7), 8, 16, ((3, 3), (1, 1), (2, 2), (2, 2)), "W4A8_C_STATIC_B32x4@30"),
        ((9, 7), 3, 20, ((3, 3), (2, 2), (1, 1), (1, 1)), "W8A8"),
    ],
)
def test_convolutions(size: Any, channels: int, rows: int, numbers: Any, scheme: str) -> None:
    """Bytes in and floats out with a residual, or floats in and bytes out; channels that are no whole words."""
    geometry, fmt, rng = Geometry(size, channels, *numbers), Format.parse(scheme), torch.Generator().manual_seed(rows)
    is_rounded = "STATIC" in scheme
    parts, bias = list(random_packed(fmt, rows, geometry.columns, rng).parts.values()), torch.randn(rows, generator=rng)
    shape = (2, *geometry.outputs, rows)
    x = torch.randn(2, *size, channels, generator=rng)
    x = torch.randint(1, 256, x.shape, generator=rng).to(torch.uint8).view(torch.int8) if is_rounded else x
    residual, scale = (torch.randn(shape, generator=rng), None) if is_rounded else (None, torch.tensor([0.05]))
    following = None if is_rounded else Format.parse("W8A8_STATIC").activations
    ceiling = None if is_rounded else 6.0  # of outputs in the hundreds
    epilogue = Epilogue(is_rounded, True, following, ceiling)
    func = convolution(rows, geometry, fmt, True, is_rounded, epilogue, SIMD128)
    got = run(func, [x, *parts, bias, residual, scale], [2], shape, "float32" if is_rounded else "int8")
    more = (scheme, rows, pairs(geometry), True, None if is_rounded else "W8A8_STATIC", ceiling)
    expected = fused_convolution(x, parts, bias, residual, scale, *more).numpy()
    if is_rounded:
        assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()
    else:  # a last bit may fall on the other side of a boundary of rounding
        difference = np.abs(got.view(np.uint8).astype(int) - expected.view(np.uint8))
        assert difference.max() <= 1 and (difference > 0).mean() < 1e-2


@pytest.mark.parametrize("scheme", ["", "W8A8_STATIC"])
def test_depthwise_convolutions(scheme: str) -> None:
    geometry, rng = Geometry((7, 9), 21, (3, 3), (2, 2), (1, 1), (1, 1)), torch.Generator().manual_seed(0)
    fmt = Format.parse(scheme) if scheme else None
    parts = [torch.randn(21, 9)] if fmt is None else list(random_packed(fmt, 21, 9, rng).parts.values())
    x, bias = torch.randn(2, 7, 9, 21, generator=rng), torch.randn(21, generator=rng)
    func = depthwise(geometry, fmt, True, False, Epilogue(False, True), SIMD128)
    got = run(func, [x, *parts, bias], [2], (2, *geometry.outputs, 21))
    more = (scheme, 21, pairs(geometry), True, None, None, True)
    expected = fused_convolution(x, parts, bias, None, None, *more).numpy()
    assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(("centred", "has_bias"), [(False, False), (True, True)])
def test_norms(centred: bool, has_bias: bool) -> None:
    x, weight, bias = 3 * torch.randn(1, 5, 100) + 1, torch.randn(100), torch.randn(100) if has_bias else None
    got = run(norm.norm(100, 1e-5, centred, has_bias), [x, weight, bias], [1, 5], (1, 5, 100))
    if centred:
        expected = torch.nn.functional.layer_norm(x, (100,), weight, bias, 1e-5)
    else:
        expected = OPS.rms_norm(x, weight, 1e-5)
    assert np.abs(got - expected.numpy()).max() < TOLERANCE * max(1.0, float(expected.abs().max()))
    x = special_rows(100, torch.Generator().manual_seed(0))
    got = run(norm.norm(100, 1e-5, centred, has_bias), [x, weight, bias], [1, x.shape[1]], tuple(x.shape))
    check_special(torch.from_numpy(got), special_norm(x, weight, bias, centred), TOLERANCE, centred)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "sinks"),
    [(4, 2, 16, 0, 0.0, False), (3, 3, 10, 0, 0.0, True), (4, 1, 64, 5, 2.0, False)],
)
def test_cached_attention(heads: int, kv_heads: int, width: int, window: int, softcap: float, sinks: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    sink = torch.randn(heads, generator=rng) if sinks else None
    func = attention.cached_attention(heads, kv_heads, width, 0.3, window, softcap, sinks)
    for batch, past, new, room in [(1, 0, 1, 3), (2, 3, 11, 20), (1, 69, 1, 80)]:
        q = torch.randn(batch, heads, new, width, generator=rng)
        k, v = (torch.randn(batch, kv_heads, new, width, generator=rng) for _ in range(2))
        caches = [torch.randn(batch, kv_heads, room, width, generator=rng) for _ in range(2)]
        position = torch.arange(past, past + new)
        expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, window, softcap, sink)
        got = run(func, [q, k, v, *caches, position, sink], [batch, new, room], (batch, new, heads, width))
        assert error(got, expected) < TOLERANCE, (batch, past, new)
    for q, k, v in special_attention(heads, kv_heads, 3, width, rng):
        caches, position = [torch.zeros(1, kv_heads, 3, width) for _ in range(2)], torch.arange(3)
        expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, window, softcap, sink)
        got = run(func, [q, k, v, *caches, position, sink], [1, 3, 3], (1, 3, heads, width))
        check_special(torch.from_numpy(got), expected, TOLERANCE, (window, softcap))


@pytest.mark.parametrize("name", ["sin", "cos", "exp", "log", "tanh", "sigmoid", "erf", "rsqrt"])
def test_functions_need_no_library(name: str) -> None:
    most = 20000 if name in ("sin", "cos") else 50  # angles of the last of many positions
    x = torch.linspace(-most, most, 4096)
    x = x.abs() + 0.1 if name == "rsqrt" else x
    if name == "log":
        x[:8] = torch.tensor([0.0, -1.0, torch.inf, torch.nan, 1e-40, 1.0, 3.4e38, -torch.inf])
        x[8:2048] = torch.logspace(-37, 38, 2040)
    given = te.placeholder((4096,), name="x")
    computed = te.compute((4096,), lambda i: getattr(tvm.tirx, name)(given[i]), "y")
    mod = ScheduleElementwise()(tvm.IRModule({"main": te.create_prim_func([given, computed])}))
    got = run(mod["main"], [x], [], (4096,))
    expected = (torch.special.erf if name == "erf" else getattr(torch, name))(x.double())
    assert np.allclose(got, expected.numpy(), rtol=2e-6, atol=4e-7, equal_nan=True)


def test_a_memory_without_a_limit_is_seen() -> None:
    """Its flag is the byte that a page sets to 3 before workers share the memory."""
    begin, rest = b"\0asm...\x03env\x06memory\x02", b"\x05\x80\x80\x04..."
    assert wasm.memory_flag(begin + b"\x01" + rest) == len(begin)
    for wrong in (begin + b"\x00" + rest, begin + b"\x03" + rest, rest):
        with pytest.raises(VerificationError, match="no memory with a limit"):
            wasm.memory_flag(wrong)


def test_without_a_linker_the_target_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.codegen.targets.webgpu import Webgpu

    monkeypatch.setattr(wasm.shutil, "which", lambda _name: None)
    monkeypatch.setattr(wasm.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ToolchainError, match=r"no linker for WebAssembly.*lld.*wasm: false"):
        Webgpu().check_toolchain()
    Webgpu(wasm=False).check_toolchain()
