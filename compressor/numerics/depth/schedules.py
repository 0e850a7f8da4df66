"""Schedules of depth: how many blocks a token runs, falling with its position (SkipDecode).

Del Corro et al. 2023, arXiv 2307.02628, section 3: the whole batch has one budget at a position, and no later position
has a larger one.  A budget of n blocks takes the first ones, which always run, and the last; what is left out lies
behind the first.  So the blocks of a later position are among those of every earlier one, whose keys and values are
all there.

    blocks    0  1  2  3  4
    n = 5     x  x  x  x  x
    n = 4     x  .  x  x  x
    n = 3     x  .  .  x  x
"""

from __future__ import annotations

from collections.abc import Sequence

Schedule = tuple[tuple[int, int], ...]
"""(position, blocks), rising positions from 0: from there on, tokens run so many blocks."""


def why_wrong(schedule: Sequence[Sequence[int]], blocks: int | None = None, first: int = 0) -> str:
    """Say why a schedule cannot be; an empty text if it can.

    Args:
        blocks: of the model; None while it is unknown.
        first: blocks that always run.
    """
    if not schedule or any(len(pair) != 2 for pair in schedule):
        return "give pairs [position, blocks]"
    before: Sequence[int] | None = None
    for position, count in schedule:
        if before is None and position != 0:
            return f"they begin at position {position}; begin at 0"
        if before is not None and position <= before[0]:
            return f"position {position} stands behind {before[0]}; let positions rise"
        if before is not None and count > before[1]:
            return (
                f"they rise from {before[1]} to {count} blocks at position {position}, where keys and values of "
                "earlier tokens would be missing; let them fall"
            )
        if count < max(1, first) or (blocks is not None and count > blocks):
            has = "" if blocks is None else f"the model has {blocks}, "
            return f"{count} blocks at position {position}: {has}{max(1, first)} at least run"
        before = (position, count)
    return ""


def linear_schedule(most: int, least: int, begin: int, end: int) -> Schedule:
    """Return a schedule that falls along a straight line, rounded to whole blocks.

    Args:
        most: blocks up to the position ``begin``.
        least: blocks from the position ``end`` on.
    """
    found = [(0, most)]
    for count in range(most - 1, least - 1, -1):
        share = (most - count - 0.5) / (most - least)  # where rounding goes to `count`
        position = max(begin + -(-share * (end - begin) // 1), 0)
        if int(position) > found[-1][0]:
            found.append((int(position), count))
        else:
            found[-1] = (found[-1][0], count)
    return tuple(found)


def blocks_at(schedule: Schedule, position: int) -> int:
    """Return how many blocks the token at a position runs."""
    return next(count for start, count in reversed(schedule) if position >= start)


def block_ends(schedule: Schedule, blocks: int, first: int) -> list[int | None]:
    """Return for each block the first position whose token passes it by; None where all run it."""
    ends: list[int | None] = []
    for block in range(blocks):
        least = 0 if block < first else blocks - block + first  # budgets that hold this block
        ends.append(next((start for start, count in schedule if count < least), None))
    return ends


def mean_blocks(schedule: Schedule, positions: int) -> float:
    """Return the mean number of blocks that the tokens at the first positions run."""
    return sum(blocks_at(schedule, position) for position in range(positions)) / positions
