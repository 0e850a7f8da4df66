"""Choose an order of a head's channels in which outliers share scale blocks, so that rounding the cache costs less.

Model of the cost: with w_d the weight of an error in channel d, t a token, and b the block of channel d,

    cost = sum_d w_d min(mean_t x_d(t)^2, c mean_t max_{e in b} x_e(t)^2),   c = 1 / (12 largest^2).

A block's step is in proportion to its largest channel, and uniform rounding errs by step^2 / 12 on average; a channel
below the step is rounded to zero, which costs its own mean square and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressor.formats.cache import CacheFormat
from compressor.formats.layouts.packed_cache import dequantize_cache, pack_cache, quantize_cache

_SWEEPS = 8
_LEAST_GAIN = 1e-6  # of the cost: the last bits of a mean must not decide


def order_channels(rows: Tensor, weight: Tensor, fmt: CacheFormat) -> Tensor:
    """Deal channels out to the format's blocks by swaps of two, each the best for one of them, until no swap helps.

    The order stays as it comes unless the rows are rounded better for it.  Sorting by size, as in the paper, puts the
    two channels of a rotary pair together, of which one is large when the other is small: measured, scores got worse.

    Args:
        rows: float32 [tokens, D].
        weight: float64 [D], the cost of an error in each channel.
    Returns:
        int32 [D]: the channel at each place; within a block they keep their order.
    """
    assignment = _Assignment(rows, weight, fmt)
    for _ in range(_SWEEPS):
        if not assignment.sweep():
            break
    identity = torch.arange(rows.shape[1])
    order = torch.argsort(assignment.block, stable=True)
    cost = _rounding_cost(rows[:, order], weight[order], fmt)
    cost_before = _rounding_cost(rows[:, identity], weight[identity], fmt)
    return (order if cost < cost_before * (1 - _LEAST_GAIN) else identity).int()


class _Assignment:
    """Assignment of channels to blocks, with each block's largest squares: [D, tokens] and [D] unless said otherwise.

    Attributes:
        block: each channel's block.
        squares: x^2 of each channel and token.
        largest: the largest square in each channel's block.
        others: the largest square among the other channels of each channel's block.
        costs: each channel's share of the cost.
    """

    def __init__(self, rows: Tensor, weight: Tensor, fmt: CacheFormat) -> None:
        self.squares = rows.double().square().t().contiguous()
        channels = len(self.squares)
        self.block = torch.arange(channels) // fmt.span(channels)
        self.largest = torch.empty_like(self.squares)
        self.others = torch.empty_like(self.squares)
        self._weight = weight
        self._mean_square = self.squares.mean(1)
        self._ratio = 1 / (12 * fmt.max_value**2)
        for block in range(int(self.block[-1]) + 1):
            self._update_largest(block)
        self.costs = self._cost(self.largest.mean(1))
        self._least_change = -_LEAST_GAIN * float(self.costs.sum())

    def sweep(self) -> bool:
        """Swap each channel in turn with the partner that lowers the cost most; return whether any was swapped."""
        swapped = False
        for i in range(len(self.squares)):
            change = self._change_of_swaps(i)
            j = int(change.argmin())
            if float(change[j]) < self._least_change:
                self._swap(i, j)
                swapped = True
        return swapped

    def _cost(self, mean_largest: Tensor) -> Tensor:
        return self._weight * torch.minimum(self._mean_square, self._ratio * mean_largest)

    def _update_largest(self, block: int) -> None:
        inside = torch.where(self.block == block)[0]
        values, places = self.squares[inside].topk(min(2, len(inside)), dim=0)
        second = values[1] if len(inside) > 1 else torch.zeros_like(values[0])
        is_largest = torch.arange(len(inside))[:, None] == places[0]
        self.largest[inside] = values[0]
        self.others[inside] = torch.where(is_largest, second, values[0])

    def _change_of_swaps(self, i: int) -> Tensor:
        """Return the change of the cost if channels i and j swapped their blocks, for every j; 0 within a block.

        Only the two blocks change.  ``with_j[j, d]`` is channel d's cost in i's block once j has taken i's place, and
        ``with_i[j, d]`` its cost in j's block once i has taken j's place, whichever block d is in: the sums below take
        the channels that stay, and the one that comes in place of the one that leaves.
        """
        in_block_of_i = self.block == self.block[i]
        in_block_of_j = self.block[:, None] == self.block  # [j, d]
        with_j = self._cost(torch.maximum(self.others[i], self.squares).mean(1)[:, None])
        with_i = self._cost(torch.maximum(self.others, self.squares[i]).mean(1)[:, None])
        block_of_i = with_j[:, in_block_of_i].sum(1) - with_j[:, i] + with_j.diagonal()
        block_of_j = (with_i * in_block_of_j).sum(1) - with_i.diagonal() + with_i[:, i]
        before = (self.costs * in_block_of_j).sum(1)  # of j's block
        return torch.where(in_block_of_i, 0.0, block_of_i + block_of_j - before[i] - before)

    def _swap(self, i: int, j: int) -> None:
        block_of_i = int(self.block[i])
        block_of_j = int(self.block[j])
        self.block[i] = block_of_j
        self.block[j] = block_of_i
        self._update_largest(block_of_j)
        self._update_largest(block_of_i)
        self.costs = self._cost(self.largest.mean(1))


def _rounding_cost(rows: Tensor, weight: Tensor, fmt: CacheFormat) -> float:
    """Return the weighted mean squared error of storing the rows in the format."""
    stored = dequantize_cache(pack_cache(*quantize_cache(rows, fmt), fmt), fmt, rows.shape[1])
    return float((stored - rows).double().square().mean(0) @ weight)
