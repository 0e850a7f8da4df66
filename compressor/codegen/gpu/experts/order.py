"""Sort pairs of token and expert by expert, on the device: launches know how many pairs there are, not whose.

The pairs of each expert, in the order of tokens, fill blocks of ``width`` slots of their own::

    count   chosen          -> counts    int32 [experts]
    place   chosen, counts  -> owner     int32 [blocks]   the expert of a block; -1 of those that nothing fills
                               order     int32 [slots]    the pair of a slot; -1 behind an expert's last
                               slot_of   int32 [pairs]    the slot of a pair; -1 of those without an expert of ours
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from compressor.codegen.gpu.intrinsics import barrier

THREADS = 256
"""Threads that look for an expert's pairs, each in a run of its own."""


@dataclass(frozen=True)
class Order:
    """The buffers; see the module."""

    counts: Any
    owner: Any
    order: Any
    slot_of: Any

    @classmethod
    def allocate(cls, experts: int, pairs: Any, width: int) -> Order:
        """Allocate them for blocks of ``width`` slots; on the host's side."""
        return cls(*(T.alloc_buffer(size, "int32") for size in cls.sizes(experts, pairs, width)))

    @staticmethod
    def sizes(experts: int, pairs: Any, width: int) -> tuple[tuple[Any], ...]:
        """Return the shapes of the buffers."""
        blocks = block_count(experts, pairs, width)
        return (experts,), (blocks,), (blocks * width,), (pairs,)


def block_count(experts: int, pairs: Any, width: int) -> Any:
    """Return how many blocks of slots are enough, however pairs are spread."""
    return pairs // width + experts


def sort_pairs(experts: int, width: int) -> Any:
    """Make a macro ``sort(chosen, pairs, into)`` that launches both steps.

    ``chosen`` is int64 [pairs]; values that name no expert are left out.
    """
    assert width <= THREADS
    count, place = counting(), placing(experts, width)

    @T.inline
    def sort(chosen, pairs, into):
        with T.launch_thread("blockIdx.x", experts) as e, T.launch_thread("threadIdx.x", THREADS) as t:
            runs = T.alloc_buffer((THREADS,), "int32", scope="shared")
            found = T.alloc_buffer((1,), "int32", scope="local")
            count(chosen, pairs, e, t, found)
            runs[t] = found[0]
            barrier()
            if t == 0:
                found[0] = T.int32(0)
                for i in range(THREADS):
                    found[0] = found[0] + runs[i]
                into.counts[e] = found[0]
        with T.launch_thread("blockIdx.x", experts) as e, T.launch_thread("threadIdx.x", THREADS) as t:
            runs = T.alloc_buffer((THREADS,), "int32", scope="shared")
            found = T.alloc_buffer((1,), "int32", scope="local")
            count(chosen, pairs, e, t, found)
            runs[t] = found[0]
            barrier()
            place(chosen, pairs, e, t, runs, into)

    return sort


def run_of(pairs: Any) -> Any:
    """Return how many pairs a thread looks at."""
    return (T.Cast("int32", pairs) + (THREADS - 1)) // THREADS


def counting() -> Any:
    """Make a macro that leaves in ``found`` how many of thread ``t``'s pairs are those of expert ``e``."""

    @T.inline
    def count(chosen, pairs, e, t, found):
        found[0] = T.int32(0)
        for i in range(run_of(pairs)):
            if t * run_of(pairs) + i < T.Cast("int32", pairs):
                if chosen[t * run_of(pairs) + i] == T.Cast("int64", e):
                    found[0] = found[0] + 1

    return count


def placing(experts: int, width: int) -> Any:
    """Make a macro that gives thread ``t``'s pairs of expert ``e`` their slots, and slots and blocks their owners.

    ``runs`` holds what each thread has counted.
    """

    @T.inline
    def place(chosen, pairs, e, t, runs, into):
        slot = T.alloc_buffer((1,), "int32", scope="local")
        first = T.alloc_buffer((1,), "int32", scope="local")
        block = T.alloc_buffer((1,), "int32", scope="local")
        each = T.meta_var(run_of(pairs))
        first[0] = T.int32(0)
        for other in range(e):
            first[0] = first[0] + (into.counts[other] + (width - 1)) // width
        slot[0] = first[0] * width
        for i in range(t):
            slot[0] = slot[0] + runs[i]
        for i in range(each):
            if t * each + i < T.Cast("int32", pairs):
                if chosen[t * each + i] == T.Cast("int64", e):
                    into.order[slot[0]] = t * each + i
                    into.slot_of[t * each + i] = slot[0]
                    slot[0] = slot[0] + 1
                if e == 0:
                    if chosen[t * each + i] < 0 or chosen[t * each + i] >= experts:
                        into.slot_of[t * each + i] = T.int32(-1)
        end = T.meta_var(first[0] + (into.counts[e] + (width - 1)) // width)
        if t < width:
            if into.counts[e] % width > 0 and t >= into.counts[e] % width:
                into.order[(end - 1) * width + t] = T.int32(-1)
        block[0] = first[0] + t
        while block[0] < end:
            into.owner[block[0]] = T.Cast("int32", e)
            block[0] = block[0] + THREADS
        if e == experts - 1:
            block[0] = end + t
            while block[0] < T.Cast("int32", block_count(experts, pairs, width)):
                into.owner[block[0]] = T.int32(-1)
                block[0] = block[0] + THREADS

    return place
