"""Give stored weights the names of today's model class, by the conversions that transformers applies while it loads.

    embed_out.weight                      becomes   lm_head.weight                            (a renaming)
    layers.0.attn.Wqkv.weight [3 n, m]    becomes   layers.0.self_attn.{q,k,v}_proj.weight    (rows of the mapped file)

A conversion is made when the weight is read: rows of a memory-mapped weight stay views of the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compressor.capture.weights import WeightSource
from compressor.errors import CaptureError, first_line

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
    from transformers.conversion_mapping import get_model_conversion_mapping as mapping_of
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions: Any = mapping_of
    transforms = conversions(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: t for t in converters for pattern in t.source_patterns}
    known, prefix = set(model.state_dict()), f"{model.base_model_prefix}."

    def fits(name: str) -> bool:
        return name in known or name.removeprefix(prefix) in known or prefix + name in known

    rename: Any = rename_source_key
    readers: dict[str, Callable[[], Tensor]] = {}
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for stored in sorted(source.names, key=_natural):
        name, pattern = rename(stored, renamings, converters)
        if fits(stored) or not fits(name):
            readers[stored] = partial(source.read, stored)
        elif pattern is None:
            readers[name] = partial(source.read, stored)
        else:
            groups[name][pattern].append(stored)
    for first, collected in groups.items():
        converter = by_pattern[next(iter(collected))]
        targets = [first.replace(converter.target_patterns[0], target) for target in converter.target_patterns]
        for target in targets:
            readers[target] = partial(_convert, source, converter, first, dict(collected), target, model)
    return WeightSource(source.place, frozenset(readers), lambda name: readers[name]())


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
