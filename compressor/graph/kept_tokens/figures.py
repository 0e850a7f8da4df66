"""Count what a prompt's token costs a decoder: operations, and the bytes of its keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from compressor.formats.cache import cache_bytes_per_token
from compressor.graph.costs import node_costs
from compressor.graph.model import ModelInfo, weight_bytes

_PROMPT = 512


@dataclass(frozen=True)
class PromptCost:
    """Costs of one decoder.

    Attributes:
        tokens: of the prompt, whose last one's logits are wanted.
        multiply_adds: of linears and attention, for each of them.
        cache_bytes: of the keys and values of one token.
        weight_bytes: of all parameters.
    """

    tokens: int
    multiply_adds: float
    cache_bytes: int
    weight_bytes: int

    def against(self, before: PromptCost) -> str:
        """Say what has become of these costs."""
        share = self.multiply_adds / before.multiply_adds
        return (
            f"a prompt of {self.tokens} tokens takes {self.multiply_adds / 1e6:.4g} million multiply-adds a token in "
            f"place of {before.multiply_adds / 1e6:.4g} ({share:.1%}), its keys and values {self.cache_bytes} bytes a "
            f"token in place of {before.cache_bytes}, and weights {self.weight_bytes} bytes in place of "
            f"{before.weight_bytes}"
        )


def prompt_cost(graph: GraphModule, tokens: int = _PROMPT) -> PromptCost:
    """Count a decoder's costs for a prompt of so many tokens, or as many as it has positions."""
    info: ModelInfo = graph.meta["model"]
    tokens = min(tokens, info.max_positions or tokens)
    costs = node_costs(graph, 1, tokens, rows=1).values()
    products = sum(cost.flops for cost in costs if cost.kind in ("linear", "attention")) / 2
    cache = cache_bytes_per_token(info.cache_format, info.cache_heads, info.head_dim)
    return PromptCost(tokens, products / tokens, cache, weight_bytes(graph))
