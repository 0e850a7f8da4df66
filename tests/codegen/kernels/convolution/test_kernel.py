"""Convolutions of integers against the eager reference: geometries, formats, and chains that stay in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Program, build, call, check_special, pairs, random_packed, relative_error, special_rows
from torch import Tensor, nn
from torch.export import Dim

from compressor.capture.capture import capture
from compressor.capture.export import reexport
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import Epilogue, convolution, reads_planes, supports
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.lowering.convolutions import fuse_convolutions, fused_convolution
from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import X86
from compressor.data.text import Samples
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

OPS = torch.ops.compressor
ISAS = [x86.AMX, x86.AVX512_VNNI, x86.AVX2]
TOLERANCE = 2e-6  # of the largest output: both sides apply scales in float32

# size, channels, out, kernel, stride, padding, dilation
PLAIN = ((8, 8), 16, 16, (3, 3), (1, 1), (1, 1), (1, 1))
CASES = {
    "plain": PLAIN,
    "rows of 32": ((32, 32), 16, 32, (3, 3), (1, 1), (1, 1), (1, 1)),
    "three channels": ((9, 7), 3, 20, (3, 3), (1, 1), (1, 1), (1, 1)),
    "every second": ((19, 33), 20, 37, (3, 3), (2, 2), (1, 1), (1, 1)),
    "dilated": ((40, 21), 64, 64, (5, 3), (1, 1), (2, 1), (1, 2)),
    "one by one": ((6, 5), 36, 16, (1, 1), (2, 2), (0, 0), (1, 1)),
    "wide padding": ((5, 4), 8, 16, (3, 3), (1, 1), (2, 3), (1, 1)),
    "bands": ((70, 48), 32, 48, (3, 3), (1, 1), (1, 1), (1, 1)),
    "parts of the rows": ((7, 7), 64, 384, (1, 1), (1, 1), (0, 0), (1, 1)),
}


def operands(case: Any, fmt: Format, n: int, seed: int = 0) -> tuple[Geometry, Tensor, list[Tensor], Tensor, Tensor]:
    """Geometry, images, the weight's parts, bias and residual."""
    size, channels, rows, *pairs = case
    geometry, rng = Geometry(size, channels, *pairs), torch.Generator().manual_seed(seed)
    packed = random_packed(fmt, rows, geometry.columns, rng)
    x = torch.randn(n, *size, channels, generator=rng)
    residual = torch.randn(n, *geometry.outputs, rows, generator=rng)
    return geometry, x, list(packed.parts.values()), torch.randn(rows, generator=rng), residual


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("scheme", ["W8A8_STATIC", "W8A8", "W4A8_C", "W4A6_C_STATIC"])
def test_formats(scheme: str, isa: Isa) -> None:
    check(PLAIN, Format.parse(scheme), isa)


@pytest.mark.parametrize("isa", [x86.AMX, x86.AVX2], ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_geometries(name: str, isa: Isa) -> None:
    for scheme in ("W8A8_STATIC", "W8A8"):
        check(CASES[name], Format.parse(scheme), isa)


def check(case: Any, fmt: Format, isa: Isa) -> None:
    """Check a kernel with all that an epilogue has, against patches, packed linear, sum and relu."""
    geometry, x, parts, bias, residual = operands(case, fmt, 3)
    assert not supports(fmt, geometry)
    kernel = build(convolution(len(bias), geometry, fmt, True, False, Epilogue(True, True), isa), isa)
    got = call(kernel, x, *parts, bias, residual, out=tuple(residual.shape))
    expected = fused_convolution(x, parts, bias, residual, None, fmt.name, len(bias), pairs(geometry), True, None)
    assert relative_error(got, expected) < TOLERANCE
    special = special_rows(x[0].numel(), torch.Generator().manual_seed(0)).reshape(-1, *x.shape[1:])
    for image in special:  # alone, as the largest of other images is no measure for it
        got = call(kernel, image[None], *parts, bias, residual[:1], out=tuple(residual[:1].shape))
        more = (fmt.name, len(bias), pairs(geometry), True, None)
        expected = fused_convolution(image[None], parts, bias, residual[:1], None, *more)
        if "STATIC" in fmt.name:  # NaN in a band of the image is NaN in all that is computed of it
            expected = torch.where(torch.isnan(got) & torch.isnan(expected).any(), torch.nan, expected)
        check_special(got.flatten()[None], expected.flatten()[None], TOLERANCE, (fmt.name, isa.name))


# size, channels, out: some of one block, of blocks that overlap, of several bands, of several parts of the rows
PIXELS = [((1, 1), 8, 16), ((5, 3), 20, 37), ((15, 14), 12, 24), ((13, 2), 4, 96), ((7, 7), 64, 344), ((4, 5), 18, 30)]


@pytest.mark.parametrize("isa", [x86.AVX512_VNNI, x86.AVX2], ids=lambda isa: isa.name)
def test_single_pixels_are_read_where_they_lie(isa: Isa) -> None:
    fmt = Format.parse("W8A8_STATIC")
    for size, channels, rows in PIXELS:
        case = (size, channels, rows, (1, 1), (1, 1), (0, 0), (1, 1))
        geometry, x, parts, bias, residual = operands(case, fmt, 2)
        codes = torch.round((x / parts[-1]).clamp(-127, 127))
        stored = (codes + 128).to(torch.uint8).view(torch.int8)
        kernel = build(convolution(rows, geometry, fmt, True, True, Epilogue(True, True), isa), isa)
        args = (fmt.name, rows, pairs(geometry), True, None)
        got = call(kernel, stored, *parts, bias, residual, out=tuple(residual.shape))
        assert relative_error(got, fused_convolution(stored, parts, bias, residual, None, *args)) < TOLERANCE
        stored[1, -1, -1, -1] = 0  # the byte of NaN
        broken = call(kernel, stored, *parts, bias, residual, out=tuple(residual.shape))
        assert torch.equal(broken[0], got[0]) and torch.isnan(broken[1, -1, -1]).all()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_planes_are_read_as_pixels_are(channels: int) -> None:
    fmt, isa = Format.parse("W8A8_STATIC"), x86.AVX512_VNNI
    case = ((11, 21), channels, 16, (3, 3), (2, 2), (1, 1), (1, 1))
    geometry, x, parts, bias, residual = operands(case, fmt, 2)
    assert reads_planes(fmt, geometry) and not reads_planes(Format.parse("W8A8"), geometry)
    assert not reads_planes(fmt, Geometry(*PLAIN[:2], *PLAIN[3:]))
    x[1, 3, 4, 0] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)  # NaN, of odd bits
    results = []
    for image, is_planar in ((x, False), (x.permute(0, 3, 1, 2).contiguous(), True)):
        kernel = build(convolution(16, geometry, fmt, True, False, Epilogue(), isa, is_planar), isa)
        results.append(call(kernel, image, *parts, bias, out=tuple(residual.shape)))
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())
    assert torch.isfinite(results[1][0]).all() and torch.isnan(results[1][1]).any()


def test_what_has_no_kernel() -> None:
    geometry = Geometry(*PLAIN[:2], *PLAIN[3:])
    for name in ("W8A16_C", "W8A8_ASYM_C", "W4A8_G32", "W8A8_S0.45", "BIP4A4_C", "W8A1_C", "FP8_E4M3_AFP8_E4M3_STATIC"):
        assert Format.parse(name).name in supports(Format.parse(name), geometry)
    wide = Geometry((8, 8), 33, (3, 3), (1, 1), (1, 1), (1, 1))  # too many words to put together one by one
    assert "one by one" in supports(Format.parse("W8A8_STATIC"), wide)
    assert not supports(Format.parse("W8A8"), wide)


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("channels", [16, 6])
def test_a_chain_in_bytes_is_the_same_to_the_bit(channels: int, isa: Isa) -> None:
    fmt = Format.parse("W8A8_STATIC")
    first = operands(((9, 10), 4, channels, (3, 3), (1, 1), (1, 1), (1, 1)), fmt, 2)
    second = operands(((9, 10), channels, 16, (3, 3), (2, 2), (1, 1), (1, 1)), fmt, 2, seed=1)
    next_scale = second[2][-1].fill_(float(first[4].abs().max()) / 50)

    def run(is_rounded: bool) -> tuple[Tensor, Tensor]:
        epilogue = Epilogue(False, True, Activations(granularity="tensor") if is_rounded else None)
        kernel = build(convolution(channels, first[0], fmt, True, False, epilogue, isa), isa)
        given = (first[1], *first[2], first[3], next_scale if is_rounded else None)
        middle = call(kernel, *given, out=(2, 9, 10, channels), kind=np.int8 if is_rounded else np.float32)
        kernel = build(convolution(16, second[0], fmt, True, is_rounded, Epilogue(), isa), isa)
        return middle, call(kernel, middle, *second[2], second[3], out=tuple(second[4].shape))

    (floats, plain), (stored, chained) = run(False), run(True)
    assert torch.equal(plain, chained)
    codes = torch.round((floats * (1 / next_scale)).clamp(-127, 127)) + 128
    assert torch.equal(stored.view(torch.uint8).float(), codes)
    expected = fused_convolution(
        first[1], first[2], first[3], None, next_scale, fmt.name, channels, pairs(first[0]), True, fmt.name
    )
    assert float((stored.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs().max()) <= 1
    first[1][1, 4, 5, 0] = torch.nan
    broken = run(True)[1]
    assert torch.equal(broken[0], chained[0]) and torch.isnan(broken[1]).all()


class Residual(nn.Module):
    """Two blocks with shortcuts; the second convolution of each has only the first in front."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 12, 12] -> [B, 5]."""
        x = self.stem(x).relu()
        for one, two in zip(self.inner[::2], self.inner[1::2], strict=True):
            x = (two(one(x).relu()) + x).relu()
        return self.head(x.mean((2, 3)))


@pytest.mark.of_x86
@pytest.mark.parametrize("scheme", ["W8A8_STATIC", "W8A8", "W8A16_C"])
def test_graphs(scheme: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    dense = capture(Residual().eval(), (x,), dynamic_shapes=({0: Dim("batch", min=1)},))
    graph = Rtn(scheme, targets=("Conv2d", "Linear")).run(
        dense, Context(samples=Samples(x, torch.empty(0), "", "by chance"))
    )
    nodes = reexport(graph).graph
    outcomes = fuse_convolutions(nodes)
    left = [node for node in nodes.nodes if node.target is OPS.patches.default]
    fused = [node for node in nodes.nodes if node.target is fused_convolution]
    assert (len(fused), len(left)) == ((0, 5) if scheme == "W8A16_C" else (5, 0))
    by_rule = {rule: [each.reason for each in outcomes if each.rule == rule] for rule in {o.rule for o in outcomes}}
    refused = "the kernel of convolutions does not serve it: W8A16 does not multiply integers"
    in_one = by_rule["convolution in one kernel"]
    assert all(reason.startswith(refused) for reason in in_one) if left else in_one == [""] * 5
    if fused:
        assert by_rule["addition to a convolution's outputs"] == [""] * 2
        assert by_rule["relu to a convolution's outputs"] == [""] * 5
        own = "" if scheme == "W8A8_STATIC" else "W8A8 has no calibrated scale of activations"
        shared = " is also read by others, in float32"
        assert [
            reason.partition(" ")[2] if shared in reason else reason
            for reason in by_rule["rounding in the convolution in front"]
        ] == [shared[1:], own, shared[1:], own]
        assert [bool(node.args[3]) for node in fused] == [False, False, True, False, True]
        assert all(node.args[8] for node in fused) and not any("relu" in str(node.target) for node in nodes.nodes)
        in_bytes = [node.args[9] is not None for node in fused]
        assert in_bytes == [False, scheme == "W8A8_STATIC", False, scheme == "W8A8_STATIC", False]
    library = compile_graph(graph, X86(), tune="off")
    families = {kernel["family"] for kernel in library.kernels}
    assert families == ({"patches"} if left else {"convolution"}) | {"packed_linear"}
    for batch in (1, 3):
        got, expected = Program(graph, library)(x[:batch]), graph(x[:batch])
        # Activations that lie between two codes may get the other one, and all that follows with them.
        assert relative_error(torch.from_numpy(got), expected) < (1e-5 if left else 5e-4)
