"""Score tokens by a bundle's kernels: log-likelihoods, as tasks of multiple choice and perplexities ask for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from compressor_runtime import Bundle

_ROWS = 256  # of logits at once, each as long as the vocabulary


class SessionScores:
    """Log-likelihoods of tokens behind others, by one session of a decoder.

    Tokens at the begin that are those of the call before are not read again: the answers to choose from follow the
    same question.

    Args:
        bundle: of a decoder.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle, self._session = bundle, bundle.session(1)
        self._goes_back = not bundle.model.get("states")  # recurrent layers keep the last token's state only
        self._read: list[int] = []  # by the session

    def score(self, ids: Sequence[int], scored: int) -> tuple[float, bool]:
        """Return the log-likelihood of the last tokens, in nats, and whether each was the likeliest.

        Sums and logarithms are in float64, of float32 logits.

        Args:
            ids: tokens [n], at most one more than the model has positions.
            scored: how many of them, from 1 to n - 1.
        """
        targets, total, is_greedy = np.array(ids[-scored:]), 0.0, True
        for logits in self._following(list(ids[:-1]), scored):
            part, targets = targets[: len(logits)], targets[len(logits) :]
            x = logits.astype(np.float64) - logits.max(1, keepdims=True)
            total += float((np.take_along_axis(x, part[:, None], 1)[:, 0] - np.log(np.exp(x).sum(1))).sum())
            is_greedy = is_greedy and bool((logits.argmax(1) == part).all())
        return total, is_greedy

    def _following(self, ids: list[int], wanted: int) -> Iterator[NDArray[np.float32]]:
        """Yield logits [R, V] of what comes after the last ``wanted`` tokens, in parts."""
        if self._bundle.leaves_early:
            from compressor.evaluate.quality_worker import early_logits

            yield early_logits(self._bundle, np.array(ids), len(ids))[-wanted:]
            return
        first = len(ids) - wanted
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._read, ids, strict=False)))
        begin = min(same, first)
        if not self._goes_back and begin != len(self._read):
            begin = 0
        self._session.position, self._read = begin, ids[:begin]
        for at in range(begin, len(ids), _ROWS):
            part = ids[at : at + _ROWS]
            rows: Any = np.arange(max(first - at, 0), len(part))
            logits = self._session.step([part], keep=rows if len(rows) else None)[0]
            self._read += part
            if len(rows):
                yield logits
