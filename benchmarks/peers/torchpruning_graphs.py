"""Torch-Pruning on modules of many kinds, for benchmarks/pruned_graphs.py: as in its examples, without rules of ours.

Runs where both tools can be imported.  Modules of transformers take its recipe for language models: heads go whole, as
many query heads for each head of keys, and the modules' counts of heads are set afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn

_OF_HEADS = {"q_proj": 0, "query": 0, "k_proj": 1, "key": 1, "v_proj": 1, "value": 1}
"""Name of a linear -> whether its heads are those of keys and values."""


def prune(model: nn.Module, inputs: Sequence[Tensor], ratio: float) -> nn.Module:
    """Remove a share of all channels, and of heads, but for what the last linear or convolution writes."""
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    model.requires_grad_(True)
    last = [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)][-1]
    heads: dict[nn.Module, int] = {}
    for name, one in model.named_modules():
        kind = _OF_HEADS.get(name.rpartition(".")[2])
        if kind is not None and config is not None:
            count = config.num_attention_heads
            heads[one] = getattr(config, "num_key_value_heads", count) if kind else count
        elif name == "qkv":
            heads[one] = 4
    pruner = tp.pruner.BasePruner(
        model, tuple(inputs), importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=ratio,
        ignored_layers=[last] if config is None or hasattr(model, "lm_head") else [], num_heads=heads,
        prune_num_heads=bool(heads), prune_head_dims=False, head_pruning_ratio=ratio,
    )  # fmt: skip
    pruner.step()
    _state_heads(model)
    return model.requires_grad_(False)


def _state_heads(model: nn.Module) -> None:
    """Set what attention modules of transformers say about their heads."""
    for one in model.modules():
        held: Any = one
        if hasattr(one, "q_proj") and hasattr(one, "head_dim"):
            held.num_heads = held.q_proj.out_features // held.head_dim
            held.num_key_value_groups = held.num_heads // max(1, held.k_proj.out_features // held.head_dim)
        elif hasattr(one, "query") and hasattr(one, "attention_head_size"):
            held.num_attention_heads = held.query.out_features // held.attention_head_size
            held.all_head_size = held.query.out_features


@torch.no_grad()
def zeros(model: nn.Module, example: Tensor, writers: Sequence[str]) -> str:
    """Set half of some channels to zero and remove them: return the largest relative change, or how it fails.

    Args:
        writers: modules that write the channels; the removal begins at the first.
    """
    gone: list[int] = []
    for writer in writers:
        one: Any = model.get_submodule(writer)
        rows, parts = one.weight.shape[0], 3 if writer == "qkv" else 1
        zero = [part * rows // parts + i for part in range(parts) for i in range(rows // parts // 2)]
        gone = gone or zero
        for value in (one.weight, one.bias, getattr(one, "running_mean", None)):
            if value is not None:
                value[zero] = 0.0
    expected = model(example)
    try:
        with torch.enable_grad():
            model.requires_grad_(True)
            graph = tp.DependencyGraph().build_dependency(model, example_inputs=example)
            first = model.get_submodule(writers[0])
            kind = tp.prune_linear_out_channels if isinstance(first, nn.Linear) else tp.prune_conv_out_channels
            graph.get_pruning_group(first, kind, idxs=gone).prune()
        found = model(example)
    except Exception as error:
        return f"no: {(str(error).strip().splitlines() or [''])[0][:100]}"
    return f"{float((found - expected).abs().max() / expected.abs().max()):.0e}"
