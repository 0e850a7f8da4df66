"""Train routers and small networks: how they begin, the loss, the price that meets a cost, what tokens take.

A router's outputs, less a price times what each choice costs, decide.  The price is part of the router's bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.graph.exits.auxiliary import Routed, auxiliary_names, mixed_graph, routed_networks, whole_graph
from compressor.graph.rewrite import set_parameter
from compressor.numerics.products.deterministic import total
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.losses import divergence, hidden_error, next_token_loss
from compressor.training.trainable import Outputs, TrainableGraph

_DEAREST, _HALVINGS = 32.0, 12  # the price lies between this and its negative, and is found so closely


def begin_auxiliary(graph: GraphModule, networks: Sequence[str], seed: int) -> None:
    """Let small networks add nothing yet, and routers send tokens at random.

    Args:
        networks: names, whose routers and small networks are on the meta device.
    """
    generator = torch.Generator().manual_seed(seed)
    for network in networks:
        router, bias, *inner, down = auxiliary_names(network)
        for name in (router, *inner):
            held = graph.get_parameter(name)
            value = torch.randn(held.shape, generator=generator) / held.shape[1] ** 0.5
            set_parameter(graph, name, value.to(held.dtype))
        for name in (bias, down):
            held = graph.get_parameter(name)
            set_parameter(graph, name, torch.zeros(held.shape, dtype=held.dtype))


def auxiliary_loss(graph: GraphModule, cost: float, pull: float, mimic: float, device: Device) -> Objective:
    """Return the divergence from the model as it was, with what is off the cost and what small networks do not mimic.

    Args:
        graph: whose networks are routed; outputs are those of :func:`mixed_graph`.
        cost: wanted mean share of the networks' multiply-adds.
        pull: weight of the squared difference to it.
        mimic: weight of the small networks' relative error in what the networks themselves make of every token.
    """
    teacher, networks = TrainableGraph(whole_graph(graph), (), (), device), routed_networks(graph)

    def objective(batch: Tensor, outputs: Outputs, step: int) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch).last
        off = share(networks, outputs.hidden[::3]) - cost
        error = hidden_error(outputs.hidden[2::3], [big.detach() for big in outputs.hidden[1::3]])
        return divergence(outputs.last, wanted, 1.0) + pull * off.square() + mimic * error

    return objective


def share(networks: Sequence[Routed], choices: Sequence[Tensor]) -> Tensor:
    """Return the multiply-adds of what tokens take, routers included, over those of the networks themselves.

    Args:
        choices: of each network [T, 3].
    """
    spent = []
    for network, choice in zip(networks, choices, strict=True):
        router, big, small = network.operations
        means = [total(column) / len(choice) for column in choice[:, :2].unbind(1)]
        spent.append(router + big * means[0] + small * means[1])
    return torch.stack(spent).sum() / sum(network.operations[1] for network in networks)


@dataclass(frozen=True)
class Taken:
    """Shares of the networks that tokens of some samples take.

    Attributes:
        share: of the networks' multiply-adds, routers included.
        shares: of tokens that take the network, the small one and neither, over all networks.
        loss: mean negative log-likelihood of the next token, in nats.
    """

    share: float
    shares: tuple[float, float, float]
    loss: float


class Measure:
    """Run samples through a graph whose networks are routed, in PyTorch.

    Args:
        batch: samples at once.
    """

    def __init__(self, graph: GraphModule, batch: int) -> None:
        mixed, points = mixed_graph(graph)
        self._networks, self._batch = routed_networks(graph), batch
        self._model, self._whole = TrainableGraph(mixed, (), points[::3]), TrainableGraph(whole_graph(graph))
        self._biases = {name: graph.get_parameter(name) for name in (_bias(one) for one in self._networks)}

    @torch.no_grad()
    def taken(self, samples: Tensor, price: float = 0.0) -> Taken:
        """Return what tokens of samples, int64 [n, S], take at a price beyond what the biases hold."""
        weights, found, losses = self.biases(price), list[list[Tensor]](), 0.0
        for part in torch.split(samples, self._batch):
            outputs = self._model(part, weights)
            found.append([choice.round() for choice in outputs.hidden])
            losses += float(next_token_loss(outputs.last, part)) * len(part)
        choices = [torch.cat(of_one) for of_one in zip(*found, strict=True)]
        means = torch.stack([choice.mean(0) for choice in choices]).mean(0).tolist()
        return Taken(float(share(self._networks, choices)), (means[0], means[1], means[2]), losses / len(samples))

    @torch.no_grad()
    def whole_loss(self, samples: Tensor) -> float:
        """Return the loss of the model as it was."""
        parts = torch.split(samples, self._batch)
        return sum(float(next_token_loss(self._whole(part).last, part)) * len(part) for part in parts) / len(samples)

    def biases(self, price: float) -> Mapping[str, Tensor]:
        """Return the routers' biases with a price added."""
        found = {}
        for network in self._networks:
            _, big, small = network.operations
            costs = torch.tensor([1.0, small / big, 0.0])
            found[_bias(network)] = self._biases[_bias(network)] - price * costs
        return found

    def price(self, samples: Tensor, cost: float) -> float:
        """Return the lowest price at which samples take no more than a share of the networks' multiply-adds.

        Tokens take what is cheaper as the price rises, but for what later networks make of it: the price that is
        returned is one at which this held.
        """
        low, high = -_DEAREST, _DEAREST
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.taken(samples, middle).share <= cost else (middle, high)
        return high


def _bias(network: Routed) -> str:
    return auxiliary_names(network.name)[1]
