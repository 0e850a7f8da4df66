"""Arguments that nobody expects: as text for commands, as objects for the Python API."""

from __future__ import annotations

import datetime
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("ARGUMENT_EXAMPLES", "0"))
"""For each command and function, drawn anew each time; 0 draws the same twelve: a suite fails for changes only."""

any_argument = settings(
    max_examples=EXAMPLES or 12,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
    database=None,
)

NUMBERS = (
    *("0", "-1", "1", "2", "7", "-0", "00", "1e3", "1_0", "٣", "0x10", "nan", "-nan", "inf", "-inf", "1e999", "5e-324"),
    *("18446744073709551616", "-9223372036854775809", "9" * 5000, "0.5", "1.0", " 1", "1\n", "+1", ""),
)
TEXTS = (
    *("", " ", ".", "..", "/", "//", "~", "-", "--", "-x", "--json", "=", "a=b", "a=", "=b", "a.b=c", "a=b=c", "{}"),
    *("null", "true", "\udcff", "é", "한국어 🙂", "a\nb", "\x1b[2J", "[red]", "[/]", "%s", "{0}", "x" * 5000),
    *("/dev/null", "/dev/full", "/proc/self/mem", "loop", "file", "empty", "nowhere/below", "file/below", "../..", "*"),
    *("quickstart", "reference", "x86", "webgpu", "null", "rtn", "W4A16_G32", "python_docs", "W8A8", "passes.rtn=3"),
    *("passes.0.rtn.scheme=W9A9", "seed=-1", "gates={}", "tune=full", "passes=[]", "target={x86: {isa: z}}"),
)
texts = st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.text(max_size=12).filter(lambda text: "\0" not in text)
"""No argument of a command can have a NUL in it."""


class Odd:
    """Has none of the methods that anything asks for."""


OBJECTS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 1 << 70, 0.5, -0.0, math.nan, math.inf, 1j, "", "x", b"x", "\udcff", "a\0b", Odd),
    *(Odd(), object(), [], [[]], (), {}, {1: 2}, {"a": None}, [None], [0.5], [1, 2], [[1, 2], [3]], range(3), set()),
    *(iter([1]), (x for x in ()), len, lambda: None, Path(), Path("x" * 300), Path("no"), datetime.date(2026, 1, 1)),
    *(np.zeros(0), np.zeros((2, 3)), np.array(None), np.array(["a"]), np.array([1], np.uint64), np.float16(1)),
    *(np.ones((1, 2), np.int64), np.full((1, 1), -5), torch.zeros(0), torch.ones(2, 3), torch.tensor(1)),
    *(torch.ones(1, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.complex64), torch.nn.Linear(2, 2), ...),
)
objects = st.sampled_from(OBJECTS) | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
