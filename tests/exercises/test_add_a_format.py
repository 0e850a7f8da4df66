"""A format with one more part takes six files: name, tensor, meaning, rounding, kernel and test."""

from __future__ import annotations

from typing import Any

EXTRA = '''@dataclass(frozen=True)
class RowScales:
    """One float32 a row, by which everything that the codes of the row stand for is multiplied."""

    label: ClassVar[str] = "row scales"
    suffix: ClassVar[str] = "_R"
    text: ClassVar[str] = "float32, one for each row"
    pattern: ClassVar[str] = r"_(R)"

    @classmethod
    def read(cls, text: str) -> RowScales | None:
        """Return the extra that the group of ``pattern`` names."""
        return cls()

    def conflict(self, fmt: Any) -> str:
        """Stand beside anything."""
        return ""


Extra: TypeAlias = (
    RowScales | Outliers | OutlierFeatures | ColumnBlocks | KeptOfGroup | SingleZeros | SkippedInputs
    | TwoPlanes | UpperPlane
)
'''

PART = """def _row_scales(fmt: Layout, rows: int, _columns: int) -> Stored | None:
    return ("float32", (_tiles(rows) * TILE_ROWS,)) if fmt.extra(RowScales) else None


PART_TABLE = (
    Part("row_scales", _row_scales, timing_fill=1),
"""

ROUNDING = """    if fmt.extra(RowScales):
        largest_of_row = weight.float().abs().amax(dim=1).clamp(min=1e-30)
        plain = replace(fmt, extras=tuple(extra for extra in fmt.extras if not isinstance(extra, RowScales)))
        rest = rtn_quantize(weight.float() / largest_of_row[:, None], plain, choose)
        filled = torch.cat([largest_of_row, largest_of_row.new_zeros(-len(weight) % TILE_ROWS)])
        return rest.with_parts(fmt, row_scales=filled)
    if fmt.outlier_percent:
"""

MULTIPLICATION = """        if fmt.extra(RowScales) is not None:
            at_rows = T.meta_var(T.ramp(tile * TILE_ROWS, 1, TILE_ROWS))
            out[t, n, every] = out[t, n, every] * weight.parts["row_scales"][at_rows]
"""

TEST = '''"""Formats with a scale of each row beside those of groups: their name, bytes, values and kernel."""

import pytest
import torch
from kernel_cases import OPS, TOLERANCE, build, relative_error, run

from compressor.codegen.kernels.convolution.kernel import supports as convolution_supports
from compressor.codegen.kernels.convolution.feeds import Geometry
from compressor.codegen.kernels.linear import packed
from compressor.codegen.targets import x86
from compressor.codegen.web.kernels.packed_linear import supports as web_supports
from compressor.formats.format import Format
from compressor.formats.packing import dequantize
from compressor.numerics.nearest import rtn_quantize


def test_rows_of_any_size_keep_their_precision() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    size = torch.logspace(-12, 12, 40)[:, None]
    plain = rtn_quantize(weight / weight.abs().amax(dim=1, keepdim=True), Format.parse("W4A16_G32"))
    scaled = rtn_quantize(weight * size, Format.parse("W4A16_G32_R"))
    assert scaled.format.name == "W4A16_G32_R" and scaled.nbytes == scaled.format.packed_bytes(40, 96)
    expected = dequantize(plain) * (weight * size).abs().amax(dim=1, keepdim=True)
    assert torch.allclose(dequantize(scaled), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["W4A16_G32_R", "W4A8_G32_R", "NF4_G64_R"])
@pytest.mark.parametrize("isa", [x86.AVX512_VNNI, x86.AVX2], ids=lambda isa: isa.name)
def test_the_kernel_computes_what_is_stored(name: str, isa: x86.Isa) -> None:
    rng, fmt = torch.Generator().manual_seed(1), Format.parse(name)
    weight = rtn_quantize(torch.randn(40, 96, generator=rng), fmt)
    kernel = build(packed.packed_linear(40, 96, fmt, False, isa, packed.Schedule(1, 1, 2)), isa)
    for tokens in (1, 3):
        x, parts = torch.randn(1, tokens, 96, generator=rng), list(weight.parts.values())
        expected = OPS.packed_linear(x, parts, None, name, 96, 40)
        assert relative_error(run(kernel, x, *parts, out=(1, tokens, 40)), expected) < TOLERANCE


def test_kernels_that_do_not_read_it_say_so() -> None:
    assert "_R" in web_supports(Format.parse("W4A16_G32_R"))
    geometry = Geometry((8, 8), 4, (3, 3), (1, 1), (1, 1), (1, 1))
    assert "W8A8_R" in convolution_supports(Format.parse("W8A8_R"), geometry)
'''


def test_a_format_with_one_more_part_takes_six_files(scratch: Any) -> None:
    extras, parts = "compressor/formats/extras.py", "compressor/formats/parts.py"
    packing, nearest = "compressor/formats/packing.py", "compressor/numerics/nearest.py"
    kernel, test = "compressor/codegen/kernels/linear/packed.py", "tests/formats/test_row_scales.py"
    before = (
        "Extra: TypeAlias = (\n    Outliers | OutlierFeatures | ColumnBlocks | KeptOfGroup | SingleZeros | "
        "SkippedInputs | TwoPlanes | UpperPlane\n)\n"
    )
    scratch.edit(extras, before, EXTRA)
    scratch.edit(parts, "PART_TABLE = (\n", PART)
    scratch.edit(parts, "from compressor.formats.extras import", "from compressor.formats.extras import RowScales,")
    spread = "unscaled(codes, zero, fmt).mul_(scale)\n"
    rescale = "values if row_scales is None else values.mul_(row_scales[begin:end, None])\n"
    values = f'        values = {spread}        row_scales = packed.parts.get("row_scales")\n'
    yields = "        yield slice(begin, end), "
    scratch.edit(packing, yields + spread, values + yields + rescale)
    scratch.edit(nearest, "    if fmt.outlier_percent:\n", ROUNDING)
    scratch.edit(nearest, "import torch\n", "from dataclasses import replace\n\nimport torch\n")
    imported = "from compressor.formats.format import Format\n"
    added = "from compressor.formats.extras import RowScales\n"
    scratch.edit(nearest, imported, added + imported + "from compressor.formats.parts import TILE_ROWS\n")
    scratch.edit(
        kernel,
        "_EXTRAS = (Outliers, OutlierFeatures, ColumnBlocks",
        "_EXTRAS = (Outliers, OutlierFeatures, RowScales, ColumnBlocks",
    )
    scratch.edit(kernel, "Outliers, SingleZeros, Skipped", "Outliers, RowScales, SingleZeros, Skipped")
    place = "        place = T.meta_var(T.ramp(tile * TILE_ROWS, 1, TILE_ROWS))\n"
    scratch.edit(kernel, place, place + MULTIPLICATION)
    scratch.write(test, TEST)
    assert "row scales" in scratch.compress("show", "W4A16_G32_R")
    scratch.python("-m", "pytest", "-q", test, "tests/formats/test_packing.py", "tests/test_house.py")
    assert sorted(scratch.changed()) == sorted([extras, parts, packing, nearest, kernel, test])
