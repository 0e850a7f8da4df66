"""Estimate how often guesses are right, from what became of earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from compressor_runtime.speculation.tree import Tree

_MEMORY = 64
"""Guesses of a kind that an estimate mostly rests on: texts change."""


class Acceptance:
    """Probabilities that a guess is right, by what the guess rests on.

    An estimate begins at a prior that counts like two guesses, and moves with each outcome by 1 / (guesses + 3), at
    least by 1 / 64.

    Args:
        prior: what a guess rests on -> probability, before any was seen.
    """

    def __init__(self, prior: Callable[[Hashable], float]) -> None:
        self._prior = prior
        self._found: dict[Hashable, tuple[float, int]] = {}

    def chance(self, source: Hashable) -> float:
        """Return the probability that such a guess is right, given that all before it are."""
        found = self._found.get(source)
        return self._prior(source) if found is None else found[0]

    def learn(self, tree: Tree, tokens: Sequence[int]) -> None:
        """Compare a draft, verified or not, with the tokens that came."""
        node = -1
        for token in tokens:
            behind = tree.children(node)
            for guess, child in behind.items():
                self._count(tree.sources[child], guess == token)
            if token not in behind:
                return
            node = behind[token]

    def _count(self, source: Hashable, right: bool) -> None:
        chance, count = self._found.get(source, (self._prior(source), 0))
        chance += (right - chance) / min(count + 3, _MEMORY)
        self._found[source] = (chance, count + 1)
