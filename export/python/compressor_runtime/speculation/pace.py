"""Measure what steps and verifications take, and draft only where that is expected to pay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from compressor_runtime.speculation.cost import best_count, is_worth_drafting
from compressor_runtime.speculation.tree import Wish

_WINDOW = 9  # last times of each size, of which the median counts
_STALE_ROUNDS = 256  # a size that was not seen for so long is tried again, if accounts allow
_ROW_GUESS = 0.03  # of a step: a further row's time, until one was measured
_FIRST_ROWS = 3  # that are added in a first verification; later ones have at most twice the rows of measured ones
_LEAST_CHANCE = 0.02
_MARGIN = 0.03  # estimates are of those drafts that look best, so a little less comes true
_DEBT, _GRACE_STEPS = 0.003, 2
"""Drafts together may have cost this share of all time, and so many steps, more than they have gained."""
_MOST_CREDIT_STEPS = 20  # a gain of long ago does not pay for long losses
_LONGEST = 2
"""Steps that a verification takes at most for each of its rows, and a draft or the delay of a step altogether: what
took longer waited for another process, which says nothing of the draft."""


class Pace:
    """Times of steps and verifications, and an account of each draft: what it has gained, less what it has cost.

    One serves all texts of a bundle.  Times are running medians: they follow a context that grows, and a busy machine.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._seen: dict[int, int] = {}  # rows -> number of the round that last had so many
        self._rounds = 0
        self._elapsed_s = 0.0
        self._accounts: dict[str, float] = {}
        self._draft_times: dict[str, dict[int, deque[float]]] = {}  # of models that draft, by the texts of a call
        self._tried: dict[str, int] = {}  # draft -> number of the round when it last drafted

    def note(self, rows: int, seconds: float, count: int = 1) -> None:
        """Remember the time of a step (a row for each sequence), or of a verification with more rows.

        Args:
            count: of so many, on average.
        """
        self._rounds += count
        self._elapsed_s += seconds * count
        if seconds <= 0:
            return  # a clock that stood still measured nothing
        if rows not in self._times and seconds > _LONGEST * rows * min(self._medians.values(), default=seconds):
            return  # alone it would be the median, and keep this size from being tried again
        times = self._times.setdefault(rows, deque(maxlen=_WINDOW))
        times.append(seconds)
        self._medians[rows] = median(times)
        self._seen[rows] = self._rounds

    def note_draft(self, name: str, seconds: float, texts: int = 1) -> None:
        """Remember the time in which a model drafted one token of each of so many texts, in one call."""
        by_texts = self._draft_times.setdefault(name, {})
        by_texts.setdefault(texts, deque(maxlen=_WINDOW)).append(seconds)
        self._tried[name] = self._rounds

    def draft_s(self, name: str, texts: int = 1) -> float | None:
        """Return the time in which a model drafts one token of each of so many texts, in one call.

        It is measured, or on a line between measured numbers of texts; fewer than any measured are taken to need the
        same time.  None before one was measured twice: the first says little.
        """
        measured = self._draft_times.get(name, {}).items()
        known = sorted((count, median(times)) for count, times in measured if len(times) > 1)
        return on_lines(known, max(texts, known[0][0])) if known else None

    def going(self, name: str, sequences: int, room: int, wishes: Mapping[int, Wish]) -> dict[int, Wish]:
        """Return those of the drafts that should go on by a token, which one model reads in one call.

        Those that would not pay beside the others are left out, until all that are left do.  Drafts that were not
        expected to pay are tried again, with one token, after so many rounds as a size of verifications is.

        Args:
            name: of the kind.
            sequences: texts that wait for the drafts.
            room: drafted tokens that may be verified, of all texts together.
            wishes: of each draft; all have drafted as many tokens.
        """
        going = dict(wishes) if self.knows(sequences) else {}
        if going and not any(wish.chances for wish in going.values()) and self._is_untried(name, len(going)):
            return going
        known = self._known(sequences) if going else []
        while going and (draft_s := self.draft_s(name, len(going))) is not None:
            rows = min(room, known[-1][0] + max(_FIRST_ROWS, known[-1][0]) - sequences)
            paying = {
                place: wish
                for place, wish in going.items()
                if is_worth_drafting(
                    wish.chances,
                    wish.following,
                    min(wish.most, max(1, rows // len(going))),
                    sequences,
                    partial(on_lines, known),
                    draft_s,
                    _MARGIN,
                    len(going),
                )
            }
            if len(paying) == len(going):
                return going
            going = paying
        return {}

    def _is_untried(self, name: str, texts: int) -> bool:
        """Tell whether no draft of this kind was measured for long, or the model with so many texts hardly at all."""
        times = self._draft_times.get(name, {}).get(texts, ())
        return len(times) < 2 or self._rounds - self._tried[name] > _STALE_ROUNDS

    def wait(self, seconds: float) -> None:
        """Count the time of a prompt, in which no token came."""
        self._elapsed_s += seconds

    def medians(self) -> dict[int, float]:
        """Return the seconds of a step or verification by its rows, as far as measured."""
        return dict(sorted(self._medians.items()))

    def knows(self, sequences: int) -> bool:
        """Tell whether steps without drafts were measured; the first of a process says little."""
        return len(self._times.get(sequences, ())) > 1

    def seconds(self, rows: int, sequences: int = 1) -> float:
        """Return the time to expect of a verification of ``rows``: measured, or on a line between measured sizes.

        Beyond the largest measured, the line from a step through it goes on; where there is none, a row is guessed to
        take 3% of a step, so that a first verification happens.
        """
        return on_lines(self._known(sequences), rows)

    def _known(self, sequences: int) -> list[tuple[int, float]]:
        """Return sizes and times, smallest first, from a step's on; without those of long ago."""
        fresh = self._rounds - _STALE_ROUNDS
        return sorted(
            (rows, seconds)
            for rows, seconds in self._medians.items()
            if rows == sequences or (rows > sequences and self._seen[rows] > fresh)
        )

    def least_chance(self, sequences: int) -> float:
        """Return a probability of being accepted below which no drafted token pays: a row's share of a step."""
        if not self.knows(sequences):
            return _ROW_GUESS
        known = self._known(sequences)
        (first, step), *others = known
        slopes = [(seconds - step) / (rows - first) for rows, seconds in others]
        return max(_LEAST_CHANCE, min(slopes, default=0.0) / step * sequences)

    def choose(self, chances: Sequence[float], sequences: int) -> int:
        """Return how many drafted tokens to verify, given the probability that each is accepted, falling."""
        if not chances or not self.knows(sequences):
            return 0
        known = self._known(sequences)
        most = known[-1][0] + max(_FIRST_ROWS, known[-1][0]) - sequences  # a guess far from what is measured is none
        return best_count(chances[:most], sequences, lambda rows: on_lines(known, rows), _MARGIN)

    def may_draft(self, name: str, sequences: int, drafts: int = 1) -> bool:
        """Tell whether a draft's account allows it to go on; it may owe its share, of so many drafts together."""
        if not self.knows(sequences):
            return False
        debt = _DEBT * self._elapsed_s + _GRACE_STEPS * self._medians[sequences]
        return self._accounts.get(name, 0.0) > -debt / drafts

    def charge(self, name: str, seconds: float) -> None:
        """Book what a draft has cost."""
        self._elapsed_s += seconds
        if name not in self._draft_times:  # of one that runs a model, any time may be its own
            seconds = min(seconds, _LONGEST * min(self._medians.values(), default=seconds))
        self._accounts[name] = self._accounts.get(name, 0.0) - seconds

    def settle(self, seconds: float, sequences: int, drafted: Mapping[str, int], accepted: Mapping[str, int]) -> None:
        """Book a verification: each draft gains the steps that its tokens saved, and bears its rows' share of the rest.

        Args:
            seconds: the verification took.
            drafted, accepted: tokens of each draft.
        """
        if not self.knows(sequences):
            return
        step = self._medians[sequences]
        rows = sum(drafted.values())
        if seconds > _LONGEST * (rows + sequences) * step:
            seconds = self.seconds(rows + sequences, sequences)
        extra = seconds - step
        for name, count in drafted.items():
            gain = accepted.get(name, 0) * step / sequences - extra * count / rows
            self._accounts[name] = min(self._accounts.get(name, 0.0) + gain, _MOST_CREDIT_STEPS * step)

    def delay(self, seconds: float, drafted: Mapping[str, int]) -> None:
        """Book what a plain step of one sequence took longer because the round before it verified drafts.

        Args:
            drafted: tokens of each draft that were verified then.
        """
        if self.knows(1):
            extra, rows = seconds - self._medians[1], sum(drafted.values())
            if extra > _LONGEST * self._medians[1]:
                return
            for name, count in drafted.items():
                self._accounts[name] = self._accounts.get(name, 0.0) - extra * count / rows


def on_lines(known: Sequence[tuple[int, float]], rows: int) -> float:
    """Return the time of a size from those of others, smallest first; see :meth:`Pace.seconds`."""
    (first, step), (below, seconds) = known[0], known[0]
    for size, time_s in known[1:]:
        if size > rows:
            return seconds + (time_s - seconds) * (rows - below) / (size - below)
        below, seconds = size, time_s
    slope = _ROW_GUESS * step if below == first else max(0.0, seconds - step) / (below - first)
    return seconds + slope * (rows - below)


class Always(Pace):
    """Verify every drafted token, whether it pays or not: to measure how often drafts are right, and at what cost."""

    def choose(self, chances: Sequence[float], sequences: int) -> int:
        """Return the number of drafted tokens."""
        return len(chances)

    def least_chance(self, sequences: int) -> float:
        """Return 2%."""
        return _LEAST_CHANCE

    def going(self, name: str, sequences: int, room: int, wishes: Mapping[int, Wish]) -> dict[int, Wish]:
        """Return all drafts."""
        return dict(wishes)

    def may_draft(self, name: str, sequences: int, drafts: int = 1) -> bool:
        """Return True."""
        return True
