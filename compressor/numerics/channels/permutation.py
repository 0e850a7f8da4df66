"""Find an order of channels from which a later pass loses less: patterns N:M, blocks, groups of scales.

What a weight holds of the channels is a :class:`Piece`, [channels, features].  The channels of a weight's columns have
its rows as features, and the other way round.  An order cuts the channels into clusters of neighbours; each goal has a
value that it adds up over clusters, and a way to deal the channels of two clusters out anew:

    n_of_m   the N largest of each cluster and feature         all ways to part 2 M channels, M <= 4; else one swap
             (Pool and Yu 2021, Channel Permutations for N:M Sparsity, NeurIPS)
    blocks   the features with the largest sums, a cluster     swaps that suit what both keep now; one swap by value

Groups of scales are in :mod:`compressor.numerics.channels.shared_scales`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor

from compressor.numerics.channels.exchanges import LEAST_GAIN, exchange

_PASSES, _TRIED = 12, 4  # times that blocks are chosen anew; channels of a cluster that a swap is tried of


@dataclass(frozen=True)
class Piece:
    """Hold one weight's share of some channels.

    Attributes:
        values: float32 [channels, features]: what a later pass may lose; of groups, the weights.
        weights: what an error in a channel costs, float32 [channels]; of groups.
        size: channels of a cluster.
        kept: share that blocks keep.
        across: whether blocks are chosen among the clusters, for each feature; else among the features, for each
            cluster.
    """

    values: Tensor
    weights: Tensor
    size: int
    kept: float = 0.0
    across: bool = False

    def sampled(self, step: int) -> Piece:
        """Return the same with every ``step``-th feature."""
        return replace(self, values=self.values[:, ::step].contiguous())

    def clusters(self, order: Tensor) -> Tensor:
        """Return the values in an order, [clusters, size, features]."""
        return self.values[order].view(-1, self.size, self.values.shape[1])


class Goal(Protocol):
    """Measure orders of channels, and search a good one."""

    def value(self, piece: Piece, order: Tensor) -> float:
        """Return what an order is worth to one weight: the more the better."""

    def search(self, pieces: Sequence[Piece], rounds: int) -> Tensor:
        """Return a good order of the channels, int64 [channels], after so many rounds of exchanges at most."""


@dataclass(frozen=True)
class KeptOfGroups:
    """The N largest of every M neighbours are kept."""

    kept: int

    def value(self, piece: Piece, order: Tensor) -> float:
        """Return the sum of what is kept."""
        return float(_top_sum(list(piece.clusters(order).unbind(1)), self.kept).double().sum(1).sum())

    def search(self, pieces: Sequence[Piece], rounds: int) -> Tensor:
        """Exchange channels between groups."""
        values, size = torch.cat([piece.values for piece in pieces], 1), pieces[0].size
        better = partial(self._best_parting if size <= 4 else self._best_swap, values)
        return exchange(torch.arange(len(values)), size, rounds, better)

    def _best_parting(self, values: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Part the channels of each pair in the best of all ways."""
        columns, size = [values[one] for one in pairs.unbind(1)], pairs.shape[1] // 2
        sums = {
            part: _top_sum([columns[i] for i in part], self.kept).sum(1, dtype=torch.float64)
            for part in combinations(range(2 * size), size)
        }
        rests = {part: tuple(i for i in range(2 * size) if i not in part) for part in sums if part[0] == 0}
        worth = torch.stack([sums[part] + sums[rest] for part, rest in rests.items()])
        orders = torch.tensor([[*part, *rest] for part, rest in rests.items()])  # the first leaves all where they are
        best = worth.argmax(0)
        return pairs.gather(1, orders[best]), worth.amax(0) > worth[0] * (1 + LEAST_GAIN)

    def _best_swap(self, values: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Swap the best two channels of each pair."""
        size, kept = pairs.shape[1] // 2, self.kept
        both = values[pairs]
        halves = both[:, :size], both[:, size:]
        tops = [half.topk(kept, dim=1).values.sum((1, 2), dtype=torch.float64) for half in halves]
        # Of a group without one channel: its N - 1 largest stay whatever comes, and what comes is kept, or the N-th.
        rests = [[_rest(half, i, kept) for i in range(size)] for half in halves]
        worth = []
        for i, (sum_i, next_i) in enumerate(rests[0]):
            for j, (sum_j, next_j) in enumerate(rests[1]):
                after = torch.maximum(next_i, halves[1][:, j]) + torch.maximum(next_j, halves[0][:, i])
                worth.append(sum_i + sum_j + after.sum(1, dtype=torch.float64))
        best = torch.stack(worth).argmax(0)[:, None]
        found = swapped(pairs, best // size, size + best % size)
        return found, torch.stack(worth).amax(0) > (tops[0] + tops[1]) * (1 + LEAST_GAIN)


def swapped(pairs: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Let the channels at two places of each pair, int64 [pairs, 1], change them."""
    return pairs.scatter(1, i, pairs.gather(1, j)).scatter(1, j, pairs.gather(1, i))


def _rest(half: Tensor, left_out: int, kept: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the N - 1 largest of the other channels, [pairs], and the N-th, [pairs, features]."""
    others = torch.cat([half[:, :left_out], half[:, left_out + 1 :]], 1).topk(kept, dim=1).values
    return others[:, :-1].sum((1, 2), dtype=torch.float64), others[:, -1]


def _top_sum(columns: list[Tensor], kept: int) -> Tensor:
    """Return the sum of the N largest of several tensors, element by element."""
    if len(columns) == 4 and kept == 2:
        a, b, c, d = columns
        high, low = torch.maximum(a, b), torch.minimum(a, b)
        other, least = torch.maximum(c, d), torch.minimum(c, d)
        return torch.maximum(high, other) + torch.maximum(torch.minimum(high, other), torch.maximum(low, least))
    return torch.stack(columns).topk(kept, dim=0).values.sum(0)


@dataclass(frozen=True)
class KeptBlocks:
    """Blocks with the largest sums are kept: their rows, or their columns, are the clusters."""

    def value(self, piece: Piece, order: Tensor) -> float:
        """Return the sum of what is kept."""
        sums = _block_sums(piece, order)
        return float((sums * _kept_blocks(piece, sums)).sum(1).sum())

    def search(self, pieces: Sequence[Piece], rounds: int) -> Tensor:
        """Go from the present order, and from one of similar neighbours, and return what is worth more in the end."""
        found = [self._climb(pieces, start, rounds) for start in (torch.arange(len(pieces[0].values)), _alike(pieces))]
        worth = [sum(self.value(piece, order) for piece in pieces) for order in found]
        return found[int(worth[1] > worth[0] * (1 + LEAST_GAIN))]

    def _climb(self, pieces: Sequence[Piece], order: Tensor, rounds: int) -> Tensor:
        """Let channels move to clusters that keep more of what they hold, and choose what is kept anew, in turns."""
        size, worth = min(piece.size for piece in pieces), sum(self.value(piece, order) for piece in pieces)
        for _ in range(_PASSES):
            held = sum(_held_by_clusters(piece, order, size) for piece in pieces)
            assert isinstance(held, Tensor)
            found = _assign(held, order, size, rounds)
            now = sum(self.value(piece, found) for piece in pieces)
            if not now > worth * (1 + LEAST_GAIN):
                break
            order, worth = found, now
        if any(piece.across for piece in pieces):  # what a swap changes is not in two clusters alone
            return order
        return exchange(order, size, rounds, partial(self._best_swap, pieces))

    def _best_swap(self, pieces: Sequence[Piece], pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Swap the best two channels of each pair, of the few whose clusters hold least of what they hold."""
        size, tried = pairs.shape[1] // 2, min(pairs.shape[1] // 2, _TRIED)
        halves = pairs[:, :size], pairs[:, size:]
        gains = [torch.zeros(len(pairs), size, dtype=torch.float64) for _ in halves]
        sums = [[piece.values[half].sum(1, dtype=torch.float64) for half in halves] for piece in pieces]
        for piece, both in zip(pieces, sums, strict=True):
            kept = [_kept_blocks(piece, one).double() for one in both]
            for gain, half, other in zip(gains, halves, (kept[1] - kept[0], kept[0] - kept[1]), strict=True):
                gain += (piece.values[half].double() @ other[:, :, None])[:, :, 0]
        first, second = (gain.topk(tried, dim=1).indices for gain in gains)
        ways = torch.cartesian_prod(torch.arange(tried), torch.arange(tried))
        i, j = first[:, ways[:, 0]], size + second[:, ways[:, 1]]  # [pairs, ways]
        worth = torch.zeros(len(pairs), len(ways) + 1, dtype=torch.float64)  # the last leaves all where they are
        for piece, both in zip(pieces, sums, strict=True):
            change = (piece.values[pairs.gather(1, j)] - piece.values[pairs.gather(1, i)]).double()
            change = torch.cat([change, torch.zeros_like(change[:, :1])], 1)
            count = max(1, round(piece.kept * change.shape[2]))
            for one, sign in zip(both, (1, -1), strict=True):
                worth += (one[:, None] + sign * change).topk(count, dim=2, sorted=False).values.sum(2)
        best = worth[:, :-1].argmax(1, keepdim=True)
        found = swapped(pairs, i.gather(1, best), j.gather(1, best))
        return found, worth[:, :-1].amax(1) > worth[:, -1] * (1 + LEAST_GAIN)


def _block_sums(piece: Piece, order: Tensor) -> Tensor:
    """Return what each block holds, float64 [clusters, features]."""
    return piece.clusters(order).sum(1, dtype=torch.float64)


def _kept_blocks(piece: Piece, sums: Tensor) -> Tensor:
    """Return which blocks are kept, bool [clusters, features]."""
    axis = 0 if piece.across else 1
    best = sums.argsort(dim=axis, descending=True, stable=True)
    count = max(1, round(piece.kept * sums.shape[axis]))
    return torch.zeros_like(sums, dtype=torch.bool).scatter(axis, best.narrow(axis, 0, count), True)


def _held_by_clusters(piece: Piece, order: Tensor, size: int) -> Tensor:
    """Return what each channel would hold in each cluster of ``size``, if that kept what it keeps now."""
    kept = _kept_blocks(piece, _block_sums(piece, order)).double()
    return (piece.values.double() @ kept.t()).repeat_interleave(piece.size // size, dim=1)


def _assign(held: Tensor, order: Tensor, size: int, rounds: int) -> Tensor:
    """Exchange channels between clusters as long as that raises the sum of what they hold there.

    Of a pair of clusters, with x_i what a channel of the first gains by moving and y_j one of the second, the largest
    of both sides change places as long as x_i + y_j > 0: the best that the two can do.

    Args:
        held: float64 [channels, clusters].
    """
    cluster = torch.empty_like(order)
    cluster[order] = torch.arange(len(order)) // size
    least = LEAST_GAIN * held.amax()

    def better(pairs: Tensor) -> tuple[Tensor, Tensor]:
        homes = cluster[pairs[:, [0, size]]]  # [pairs, 2]
        away = homes.flip(1).repeat_interleave(size, 1)
        gains = held[pairs, away] - held[pairs, homes.repeat_interleave(size, 1)]
        ranks = [part.argsort(dim=1, descending=True, stable=True) for part in (gains[:, :size], gains[:, size:])]
        first, second = pairs[:, :size].gather(1, ranks[0]), pairs[:, size:].gather(1, ranks[1])
        both = gains[:, :size].gather(1, ranks[0]) + gains[:, size:].gather(1, ranks[1])
        moves = both > least
        found = torch.cat([torch.where(moves, second, first), torch.where(moves, first, second)], 1)
        cluster[found] = homes.repeat_interleave(size, 1)
        return found, moves.any(1)

    return exchange(order, size, rounds, better)


def _alike(pieces: Sequence[Piece]) -> Tensor:
    """Return an order of similar neighbours: the largest channel left, and those that hold most where it is large."""
    values = torch.cat([piece.values for piece in pieces], 1).double()
    size, share = max(piece.size for piece in pieces), max(piece.kept for piece in pieces)
    order: list[int] = []
    kept, left = max(1, round(share * values.shape[1])), values.sum(1)
    while len(order) < len(values):
        seed = values[int(left.argmax())]
        for _ in range(2):
            mask = torch.zeros_like(seed).scatter(0, seed.topk(kept).indices, 1.0)
            fit = (values @ mask).masked_fill(torch.isinf(left), -torch.inf)
            chosen = fit.topk(min(size, len(values) - len(order))).indices
            seed = values[chosen].sum(0)
        left[chosen] = -torch.inf
        order += chosen.tolist()
    return torch.tensor(order)
