"""Open what is converted: a bundle, or a folder of quantised weights, as a dense graph that knows what was packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.checkpoints.dense_weights import weight_spill
from compressor.capture.checkpoints.gguf.gguf_models import find_gguf
from compressor.capture.checkpoints.open_checkpoint import dense_folder
from compressor.errors import UsageError
from compressor.export.exchange.bundle_graph import bundle_graph
from compressor.export.exchange.dense_form import dense_form, list_packed, spilled_value
from compressor.formats.packing import PackedWeight
from compressor.graph.provenance import Stored
from compressor.host.json_files import read_object


@dataclass(frozen=True)
class Original:
    """Hold a model whose weights are stored as codes.

    Attributes:
        graph: with dense operators, on the values that the codes stand for.
        packed: by parameter, the packed weight of a bundle; None where a checkpoint of another tool stores codes.
        notes: of numbers that are not weights.
    """

    graph: GraphModule
    packed: Mapping[str, PackedWeight | None]
    notes: tuple[str, ...] = ()


def is_bundle(folder: Path) -> bool:
    """Return whether a folder is a bundle: it has a manifest that is not a written checkpoint's."""
    manifest = folder / "manifest.json"
    return manifest.is_file() and not str(read_object(manifest).get("format")).startswith("compressor checkpoint")


def check_original(folder: Path) -> None:
    """Check the headers of a folder of quantised weights; no weight is read.

    Raises:
        UsageError: they are damaged or contradict each other, or the weights are not quantised.
    """
    if not is_bundle(folder) and not dense_folder(folder, weights=False).source.quantized:
        raise UsageError(
            f"{folder}: its weights are not quantised, and there are no codes to convert; compress it by a recipe, "
            "which may write exports as well"
        )


def open_original(folder: Path, model: str | None = None) -> Original:
    """Open a bundle or a checked folder of quantised weights.

    Args:
        model: folder or id of the model that a bundle was made from; None takes its recipe's.
    Raises:
        BundleError: it is damaged.
        UsageError: the bundle is not that of its model.
    """
    if is_bundle(folder):
        return _from_bundle(folder, model)
    if model is not None:
        raise UsageError("--model names the model that a bundle was made from; a checkpoint has its own")
    graph, quantized = capture(folder), dense_folder(folder, weights=False).source.quantized
    stored: Mapping[str, Stored] = graph.meta["stored"]
    held = dict(graph.named_parameters())
    packed = {name: None for name, form in stored.items() if name in held and quantized.keys() & set(form.names)}
    notes = []
    if rounded := _rounded_activations(folder):
        notes.append(f"activations that {folder.name} rounds ({rounded}) are floats here")
    if find_gguf(folder) is not None and not (folder / "tokenizer.json").is_file():
        notes.append(f"{folder.name} has no tokenizer.json: other layouts than gguf are written without a tokenizer")
    return Original(graph, packed, tuple(notes))


def _from_bundle(folder: Path, model: str | None) -> Original:
    graph = bundle_graph(folder, model)
    spill = weight_spill()

    sites = list_packed(graph)
    dense = dense_form(graph, lambda site: spilled_value(site, spill))
    return Original(dense, {site.parameter: site.packed for site in sites})


def _rounded_activations(folder: Path) -> str:
    """Name the schemes of a checkpoint that round activations, empty if none does: capture reads weights alone."""
    file = folder / "config.json"
    stated = read_object(file).get("quantization_config") if file.is_file() else None
    groups = stated.get("config_groups") if isinstance(stated, dict) else None
    if not isinstance(groups, dict):
        return ""
    return ", ".join(name for name, group in groups.items() if group.get("input_activations"))
