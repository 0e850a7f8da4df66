"""Error rates are the edits of the textbook's recursion over the length of what was said."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.evaluate.speech.error_rates import ErrorRates, edit_distance, plain_words


def edits(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Return the edit distance by its definition."""

    @cache
    def rest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return len(a) - i + len(b) - j
        return min(rest(i + 1, j) + 1, rest(i, j + 1) + 1, rest(i + 1, j + 1) + (a[i] != b[j]))

    return rest(0, 0)


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=8))
def test_distances_are_the_definitions(a: list[str], b: list[str]) -> None:
    assert edit_distance(a, b) == edits(tuple(a), tuple(b))


def test_case_and_punctuation_do_not_count() -> None:
    assert plain_words("  Don't stop, \u201cMr. Smith\u201d \u2014 it\u2019s \uff11 o'clock_now! 'tis") == [
        *("don't", "stop", "mr", "smith", "it", "s", "1", "o'clock", "now", "tis")
    ]


def test_rates_are_of_all_texts_together() -> None:
    rates = ErrorRates()
    rates.add("the cat sat", "The cat sat.")
    rates.add("on a mat", "on the the mat")
    assert rates.of_words == pytest.approx(edits(tuple(["on", "a", "mat"]), tuple(["on", "the", "the", "mat"])) / 6)
    assert rates.of_characters == pytest.approx(edits(tuple("on a mat"), tuple("on the the mat")) / 19)
