"""Kernels for ARM under qemu: every family at some level, the instructions of inner loops, and a level too high.

The whole set of a level is ``pytest --arm LEVEL tests/codegen/kernels``; a quarter of an hour on two cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import emulated_arm
import pytest
import torch
from arm_code import counts, innermost_loops
from kernel_cases import build, random_packed, run

from compressor.codegen import neon
from compressor.codegen.isa import Isa
from compressor.codegen.kernels.linear import packed
from compressor.formats.format import Format

FAMILIES = {
    "attention/test_cached.py": ["test_cached_attention"],
    "attention/test_cross.py": ["test_cross_attention"],
    "attention/test_kept.py": ["test_kept_tokens"],
    "attention/test_packed.py": ["test_packed_rows_are_those_of_the_operator_byte_for_byte", "test_packed_attention"],
    "attention/test_tree.py": ["test_packed_caches"],
    "convolution/test_depthwise.py": ["test_formats"],
    "convolution/test_groups.py": ["test_geometries"],
    "convolution/test_kernel.py": ["test_formats", "test_a_chain_in_bytes_is_the_same_to_the_bit"],
    "linear/test_expand.py": ["test_kinds_of_codes_and_ragged_shapes"],
    "linear/test_packed.py": [
        "test_packed_linear", "test_packed_linear_of_floats_tables_and_codebooks",
        "test_blocks_of_columns_that_are_left_out", "test_products_of_bit_planes_are_exact",
        "test_packed_linear_of_rounded_activations", "test_dense_linear", "test_norms",
    ],
    "linear/test_planes.py": ["test_both_planes_give_the_bits_of_whole_codes"],
    "recurrence/test_states.py": ["test_kernel"],
    "test_embedding.py": ["test_packed_embedding"],
    "test_experts.py": ["test_packed_routed_linear"],
    "test_n_of_m.py": ["test_n_of_m_linear"],
    "test_rows.py": ["test_rows_of_linears"],
    "test_skipping.py": ["test_skipping_linear"],
}  # fmt: skip


def test_a_case_of_every_family() -> None:
    """The first case of a test of each family, where each instruction set of x86 stands for a level of ARM."""
    tests = [str(Path(__file__).parent / f"{file}::{name}") for file, names in FAMILIES.items() for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "--arm=each", "--most-cases=1", *tests]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(tests)} passed" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize(("isa", "name", "of_one", "of_prompts"), [
    (neon.NEON, "W4A8_G128", "smull", "smull2"), (neon.DOTPROD, "W4A8_G128", "sdot", "sdot"),
    (neon.I8MM, "W8A8", "usdot", "smmla"), (neon.DOTPROD, "NF4_G64", "tbl", "tbl"),
    (neon.DOTPROD, "W4A16_G128", "sdot", "sdot"), (neon.I8MM, "W8A16", "usdot", "smmla"),
    (neon.DOTPROD, "BIP1A1_G64", "cnt", "cnt"),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_inner_loops_have_the_instructions(isa: Isa, name: str, of_one: str, of_prompts: str) -> None:
    fmt = Format.parse(name)
    (schedule, *_) = packed.gemm_space(4, 4, fmt, isa)
    loops = [counts(loop) for loop in innermost_loops(packed.packed_linear(64, 256, fmt, False, isa, schedule), isa)]
    # One token's loop comes first, a prompt's last; some instructions of a register (32 tokens' code lies between).
    found = [[name for name in (of_one, of_prompts) if loop[name] >= 4] for loop in loops]
    has = [names for names in found if names]
    assert has and of_one in has[0] and of_prompts in has[-1], [dict(loop) for loop in loops]


def test_a_level_too_high_ends_in_an_illegal_instruction() -> None:
    """Also that the CPUs that are emulated have what their level says, and no more."""
    fmt, rng = Format.parse("W8A8"), torch.Generator().manual_seed(0)
    weight, x = random_packed(fmt, 16, 64, rng), torch.randn(1, 1, 64, generator=rng)
    func = packed.packed_linear(16, 64, fmt, False, neon.DOTPROD, packed.Schedule(1, 1, 2))
    module = emulated_arm.compiled(func, neon.DOTPROD).mod
    kernel = emulated_arm.emulator("cortex-a53").load(module)
    with pytest.raises(RuntimeError, match="with -4"):
        run(kernel, x, *weight.parts.values(), out=(1, 1, 16))
    assert run(build(func, neon.DOTPROD), x, *weight.parts.values(), out=(1, 1, 16)).isfinite().all()
