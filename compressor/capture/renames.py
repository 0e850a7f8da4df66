"""Give stored weights the names of today's model class, by the conversions that transformers applies while it loads.

    embed_out.weight                      becomes   lm_head.weight                            (a renaming)
    layers.0.attn.Wqkv.weight [3 n, m]    becomes   layers.0.self_attn.{q,k,v}_proj.weight    (rows of the mapped file)
    experts.{0,1,...}.w2.weight [m, n]    becomes   experts.down_proj [E, m, n]               (read expert by expert)

A conversion is made when the weight is read: rows of a memory-mapped weight stay views of the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from compressor.capture.weights import WeightSource
from compressor.errors import CaptureError, first_line
from compressor.host.cache import cache_folder
from compressor.host.tensor_files import Spill, release

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def renamed_source(source: WeightSource, model: PreTrainedModel) -> WeightSource:
    """Return the source under the names that transformers' own loading would give its weights.

    A stored name that the conversion does not turn into a name of the model is left as it is.

    Args:
        source: the checkpoint's tensors.
        model: built from its configuration.
    Raises:
        CaptureError: when a weight is read whose conversion fails.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    known, prefix = set(model.state_dict()), f"{model.base_model_prefix}."

    def fits(name: str) -> bool:
        return name in known or name.removeprefix(prefix) in known or prefix + name in known

    rename = cast("Callable[..., Any]", rename_source_key)
    readers: dict[str, Callable[[], Tensor]] = {}
    slices: dict[str, Callable[[int], Tensor]] = {}
    pieces: dict[str, Callable[[int], tuple[str, ...]]] = {}
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    in_files: dict[str, str] = {}
    for stored in sorted(source.names, key=_natural):
        name, pattern = rename(stored, renamings, converters)
        if fits(stored) or not fits(name):
            readers[stored] = partial(source.read, stored)
        elif pattern is None:
            readers[name], in_files[name] = partial(source.read, stored), stored
        else:
            groups[name][pattern].append(stored)
    for first, collected in groups.items():
        converter = by_pattern[next(iter(collected))]
        targets = [first.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
        for target in targets:
            in_files[target] = ""
            readers[target] = partial(_convert, source, converter, first, dict(collected), target, model)
            if _merges_slices(converter, collected):
                slices[target] = partial(_convert_slice, source, converter, first, dict(collected), target, model)
                if {operation.dim for operation in cast("list[Any]", converter.operations[1:])} <= {1}:  # rows of each
                    pieces[target] = partial(_names_of_slice, converter, dict(collected))
    return replace(
        source,
        names=frozenset(readers),
        read=lambda name: readers[name](),
        slices=slices,
        slice_names=pieces,
        in_files=in_files,
    )


def _names_of_slice(converter: Any, collected: Mapping[str, Sequence[str]], place: int) -> tuple[str, ...]:
    """Name the stored tensors of one slice, in the order in which they are concatenated: that of the patterns."""
    return tuple(collected[pattern][place] for pattern in converter.source_patterns if pattern in collected)


def _merges_slices(converter: Any, collected: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a conversion stacks tensors along a new first dimension, and then leaves that as it is.

    So do the conversions of experts: slice ``e`` of the result follows from the stored tensors of expert ``e`` alone.
    """
    kinds = [type(operation).__name__ for operation in converter.operations]
    stacks = kinds[:1] == ["MergeModulelist"] and kinds[1:] in ([], ["Concatenate"])
    dims = [operation.dim for operation in converter.operations]
    return stacks and dims[0] == 0 and 0 not in dims[1:] and len({len(names) for names in collected.values()}) == 1


def _convert_slice(
    source: WeightSource,
    converter: Any,
    first: str,
    collected: Mapping[str, Sequence[str]],
    target: str,
    model: PreTrainedModel,
    place: int,
) -> Tensor:
    """Read one slice along the first dimension of what :func:`_convert` returns.

    It is a view of the mapped file if one stored tensor is all of it, else it lies in a mapped file in the cache
    folder: a model's experts together may exceed the memory.
    """
    of_this = {pattern: [names[place]] for pattern, names in collected.items()}
    if len(of_this) == 1 and len(converter.operations) == 1:
        return source.read(next(iter(of_this.values()))[0])
    made = _convert(source, converter, first, of_this, target, model)[0]
    if made.is_meta:
        return made
    held = Spill(cache_folder() / "spilled", "weights of experts, which are stored in pieces").empty(
        made.shape, made.dtype
    )
    held.copy_(made)
    release([held, *(source.read(name) for names in of_this.values() for name in names)])
    return held


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts ``10`` after ``9``: converters stack tensors in the order of their numbers."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _convert(
    source: WeightSource,
    converter: Any,
    first: str,
    collected: dict[str, list[str]],
    target: str,
    model: PreTrainedModel,
) -> Tensor:
    """Read the stored tensors of a conversion and return one of its results.

    Args:
        first: the name of its first result in the model.
        collected: stored names, by the pattern that they matched.
        target: the name of the result that is asked for.
    """
    values: dict[str, Any] = {pattern: [source.read(name) for name in names] for pattern, names in collected.items()}
    try:
        for operation in converter.operations:
            values = operation.convert(
                values,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=first,
                model=model,
                config=model.config,
                missing_keys=None,
            )
        (found,) = [v for name, v in values.items() if first.replace(converter.target_patterns[0], name) == target]
    except Exception as error:  # the conversion is transformers' code
        names = ", ".join(name for names in collected.values() for name in names)
        raise CaptureError(
            f"{source.place}: {names:.200} cannot be turned into {target} ({type(error).__name__}: "
            f"{first_line(error)}); load the model with transformers and save it again"
        ) from error
    result: Tensor = found[0] if isinstance(found, list) else found
    return result
