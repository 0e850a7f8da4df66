"""Depthwise convolutions against the eager reference: geometries, formats, bounds, and chains that stay in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import Program, build, call, check_special, pairs, random_packed, relative_error, special_rows
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import relu6

from compressor.capture.capture import capture
from compressor.capture.export import reexport
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.convolution.depthwise import depthwise, supports
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.convolution.kernel import Epilogue
from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.lowering.convolutions import fuse_convolutions, fused_convolution
from compressor.codegen.targets import x86
from compressor.codegen.targets.x86 import X86
from compressor.data.text import Samples
from compressor.formats.activations import Activations
from compressor.formats.format import Format
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context

TOLERANCE = 2e-6  # of the largest output: both sides apply scales in float32

# size, channels, kernel, stride, padding, dilation
PLAIN = ((9, 8), 48, (3, 3), (1, 1), (1, 1), (1, 1))
CASES = {
    "ragged": ((7, 9), 21, (3, 3), (2, 2), (1, 1), (1, 1)),
    "few channels": ((5, 6), 3, (3, 3), (1, 1), (1, 1), (1, 1)),
    "dilated, uneven": ((12, 11), 32, (5, 3), (1, 2), (4, 0), (2, 1)),
    "a row": ((1, 30), 16, (1, 7), (1, 1), (0, 3), (1, 1)),
    "bands": ((60, 50), 64, (3, 3), (1, 1), (1, 1), (1, 1)),
}
FORMATS = ["", "W8A16_C", "W8A8", "W8A8_STATIC", "W4A16_G32", "FP8_E4M3_C", "W4A6_C_STATIC"]


def operands(case: Any, name: str, n: int) -> tuple[Geometry, Tensor, list[Tensor], Tensor, Tensor]:
    """Geometry, images, the weight or its parts, bias and residual."""
    size, channels, *given = case
    geometry, rng = Geometry(size, channels, *given), torch.Generator().manual_seed(0)
    taps = geometry.kernel[0] * geometry.kernel[1]
    parts = [torch.randn(channels, taps, generator=rng)]
    if name:
        parts = list(random_packed(Format.parse(name), channels, taps, rng).parts.values())
    x = torch.randn(n, *size, channels, generator=rng)
    residual = torch.randn(n, *geometry.outputs, channels, generator=rng)
    return geometry, x, parts, torch.randn(channels, generator=rng), residual


def check(case: Any, name: str, isa: Isa) -> None:
    """Check a kernel with all that an epilogue has, on ordinary images and on some with one special float."""
    geometry, x, parts, bias, residual = operands(case, name, 2)
    fmt, ceiling = Format.parse(name) if name else None, 100.0 if name else 6.0  # of outputs in the hundreds
    kernel = build(depthwise(geometry, fmt, True, False, Epilogue(True, True, None, ceiling), isa), isa)
    special = special_rows(x[0].numel(), torch.Generator().manual_seed(0)).reshape(-1, *x.shape[1:])
    for image in [x, *special.unsqueeze(1)]:
        more = residual[: len(image)]
        got = call(kernel, image, *parts, bias, more, out=tuple(more.shape))
        given = (name, len(bias), pairs(geometry), True, None, ceiling, True)
        expected = fused_convolution(image, parts, bias, more, None, *given)
        if image is x:
            assert relative_error(got, expected) < TOLERANCE
        check_special(got.flatten()[None], expected.flatten()[None], TOLERANCE, (name, isa.name), image.flatten()[None])


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    check(PLAIN, name, x86.AVX512_VNNI)


@pytest.mark.parametrize("case", CASES)
def test_geometries(case: str) -> None:
    for name in ("", "W8A8_STATIC", "W8A8") if case == "ragged" else ("W8A8_STATIC",):
        check(CASES[case], name, x86.AVX2)


def test_a_chain_in_bytes_is_the_same_to_the_bit() -> None:
    fmt, isa = Format.parse("W8A8_STATIC"), x86.AVX512_VNNI
    for case in (PLAIN, CASES["ragged"]):
        geometry, x, parts, bias, residual = operands(case, fmt.name, 2)
        scale, act = parts[-1], Activations(granularity="tensor")
        codes = torch.round((x * (1 / scale)).clamp(-127, 127))
        stored = (codes + 128).to(torch.uint8).view(torch.int8)
        shape, results = tuple(residual.shape), []
        for image, is_rounded in ((x, False), (stored, True)):
            kernel = build(depthwise(geometry, fmt, True, is_rounded, Epilogue(False, True, act), isa), isa)
            results.append(call(kernel, image, *parts, bias, scale, out=shape, kind=np.int8))
        assert torch.equal(*results)
        args = (fmt.name, len(bias), pairs(geometry), True, fmt.name, None, True)
        expected = fused_convolution(stored, parts, bias, None, scale, *args)
        assert float((results[1].view(torch.uint8).int() - expected.view(torch.uint8).int()).abs().max()) <= 1
        kernel = build(depthwise(geometry, fmt, True, True, Epilogue(), isa), isa)
        stored[1, 2, 3, 1] = -128 ^ -128  # the byte of NaN
        got = call(kernel, stored, *parts, bias, out=shape)
        assert torch.isfinite(got[0]).all() and torch.isnan(got[1, ..., 1]).any()
        assert torch.isfinite(got[1, ..., 16:]).all()  # of other tiles of channels


class Inverted(nn.Module):
    """A block as MobileNetV2 has them, and a depthwise convolution with a bias whose output is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.expand = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 20, 1)
        self.filter, self.project = nn.Conv2d(20, 20, 3, padding=1, groups=20), nn.Conv2d(20, 8, 1)
        self.last, self.head = nn.Conv2d(8, 8, 3, stride=2, groups=8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 12, 12] -> [B, 5]."""
        x = relu6(self.stem(x))
        x = x + self.project(relu6(self.filter(relu6(self.expand(x)))))
        y = self.last(x)
        return self.head((y * y.sigmoid()).mean((2, 3)))


class Rows(nn.Module):
    """Convolutions of rows, the second depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each = nn.Conv1d(4, 18, 3, padding=1), nn.Conv1d(18, 18, 5, 2, groups=18)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 4, 20] -> [B, 18, 8]."""
        return self.each(self.first(x).relu())


@pytest.mark.of_x86
def test_rows() -> None:
    torch.manual_seed(0)
    module, x = Rows().eval().requires_grad_(False), torch.randn(3, 4, 20)
    graph = capture(module, (x,), dynamic_shapes=({0: Dim("batch", min=1)},))
    graph = Rtn("W8A16_C", targets="Conv1d").run(graph, Context())
    library = compile_graph(graph, X86(), tune="off")
    assert [kernel["family"] for kernel in library.kernels] == ["patches", "packed_linear", "depthwise"]
    assert relative_error(torch.from_numpy(Program(graph, library)(x)), graph(x)) < 1e-5
    assert relative_error(graph(x), module(x)) < 0.02


@pytest.mark.of_x86
@pytest.mark.parametrize("scheme", ["W8A8_STATIC", "W8A8", "W8A16_C", ""])
def test_graphs(scheme: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    graph = capture(Inverted().eval(), (x,), dynamic_shapes=({0: Dim("batch", min=1)},))
    if scheme:
        samples = Samples(x, torch.empty(0), "", "by chance")
        graph = Rtn(scheme, targets=("Conv2d", "Linear")).run(graph, Context(samples=samples))
    nodes = reexport(graph).graph
    fuse_convolutions(nodes)
    fused = [node.args for node in nodes.nodes if node.target is fused_convolution]
    packed = [args for args in fused if not args[11]]
    assert len([args for args in fused if args[11]]) == 2
    assert len(packed) == {"W8A8_STATIC": 3, "W8A8": 1}.get(scheme, 0)
    if scheme == "W8A8_STATIC":  # stem, expand, filter, project, last
        assert [args[10] for args in fused] == [6.0, 6.0, 6.0, None, None]
        assert [args[9] is not None for args in fused] == [False, True, True, True, False]
        assert [args[3] is not None for args in fused] == [False, False, False, True, False]
    library = compile_graph(graph, X86(), tune="off")
    assert [kernel["family"] for kernel in library.kernels].count("depthwise") == 2
    for batch in (1, 3):
        got, expected = Program(graph, library)(x[:batch]), graph(x[:batch])
        # Activations that lie between two codes may get the other one, and all that follows with them.
        assert relative_error(torch.from_numpy(got), expected) < (5e-4 if "A8" in scheme else 1e-5)


def test_what_has_no_kernel() -> None:
    for name in ("W8A8_ASYM_C", "LUT4", "W4A8_G8", "W8A16_S0.45", "W8A1_C", "FP8_E4M3_AFP8_E4M3", "BIP4A4_C"):
        assert Format.parse(name).name in supports(Format.parse(name), 9)
    assert "not be exact" in supports(Format.parse("W8A8"), 33 * 33)
    assert not supports(Format.parse("W4A16_G32"), 25) and not supports(None, 33 * 33)
