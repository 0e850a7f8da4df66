"""Override a recipe from the command line: ``--set KEY=VALUE``."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from compressor.errors import RecipeError
from compressor.recipe.located_yaml import DEEPEST, KeyPath, Origin, Source, nearest, parse_value


def apply_override(source: Source, text: str) -> None:
    """Apply ``dotted.key=value`` to the data; the value is read as YAML.

    ``passes.<name>.<option>`` addresses a pass by its name, ``passes.<index>.<option>`` by its place, and
    ``passes.<index>.<name>.<option>``, as errors write it, by both.

    Raises:
        RecipeError: there is no ``=``, the value is not YAML, or the key is too long or leads nowhere.
    """
    origin = Origin(f"--set {text[:80]!r}", 0, Path())
    dotted, equals, value_text = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"{origin}: write it as KEY=VALUE, such as passes.gptq.group_size=64")
    if len(keys) > DEEPEST:
        raise RecipeError(f"{origin}: {len(keys)} keys within one another; a recipe has at most {DEEPEST} levels")
    set_value(source, keys, value_text, origin)


def set_value(source: Source, keys: list[str], value_text: str, origin: Origin) -> None:
    """Put a YAML value at a key, and create missing mappings on the way."""
    value, origins = parse_value(value_text, origin)
    path: KeyPath = ()
    if keys[0] == "passes" and len(keys) > 1:
        path = _pass_path(source, keys[1], origin)
        keys = keys[2:]
        if len(keys) > 1 and keys[0] == path[-1]:  # `passes.0.rtn.scheme`, as errors write it
            keys = keys[1:]
        if not keys:
            raise RecipeError(f"{origin}: name an option of the pass, such as passes.{path[-1]}.scheme=W4A16_G128")
    holder: Any = source.data
    for key in path:
        holder = holder[key]
    for key, following in pairwise(keys):
        if holder.get(key) is None:
            holder[key] = {}
            source.origins[(*path, key)] = origin
        elif holder[key] == following:  # `target: x86` is short for `target: {x86: {}}`
            holder[key] = {following: {}}
        holder, path = holder[key], (*path, key)
        if not isinstance(holder, dict):
            raise RecipeError(f"{origin}: {'.'.join(map(str, path))} is {holder!r:.80}, which has no keys of its own")
    source.graft((*path, keys[-1]), value, Source({}, origins))


def _pass_path(source: Source, which: str, origin: Origin) -> KeyPath:
    """Return the path of the options of one pass, found by name or by index."""
    passes = source.data.get("passes")
    if not isinstance(passes, list) or not all(_name(step) for step in passes):
        raise RecipeError(f"{origin}: the recipe's passes are not a list of `name: {{options}}`")
    names = [str(_name(step)) for step in passes]
    by_name = [i for i, name in enumerate(names) if name == which]
    places = [i for i in range(len(names)) if str(i) == which] or by_name
    if not places:
        known = nearest(which, set(names)) if names else "the recipe has no passes"
        raise RecipeError(f"{origin}: the recipe has no pass {which!r:.80}; {known}")
    if len(places) > 1:
        options = " or ".join(f"passes.{place}" for place in places)
        raise RecipeError(f"{origin}: the recipe has {which!r} {len(places)} times; address one as {options}")
    place = places[0]
    name = names[places[0]]
    if not isinstance(passes[place], dict):
        passes[place] = {name: {}}
    elif passes[place][name] is None:
        passes[place][name] = {}
    if not isinstance(passes[place][name], dict):
        raise source.error(("passes", place, name), f"{passes[place][name]!r:.80} is not a mapping of options")
    return ("passes", place, name)


def _name(step: Any) -> str | None:
    if isinstance(step, str):
        return step
    if isinstance(step, dict) and len(step) == 1:
        return str(next(iter(step)))
    return None


def set_device(source: Source, device: str) -> None:
    """Put ``--device`` among the options of the recipe's target, which says whether it has devices."""
    target = source.data.get("target")
    name = next(iter(target), None) if isinstance(target, dict) else target or "x86"
    set_value(source, ["target", str(name), "device"], json.dumps(device), Origin("--device", 0, Path()))
