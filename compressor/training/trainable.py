"""A captured graph whose chosen parameters are float32 leaves that gradients are asked of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from compressor.calibration.segment_runner import flat_inputs
from compressor.graph.model import ModelInfo
from compressor.training.adapters import Adapters
from compressor.training.device import Device


@dataclass(frozen=True)
class Outputs:
    """Outputs of one batch.

    Attributes:
        last: a decoder's logits float32 [B, S, V], an encoder's hidden states, or what a plain module returns.
        hidden: values of the nodes that were asked for, in their order.
    """

    last: Tensor
    hidden: Sequence[Tensor]


class StandIns(Protocol):
    """Tensors that are trained in the place of some weights.

    Attributes:
        leaves: what gradients are asked of, by name.
    """

    leaves: dict[str, Tensor]

    def fused(self) -> dict[str, Tensor]:
        """Return what runs in the place of each weight while it is trained, float32 [out, in]."""

    def stored(self) -> dict[str, Tensor]:
        """Return what is stored of each weight, and held against the best so far, float32 [out, in]."""


class TrainableGraph:
    """Run a graph on whole batches, with weights of its own in place of some parameters.

    The graph itself stays as it is.

    Args:
        graph: a captured model.
        names: parameters to train; each gets a float32 copy on the device.
        points: nodes whose values are returned beside the output.
        device: where all of it runs; None is the CPU.

    Attributes:
        weights: what is trained, by name: the copies, or what stands in for them.
        stand_ins: of weights that do not run as they are trained or stay; None where there are none.
    """

    def __init__(
        self,
        graph: GraphModule,
        names: Sequence[str] = (),
        points: Sequence[Node] = (),
        device: Device | None = None,
    ) -> None:
        self.graph, self.points, self.info = graph, list(points), _info(graph)
        self.device = device or Device()
        self._types = {name: graph.get_parameter(name).dtype for name in names}
        parameters = {name: graph.get_parameter(name).detach() for name in names}
        on = self.device.torch
        self.weights = {n: p.to(on, torch.float32, copy=True).requires_grad_() for n, p in parameters.items()}
        self.stand_ins: StandIns | None = None

    def adapt(self, names: Collection[str], rank: int, seed: int) -> None:
        """Train adapters in the place of some weights."""
        self.stand_in(names, lambda frozen: Adapters(frozen, rank, seed))

    def stand_in(self, names: Collection[str], make: Callable[[dict[str, Tensor]], StandIns]) -> None:
        """Train what is made for some weights in their place; they stay what they are until they are stored."""
        self.stand_ins = make({name: self.weights.pop(name).detach() for name in names})
        self.weights |= self.stand_ins.leaves

    def __call__(
        self, batch: Tensor, weights: Mapping[str, Tensor] | None = None, number: int | None = None
    ) -> Outputs:
        """Run one batch from empty caches; with gradients, where they are enabled.

        Args:
            batch: int64 [B, S]; of a plain module its input, float32 [B, ...].
            weights: others in place of its own.
            number: of the batch in a training, which decides what is random; None where nothing is to be.
        """
        reader = Reader(self.graph, self.values() if weights is None else weights, self.points, self.device)
        last, *_ = reader.run(*flat_inputs(self.info, batch), enable_io_processing=False)
        return Outputs(last, [reader.seen[node] for node in self.points])

    def stored(self) -> dict[str, Tensor]:
        """Return the weights as they will be stored: in the type that each parameter has."""
        with torch.no_grad():
            values = self.weights if self.stand_ins is None else self.weights | self.stand_ins.stored()
        return {name: values[name].detach().to(kind, copy=True) for name, kind in self._types.items()}

    def values(self) -> dict[str, Tensor]:
        """Return what runs in the place of parameters, by name."""
        return self.weights if self.stand_ins is None else self.weights | self.stand_ins.fused()


def _info(graph: GraphModule) -> ModelInfo:
    info: ModelInfo = graph.meta["model"]
    return info


class Reader(Interpreter):
    """Runs nodes on a device, with weights in the place of parameters.

    Attributes:
        seen: values of the points that have run.
    """

    def __init__(
        self, graph: GraphModule, weights: Mapping[str, Tensor], points: Sequence[Node], device: Device
    ) -> None:
        super().__init__(graph)
        self._weights, self._points, self._device = weights, set(points), device
        self.seen: dict[Node, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        """Return a weight in the place of a parameter, where there is one."""
        if target in self._weights:
            return self._weights[target]
        held = super().fetch_attr(target)
        return self._device.of(held) if isinstance(held, Tensor) else held

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator where the training is, whatever device its arguments lie on or name."""
        return super().call_function(target, *self._device.placed((args, kwargs)))

    def run_node(self, n: Node) -> Any:
        """Run a node, and keep its value where it was asked for."""
        value = super().run_node(n)
        if n in self._points:
            self.seen[n] = value
        return value
