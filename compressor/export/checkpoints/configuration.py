"""Find the values of config.json with which a model's class is as wide as a graph that passes have made smaller.

intermediate_size: 512   becomes  384        num_key_value_heads: 4   becomes  3, and head_dim is stated
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from compressor.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ATTENTION = (torch.ops.compressor.cached_attention.default, torch.ops.compressor.masked_attention.default)
_MOST = 32  # combinations of keys that are tried
_WIDTHS = ("inner", "intermediate", "ffn")
"""Parts of the names of keys that state a width, and may be null where it follows from another one."""

Shape = tuple[int, ...]
Keys = tuple[str, ...]
"""Keys on the way to a value of config.json."""


def configurations(
    stated: Mapping[str, Any], config: PreTrainedConfig, graph: GraphModule, shapes: Mapping[str, tuple[Shape, Shape]]
) -> Iterator[dict[str, Any]]:
    """Yield contents of config.json that may describe a graph, those with the fewest changes first.

    Args:
        stated: the model's config.json.
        config: what transformers reads in it.
        graph: made smaller.
        shapes: by stored tensor, its shape and what it is to be.
    Raises:
        UsageError: layers differ, where a configuration has one number for all.
    """
    heads, explained = _heads(config, graph)
    widths: dict[int, dict[int, str]] = defaultdict(dict)
    whole: dict[int, str] = {}
    for name, (old, new) in shapes.items():
        for size, left in zip(old, new, strict=True):
            if size == left:
                whole.setdefault(size, name)
            elif (size, left) not in explained:
                widths[size].setdefault(left, name)
    places = list(_numbers(stated, set(widths)))
    for size, lefts in widths.items():
        found = {**lefts, **({size: whole[size]} if size in whole else {})}
        if len(found) > 1 and sum(_value(stated, keys) == size for keys in places) == 1:
            told = " and ".join(f"{left} ({name})" for left, name in sorted(found.items())[:2])
            raise UsageError(f"layers keep {told} of {size} channels, and config.json has one number for all of them")
    news = {left for found in widths.values() for left in found}
    options = [[None, *sorted(widths.get(_value(stated, keys) or 0, news))] for keys in places]
    combinations = sorted(product(*options), key=lambda values: sum(value is not None for value in values))
    for values in combinations[:_MOST]:
        changed = copy.deepcopy(dict(stated))
        for keys, value in zip(places, values, strict=True):
            if value is not None:
                _set(changed, keys, value)
        for key, value in heads.items():
            _set(changed, next(_holders(stated, key), (key,)), value)
        yield changed


def changes(stated: Mapping[str, Any], changed: Mapping[str, Any], inside: str = "") -> list[str]:
    """List what is another in a config.json, as ``key value`` each."""
    found = []
    for key, value in changed.items():
        if isinstance(value, dict) and isinstance(stated.get(key), dict):
            found += changes(stated[key], value, f"{inside}{key}.")
        elif stated.get(key) != value:
            found.append(f"{inside}{key} {value}")
    return found


def _heads(config: PreTrainedConfig, graph: GraphModule) -> tuple[dict[str, int], set[tuple[int, int]]]:
    """Return the keys for numbers of heads that change, and the widths of linears that follow from them."""
    counts = set()
    for node in graph.graph.nodes:
        if node.target in _ATTENTION:
            queries, keys = (part.meta["val"].shape for part in node.args[:2])
            counts.add((int(queries[1]), int(keys[1]), int(queries[3])))
    text = config.get_text_config()
    old = getattr(text, "num_attention_heads", None)
    if not counts or type(old) is not int:
        return {}, set()
    if len(counts) > 1:
        least, most = min(counts), max(counts)
        raise UsageError(
            f"layers keep {least[0]} and {most[0]} heads ({least[1]} and {most[1]} of keys), and config.json has one "
            "number for all of them"
        )
    ((queries, keys, width),) = counts
    old_keys = getattr(text, "num_key_value_heads", None) or old
    if (queries, keys) == (old, old_keys):
        return {}, set()
    names = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": width}
    alias = type(text).attribute_map
    # A class may read a width of heads that is not among its keys.
    stated = [name for name in names if hasattr(text, name) or name == "head_dim"]
    known = {alias.get(name, name): names[name] for name in stated}
    all_old, all_new = old + 2 * old_keys, queries + 2 * keys
    pairs = ((old, queries), (old_keys, keys), (all_old, all_new))
    return known, {(before * width, after * width) for before, after in pairs}


def _numbers(stated: Mapping[str, Any], sizes: set[int], above: Keys = ()) -> Iterator[Keys]:
    """Yield where one of some sizes stands, or none where a width may stand."""
    for key, value in stated.items():
        if isinstance(value, dict):
            yield from _numbers(value, sizes, (*above, key))
        elif (type(value) is int and value in sizes) or (
            value is None and sizes and any(word in key for word in _WIDTHS)
        ):
            yield *above, key


def _holders(stated: Mapping[str, Any], wanted: str, above: Keys = ()) -> Iterator[Keys]:
    for key, value in stated.items():
        if key == wanted:
            yield *above, key
        elif isinstance(value, dict):
            yield from _holders(value, wanted, (*above, key))


def _value(stated: Mapping[str, Any], keys: Keys) -> Any:
    for key in keys:
        stated = stated[key]
    return stated


def _set(content: dict[str, Any], keys: Keys, value: int) -> None:
    for key in keys[:-1]:
        content = content[key]
    content[keys[-1]] = value
