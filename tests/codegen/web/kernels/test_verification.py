"""Kernels in WGSL that verify drafted tokens: the bits of single tokens, and what the eager operators say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import OPS, random_packed
from token_trees import path_to, random_trees
from torch import Tensor
from web_formats import TOLERANCE, bound, error, fed

from compressor.codegen.isa import INDEPENDENT_ROWS
from compressor.codegen.web.execute_webgpu import Pipelines, buffer_of, device, empty_buffer, read_buffer
from compressor.codegen.web.kernel import Kernel
from compressor.codegen.web.kernels import attention, dense_linear, norm, tree_attention
from compressor.codegen.web.kernels.packed_linear import packed_linear
from compressor.formats.format import Format

COLUMNS, WIDTH = 136, 24


def compiled(*alternatives: Kernel) -> Callable[[Sequence[Tensor], Sequence[int], Sequence[int]], np.ndarray]:
    """Return what runs the first of these kernels that serves, compiled once: operands, sizes, shape -> output."""
    pipelines = Pipelines({kernel.name: kernel.record() for kernel in alternatives})

    def run(operands: Sequence[Tensor], sizes: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        out = empty_buffer(4 * int(np.prod(shape)))
        encoder = device().create_command_encoder()
        buffers = [*(buffer_of(bound(x)) for x in operands), out]
        pipelines.dispatch(encoder, list(pipelines.records), buffers, sizes)
        device().queue.submit([encoder.finish()])
        return read_buffer(out, "float32", shape)

    return run


def check_rows(kernels: tuple[Kernel, ...], given: Sequence[Tensor], fixed: Sequence[Tensor], width: int) -> None:
    """Compare rows alone with the same rows among others, bit for bit."""
    run = compiled(*kernels)

    def rows(begin: int, end: int) -> np.ndarray:
        operands = [*(x[begin:end] for x in given), *fixed]
        return run(operands, [end - begin], (end - begin, width)).view(np.uint32)

    alone = np.concatenate([rows(i, i + 1) for i in range(INDEPENDENT_ROWS)])
    assert not np.isnan(alone.view(np.float32)).any() and len(np.unique(alone)) > width
    for count in (2, 3, 7, INDEPENDENT_ROWS):
        first = INDEPENDENT_ROWS - count
        assert np.array_equal(rows(first, INDEPENDENT_ROWS), alone[first:]), count


@pytest.mark.parametrize("name", ["W4A16_G32", "W4A8_ASYM_G32", "NVFP4"])
def test_rows_of_packed_linears(name: str, require_adapter: None) -> None:
    rng, fmt = torch.Generator().manual_seed(1), Format.parse(name)
    packed = random_packed(fmt, WIDTH, COLUMNS, rng)
    parts = {key: part for key, part in packed.parts.items() if key != "input_scale"}
    given = [
        x.reshape(INDEPENDENT_ROWS, -1)
        for x in fed(fmt, torch.randn(1, INDEPENDENT_ROWS, COLUMNS, generator=rng), packed.parts)
    ]
    kernels = packed_linear(WIDTH, COLUMNS, fmt, True, verifies=True)
    check_rows(kernels, given, [*parts.values(), torch.randn(WIDTH, generator=rng)], WIDTH)


def test_rows_of_dense_linears_and_norms(require_adapter: None) -> None:
    rng = torch.Generator().manual_seed(2)
    x, bias = torch.randn(INDEPENDENT_ROWS, COLUMNS, generator=rng), torch.randn(21, generator=rng)
    kernels = dense_linear.dense_linear(21, COLUMNS, "float32", True, verifies=True)
    check_rows(kernels, [x], [torch.randn(21, COLUMNS, generator=rng), bias], 21)
    check_rows((norm.norm(COLUMNS, 1e-5, False, False),), [x], [torch.randn(COLUMNS, generator=rng)], COLUMNS)


SETTINGS: list[tuple[Any, ...]] = [  # heads, kv_heads, width, scale, window, softcap, sinks, chunk, slopes, biases
    (6, 2, 12, 0.3, 9, 2.0, False, 0, False, 0),
    (2, 2, 16, 0.3, 0, 0.0, True, 8, True, 40),  # as many buffers as a kernel may bind
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_of_trees(settings: tuple[Any, ...], require_adapter: None) -> None:
    """As the eager operator, and with the bits of a token alone: ragged trees behind ragged sequences."""
    heads, kv_heads, width, scale, window, softcap, has_sinks, chunk, has_slopes, biases = settings
    rng, capacity = torch.Generator().manual_seed(3), 160
    trees = random_trees(random.Random(width), (5, 0, 130), (4, 3, 6))
    position, parent, slot, row = trees
    tokens = len(position)
    q = torch.randn(1, heads, tokens, width, generator=rng) * 4
    k, v = (torch.randn(1, kv_heads, tokens, width, generator=rng) for _ in range(2))
    caches = [torch.randn(3, kv_heads, capacity, width, generator=rng) for _ in range(2)]
    sink = torch.randn(heads, generator=rng) if has_sinks else None
    slopes = torch.rand(heads, generator=rng) if has_slopes else None
    bias = torch.randn(biases, heads, generator=rng) if biases else None
    rest = (scale, window, softcap, sink, chunk, slopes, bias)
    expected = OPS.tree_attention(q, k, v, *caches, *trees, *rest)
    tree = torch.from_numpy(compiled(tree_attention.join_tree())(trees, [tokens], (tokens, 4)).view(np.int32).copy())
    assert torch.equal(tree, torch.stack(trees, 1).int())
    write = compiled(tree_attention.write_rows(kv_heads, width))
    written = torch.from_numpy(write([k, tree], [tokens, capacity], (3, kv_heads, capacity, width)))
    assert torch.equal(written[slot, :, row], k[0].transpose(0, 1)) and int((written != 0).sum()) == k.numel()
    for cache, new in zip(caches, (k, v), strict=True):
        cache[slot, :, row] = new[0].transpose(0, 1)
    more = [x for x in (sink, slopes, bias) if x is not None]
    got = compiled(tree_attention.tree_attention(*settings))(
        [q, *caches, tree, *more], [tokens, capacity], (1, tokens, heads, width)
    )
    assert error(got, expected) < 2 * TOLERANCE
    alone = compiled(*attention.cached_attention(*settings)[:1])
    for t in range(tokens):
        path = path_to(parent.tolist(), t)
        base, rows = int(position[path[0]]), row[path].tolist()
        held = [cache[slot[t] : slot[t] + 1].clone() for cache in caches]
        for cache, whole in zip(held, caches, strict=True):
            cache[:, :, base : base + len(rows)] = whole[slot[t] : slot[t] + 1, :, rows]
        given = [q[:, :, t : t + 1], *held, position[t : t + 1], *more]
        one = alone(given, [1, 1, capacity], (1, 1, heads, width))
        assert np.array_equal(one[0, 0].view(np.uint32), got[0, t].view(np.uint32)), t
