"""Count the words and characters of a text that another has wrong."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Sequence

import numpy as np

_OTHER = re.compile(r"[^\w\s']|_|(?<!\w)'|'(?!\w)")  # punctuation, but for apostrophes within words


def plain_words(text: str) -> list[str]:
    """Return a text's words as they are compared: without case, punctuation, and forms of one character (NFKC)."""
    return _OTHER.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split()


def edit_distance(said: Sequence[Hashable], heard: Sequence[Hashable]) -> int:
    """Return the least number of insertions, deletions and replacements that make one sequence the other.

    By rows of the usual table (Wagner and Fischer, JACM 21, 1974).  Within a row, insertions come one after another:
    row[j] = min over i <= j of (candidate[i] + j - i), which is a running minimum of candidate - place, plus the place.
    """
    codes = {item: code for code, item in enumerate(dict.fromkeys([*said, *heard]))}
    others = np.array([codes[item] for item in heard], np.int64)
    places = np.arange(len(others) + 1)
    row = places
    for count, item in enumerate(said, 1):
        candidates = np.empty_like(row)
        candidates[0] = count
        candidates[1:] = np.minimum(row[1:] + 1, row[:-1] + (others != codes[item]))
        row = np.minimum.accumulate(candidates - places) + places
    return int(row[-1])


class ErrorRates:
    """Add up errors over texts: a rate is that of all texts together, so long ones count more."""

    def __init__(self) -> None:
        self._words = self._characters = self._wrong_words = self._wrong_characters = 0

    def add(self, said: str, heard: str) -> None:
        """Compare a text with what a model made of it."""
        right, found = plain_words(said), plain_words(heard)
        self._words += len(right)
        self._wrong_words += edit_distance(right, found)
        line, other = " ".join(right), " ".join(found)
        self._characters += len(line)
        self._wrong_characters += edit_distance(line, other)

    @property
    def of_words(self) -> float:
        """Edits over the words that were said; above 1 where more is heard than was said."""
        return self._wrong_words / max(1, self._words)

    @property
    def of_characters(self) -> float:
        """Edits over the characters that were said, with one space between words."""
        return self._wrong_characters / max(1, self._characters)
