"""Tell which architectures are within limits of time, memory and size: by their parts, and as wholes once measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.pipeline.context import Context
from compressor.pipeline.structured.costs.memory import held_bytes, peaks
from compressor.pipeline.structured.costs.times import Choice, Costing, Times
from compressor.search.front import lowered
from compressor.search.programme import Limit

AT_ONCE = 4  # architectures that are timed together


class Costs:
    """Tell what architectures take.

    Args:
        graph: whole.
        limits: by measure, but for time and memory.
        latency: a step's largest time, as a share of the whole graph's; None where it is not limited.
        memory: most bytes of activations at once; None where they are not limited.
        budgets: further limits of the one measure, as shares of the whole model's.
    Raises:
        UsageError: time or memory is limited, and nothing here tells it.

    Attributes:
        limits: by measure, as sums of what single alternatives take.
        clock: times architectures as wholes; None where time is not limited.
        parts: what single alternatives take of the time as they were timed apart.
    """

    def __init__(
        self,
        graph: GraphModule,
        ctx: Context,
        given: Costing,
        limits: Mapping[str, Limit],
        latency: float | None,
        memory: float | None,
        budgets: Sequence[float],
    ) -> None:
        self._graph, self._ctx, self._given, self._memory, self._budgets = graph, ctx, given, memory, budgets
        self.limits, self.clock, self.parts = dict(limits), None, None
        self._held = dict[Choice, int]()
        if memory is not None:
            self.limits["peak_memory"] = peaks(graph, ctx, given, memory)
        if latency is not None:
            self.clock = Times(graph, ctx, given, latency)
            self.limits["latency"] = self.parts = self.clock.limit()

    def sets(self) -> list[tuple[float | None, dict[str, Limit]]]:
        """Return the limits, and those of each further budget with its share."""
        shares = zip(self._budgets, lowered(self.limits, self._budgets).items(), strict=True)
        return [(None, self.limits), *((share, dict([limit])) for share, limit in shares)]

    def of(self, measure: str, choice: Choice) -> float:
        """Return what an architecture takes: its time as a whole if it was timed, else the sum of its parts."""
        timed = None if self.clock is None or measure != "latency" else self.clock.taken.get(choice)
        return self.limits[measure].sum(choice) if timed is None else timed

    def within(self, choice: Choice, share: float | None = None) -> bool:
        """Tell whether an architecture is within the limits, by its parts' memory.

        Args:
            share: of the whole model's, in the place of the one limit.
        """
        whole = (0,) * len(choice)
        for name, limit in self.limits.items():
            wanted = limit if share is None else replace(limit, most=share * limit.sum(whole))
            if not wanted.holds(self.of(name, choice)):
                return False
        return True

    def allow(self, choice: Choice, share: float | None = None) -> bool:
        """Tell whether an architecture is within the limits, and its program's memory as a whole too."""
        if not self.within(choice, share):
            return False
        return self._memory is None or share is not None or self.held(choice) <= self._memory

    def held(self, choice: Choice) -> int:
        """Return the bytes of activations that an architecture's program holds at once."""
        if choice not in self._held:
            self._held[choice] = held_bytes(self._graph, self._ctx, self._given, self._given.picks(choice))
        return self._held[choice]

    def time_best(self, ranked: Sequence[Choice]) -> bool:
        """Time the first few architectures within each budget as wholes; the first one of all twice, at last.

        Returns:
            Something was timed, and :attr:`limits` tell anew what single alternatives take.
        """
        if self.clock is None:
            return False
        best = next(filter(self.allow, ranked), None)
        found = dict[Choice, None]()
        for share, _ in self.sets():
            within = list(islice((one for one in ranked if self.allow(one, share)), AT_ONCE))
            if within and within[0] not in self.clock.taken:
                found |= dict.fromkeys(one for one in within if one not in self.clock.taken)
        if found:
            self.clock.time(list(found))
        elif best is not None and best not in self.clock.repeated:
            self.clock.confirm(best)
        else:
            return False
        self.limits["latency"] = self.clock.limit()
        return True

    def best(self, ranked: Sequence[Choice]) -> Choice:
        """Return the first architecture within the limits; where time is limited, of those that were timed.

        Raises:
            UsageError: none is, though the parts of some are.
        """
        clock, name = self.clock, self._given.pass_name
        timed = [one for one in ranked if clock is None or one in clock.taken]
        if (found := next(filter(self.allow, timed), None)) is not None:
            return found
        within = [one for one in timed if self.within(one)]
        if clock is not None and not within:
            least, most = min(self.of("latency", one) for one in timed), self.limits["latency"].most
            raise UsageError(
                f"{name}: latency of at most {1e3 * most:.4g} ms: the {len(timed)} architectures that were timed as "
                f"wholes take {1e3 * least:.4g} ms at least, though their parts add up to less; raise it or `pool`"
            )
        raise UsageError(
            f"{name}: peak_memory of at most {self._memory:,.0f} bytes: programs of the {len(within)} architectures "
            f"within the limits hold {min(map(self.held, within)):,} at least, as memory is kept for later values; "
            "raise it or `pool`"
        )

    def told(self, best: Choice) -> list[str]:
        """Say of each limit what the choice takes; of memory, as its program is planned; of time, when timed again."""
        name, whole = self._given.pass_name, (0,) * len(best)
        notes = [
            f"{name}: {measure} {self.of(measure, best):,.6g}{limit.unit}, at most {limit.most:,.6g}{limit.unit}; all "
            f"as it is {limit.sum(whole):,.6g}{limit.unit}"
            for measure, limit in self.limits.items()
        ]
        if self._memory is not None:
            notes.append(
                f"{name}: activations are foreseen to take {self.limits['peak_memory'].sum(best):,.0f} bytes at once, "
                f"and take {self.held(best):,} as the program is planned"
            )
        if self.clock is not None and self.parts is not None:
            if best not in self.clock.repeated:
                self.clock.confirm(best)
            notes.append(self.clock.told(best, self.parts.sum(best)))
        return notes
