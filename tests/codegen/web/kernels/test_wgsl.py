"""Kernels in WGSL against the eager operators, through wgpu; naga, inside it, validates every text."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import OPS, check_special, random_packed, special_attention, special_norm, special_rows
from torch import Tensor
from web_formats import SERVED, TOLERANCE, bound, error, fed

from compressor.codegen.web.execute_webgpu import run_kernels
from compressor.codegen.web.kernel import Kernel, evaluate, specialised
from compressor.codegen.web.kernels import attention, dense_linear, embedding, norm, softmax, top_k, tree_attention
from compressor.codegen.web.kernels.activations import round_activations
from compressor.codegen.web.kernels.packed_linear import packed_linear, stored_parts
from compressor.codegen.web.kernels.products import POLYFILLS
from compressor.errors import UsageError
from compressor.formats.format import FORMATS, Format

GOLDEN = Path(__file__).parents[4] / "tests" / "golden" / "webgpu"


def run(
    kernels: Sequence[Kernel],
    operands: Sequence[Tensor | None],
    sizes: Sequence[int],
    out: Any,
    *,
    half: bool = False,
) -> np.ndarray:
    """Operands (None is left out) in the order of the bindings, the output last."""
    given = [bound(x) for x in operands if x is not None]
    records = {kernel.name: kernel.record() for kernel in kernels}
    (found,) = run_kernels(records, given, sizes, {len(given): ("float32", out)}, half=half)
    return found


def small(kernels: Sequence[Kernel], constants: dict[str, int]) -> list[Kernel]:
    """Return the same kernels with constants for which a software adapter compiles in a tenth of the time."""
    return [dataclasses.replace(k, constants={**k.constants, **constants}, limits={}) for k in kernels[1:]]


def operands(fmt: Format, x: Tensor, parts: dict[str, Tensor]) -> list[Tensor]:
    return [*fed(fmt, x, parts), *(parts[name] for name in stored_parts(fmt))]


@pytest.mark.parametrize("name", SERVED)
def test_packed_linear_of_every_format(name: str, require_adapter: None) -> None:
    pick, fmt = random.Random(zlib.crc32(name.encode())), Format.parse(name)
    rows, columns, tokens = pick.randint(17, 70), pick.randint(9, 200), pick.choice([3, 5])
    rng = torch.Generator().manual_seed(rows)
    packed, x = random_packed(fmt, rows, columns, rng), torch.randn(1, tokens, columns, generator=rng)
    x = torch.cat((x, special_rows(columns, rng)), dim=1)
    bias = torch.randn(rows, generator=rng) if pick.random() < 0.5 else None
    kernels = small(packed_linear(rows, columns, fmt, bias is not None), {"LANES": 2, "TILES": 2, "TOKENS": 2})
    got = run(kernels, [*operands(fmt, x, packed.parts), bias], [x.shape[1]], (1, x.shape[1], rows))
    expected = OPS.packed_linear(x, list(packed.parts.values()), bias, name, columns, rows)
    assert error(got[:, :tokens], expected[:, :tokens]) < TOLERANCE, (rows, columns, tokens)
    check_special(
        torch.from_numpy(got)[:, tokens:], expected[:, tokens:], TOLERANCE, (name, rows, columns), x[:, tokens:]
    )


@pytest.mark.parametrize("name", ["W4A16_G32", "W3A16_ASYM_G32", "NF4_G64", "LUT3", "W8A8", "W4A8_ASYM_G32"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (16, 64), (33, 100)])
def test_packed_linear_as_shipped(name: str, rows: int, columns: int, require_adapter: None) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    packed = random_packed(fmt, rows, columns, rng)
    for tokens in (1, 2, 3, 9):
        x = torch.randn(1, tokens, columns, generator=rng)
        kernels = packed_linear(rows, columns, fmt, False)
        got = run(kernels, operands(fmt, x, packed.parts), [tokens], (1, tokens, rows))
        expected = OPS.packed_linear(x, list(packed.parts.values()), None, name, columns, rows)
        assert error(got, expected) < TOLERANCE, tokens


@pytest.mark.parametrize("name", ["W4A16_G32", "W8A16", "NF4_G64", "LUT3", "MXFP4", "FP6_E3M2_G32", "dense"])
def test_products_in_float16(name: str, require_half: None) -> None:
    """Weights and activations are rounded to 11 bits; sums of four products, too."""
    rng, rows, columns, tokens = torch.Generator().manual_seed(0), 33, 100, 5
    x = torch.randn(1, tokens, columns, generator=rng)
    if name == "dense":
        weight = torch.randn(rows, columns, generator=rng)
        given, kernels = [x, weight], dense_linear.dense_linear(rows, columns, "float32", False)
        expected = OPS.dense_linear(x, weight, None)
    else:
        fmt = Format.parse(name)
        packed = random_packed(fmt, rows, columns, rng)
        given, kernels = operands(fmt, x, packed.parts), packed_linear(rows, columns, fmt, False)
        expected = OPS.packed_linear(x, list(packed.parts.values()), None, name, columns, rows)
    assert 1e-5 < error(run(kernels, given, [tokens], (1, tokens, rows), half=True), expected) < 2e-3


def test_without_the_integer_product_a_polyfill_serves(require_adapter: None) -> None:
    """A function of the text hides WGSL's own of the same name."""
    fmt, rng = Format.parse("W4A8_G32"), torch.Generator().manual_seed(0)
    packed, x = random_packed(fmt, 33, 100, rng), torch.randn(1, 3, 100, generator=rng)
    (text,) = POLYFILLS.values()
    kernels = [dataclasses.replace(k, text=k.text + text) for k in packed_linear(33, 100, fmt, False)]
    got = run(kernels, operands(fmt, x, packed.parts), [3], (1, 3, 33))
    assert error(got, OPS.packed_linear(x, list(packed.parts.values()), None, fmt.name, 100, 33)) < TOLERANCE
    wrong = [dataclasses.replace(k, text=k.text.replace("down);", "down) + 1;")) for k in kernels]
    assert error(run(wrong, operands(fmt, x, packed.parts), [3], (1, 3, 33)), torch.from_numpy(got)) > TOLERANCE


@pytest.mark.parametrize("name", [*sorted(set(FORMATS) - set(SERVED))[:3], "W4A16_G128_S0.45"])
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"format {Format.parse(name).name}: the target webgpu has no kernels for"):
        packed_linear(16, 128, Format.parse(name), False)


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "has_bias"), [(1, 3, True), (16, 64, False), (33, 101, True)])
def test_dense_linear(storage: torch.dtype, rows: int, columns: int, has_bias: bool, require_adapter: None) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=rng).to(storage)
    bias = torch.randn(rows, generator=rng) if has_bias else None
    kernels = dense_linear.dense_linear(rows, columns, str(storage).removeprefix("torch."), has_bias)
    for tokens in (1, 3, 9):
        x = torch.randn(1, tokens, columns, generator=rng)
        got = run(kernels, [x, weight, bias], [tokens], (1, tokens, rows))
        assert error(got, OPS.dense_linear(x, weight, bias)) < TOLERANCE, tokens


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 64])
def test_embedding(storage: torch.dtype, width: int, require_adapter: None) -> None:
    table = torch.randn(11, width).to(storage)
    ids = torch.tensor([[3, 0, 10], [7, 7, 1]])
    kernel = embedding.embedding(11, width, str(storage).removeprefix("torch."))
    got = run([kernel], [table, ids], [ids.numel()], (2, 3, width))
    assert np.array_equal(got, table[ids].float().numpy())


@pytest.mark.parametrize("name", ["W8A16", "W4A16_G64", "W3A16_ASYM_G32", "NF4_G64", "MXFP4", "NVFP4", "LUT3", "W8A8"])
def test_packed_embedding(name: str, require_adapter: None) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(len(name))
    for rows, width in ((33, 130), (16, 31)):
        packed = random_packed(fmt, rows, width, rng)
        ids = torch.randint(rows, (2, 3), generator=rng)
        kernel = embedding.packed_embedding(rows, width, fmt)
        got = run([kernel], [ids, *(packed.parts[part] for part in stored_parts(fmt))], [6], (2, 3, width))
        expected = OPS.packed_embedding(ids, list(packed.parts.values()), name, rows, width)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [1, 64, 100])
@pytest.mark.parametrize(("centred", "has_bias"), [(False, False), (True, False), (True, True)])
def test_norms(width: int, centred: bool, has_bias: bool, require_adapter: None) -> None:
    x, weight, bias = 3 * torch.randn(1, 5, width) + 1, torch.randn(width), torch.randn(width) if has_bias else None
    got = run([norm.norm(width, 1e-5, centred, has_bias)], [x, weight, bias], [5], (1, 5, width))
    if centred:
        expected = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-5)
    else:
        expected = OPS.rms_norm(x, weight, 1e-5)
    assert np.abs(got - expected.numpy()).max() < TOLERANCE * max(1.0, float(expected.abs().max()))
    x = special_rows(width, torch.Generator().manual_seed(0))
    got = run([norm.norm(width, 1e-5, centred, has_bias)], [x, weight, bias], [x.shape[1]], tuple(x.shape))
    check_special(torch.from_numpy(got), special_norm(x, weight, bias, centred), TOLERANCE, centred)


@pytest.mark.parametrize("width", [1, 7, 200])
def test_softmax(width: int, require_adapter: None) -> None:
    x = 3 * torch.randn(6, width, generator=torch.Generator().manual_seed(0))
    x[1] += 1e30
    x[2, -1], x[3, 0], x[4, 0], x[5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    got = run([softmax.softmax(width)], [x], [6], (6, width))
    np.testing.assert_allclose(got, x.softmax(-1).numpy(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "softcap", "sinks"),
    [(4, 2, 16, 0, 0.0, False), (3, 3, 10, 0, 0.0, True), (4, 1, 64, 5, 2.0, False), (2, 1, 320, 0, 0.0, False)],
)
def test_cached_attention(
    heads: int, kv_heads: int, width: int, window: int, softcap: float, sinks: bool, require_adapter: None
) -> None:
    """From empty and filled caches, one token and several, beyond a block of keys."""
    rng = torch.Generator().manual_seed(0)
    sink = torch.randn(heads, generator=rng) if sinks else None
    for batch, past, new, room in [(1, 0, 1, 3), (2, 3, 11, 20), (1, 69, 1, 80), (1, 60, 9, 80)]:
        q = torch.randn(batch, heads, new, width, generator=rng)
        k, v = (torch.randn(batch, kv_heads, new, width, generator=rng) for _ in range(2))
        caches = [torch.full((batch, kv_heads, room, width), float("nan")) for _ in range(2)]
        for cache in caches:
            cache[:, :, :past] = torch.randn(batch, kv_heads, past, width, generator=rng)
        position = torch.arange(past, past + new)
        expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, window, softcap, sink)
        for cache, added in zip(caches, (k, v), strict=True):
            cache[:, :, past : past + new] = added
        kernels = attention.cached_attention(heads, kv_heads, width, 0.3, window, softcap, sinks)
        got = run(kernels, [q, *caches, position, sink], [batch, new, room], (batch, new, heads, width))
        assert error(got, expected) < 2 * TOLERANCE, (batch, past, new)
    for q, k, v in special_attention(heads, kv_heads, 3, width, rng):
        expected = OPS.cached_attention(q, k, v, k, v, torch.arange(3), 0.3, window, softcap, sink)
        got = run(kernels, [q, k, v, torch.arange(3), sink], [1, 3, 3], (1, 3, heads, width))
        check_special(torch.from_numpy(got), expected, 2 * TOLERANCE, (window, softcap))


@pytest.mark.parametrize(
    ("window", "chunk", "slopes", "biases"), [(0, 0, True, 0), (0, 8, False, 0), (5, 8, False, 3), (0, 0, True, 40)]
)
def test_rules_of_cached_attention(window: int, chunk: int, slopes: bool, biases: int, require_adapter: None) -> None:
    """ALiBi, chunks, and biases of distances, from fewer of them than the cache is long to more."""
    rng = torch.Generator().manual_seed(0)
    slope = torch.rand(4, generator=rng) if slopes else None
    bias = torch.randn(biases, 4, generator=rng) if biases else None
    kernels = attention.cached_attention(4, 2, 12, 0.3, window, 0.0, False, chunk, slopes, biases)
    for past, new in [(0, 11), (30, 1), (19, 9)]:
        q = torch.randn(2, 4, new, 12, generator=rng)
        k, v = (torch.randn(2, 2, new, 12, generator=rng) for _ in range(2))
        caches = [torch.randn(2, 2, 40, 12, generator=rng) for _ in range(2)]
        position = torch.arange(past, past + new)
        expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, window, 0.0, None, chunk, slope, bias)
        for cache, added in zip(caches, (k, v), strict=True):
            cache[:, :, past : past + new] = added
        got = run(kernels, [q, *caches, position, slope, bias], [2, new, 40], (2, new, 4, 12))
        assert error(got, expected) < 2 * TOLERANCE, (past, new)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("own", [(True, False, True), (False, True, True), (False, True, False)])
def test_biases_and_windows_of_masked_attention(window: int, own: tuple[bool, ...], require_adapter: None) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 70, 12, generator=rng) for heads in (4, 2, 2))
    mask, cap = torch.ones(2, 70), 2.0 if window else 0.0
    mask[0, 5:], mask[1, :20] = 0, 0  # queries around which all is padding
    bias = torch.randn([n if each else 1 for n, each in zip((2, 4, 70), own, strict=True)] + [70], generator=rng)
    got = run(
        attention.masked_attention(4, 2, 12, 0.4, window, own, cap), [q, k, v, mask, bias], [2, 70, 70], (2, 70, 4, 12)
    )
    assert error(got, OPS.masked_attention(q, k, v, mask, 0.4, window, bias, cap)) < 2 * TOLERANCE


def test_a_cache_is_written_where_the_tokens_are(require_adapter: None) -> None:
    added, position = torch.randn(2, 3, 4, 5), torch.arange(6, 10)
    got = run([attention.write_cache(3, 5)], [added, position], [2, 4, 12], (2, 3, 12, 5))
    assert np.array_equal(got[:, :, 6:10], added.numpy())
    assert not got[:, :, :6].any() and not got[:, :, 10:].any()


def test_masked_attention(require_adapter: None) -> None:
    q, k, v = (torch.randn(2, heads, 70, 12) for heads in (4, 2, 2))
    mask = torch.ones(2, 70)
    mask[0, 5:], mask[1, :66] = 0, 0  # at the end, and more than the first block of keys
    got = run(attention.masked_attention(4, 2, 12, 0.4), [q, k, v, mask], [2, 70, 70], (2, 70, 4, 12))
    assert error(got, OPS.masked_attention(q, k, v, mask, 0.4)) < 2 * TOLERANCE
    for new in (1, 9):  # to a source of another length
        q = torch.randn(2, 4, new, 12)
        got = run(attention.masked_attention(4, 2, 12, 0.4), [q, k, v, mask], [2, new, 70], (2, new, 4, 12))
        assert error(got, OPS.masked_attention(q, k, v, mask, 0.4)) < 2 * TOLERANCE


@pytest.mark.parametrize("width", [3, 97, 2048, 20000])
def test_top_k(width: int, require_adapter: None) -> None:
    """Signs, equal numbers, more than there are."""
    x = torch.randn(width, generator=torch.Generator().manual_seed(width))
    x = (x * 8).round() / 8 if width == 2048 else x
    for count in (1, 2, 40, top_k.MOST):
        record = top_k.top_k(width).record()
        (found,) = run_kernels({"top_k": record}, [x.numpy()], [count], {1: ("uint32", (1 + 4 * top_k.MOST,))})
        kth = float(x.sort(descending=True).values[min(count, width) - 1])
        expected = {i: float(x[i]) for i in range(width) if float(x[i]) >= kth}
        assert found[0] == len(expected)
        stored = min(len(expected), 2 * top_k.MOST)
        got = dict(zip(found[1::2][:stored].tolist(), found[2::2][:stored].view(np.float32).tolist(), strict=True))
        assert got.items() <= expected.items() and len(got) == stored


def test_argmax_takes_the_first_of_the_largest(require_adapter: None) -> None:
    x = torch.randn(4, 1003)
    x[0, [17, 900]], x[1, 1002], x[2] = 9.0, 9.0, -1.0
    record = top_k.argmax(1003).record()
    (found,) = run_kernels({"argmax": record}, [x.numpy()], [4], {1: ("uint32", (4,))})
    assert found.tolist() == [17, 1002, 0, int(x[3].argmax())]


@pytest.mark.parametrize(
    "kernel",
    [
        *packed_linear(33, 72, Format.parse("W4A16_G32"), True)[:1],
        *packed_linear(16, 64, Format.parse("W3A16_ASYM_G32"), False)[:1],
        *packed_linear(16, 64, Format.parse("NVFP4"), False)[:1],
        *packed_linear(16, 64, Format.parse("W8A8"), False)[:1],
        *packed_linear(16, 64, Format.parse("W4A8_ASYM_G32"), False)[:1],
        round_activations(72, Format.parse("W8A8")),
        round_activations(72, Format.parse("NVFP4_ANVFP4")),
        *dense_linear.dense_linear(8, 12, "float16", True)[:1],
        *attention.cached_attention(4, 2, 16, 0.25, 5, 2.0, True)[:1],
        tree_attention.tree_attention(4, 2, 16, 0.25, 5, 2.0, True),
        norm.norm(64, 1e-5, True, True),
        embedding.embedding(11, 6, "bfloat16"),
        embedding.packed_embedding(11, 6, Format.parse("W3A16_ASYM_G32")),
        top_k.argmax(97),
        top_k.top_k(97),
    ],
    ids=lambda kernel: kernel.name,
)
def test_the_text_is_the_golden_one(kernel: Kernel, request: pytest.FixtureRequest) -> None:
    """A change of a kernel's text is seen in review; ``pytest --update-golden`` writes what is expected."""
    file = GOLDEN / f"{kernel.name}.wgsl"
    text = specialised(kernel.source, kernel.constants)
    if request.config.getoption("--update-golden"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_expressions() -> None:
    names = {"S": 7, "T": 3}
    cases = [
        (5, 5),
        ("S", 7),
        (["+", "S", 1], 8),
        (["-", "S", "T"], 4),
        (["*", "S", ["+", "T", 1]], 28),
        (["//", "S", "T"], 2),
    ]
    cases += [(["%", "S", "T"], 1), (["min", "S", "T"], 3), (["max", "S", "T"], 7), (["ceil", "S", "T"], 3)]
    for expression, value in cases:
        assert evaluate(expression, names) == value
