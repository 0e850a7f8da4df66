"""Rows of packed tables: the operator and its kernels give the values that the format defines, in every format."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_cases import OPS, WIDTHS, build, random_packed, run

from compressor.codegen.isa import Isa
from compressor.codegen.kernels import embedding
from compressor.formats.format import FORMATS, Format
from compressor.formats.packing import dequantize

TABLES = [name for name, fmt in FORMATS.items() if not (fmt.extras or fmt.block_tiles or fmt.has_input_scale)]


@pytest.mark.parametrize("name", TABLES)
def test_the_operator_looks_up_what_the_table_stands_for(name: str) -> None:
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(len(name))
    packed = random_packed(fmt, 37, 300, rng)
    ids = torch.randint(37, (2, 3, 7), generator=rng)
    got = OPS.packed_embedding(ids, list(packed.parts.values()), name, 37, 300)
    torch.testing.assert_close(got, dequantize(packed)[ids], rtol=0, atol=0)


@pytest.mark.parametrize("isa", WIDTHS[:1], ids=lambda isa: isa.name)
@pytest.mark.parametrize(
    "name", ["W8A16", "W8A8", "W4A16_G64", "W3A16_ASYM_G32", "W6A16_C", "NF4_G64", "MXFP4", "NVFP4", "FP8_E4M3", "LUT3",
             "FP6_E2M3_G128", "BIP2A8_G128", "LUT4_G64", "W5A16_T"],
)  # fmt: skip
def test_packed_embedding(name: str, isa: Isa) -> None:
    fmt, pick = Format.parse(name), random.Random(name)
    rng = torch.Generator().manual_seed(len(name))
    rows, width = pick.choice([5, 16, 33]), pick.choice([4, 31, 64, 130, 321])
    packed = random_packed(fmt, rows, width, rng)
    parts = list(packed.parts.values())
    kernel = build(embedding.packed_embedding(rows, width, fmt, isa), isa)
    for shape in ((1, 1), (3, 5)):
        ids = torch.randint(rows, shape, generator=rng)
        got = run(kernel, ids, *parts, out=(*shape, width))
        torch.testing.assert_close(got, OPS.packed_embedding(ids, parts, name, rows, width), rtol=1e-6, atol=0)
