"""Number the layers of a model anew where whole ones have gone, in the names of tensors and in config.json.

model.layers.4.mlp.up_proj.weight   becomes   model.layers.3.mlp.up_proj.weight        num_hidden_layers: 5   becomes  4
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from compressor.graph.provenance import Stored

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LISTED = ("layer", "pattern")  # parts of the names of keys that hold a value for each layer
_COUNTED = "layer"  # of those that count them: num_hidden_layers, n_layer, decoder_layers
_MOST = 8  # combinations of keys that are tried


@dataclass(frozen=True)
class Lists:
    """Lists of layers of which some have gone: of each, by the name in front of the number, which are left and how many
    there were.
    """

    left: Mapping[str, tuple[tuple[int, ...], int]]

    def renamed(self, name: str) -> str | None:
        """Return a tensor's name with the number that its layer has now; None if that has gone."""
        for prefix, number, rest in _numbers(name):
            if prefix in self.left:
                kept, _ = self.left[prefix]
                if number not in kept:
                    return None
                name = f"{prefix}{kept.index(number)}{rest}"
        return name


def lists_of(graph: GraphModule) -> tuple[Lists, Lists]:
    """Return the lists of layers of which some have gone, by parameters' names, and by those of stored tensors."""
    stored: Mapping[str, Stored] = graph.meta.get("stored", {})
    live = {name for name, _ in graph.named_parameters()}
    lost = stored.keys() - live
    names = [[each for name in group if name in stored for each in stored[name].names] for group in (live, lost)]
    return _lists(live, lost), _lists(*names)


def _lists(live: Iterable[str], lost: Iterable[str]) -> Lists:
    """Find the numbers under which all parameters are lost, where others of the same list are live."""
    held: dict[str, set[int]] = {}
    gone: dict[str, set[int]] = {}
    for names, found in ((live, held), (lost, gone)):
        for name in names:
            for prefix, number, _ in _numbers(name):
                found.setdefault(prefix, set()).add(number)
    whole = {prefix: numbers - held[prefix] for prefix, numbers in gone.items() if prefix in held}
    return Lists(
        {prefix: (tuple(sorted(held[prefix])), len(held[prefix] | lost)) for prefix, lost in whole.items() if lost}
    )


def _numbers(name: str) -> Iterator[tuple[str, int, str]]:
    """Yield the numbers in a dotted name, each between what is in front of it and what is behind."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            front, behind = (".".join(each) for each in (parts[:i], parts[i + 1 :]))
            yield f"{front}." if front else "", int(part), f".{behind}" if behind else ""


def fewer_layers(content: Mapping[str, Any], config: PreTrainedConfig, lists: Lists) -> Iterator[dict[str, Any]]:
    """Yield contents of config.json that may describe a model without those layers, the fewest changes first.

    Args:
        content: of a config.json that has all of them.
        config: what transformers reads in the model's own.
    """
    if not lists.left:
        yield dict(content)
        return
    for kept, count in lists.left.values():
        content = _shortened(_with_types(content, config, count), kept, count)
    news = {count: len(kept) for kept, count in lists.left.values()}
    places = [keys for keys in _places(content) if _at(content, keys) in news]
    for chosen in sorted(product((True, False), repeat=len(places)), key=sum)[1 : _MOST + 1]:
        changed = copy.deepcopy(dict(content))
        for keys, is_changed in zip(places, chosen, strict=True):
            if is_changed:
                inner = changed
                for key in keys[:-1]:
                    inner = inner[key]
                inner[keys[-1]] = news[inner[keys[-1]]]
        yield changed


def _with_types(content: Mapping[str, Any], config: PreTrainedConfig, count: int) -> dict[str, Any]:
    """State the kinds of layers that a class makes of a pattern, which fewer layers would shift."""
    types, known = getattr(config, "layer_types", None), dict(content)
    return known | {"layer_types": list(types)} if isinstance(types, list) and len(types) == count else known


def _shortened(content: Mapping[str, Any], kept: tuple[int, ...], count: int) -> dict[str, Any]:
    """Leave out of each list with a value for each layer those of the layers that have gone."""
    found = {}
    for key, value in content.items():
        if isinstance(value, dict):
            value = _shortened(value, kept, count)
        elif isinstance(value, list) and len(value) == count and any(word in key for word in _LISTED):
            value = [value[number] for number in kept]
        found[key] = value
    return found


def _places(content: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _places(value, (*above, key))
        elif type(value) is int and _COUNTED in key:
            yield *above, key


def _at(content: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        content = content[key]
    return content
