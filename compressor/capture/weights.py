"""Find a model's weights: in a checkpoint folder, memory-mapped, or in a model in memory.

Nothing here reads a weight before it is needed: a tensor of a safetensors file is a view of the mapped file.  Without
weights, tensors are on the meta device, with the shapes and types that the files' headers state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compressor.capture.files import listed_files
from compressor.errors import CaptureError
from compressor.graph.provenance import Stored
from compressor.host.tensor_files import DTYPES, map_safetensors

if TYPE_CHECKING:
    from compressor.capture.experts.split import ExpertSlice

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
_STORED_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Spellings of old checkpoints (TensorFlow's names for a norm's two parameters).
_OLD_SUFFIXES = {".weight": ".gamma", ".bias": ".beta"}
# Buffers that models once stored and now compute; no weights.
_OBSOLETE = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")


@dataclass(frozen=True)
class WeightSource:
    """Named tensors that are produced when asked for."""

    place: str  # for messages
    names: frozenset[str]
    read: Callable[[str], Tensor]
    files: Mapping[str, Path] = field(default_factory=dict)  # the file of each tensor, where there are files
    unpacked_bytes: int = 0  # of those that are dequantised when they are read
    optional: frozenset[str] = frozenset()  # names that need no place in the model
    slices: Mapping[str, Callable[[int], Tensor]] = field(default_factory=dict)
    """Readers of single slices, by the names of tensors that are stored in slices along their first dimension."""
    slice_names: Mapping[str, Callable[[int], tuple[str, ...]]] = field(default_factory=dict)
    """Names in the files of the tensors that a slice has its rows from, one behind the other, by those of `slices`."""
    in_files: Mapping[str, str] = field(default_factory=dict)
    """The name in the files of each tensor that has another here; empty for one that is made from several."""
    quantized: Mapping[str, Path] = field(default_factory=dict)
    """The file of each tensor that is stored as codes, and dequantised when it is read."""

    def read_slice(self, name: str, place: int) -> Tensor:
        """Return one slice along a tensor's first dimension; of a mapped tensor, a view."""
        return self.slices[name](place) if name in self.slices else self.read(name)[place]


def module_source(model: nn.Module, weights: bool = True) -> WeightSource:
    """Return the tensors of a model in memory, shared, not copied.  Without ``weights``, their shapes and types."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    away = sorted({str(t.device) for t in tensors.values() if t.device.type != "cpu"})
    if away:
        raise CaptureError(f"the model's tensors are on {', '.join(away)}; move it with model.cpu() first")
    if not weights:
        tensors = {name: tensor.to("meta") for name, tensor in tensors.items()}
    return WeightSource(f"the given {type(model).__name__}", frozenset(tensors), tensors.__getitem__)


def folder_source(folder: Path, weights: bool = True) -> WeightSource:
    """Map the safetensors of a Hugging Face folder, one file or several with an index, into memory.

    Args:
        weights: False reads the files' headers only; tensors are on the meta device.
    Raises:
        CaptureError: there are none, one is missing, or one is not a safetensors file.
    """
    owner: dict[str, Path] = {}
    index = folder / INDEX_NAME
    if index.is_file():
        files = listed_files(index)
    else:
        files = [folder / SINGLE_NAME]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        why = f"only {', '.join(pickles[:3])}, which can run code when loaded" if pickles else "no weight file at all"
        raise CaptureError(
            f"{folder}: no safetensors in this folder ({why}); save the model with save_pretrained(..., "
            "safe_serialization=True) or fetch its safetensors"
        )
    handles: dict[Path, Any] = {}
    for file in files:
        handles[file] = _open(file)
        owner.update(dict.fromkeys(handles[file].keys(), file))
    mapped: dict[Path, dict[str, Tensor]] = {}

    def read(name: str) -> Tensor:
        file = owner[name]
        if file not in mapped:
            mapped[file] = _map(file)
        return mapped[file][name]

    def read_header(name: str) -> Tensor:
        return _read_header(handles[owner[name]], owner[name], name)

    return WeightSource(str(folder), frozenset(owner), read if weights else read_header, owner)


def _open(file: Path) -> Any:
    from safetensors import safe_open

    if not file.is_file():
        raise CaptureError(f"{file}: {INDEX_NAME} lists this file, and it is missing; fetch it")
    try:
        # The mapping for numpy is read-only: unlike torch's, it does not count as memory that may be written to, so
        # that a file of any size can be opened for its header.
        return safe_open(str(file), framework="numpy", device="cpu")
    except Exception as error:
        raise CaptureError(
            f"{file}: not a readable safetensors file ({error}); the download may be incomplete: fetch it again"
        ) from error


def _map(file: Path) -> dict[str, Tensor]:
    try:
        return map_safetensors(file)
    except (OSError, KeyError) as error:
        raise CaptureError(f"{file}: cannot be read ({error}); fetch the file again") from error


def _read_header(handle: Any, file: Path, name: str) -> Tensor:
    entry = handle.get_slice(name)
    if entry.get_dtype() not in DTYPES:
        raise CaptureError(f"{file}: {name} is stored as {entry.get_dtype()}; use a float16, bfloat16 or float32 "
                           "checkpoint")  # fmt: skip
    return torch.empty(entry.get_shape(), dtype=DTYPES[entry.get_dtype()], device="meta")


@dataclass
class WeightMap:
    """Which stored tensor serves each parameter and buffer of a model.

    A parameter may be stored under the name of one it is tied to, with or without the model's base prefix
    (``bert.``, ``transformer.``), and with an old spelling.
    """

    source: WeightSource
    stored: dict[str, str] = field(default_factory=dict)  # model's name -> stored name
    copies: dict[str, list[str]] = field(default_factory=dict)  # model's name -> all stored names, of equal values

    def stored_forms(
        self, transposed: set[str], plus_one: set[str], made: Iterable[str], slices: Mapping[str, ExpertSlice]
    ) -> dict[str, Stored]:
        """Say how each parameter lies in the files.

        Args:
            transposed, plus_one: names of parameters that a graph holds so.
            made: names of parameters that a graph makes of several stored ones.
            slices: of parameters that are a part of one.
        """
        found = {}
        for name, copies in self.copies.items():
            names = tuple(self.source.in_files.get(copy, copy) for copy in copies)
            reason = "" if all(names) else f"transformers makes it of other tensors as it loads {self.source.place}"
            found[name] = Stored(names, name in transposed, name in plus_one, reason)
        for name, part in slices.items():
            pieces = self.source.slice_names.get(self.stored[part.stored])
            if pieces is None or part.transposed:
                found[name] = Stored((), reason=f"it is a part of {part.stored}, which is stored as a whole")
            else:
                found[name] = Stored(pieces(part.expert), joined=True)
        return found | {name: Stored((), reason="capture makes it of stored tensors") for name in made}

    def read(self, name: str, shape: tuple[int, ...], place: int | None = None) -> Tensor:
        """Return the stored tensor for a name of the model, which must have this shape and a floating type.

        Args:
            shape: of the whole tensor.
            place: of the slice along the first dimension that is wanted; None reads all.
        """
        stored = self.stored[name]
        if place is None:
            tensor = self.source.read(stored)
        else:
            tensor, shape = self.source.read_slice(stored, place), shape[1:]
        if tuple(tensor.shape) != shape:
            raise CaptureError(
                f"{self.source.place}: {stored} has shape {list(tensor.shape)}, the configuration says {list(shape)}; "
                "config.json and the weights do not belong together"
            )
        if tensor.is_floating_point() and tensor.dtype not in _STORED_TYPES:
            raise CaptureError(f"{self.source.place}: {stored} is stored as {tensor.dtype}; use a float16, bfloat16 or "
                               "float32 checkpoint")  # fmt: skip
        return tensor.float() if tensor.dtype == torch.float64 else tensor


def map_weights(
    source: WeightSource,
    groups: Mapping[str, list[str]],
    needed: Iterable[str],
    prefix: str,
    ignored: Iterable[str],
    computed: Mapping[str, Tensor],
) -> WeightMap:
    """Match a model's names with the stored ones.

    Args:
        source: where the tensors are.
        groups: each tensor of the model, by its first name, with all names it is tied under.
        needed: first names that the graph really reads; others may be missing.
        prefix: the model class's ``base_model_prefix``.
        ignored: regular expressions of stored names that the model class is known to leave aside.
        computed: buffers that the model makes itself; old checkpoints store some of them, such as BERT's positions.
    Raises:
        CaptureError: names are missing, stored names have no place in the model, or a stored buffer differs from the
            model's own.
    """
    result, taken = WeightMap(source), set[str]()
    for first, names in groups.items():
        found = [key for name in names for key in spellings(name, prefix) if key in source.names]
        taken.update(found)
        if found:
            result.stored[first], result.copies[first] = found[0], found
            _check_equal(source, found)
    missing = sorted(set(needed) - set(result.stored))
    # A checkpoint of a model with a head, loaded as the body alone: the head's names lack the prefix.
    body_only = not any(name.startswith(f"{prefix}.") for name in groups)
    headed = body_only and any(key.startswith(f"{prefix}.") for key in taken)
    patterns = [re.compile(pattern) for pattern in ignored]
    repeated = {key: buffer for name, buffer in computed.items() for key in spellings(name, prefix)}
    unexpected = sorted(
        key
        for key in source.names - taken - source.optional
        if not (key in repeated and _equal(source.read(key), repeated[key]))
        and not (headed and not key.startswith(f"{prefix}."))
        and not _OBSOLETE.search(key)
        and not any(pattern.search(key) for pattern in patterns)
    )
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights are missing ({_some(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} weights have no place in the model ({_some(unexpected)})")
    if problems:
        raise CaptureError(
            f"{source.place}: {' and '.join(problems)}; config.json and the weights do not belong together, or "
            '"architectures" in config.json names another class'
        )
    return result


def spellings(name: str, prefix: str) -> list[str]:
    """List the names under which a parameter may be stored: with or without the base prefix, and as of old."""
    bare = name.removeprefix(f"{prefix}.")
    names = [name, bare if bare != name else f"{prefix}.{name}"] if prefix else [name]
    for new, old in _OLD_SUFFIXES.items():
        names += [n.removesuffix(new) + old for n in names if n.endswith(new)]
    return names


def _equal(stored: Tensor, buffer: Tensor) -> bool:
    """Return whether tensors have one shape and, where the stored values are at hand, the same values."""
    if stored.shape != buffer.shape:
        return False
    return stored.is_meta or torch.equal(stored.to(buffer.dtype), buffer)


def _check_equal(source: WeightSource, found: list[str]) -> None:
    """Raise a CaptureError unless the stored tensors are equal; without weights, unless they have the same shape."""
    if len(found) == 1:
        return
    first = source.read(found[0])
    for other in found[1:]:
        second = source.read(other)
        shared = first.is_meta or first.data_ptr() == second.data_ptr()
        if first.shape != second.shape or not (shared or torch.equal(first, second)):
            raise CaptureError(
                f"{source.place}: {found[0]} and {other} are one parameter of the model and differ; config.json and "
                "the weights do not belong together"
            )


def _some(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, under each of their names."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def tied_groups(model: nn.Module) -> dict[str, list[str]]:
    """Return the first name of each distinct parameter and buffer, with all its names."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model).items():
        groups.setdefault(id(tensor), []).append(name)
    return {names[0]: names for names in groups.values()}
