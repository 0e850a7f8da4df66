"""Label the entries of axes, join labels that are one channel, and note which channels have to stay."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Labels: TypeAlias = NDArray[np.int64]


class LabelSet:
    """Labels, the pairs that are one channel, and the reasons for which some have to stay."""

    def __init__(self) -> None:
        self.count = 0
        self._pairs: list[tuple[Labels, Labels]] = []
        self._kept: list[tuple[Labels, str]] = []

    def fresh(self, count: int) -> Labels:
        """Return new labels, int64 [count]."""
        self.count += count
        return np.arange(self.count - count, self.count)

    def join(self, first: Labels, second: Labels) -> None:
        """Say that labels at the same places are one channel."""
        self._pairs.append((first.ravel(), second.ravel()))

    def keep(self, labels: Labels, reason: str) -> None:
        """Say that channels have to stay, and why."""
        self._kept.append((labels.ravel(), reason))

    def channels(self) -> Labels:
        """Return the channel of each label, int64 [count]: the smallest label of those that are joined.

        Each round gives the larger of two joined channels the smaller one's number, until no two differ.
        """
        channel = np.arange(self.count)
        if not self._pairs:
            return channel
        first, second = (np.concatenate(side) for side in zip(*self._pairs, strict=True))
        while True:
            low, high = np.minimum(channel[first], channel[second]), np.maximum(channel[first], channel[second])
            if (low == high).all():
                return channel
            np.minimum.at(channel, high, low)
            while not (channel == channel[channel]).all():
                channel = channel[channel]

    def reasons(self, channels: Labels) -> dict[int, str]:
        """Return why channels have to stay; the first reason of each."""
        found: dict[int, str] = {}
        for labels, reason in self._kept:
            for channel in np.unique(channels[labels]).tolist():
                found.setdefault(channel, reason)
        return found
