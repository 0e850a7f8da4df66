"""Let the later layers of a decoder run kept tokens alone, and say what that changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from compressor.graph.kept_tokens.figures import prompt_cost
from compressor.graph.kept_tokens.layers import CannotKeep, LaterLayer, decoder_layers, later_layers
from compressor.graph.kept_tokens.rewrite import keep_tokens
from compressor.graph.kept_tokens.sharing import groups
from compressor.graph.model import ModelInfo

_LAST = 2  # layers behind the residual stream that is compared


@dataclass(frozen=True)
class Change:
    """Describe a graph whose later layers run kept tokens alone.

    Attributes:
        groups: the later layers, with their nodes from before; those of a group share keys and values.
        copies: by nodes of all tokens, which may be gone, those that compute the same of kept tokens.
        said: which layers, and what a prompt costs, before and after.
    """

    groups: Sequence[Sequence[LaterLayer]]
    copies: Mapping[Node, Node]
    said: str

    @property
    def stream(self) -> Node | None:
        """Return the residual stream in front of the last two layers, or nearer the end, but behind a later layer; None
        where there is one later layer alone.
        """
        layers = [layer for group in self.groups for layer in group]
        behind = layers[max(1, len(layers) - _LAST) :]
        return behind[0].entry if behind else None


def stop_prompts(graph: GraphModule, after: int | float, share: int) -> Change | None:
    """Let the layers behind the first ones run kept tokens alone.

    Args:
        after: how many layers with attention run all tokens; or, as a float, which share of them, rounded down.
        share: neighbouring later layers that share keys and values.
    Returns:
        What has changed; None if all layers run all tokens, as before.
    Raises:
        CannotKeep: names what stands in the way; the graph may be half rewritten.
    """
    info: ModelInfo = graph.meta["model"]
    if info.draft_heads:
        raise CannotKeep("heads that draft read the hidden states of all tokens; put the pass in front of draft_heads")
    if info.predicts:
        raise CannotKeep("a small model predicts its prompts' caches (predict_kv); leave one of the passes out")
    count = len(decoder_layers(graph))
    early = after if isinstance(after, int) else max(1, math.floor(after * count))
    if early > count:
        raise CannotKeep(f"after {after}: {info.name} has {count} layers with attention")
    if early == count:
        return None
    before, layers = prompt_cost(graph), later_layers(graph, early)
    copies, parts = keep_tokens(graph, layers, share), groups(layers, share)
    kept, last = graph.meta["model"].layers, len(parts[-1])
    ragged = f", the last {last} of them one cache" if len(parts) > 1 and last != share else ""
    caches = f"{kept} caches in place of {count}{ragged}" if share > 1 else f"{kept} caches"
    said = f"all tokens of a prompt run {early} of {count} layers; {caches}; {prompt_cost(graph).against(before)}"
    return Change(parts, copies, said)
