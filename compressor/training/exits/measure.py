"""Measure exits on samples: how sure each is, how often it says what the whole model says, and its loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.functional import cross_entropy

from compressor.errors import UsageError
from compressor.graph.exits.logits import CannotExit, exit_blocks, head_nodes, with_exits
from compressor.training.trainable import TrainableGraph


@dataclass(frozen=True)
class ExitFigures:
    """Figures of exits on samples, of each token but the last of a sample.

    Attributes:
        confidence: top-1 probability, float32 [exits, samples, tokens].
        agrees: whether the likeliest token is the whole model's, bool [exits, samples, tokens].
        losses: mean negative log-likelihood of the text's next tokens at each exit, in nats, and of the whole model.
        right: whether the whole model's likeliest token is the text's, bool [samples, tokens].
    """

    confidence: Tensor
    agrees: Tensor
    losses: tuple[float, ...]
    right: Tensor

    @property
    def agreement(self) -> tuple[float, ...]:
        """Return the share of tokens at each exit that are the whole model's."""
        return tuple(float(row.double().mean()) for row in self.agrees)

    def part(self, samples: slice) -> ExitFigures:
        """Return the figures of some samples; the losses are those of all."""
        return ExitFigures(self.confidence[:, samples], self.agrees[:, samples], self.losses, self.right[samples])


@torch.no_grad()
def measure_exits(graph: GraphModule, exits: Sequence[int], samples: Tensor) -> ExitFigures:
    """Run samples one after another, and look at each exit's logits.

    Args:
        exits: numbers of blocks that run in front of each.
        samples: int64 [n, S], S >= 2.
    """
    copied, points = with_exits(graph, exits)
    run = TrainableGraph(copied, (), points)
    confidence, agrees, right = list[Tensor](), list[Tensor](), list[Tensor]()
    losses = torch.zeros(len(exits) + 1, dtype=torch.float64)
    for sample in samples:
        outputs = run(sample[None])
        logits = torch.stack([rows[0, :-1] for rows in (*outputs.hidden, outputs.last)]).float()
        likeliest = logits.argmax(-1)
        confidence.append(torch.softmax(logits[:-1], -1).amax(-1))
        agrees.append(likeliest[:-1] == likeliest[-1])
        right.append(likeliest[-1] == sample[1:])
        for place, rows in enumerate(logits):
            losses[place] += cross_entropy(rows.double(), sample[1:])
    means = (losses / len(samples)).tolist()
    return ExitFigures(torch.stack(confidence, 1), torch.stack(agrees, 1), tuple(means), torch.stack(right))


def head_cost(graph: GraphModule) -> float:
    """Return what one exit's norm and head read, in blocks: stored bytes by the mean of the blocks'."""
    blocks = exit_blocks(graph)
    inside = {node for block in blocks for branch in block.branches for node in branch.nodes}
    share = _bytes(graph, head_nodes(graph, blocks[-1].exit)) / (_bytes(graph, inside) / len(blocks))
    return float(f"{share:.4g}")


def _bytes(graph: GraphModule, readers: Iterable[Node]) -> int:
    """Return the bytes of the parameters that some nodes read."""
    read = {source.target for node in readers for source in node.all_input_nodes if source.op == "get_attr"}
    held = dict(graph.named_parameters())
    return sum(held[str(name)].numel() * held[str(name)].element_size() for name in read if str(name) in held)


def chosen_exits(graph: GraphModule, wanted: int | Sequence[int], pass_name: str) -> tuple[int, ...]:
    """Return how many blocks run in front of each exit.

    Args:
        wanted: these numbers, rising; or how many there are to be, evenly spaced: rounded up.
    Raises:
        UsageError: tokens of the model cannot leave early, or an exit is not in front of its last block.
    """
    try:
        blocks = len(exit_blocks(graph))
    except CannotExit as error:
        raise UsageError(f"{pass_name}: {error}") from error
    if isinstance(wanted, int):
        if wanted >= blocks:
            raise UsageError(f"{pass_name}: exits {wanted}: between the model's {blocks} blocks there are {blocks - 1}")
        return tuple(-(-place * blocks // (wanted + 1)) for place in range(1, wanted + 1))
    if wanted[-1] >= blocks:
        raise UsageError(
            f"{pass_name}: exits: {wanted[-1]} blocks in front of one: the model has {blocks}; give less than that"
        )
    return tuple(wanted)
