"""Write a captured graph whose weights are not packed as a Hugging Face folder: the model's own names, files and types.

config.json         the model's, with other widths or numbers of heads
*.safetensors       the same tensors in the same files, of the graph's values; what the graph does not read is copied,
                    but for whole layers that have gone: those behind them get their numbers
all other files     copied
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.checkpoints.open_checkpoint import SIDE_FILES, dense_folder, is_model_folder, open_checkpoint
from compressor.capture.weights import INDEX_NAME, SINGLE_NAME, WeightSource
from compressor.errors import CaptureError, CompressorError, UsageError, VerificationError, first_line
from compressor.export.checkpoints.configuration import Shape, changes, configurations
from compressor.export.checkpoints.fewer_layers import Lists, fewer_layers, lists_of
from compressor.export.checkpoints.programs import why_different
from compressor.export.checkpoints.stored import CONFIG_NAME, StoredModel, Writer, write_safetensors_files
from compressor.export.manifest import listing, with_total
from compressor.graph.model import ModelInfo
from compressor.graph.provenance import Stored
from compressor.graph.rewrite import held_tensor
from compressor.host.cache import cache_folder, partial_folder

_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*")
_MANIFEST = "manifest.json"
_WRITTEN = {CONFIG_NAME, INDEX_NAME, _MANIFEST, *SIDE_FILES}
"""Files of which a written folder has its own, or that state how the former weights were quantised."""


@dataclass(frozen=True)
class FolderForm:
    """Tell how a graph is written as a folder.

    Attributes:
        config: content of config.json.
        changes: what is another in it, as ``key value`` each.
        trust_remote_code: whether the model's own code may run.
    """

    config: Mapping[str, Any]
    changes: tuple[str, ...]
    trust_remote_code: bool

    @property
    def words(self) -> str:
        """Say what is written."""
        told = f"config.json has {', '.join(self.changes)}" if self.changes else "config.json stays as it is"
        return f"a Hugging Face folder; {told}"

    def write(self, folder: Path, graph: GraphModule) -> None:
        """See :func:`write_folder`."""
        write_folder(folder, graph, self)


def plan_folder(graph: GraphModule, trust_remote_code: bool = False) -> FolderForm:
    """Find the configuration with which transformers makes a graph's program; weights are not read.

    Raises:
        UsageError: there is none, or parameters do not lie in the model's folder one by one; it says ``bundle only``.
    """
    try:
        return _plan(graph, trust_remote_code)
    except UsageError as error:
        raise UsageError(
            f"bundle only: {error}; leave `checkpoint` out, or change the passes before the first that packs weights"
        ) from error


def _plan(graph: GraphModule, trust_remote_code: bool) -> FolderForm:
    source = _source(graph)
    fitted = _shapes(graph, source)
    shapes = {name: (tuple(source.read(name).shape), new) for name, new in fitted.items()}
    stated = dense_folder(_folder(graph), weights=False).config
    config = open_checkpoint(_folder(graph), trust_remote_code, weights=False).config
    reason, lists = "", lists_of(graph)
    for wide in configurations(stated, config, graph, shapes):
        for content in fewer_layers(wide, config, lists[1]):
            unfit = _why_unfit(content, {str(lists[1].renamed(name)): shape for name, shape in fitted.items()})
            reason = unfit or _why_not(graph, source, fitted, content, trust_remote_code, lists)
            if not reason:
                return FolderForm(content, tuple(changes(stated, content)), trust_remote_code)
    raise UsageError(f"no numbers of config.json describe it ({reason})")


def write_folder(
    folder: Path,
    graph: GraphModule,
    form: FolderForm,
    packed: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
    more: Mapping[str, Any] = MappingProxyType({}),
    write: Writer = write_safetensors_files,
) -> dict[str, tuple[int, int]]:
    """Write a graph into an empty folder, and capture that again: it has to be the same program.

    Args:
        packed: of each packed weight, by its name in the model's files, the tensors that are stored for it, by the last
            part of their names.
        more: what else config.json says.
        write: writes the weights.
    Returns:
        bytes and elements of each weight, by its name in the model's class.
    Raises:
        VerificationError: it is another.
    """
    model = _stored_model(graph, form, packed, more)
    _copy_others(model.origin, folder)
    written = write(folder, model)
    again = capture(folder, trust_remote_code=form.trust_remote_code)
    if reason := why_different(graph, again, lists_of(graph)[0].renamed):
        raise VerificationError(f"checkpoint: the folder is not the graph that was written: {reason}")
    manifest = {"format": "compressor checkpoint 1", "files": listing(folder, dict(written.hashes))}
    (folder / _MANIFEST).write_bytes(with_total(manifest))
    return {name: (size, model.tensors[name].numel()) for name, size in written.bytes.items()}


def why_unwritable(graph: GraphModule, form: FolderForm, write: Writer) -> str:
    """Say why a folder that ``write`` fills would be another program, by a draft without a weight; empty if it is not.

    Raises:
        UsageError: ``write`` has no place for a weight.
    """
    source = _source(graph)
    return _why_not(graph, source, _shapes(graph, source), form.config, form.trust_remote_code, lists_of(graph), write)


def _stored_model(
    graph: GraphModule, form: FolderForm, packed: Mapping[str, Mapping[str, Tensor]], more: Mapping[str, Any]
) -> StoredModel:
    headers, source, held = _source(graph), dense_folder(_folder(graph), weights=True).source, _holders(graph)
    content = {**form.config, **more}
    tensors = {name: (headers if name in held else source).read(name) for name in source.names}
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    for name, (parameter, stored) in held.items():
        tensors[name] = _as_stored(held_tensor(graph, parameter).detach(), stored, name, tensors[name].shape)
    parts = {name: packed[name] for name in held if name in packed}
    inexact = {name for name in held.keys() - parts.keys() if not _is_exact(tensors[name], types[name])}
    if inexact:  # trained in float32, say; transformers loads all in the type of config.json
        types |= dict.fromkeys(inexact, torch.float32)
        content = {key: value for key, value in content.items() if key != "torch_dtype"} | {"dtype": "float32", **more}
    files = _files(source, lists_of(graph)[1])
    new = {name: here for names in files.values() for name, here in names.items()}
    return StoredModel(
        _folder(graph),
        content,
        {here: tensors[name] for name, here in new.items()},
        {here: types[name] for name, here in new.items()},
        {new[name]: each for name, each in parts.items() if name in new},
        {here: file for file, names in files.items() for here in names.values()},
        frozenset(here for name, here in new.items() if name not in held),
    )


def _files(source: WeightSource, lists: Lists) -> dict[str, dict[str, str]]:
    """Return, for the name of each file of the model, its tensors that stay, and the names that they are to have."""
    found: dict[str, dict[str, str]] = {}
    for name in source.names:
        if (new := lists.renamed(name)) is not None:
            file = source.quantized[name] if name in source.quantized else source.files[name]
            found.setdefault(SINGLE_NAME if file.suffix == ".gguf" else file.name, {})[name] = new
    return found


def _folder(graph: GraphModule) -> Path:
    info: ModelInfo = graph.meta["model"]
    if info.source is None or "stored" not in graph.meta or not is_model_folder(info.source):
        raise UsageError(f"{info.name} does not come from a folder with config.json and safetensors")
    return info.source


def _source(graph: GraphModule) -> WeightSource:
    """Return the tensors of a graph's folder, as the dense ones that they stand for, on the meta device."""
    return dense_folder(_folder(graph), weights=False).source


def _holders(graph: GraphModule) -> dict[str, tuple[str, Stored]]:
    """Return the parameter that holds each stored tensor.

    Raises:
        UsageError: a parameter is not a stored tensor.
    """
    stored: Mapping[str, Stored] = graph.meta["stored"]
    found: dict[str, tuple[str, Stored]] = {}
    for name, _ in graph.named_parameters():
        form = stored.get(name) or Stored((), reason="it is not a tensor of the model's folder")
        if form.reason:
            raise UsageError(f"{name}: {form.reason}")
        found |= {each: (name, form) for each in form.names}
    return found


def _shapes(graph: GraphModule, source: WeightSource) -> dict[str, Shape]:
    """Return the shape that each stored tensor is to have, of those that the graph holds."""
    return {
        name: tuple(_as_stored(held_tensor(graph, parameter).to("meta"), form, name, source.read(name).shape).shape)
        for name, (parameter, form) in _holders(graph).items()
    }


def _as_stored(value: Tensor, form: Stored, name: str, stored: torch.Size) -> Tensor:
    """Return a parameter's value as the file holds it.

    Args:
        name: of the tensor in the file.
        stored: the shape that the file's tensor has now; that of a convolution tells its kernel.
    Raises:
        UsageError: it is held as something else.
    """
    value = form.piece(value.t() if form.transposed else value, name)
    if value.dim() == 2 < len(stored) < 5:  # [out, rows * columns * in], of a convolution
        kernel = stored[2:]
        value = value.reshape(len(value), *kernel, -1).movedim(-1, 1)
    if value.dim() != len(stored):
        raise UsageError(f"{name} is stored as {list(stored)}, and held as {list(value.shape)}")
    return value - 1 if form.plus_one else value


def _is_exact(value: Tensor, dtype: torch.dtype) -> bool:
    return value.dtype == dtype or torch.equal(value.to(dtype).to(value.dtype), value)


def _why_unfit(content: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str:
    """Say why the class that a configuration names has not these shapes, as far as names tell; empty if it may."""
    import transformers
    from transformers import AutoConfig

    architecture: Any = getattr(transformers, (content.get("architectures") or [""])[0], None)
    if architecture is None or content.get("auto_map"):
        return ""
    try:
        config = AutoConfig.for_model(**content)
        with torch.device("meta"):
            made = architecture(config).state_dict()
    except Exception as error:  # transformers' own checks: a hidden size that the heads do not divide, say
        return f"transformers: {' '.join(str(error).split()):.200}"
    other = (name for name, shape in shapes.items() if name in made and tuple(made[name].shape) != shape)
    return next((f"{name} would be {list(made[name].shape)}, and is {list(shapes[name])}" for name in other), "")


def _why_not(
    graph: GraphModule,
    source: WeightSource,
    shapes: Mapping[str, Shape],
    content: Mapping[str, Any],
    trust_remote_code: bool,
    lists: tuple[Lists, Lists],
    write: Writer = write_safetensors_files,
) -> str:
    """Say why a configuration does not describe a graph, by a folder of it whose tensors are holes; empty if it does.

    Args:
        shapes: that stored tensors are to have, as :func:`_shapes` gives them.
        lists: as :func:`compressor.export.checkpoints.fewer_layers.lists_of` gives them.
    Raises:
        UsageError: the model's own folder cannot be written as it is.
    """
    places = [(name, new, file) for file, names in _files(source, lists[1]).items() for name, new in names.items()]
    tensors, held = {name: source.read(name) for name, _, _ in places}, _holders(graph)
    model = StoredModel(
        _folder(graph),
        content,
        {n: torch.empty(shapes.get(name, tensors[name].shape), device="meta") for name, n, _ in places},
        {new: tensors[name].dtype for name, new, _ in places},
        {},
        {new: file for _, new, file in places},
        frozenset(new for name, new, _ in places if name not in held),
    )
    drafts = cache_folder() / "drafts"
    drafts.mkdir(parents=True, exist_ok=True)
    with partial_folder(drafts, "checkpoint") as folder:
        _copy_others(model.origin, folder)
        write(folder, model)
        try:
            found = capture(folder, trust_remote_code=trust_remote_code, weights=False)
        except CompressorError as error:
            if not isinstance(error, CaptureError):
                raise
            return first_line(error).removeprefix(f"{folder}: ")
        return why_different(graph, found, lists[0].renamed)


def _copy_others(source: Path, folder: Path) -> None:
    """Copy what is neither weights nor their index nor the configuration."""
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in _WRITTEN:
                shutil.copyfile(file, folder / file.name)
