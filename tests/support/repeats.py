"""A toy kernel whose schedules differ in how often they do the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
from tvm.script import tirx as T

SIZE = 4096


@dataclass(frozen=True)
class Repeats:
    """A schedule that does everything ``count`` times."""

    count: int


def repeated(schedule: Repeats) -> tvm.tirx.PrimFunc:
    count = schedule.count

    @T.prim_func(s_tir=True, private=True)
    def halve(x_: T.handle, y_: T.handle) -> None:
        x = T.match_buffer(x_, (4096,), "float32")
        y = T.match_buffer(y_, (4096,), "float32")
        for _r in T.serial(T.int64(count)):
            for i in range(4096):
                y[i] = y[i] * T.float32(0.5) + x[i]

    return halve


def operands() -> list[np.ndarray]:
    return [np.ones(SIZE, "float32"), np.zeros(SIZE, "float32")]
