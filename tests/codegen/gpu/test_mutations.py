"""Faults that one may make in a kernel, each of which a test sees: barriers left out, masks and parts off by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lockstep
import pytest
import torch
from kernel_cases import OPS, SPLIT, TOLERANCE, relative_error
from lockstep import build, run

from compressor.codegen.gpu import rows
from compressor.codegen.gpu.attention import kernels
from compressor.codegen.gpu.attention.one_token import OneToken
from compressor.codegen.gpu.attention.tiles import Tiles


def check_norm() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((2, 1, 300), (300,), (300,)))
    got = run(build(rows.norm(300, 1e-5, True, True)), x, weight, bias, out=x.shape)
    assert relative_error(got, torch.nn.functional.layer_norm(x, (300,), weight, bias, 1e-5)) < TOLERANCE


def check_attention(new: int) -> None:
    heads, kv_heads, width, past, capacity, window = 4, 2, 20, 290, 400, 150
    kernel, rng = build(kernels.cached_attention(heads, kv_heads, width, 0.3, window, 0.0, True)), torch.Generator()
    q, k, v = (torch.randn(1, n, new, width, generator=rng) * 2 for n in (heads, kv_heads, kv_heads))
    caches = [torch.randn(1, kv_heads, capacity, width, generator=rng) for _ in range(2)]
    sinks, position = torch.randn(heads, generator=rng), torch.arange(past, past + new)
    got = run(kernel, q, k, v, *caches, position, sinks, out=(1, new, heads, width))
    expected = OPS.cached_attention(q, k, v, *caches, position, 0.3, window, 0.0, sinks)
    assert relative_error(got, expected) < (TOLERANCE if new == 1 else SPLIT)


def check_one_token() -> None:
    check_attention(1)


def check_tiles() -> None:
    check_attention(3)


CHECKS = (check_norm, check_one_token, check_tiles)


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_fault_each_check_passes(check: Callable[[], None]) -> None:
    check()


def fails(check: Callable[[], None]) -> None:
    with pytest.raises((AssertionError, Exception)) as error:
        check()
    assert isinstance(error.value, AssertionError) or "lockstep" in str(error.value), error.value


BARRIERS = [(check_norm, range(2)), (check_one_token, range(8)), (check_tiles, range(8, 11))]  # in a kernel's text


@pytest.mark.parametrize(("check", "which"), [(check, i) for check, places in BARRIERS for i in places])
def test_each_barrier_is_needed(check: Callable[[], None], which: int) -> None:
    lockstep.start()
    with lockstep.changed("__syncthreads();", "", which):
        fails(check)


def test_a_barrier_of_a_warp_is_needed() -> None:
    lockstep.start()
    with lockstep.changed("{ __syncwarp(); }", "{}"), pytest.raises(Exception, match="a race in shared memory"):
        check_one_token()


@pytest.mark.parametrize(
    ("check", "old", "new"),
    [
        (check_norm, "step = lanes / 2; step > 0", "step = lanes / 2; step > 1"),
        (check_norm, "< 300)", "< 299)"),
        (check_one_token, "step = lanes / 2; step > 0", "step = lanes / 4; step > 0"),
        (check_tiles, "step = lanes / 2; step > 0", "step = lanes / 4; step > 0"),
    ],
)
def test_faults_in_the_text(check: Callable[[], None], old: str, new: str) -> None:
    lockstep.start()
    with lockstep.changed(old, new):
        fails(check)


def one_more(function: Callable[..., Any], by: int = 1) -> Callable[..., Any]:
    return lambda *given: function(*given) + by


def shifted(function: Callable[..., Any], which: int) -> Callable[..., Any]:
    """Move one of the two bounds that a function gives by one."""

    def bounds(*given: Any) -> Any:
        found = list(function(*given))
        found[which] = found[which] + 1 - 2 * which
        return tuple(found)

    return bounds


@pytest.mark.parametrize(
    ("check", "place", "name", "wrong"),
    [
        (check_one_token, OneToken, "parts", lambda f: one_more(f, -1)),
        (check_one_token, kernels, "before", lambda f: shifted(f, 0)),
        (check_one_token, kernels, "before", lambda f: shifted(f, 1)),
        (check_one_token, kernels, "_first_seen", one_more),
        (check_tiles, kernels, "_first_seen", one_more),
        (check_tiles, kernels, "limits_of_tokens", lambda f: shifted(f, 1)),
        (check_tiles, kernels, "causal", lambda _f: lambda *_: True),
        (check_tiles, Tiles, "tokens", lambda f: shifted(f, 1)),
    ],
)
def test_faults_in_masks_and_in_the_parts_of_the_context(
    check: Callable[[], None], place: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.start()
    monkeypatch.setattr(place, name, wrong(getattr(place, name)))
    fails(check)
