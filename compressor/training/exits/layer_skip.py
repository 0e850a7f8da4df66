"""Layer dropout, and how much each exit's loss counts: LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710).

L blocks; block l is left out by a sample with probability p(l), and what comes behind it has a loss of weight e(l).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.graph.exits.logits import SKIPS, with_exits
from compressor.training.device import Device
from compressor.training.trainable import Outputs, TrainableGraph

Curriculum: TypeAlias = Literal["rotational", "gradual", "all"]
"""Order in which exits have a loss: in turn, from the last to the first during half of the steps, or all at once."""


def dropout_rate(block: int, blocks: int, most: float) -> float:
    """Return the probability that a sample leaves a block out: from 0 at the first to ``most`` at the last.

    D(l) p_max of section 4.1, eq. 2 and 3; S(t) is 1, as for a model that is trained already.
    """
    return most * (math.exp(block * math.log(2) / (blocks - 1)) - 1)


def exit_shares(exits: Sequence[int], blocks: int, scale: float) -> list[float]:
    """Return how much the loss of each exit counts, and last that of the whole model; together 1.

    e(l) of section 4.1.2, eq. 5: scale * (1 + ... + l) behind l blocks, and L plus the sum up to L - 1 at the end.
    Blocks count from 1 here and from 0 in the paper, where the first one's exit has no loss.

    Args:
        exits: numbers of blocks that run in front of each, below ``blocks``.
    """
    weights = [scale * sum(range(count + 1)) for count in exits]
    weights.append(blocks + scale * sum(range(blocks)))
    return [weight / sum(weights) for weight in weights]


def active_exits(curriculum: Curriculum, exits: Sequence[int], blocks: int, step: int, steps: int) -> list[bool]:
    """Return which exits have a loss in a step (section 4.1.2): C(t, l).

    ``rotational`` takes one exit a step, in turn.  ``gradual`` begins behind the last blocks, and goes on towards the
    first by one block every steps / (2 L) steps.
    """
    if curriculum == "rotational":
        return [place == step % len(exits) for place in range(len(exits))]
    if curriculum == "gradual":
        first = blocks - 1 - 2 * blocks * step // steps
        return [count >= first for count in exits]
    return [True] * len(exits)


class SkippingGraph(TrainableGraph):
    """A graph to train that returns logits of its exits, and whose samples leave blocks out at random.

    Nothing is left out where no number of a batch is given, as in evaluations.

    Args:
        exits: numbers of blocks in front of each.
        dropout: largest probability of leaving a block out; 0 leaves none out.
        seed: of what is left out.
    """

    def __init__(
        self,
        graph: GraphModule,
        names: Sequence[str],
        exits: Sequence[int],
        dropout: float,
        seed: int,
        device: Device | None = None,
    ) -> None:
        copied, points = with_exits(graph, exits, skips=dropout > 0)
        self._skips = sorted(name for name, _ in copied.named_buffers() if name.startswith(SKIPS))
        self._rate, self._seed = dropout, seed
        super().__init__(copied, names, points, device)

    def __call__(
        self, batch: Tensor, weights: Mapping[str, Tensor] | None = None, number: int | None = None
    ) -> Outputs:
        """Run one batch; without blocks for some samples, where its number in the training is given."""
        if number is None or not self._skips:
            return super().__call__(batch, weights)
        values = dict(self.values() if weights is None else weights)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        draws = torch.rand(len(self._skips), len(batch), generator=generator)
        for name, drawn in zip(self._skips, draws, strict=True):
            rate = dropout_rate(int(name.removeprefix(SKIPS)), len(self._skips) + 1, self._rate)
            values[name] = (drawn < rate)[:, None, None].to(self.device.torch)
        return super().__call__(batch, values)
