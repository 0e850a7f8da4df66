"""Write a compressed graph as a folder with ``model.onnx``, and name its inputs and results.

decoder   input_ids, past_key_values.N.key and .value   ->   logits, present.N.key and .value
encoder   input_ids, attention_mask                     ->   last_hidden_state
module    the model's own inputs                        ->   logits of a classifier, or output_N

A decoder's positions follow from the length of what it is given as past; logits are those of all new tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from compressor.errors import UsageError, VerificationError, first_line
from compressor.export.manifest import listing, with_total
from compressor.export.onnx_out.emitter import MICROSOFT, Emitter
from compressor.export.onnx_out.stored import FILE_NAME, TensorStore, onnx_package
from compressor.graph.model import ModelInfo

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

OPSETS = range(18, 24)
_COPIED = ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.jinja", "preprocessor_config.json",
           "generation_config.json", "LICENSE*")  # fmt: skip
_DECODER_INPUTS = 3  # ids, position, keep
_MOST_INSIDE = 1 << 30
"""Bytes of weights from which on they lie beside the model, unless told otherwise."""


def why_not_graph(graph: GraphModule) -> str:
    """Say which part of a model has no place among the inputs and results; empty if all have one."""
    info: ModelInfo = graph.meta["model"]
    if info.kind not in ("decoder", "encoder", "module"):
        return f"has no inputs for models of the kind {info.kind}"
    if info.kind == "decoder":
        extras = {"states of recurrent layers": info.states, "heads that draft": info.draft_heads,
                  "layers that predict caches": info.predicts, "early exits": info.exits,
                  "blocks that end": info.depths}  # fmt: skip
        found = next((name for name, value in extras.items() if value), "")
        if found:
            return f"has no place for {found}"
    return ""


class _Interface:
    """The names of a model's inputs and results."""

    def __init__(self, e: Emitter) -> None:
        self.e, self.info = e, e.graph.meta["model"]
        self.placeholders = list(e.graph.graph.find_nodes(op="placeholder"))
        self.inputs: dict[str, tuple[torch.dtype, list[Any]]] = {}
        {"decoder": self._decoder, "encoder": self._encoder}.get(self.info.kind, self._module)()

    def _input(self, node: Node, name: str, sizes: list[Any] | None = None) -> str:
        known = node.meta["val"]
        sizes = [size if isinstance(size, int) else str(size) for size in known.shape] if sizes is None else sizes
        self.inputs[name] = known.dtype, sizes
        self.e.values[node] = name
        return name

    def _decoder(self) -> None:
        e, (ids, position, keep, *caches) = self.e, self.placeholders
        name = self._input(ids, "input_ids", ["batch", "sequence"])
        for place, cache in enumerate(caches):
            layer, kind = place % self.info.layers, ("key", "value")[place // self.info.layers]
            _, heads, _, width = cache.meta["val"].shape
            self._input(cache, f"past_key_values.{layer}.{kind}", ["batch", heads, "past", width])
        past = e.add("Squeeze", e.dimension("past_key_values.0.key", 2))
        whole = e.add("Add", past, e.add("Squeeze", e.dimension(name, 1)))
        e.values[position] = e.add("Range", past, whole, e.constant(1))
        e.values[keep] = e.values[position]
        e.memo["all rows"] = keep

    def _encoder(self) -> None:
        ids, mask = self.placeholders
        self._input(ids, "input_ids", ["batch", "sequence"])
        self.inputs["attention_mask"] = torch.int64, ["batch", "sequence"]
        self.e.values[mask] = self.e.cast("attention_mask", torch.float32)

    def _module(self) -> None:
        for node in self.placeholders:
            self._input(node, str(node.target))

    def results(self) -> dict[str, tuple[str, Any]]:
        """Return the name of each result, with the tensor that it is and its example."""
        given: Any = self.e.graph.graph.output_node().args[0]
        flat = [given] if isinstance(given, Node) else pytree.tree_leaves(given)
        if self.info.kind != "decoder":
            only = "last_hidden_state" if self.info.kind == "encoder" else "logits" if self.info.classes else ""
            names = [only or f"output_{place}" for place in range(len(flat))]
            return {name: (self.e.of(x), x.meta["val"]) for name, x in zip(names, flat, strict=True)}
        found = {"logits": (self.e.of(flat[0]), flat[0].meta["val"])}
        for cache in self.placeholders[_DECODER_INPUTS:]:
            name = str(self.e.values[cache]).replace("past_key_values", "present")
            found[name] = self.e.memo["present", cache], cache.meta["val"]
        return found


def emit(e: Emitter) -> ModelProto:
    """Emit a graph as a model.

    Raises:
        UsageError: an operator has no rule, or its rule refuses it.
    """
    onnx = onnx_package()
    interface = _Interface(e)
    e.walk()
    renamed = {}
    results = interface.results()
    held = {*e.initializers, *interface.inputs}
    for name, (tensor, _) in results.items():
        if tensor in held or tensor in renamed:
            tensor = e.add("Identity", tensor)
        renamed[tensor] = name
    for node in e.nodes:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
    inputs = [_value(name, dtype, sizes) for name, (dtype, sizes) in interface.inputs.items()]
    outputs = [_value(name, known.dtype, _sizes(name, known)) for name, (_, known) in results.items()]
    stored = [tensor for tensor in e.initializers.values() if tensor is not None]
    graph = onnx.helper.make_graph(e.nodes, interface.info.name, inputs, outputs, stored)
    domains = [onnx.helper.make_opsetid("", e.opset)]
    if any(node.domain == MICROSOFT for node in e.nodes):
        domains.append(onnx.helper.make_opsetid(MICROSOFT, 1))
    version = onnx.helper.find_min_ir_version_for(domains[:1])
    model: ModelProto = onnx.helper.make_model(
        graph, opset_imports=domains, ir_version=version, producer_name="compressor"
    )
    return model


def _sizes(name: str, known: Tensor) -> list[Any]:
    if name == "logits" and known.dim() == 3:
        return ["batch", "sequence", known.shape[-1]]
    if name.startswith("present."):
        return ["batch", known.shape[1], "total", known.shape[3]]
    if name == "last_hidden_state":
        return ["batch", "sequence", known.shape[-1]]
    return [size if isinstance(size, int) else str(size) for size in known.shape]


def _value(name: str, dtype: torch.dtype, sizes: list[Any]) -> ValueInfoProto:
    onnx = onnx_package()
    kind = onnx.helper.np_dtype_to_tensor_dtype(torch.empty(0, dtype=dtype).numpy().dtype)
    found: ValueInfoProto = onnx.helper.make_tensor_value_info(name, kind, sizes)
    return found


def write_model(
    folder: Path, graph: GraphModule, settings: Mapping[str, Any], external: bool | None
) -> dict[str, tuple[int, int]]:
    """Write a graph into an empty folder, with its tokenizer's files and a manifest.

    Args:
        settings: of :class:`Emitter`.
        external: weights lie beside the model; None puts them there if they are large.
    Returns:
        bytes and elements of each weight.
    Raises:
        VerificationError: the package onnx finds the model invalid.
    """
    onnx = onnx_package()
    if external is None:
        tensors = [*graph.parameters(), *graph.buffers()]
        external = sum(tensor.numel() * tensor.element_size() for tensor in tensors) > _MOST_INSIDE
    store = TensorStore(folder, external)
    try:
        emitter = Emitter(graph, **settings, store=store)
        model = emit(emitter)
    finally:
        store.close()
    (folder / FILE_NAME).write_bytes(model.SerializeToString())
    try:
        onnx.checker.check_model(str(folder / FILE_NAME))
    except onnx.checker.ValidationError as error:
        raise VerificationError(f"{folder}: the model is not valid ONNX: {first_line(error)}") from error
    source = graph.meta["model"].source
    if source is not None and source.is_dir():
        _copy(source, folder)
    manifest = {"format": "compressor onnx 1", "files": listing(folder, {})}
    (folder / "manifest.json").write_bytes(with_total(manifest))
    return emitter.sizes


def plan_model(graph: GraphModule, settings: Mapping[str, Any]) -> None:
    """Check that all operators of a graph have rules; no weight is read.

    Raises:
        UsageError: one has none.
    """
    info: ModelInfo = graph.meta["model"]
    if why := why_not_graph(graph):
        raise UsageError(f"{info.name}: onnx {why}; leave out the pass that made it, or choose another export")
    emit(Emitter(graph, **settings, store=None))


def _copy(source: Path, folder: Path) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
