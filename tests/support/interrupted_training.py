"""Train once as a whole, and once interrupted and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from compressor.pipeline.context import Context
from compressor.pipeline.segment_cache import SegmentCache
from compressor.progress import Silent


class Stops(Silent):
    """Ends a run in one of its steps."""

    def __init__(self, step: int) -> None:
        self.left = step

    def advance(self, amount: int = 1) -> None:
        """Count a step."""
        self.left -= amount
        if self.left <= 0:
            raise KeyboardInterrupt


def whole_and_resumed(
    train: Callable[[Context], GraphModule], folder: Path, step: int, **context: Any
) -> list[dict[str, Tensor]]:
    """Return the parameters of a run, and those of one that was interrupted in a step and run again.

    Args:
        train: trains a copy of the model.
        folder: holds a cache for each.
        context: what :class:`Context` is given beside the cache.
    """
    found = []
    for reporter, name in ((Silent(), "whole"), (Stops(step), "parts"), (Silent(), "parts")):
        cache = SegmentCache(folder / name)
        try:
            graph = train(Context(results=cache, state="model", reporter=reporter, **context))
        except KeyboardInterrupt:
            assert len(list((folder / name).glob("[0-9a-f]*"))) == 1
            continue
        found.append({name: value.detach() for name, value in graph.named_parameters()})
    assert len(found) == 2, "the second run was interrupted"
    return found
