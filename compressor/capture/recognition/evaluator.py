"""Compute single nodes of an exported graph on small real inputs, without the model's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx


class Evaluator:
    """Computes nodes from what they need, and nothing else.

    Parameters are random numbers of the same shape: what is found must hold for any weights.

    Args:
        inputs: value of each placeholder that may be read.
        constant: name -> buffer or constant; None for a parameter.
    """

    def __init__(self, inputs: dict[str, Any], constant: Callable[[str], Tensor | None]) -> None:
        self.inputs, self.constant = inputs, constant
        self._rng = torch.Generator().manual_seed(0)
        self._parameters: dict[str, Tensor] = {}

    def __call__(self, node: fx.Node, given: dict[fx.Node, Any]) -> Any:
        """Return the value of a node.

        Args:
            given: values of nodes that are taken as they are, and not computed.
        Raises:
            KeyError: it needs an input that was not given.
        """
        known = dict(given)
        waiting = [node]
        while waiting:  # no recursion: a model's graph is thousands of nodes deep
            current = waiting[-1]
            if current in known:
                waiting.pop()
                continue
            missing = [source for source in current.all_input_nodes if source not in known]
            if missing:
                waiting.extend(missing)
                continue
            known[current] = self._run(current, known)
            waiting.pop()
        return known[node]

    def _run(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            return self.inputs[node.name]
        if node.op == "get_attr":
            return self._stored(str(node.target), node.meta["val"])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _stored(self, name: str, like: Tensor) -> Tensor:
        found = self.constant(name)
        if found is not None:
            return found
        if name not in self._parameters:
            self._parameters[name] = torch.randn(tuple(like.shape), generator=self._rng) / 4
        return self._parameters[name]
