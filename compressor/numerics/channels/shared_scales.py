"""Find an order of channels in which those that share a scale are alike, so that rounding costs less.

Model of the cost: a group's step is in proportion to its range, and an error's mean square to step^2, so that a row of
a group costs range^2 sum_j c_j, with c_j what an error in channel j costs: the mean square of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.numerics.channels.exchanges import LEAST_GAIN, exchange
from compressor.numerics.channels.permutation import Piece, swapped

_KEYS, _TRIED = 6, 16  # random views of weights to sort by; channels of a cluster that a swap is tried of


@dataclass(frozen=True)
class SharedScales:
    """Neighbours share a scale: its step follows from the largest of them.

    Attributes:
        zeros: whether grids have zero points, so that a step follows from the range.
    """

    zeros: bool

    def value(self, piece: Piece, order: Tensor) -> float:
        """Return minus the sum of step^2 times what errors cost, in units of codes."""
        costs = piece.weights[order].view(-1, piece.size).sum(1, dtype=torch.float64)
        high, low = (side[order].view(-1, piece.size, side.shape[1]).amax(1) for side in self._sides(piece.values))
        return -float(((high + low).square().sum(1, dtype=torch.float64) * costs).sum())

    def _sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return how far values reach on both sides of zero: the range is the sum of the largest of both."""
        if self.zeros:
            return values.clamp(min=0), (-values).clamp(min=0)
        return values.abs(), values.abs()

    def search(self, pieces: Sequence[Piece], rounds: int) -> Tensor:
        """Cut the channels of two clusters apart by one of several keys, from several orders; then swap single ones."""
        values, size = torch.cat([piece.values for piece in pieces], 1), pieces[0].size
        sides, costs = self._sides(values), torch.stack([piece.weights for piece in pieces], 1).double()
        owner = torch.repeat_interleave(torch.tensor([piece.values.shape[1] for piece in pieces]))
        of_piece = torch.nn.functional.one_hot(owner, len(pieces)).float()
        keys = _keys(values, costs)

        def worth(pairs: Tensor) -> Tensor:
            high, low = (side[pairs].view(len(pairs), 2, size, -1).amax(2) for side in sides)
            cost = costs[pairs].view(len(pairs), 2, size, -1).sum(2)
            return -(((high + low).square() @ of_piece).double() * cost).sum((1, 2))

        def better(pairs: Tensor) -> tuple[Tensor, Tensor]:
            ranks = [key[pairs].argsort(dim=1, descending=True, stable=True) for key in keys]
            tried = [pairs, *(pairs.gather(1, rank) for rank in ranks)]
            found = torch.stack([worth(one) for one in tried])
            best = found.argmax(0)
            return torch.stack(tried)[best, torch.arange(len(pairs))], found.amax(0) > found[0] * (1 - LEAST_GAIN)

        def swap(pairs: Tensor) -> tuple[Tensor, Tensor]:
            return self._best_swap(sides, costs, of_piece, worth(pairs), pairs)

        starts = [torch.arange(len(values)), *(key.argsort(descending=True, stable=True) for key in keys[:3])]
        found = [exchange(start, size, rounds, better) for start in starts]
        sums = torch.tensor([sum(self.value(piece, order) for piece in pieces) for order in found])
        return exchange(found[int(sums.argmax())], size, rounds, swap)

    def _best_swap(
        self, sides: tuple[Tensor, Tensor], costs: Tensor, of_piece: Tensor, now: Tensor, pairs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Swap the best two channels of each pair, of those without which a cluster would cost least.

        Args:
            costs: float64 [channels, pieces].
            of_piece: which features are those of which piece, float32 [features, pieces].
            now: what each pair is worth, float64 [pairs].
        """
        size = pairs.shape[1] // 2
        halves = pairs[:, :size], pairs[:, size:]
        reach = [[_without_one(side[half]) for side in sides] for half in halves]
        cost = [costs[half].sum(1, keepdim=True) - costs[half] for half in halves]
        left = [((high + low).square() @ of_piece).double() * c for (high, low), c in zip(reach, cost, strict=True)]
        tried = [one.sum(2).topk(min(size, _TRIED), dim=1, largest=False).indices for one in left]
        worth = []
        for i in tried[0].unbind(1):
            total = torch.zeros(tried[1].shape, dtype=torch.float64)
            row, place = torch.arange(len(pairs))[:, None], i[:, None]
            for mine, at, theirs, to in ((0, place, 1, tried[1]), (1, tried[1], 0, place)):
                comes = halves[theirs][row, to]
                high, low = (torch.maximum(r[row, at], s[comes]) for r, s in zip(reach[mine], sides, strict=True))
                total += (((high + low).square() @ of_piece).double() * (cost[mine][row, at] + costs[comes])).sum(2)
            worth.append(-total)
        all_of_them = torch.stack(worth, 1).flatten(1)
        best, width = all_of_them.argmax(1, keepdim=True), tried[1].shape[1]
        ways = (best // width, best % width)
        i, j = (one.gather(1, at) for one, at in zip(tried, ways, strict=True))
        return swapped(pairs, i, size + j), all_of_them.amax(1) > now * (1 - LEAST_GAIN)


def _without_one(values: Tensor) -> Tensor:
    """Return the largest value of each cluster without each channel in turn: [pairs, size, features], the same."""
    top = values.topk(2, dim=1)
    is_top = torch.arange(values.shape[1])[:, None] == top.indices[:, :1]
    return torch.where(is_top, top.values[:, 1:], top.values[:, :1])


def _keys(values: Tensor, costs: Tensor) -> list[Tensor]:
    """Return numbers to sort channels by, float64 [channels] each: size, cost, both, and random views of the sizes."""
    sizes = values.abs().double()
    size, cost = sizes.square().mean(1).sqrt(), costs.mean(1)
    generator = torch.Generator().manual_seed(0)
    views = torch.randn(sizes.shape[1], _KEYS, generator=generator, dtype=torch.float64)
    return [size, cost, size.square() * cost, *(sizes @ views).unbind(1)]
