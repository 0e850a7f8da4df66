"""Kernels for ARM under qemu: every family at some level, the instructions of inner loops, and a level too high.

The whole set of a level is ``pytest --arm LEVEL tests/codegen/kernels``; a quarter of an hour on two cores.
"""

from __future__ import annotations

import os
import re
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


def test_a_case_of_every_family() -> None:
    """The first case of each test of kernels, where each instruction set of x86 stands for a level of ARM."""
    command = [sys.executable, "-m", "pytest", "-q", "--arm=each", "--most-cases=1", str(Path(__file__).parent)]
    settings = {**os.environ, "PYTEST_ADDOPTS": "-p no:randomly"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed is not None and int(passed[1]) > 50, done.stdout[-4000:]


@pytest.mark.parametrize(("isa", "name", "of_one", "of_prompts"), [
    (neon.NEON, "W4A8_G128", "smull", "smull2"), (neon.DOTPROD, "W4A8_G128", "sdot", "sdot"),
    (neon.I8MM, "W8A8", "usdot", "smmla"), (neon.DOTPROD, "NF4_G64", "tbl", "tbl"),
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
