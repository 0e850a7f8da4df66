"""Labels that are joined are one channel, as a plain search over the pairs finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.graph.dependencies.labels import LabelSet


@given(pairs=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=30))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_channels_are_connected_components(pairs: list[tuple[int, int]]) -> None:
    labels = LabelSet()
    labels.fresh(20)
    for first, second in pairs:
        labels.join(np.array([first]), np.array([second]))
    reached = {start: {start} for start in range(20)}
    for _ in range(20):
        for first, second in pairs:
            both = reached[first] | reached[second]
            for label in both:
                reached[label] = both
    assert labels.channels().tolist() == [min(reached[label]) for label in range(20)]


def test_a_channel_stays_if_one_of_its_labels_does() -> None:
    labels = LabelSet()
    first, second = labels.fresh(3), labels.fresh(3)
    labels.join(first, second)
    labels.keep(second[1:2], "an output")
    labels.keep(first[1:2], "an input")
    assert labels.reasons(labels.channels()) == {1: "an output"}
