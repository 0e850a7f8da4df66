"""Capture a Hugging Face folder or id, or a module in memory, as a graph that passes rewrite and kernels are made from.

A decoder is captured once, with explicit positions and a key-value cache, so that calibration, prefill and decode
share one graph.  What is exported is the model's meta model (:mod:`compressor.capture.meta_model`); the checkpoint's
tensors, memory-mapped, are bound to the finished graph.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compressor.capture.archive.program import archive_module
from compressor.capture.arithmetic.constants import fold_constants
from compressor.capture.convolution.rewrite import rewrite_convolutions
from compressor.capture.ctc.program import ctc_notes, ctc_program
from compressor.capture.ctc.weight_norms import fold_weight_norms
from compressor.capture.experts.split import route_all, split_experts
from compressor.capture.export import (
    error_context,
    example_call,
    export_program,
    flatten_outputs,
    shapes_of_arguments,
    unlift,
)
from compressor.capture.files import check_path
from compressor.capture.images.classifier import class_names, image_program
from compressor.capture.meta_model import MetaModel, fake_parameters, folder_meta_model, memory_meta_model
from compressor.capture.normalize import Normalized, cast_half_embeddings, keeps_storage, normalize
from compressor.capture.onnx_in.model import is_onnx
from compressor.capture.pairs.program import finish_pair, pair_notes, pair_program
from compressor.capture.recognition.distances import replace_pair_biases
from compressor.capture.recognition.evaluator import Evaluator
from compressor.capture.recognition.probe import Probed, bias_notes, check_numbers, check_positions, probe
from compressor.capture.recognition.recognize import recognize
from compressor.capture.recurrence.decays import store_decays
from compressor.capture.recurrence.modules import recurrent_modules_unrolled
from compressor.capture.seq2seq.computed_weights import computed_weights
from compressor.capture.seq2seq.probe import probe_seq2seq
from compressor.capture.weights import map_weights, named_tensors, tied_groups
from compressor.errors import CaptureError, ModelFileError
from compressor.graph.kinds.example_sources import with_least_source
from compressor.graph.kinds.gate_projections import gate_notes
from compressor.graph.model import ModelInfo
from compressor.graph.rewrite import drop_dead_parameters
from compressor.recipe.sources import ARCHIVE_SUFFIX

_LONGEST = ("max_target_positions", "max_position_embeddings", "max_seq_len")
"""Keys of configurations for the longest sequence of a model."""
_LARGE_BUFFER_BYTES = 1 << 12
_WRAPPER = "hf"  # where the programs of capture/meta_model.py hold the model


def capture(
    model: str | Path | nn.Module,
    example_inputs: tuple[Any, ...] | Tensor | None = None,
    *,
    dynamic_shapes: Any = None,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> GraphModule:
    """Capture a model as an FX graph with symbolic batch and sequence; ``graph.meta["model"]`` describes it.

    Forward of the graph:
        decoder: ``(ids i64[B, S], position i64[S], keep i64[R], k_cache, v_cache) -> (logits f32[B, R, V], k, v)``,
            caches as lists of f32[B, Hkv, T, D] a layer, new keys and values of f32[B, Hkv, S, D]; ``keep`` are the
            indices along S whose logits are wanted; where it has recurrent layers, ``states`` follow the caches, and
            the new ones the new values: lists of f32[B, ...], of zeros before the first token;
        encoder-decoder: a decoder's inputs, then those of its encoder: ``source i64[B, N]`` and ``source_mask
            f32[B, N]``; outputs as of a decoder;
        encoder: ``(ids i64[B, S], mask f32[B, S]) -> last hidden state f32[B, S, H]``;
        pictures with texts: ``(pictures f32[B, C, H, W], ids i64[B, S], mask f32[B, S]) -> embeddings of both``;
        other modules: as given; batch norms are folded, 2-d convolutions are linears over patches
            (:mod:`compressor.capture.convolution`).

    Arithmetic is float32.  Weights of linears and embeddings keep the type they are stored in and stay
    memory-mapped (or shared with the module given: do not write to them); other parameters are float32.  Weights of a
    quantised checkpoint are dequantised, into mapped files of their own (:mod:`compressor.capture.checkpoints`).
    Parameters have their Hugging Face names, tied ones the first of theirs.

    Args:
        model: Hugging Face folder or hub id, an archive of torch.export (``.pt2``), a transformers model in memory, or
            any module.
        example_inputs: inputs of a plain module.  A transformers model given with them is taken as a plain module.
        dynamic_shapes: as for torch.export.export, with example_inputs.
        trust_remote_code: run code that comes with the checkpoint.
        weights: False reads no weight, only the headers of the files (and indices of a quantised checkpoint):
            parameters are on the meta device, with their shapes and types.  For plans.
    Raises:
        CaptureError: what stopped it, in which module and line, and what to do.
    """
    if isinstance(model, str | Path):
        check_path(model)
    if is_onnx(model):
        return _capture_onnx(Path(model), example_inputs, dynamic_shapes, weights)  # type: ignore[arg-type]
    if isinstance(model, nn.Module):
        if example_inputs is not None:
            return _capture_module(model, example_inputs, dynamic_shapes, weights)
        # A transformers model cannot exist unless transformers has been imported.
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            raise CaptureError(f"{type(model).__name__} is a plain module: give an example of its inputs, `example`")
        meta_model = memory_meta_model(model, weights)
    elif not isinstance(model, str | Path):
        raise CaptureError(f"model: {model!r:.80}; give a folder, an id of the hub, or a module")
    elif str(model).endswith(ARCHIVE_SUFFIX) and Path(model).is_file():
        module, example, shapes = archive_module(Path(model))
        return _capture_module(module, example, shapes, weights, Path(model).stem)
    elif example_inputs is not None or dynamic_shapes is not None:
        raise CaptureError(f"{model}: an example and dynamic_shapes are for modules, not for folders and ids")
    else:
        meta_model = folder_meta_model(model, trust_remote_code, weights)
    return _capture_meta_model(meta_model)


def _capture_onnx(file: Path, example: Any, dynamic_shapes: Any, weights: bool) -> GraphModule:
    """Capture an ONNX file as the module that it is, under the file's name."""
    from compressor.capture.onnx_in.inputs import choose_inputs, fixed_sizes, narrow_sizes
    from compressor.capture.onnx_in.model import read_model
    from compressor.capture.onnx_in.program import OnnxProgram

    model = read_model(file)
    module = OnnxProgram(model)
    chosen = example is None and dynamic_shapes is None
    if chosen:
        example, dynamic_shapes = choose_inputs(model, module)
    while True:
        try:
            graph = _capture_module(module, example, dynamic_shapes, weights, stored=module.stored())
            break
        except ModelFileError as error:
            raise ModelFileError(f"{file}: {error}") from error
        except CaptureError as error:
            narrowed = narrow_sizes(error, dynamic_shapes) if chosen else None
            if narrowed is None:
                raise ModelFileError(f"{file}: {fixed_sizes(error, dynamic_shapes) or error}") from error
            dynamic_shapes, chosen = narrowed, False
    graph.meta["model"] = replace(graph.meta["model"], name=file.name, architecture="onnx")
    return graph


def _capture_meta_model(meta_model: MetaModel) -> GraphModule:
    model, config = meta_model.model, meta_model.model.config.get_text_config()
    facts: dict[str, Any] = {
        "kind": meta_model.kind,
        "name": meta_model.name,
        "architecture": type(model).__name__,
        "max_positions": next(filter(None, (getattr(config, key, 0) for key in _LONGEST)), 0),
        "vocab_size": config.vocab_size if getattr(config, "vocab_size", None) else 0,
        "eos_ids": meta_model.eos_ids,
        "bos_id": meta_model.bos_id,
        "source": meta_model.folder,
        "config_sha256": meta_model.config_sha256,
        "unpacked_bytes": meta_model.source.unpacked_bytes,
    }
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake_parameters(model, mode)
    program, info, (args, shapes), probed = _program(meta_model, facts, mode)
    exported = export_program(program, args, shapes, meta_model.name, root=model)
    info = with_least_source(info, exported)

    groups = tied_groups(model)
    graph, constants = _unlifted(exported, groups, list(inspect.signature(program.forward).parameters)[: len(args)])
    layout = normalize(graph)
    check_numbers(graph, meta_model.name)
    route_all(graph, meta_model.name)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if probed is not None and meta_model.kind in ("decoder", "seq2seq"):
        with error_context(None, meta_model.name):
            constants |= replace_pair_biases(graph, Evaluator({}, {**buffers, **constants}.get))
    if probed is not None and probed.self_made:
        with error_context(None, meta_model.name):
            constants |= recognize(graph, info, {**buffers, **constants}.get)
        check_positions(graph, probed.program, meta_model.name)
    shapes_of = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    states = model.state_dict().keys()
    unstored = {name: b for name, b in buffers.items() if name not in states}
    made = computed_weights(model, meta_model.source.names) if meta_model.kind == "seq2seq" else {}
    computed = unstored | constants | made
    stored = {first: names for first, names in groups.items() if first not in computed}
    needed = [n.target for n in graph.nodes if n.op == "get_attr" and n.target not in computed]
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    weights = map_weights(meta_model.source, stored, needed, model.base_model_prefix, ignored, unstored)
    slices, normed = split_experts(graph), fold_weight_norms(graph)
    layout.transposed |= {name for name, part in slices.items() if part.transposed}

    def read(name: str) -> Tensor:
        part = slices.get(name)
        if part is not None:
            return weights.read(part.stored, shapes_of[part.stored], part.expert)
        if name in normed:
            return normed[name].weight(read)
        return computed[name] if name in computed else weights.read(name, shapes_of[name])

    info = info if meta_model.kind != "pair" else finish_pair(graph, info, model.config.text_config, read)
    captured = _bind(graph, layout, read, set(buffers) | set(constants), info)
    captured.meta["stored"] = weights.stored_forms(layout.transposed, layout.plus_one, {*normed}, slices)
    if probed is None:
        return _as_module(captured, args, shapes, None)
    captured.meta["notes"] = [*meta_model.notes, *probed.notes, *bias_notes(graph), *gate_notes(captured)]
    return captured


def _unlifted(
    exported: ExportedProgram, groups: dict[str, list[str]], arguments: list[str]
) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Return a model's graph and its constants; what follows from constants alone is computed."""
    rename = {f"{_WRAPPER}.{name}": first for first, names in groups.items() for name in names}
    graph, constants = unlift(exported, {**rename, "": _WRAPPER}, arguments)
    return graph, constants | fold_constants(graph, constants)


def _program(
    meta_model: MetaModel, facts: dict[str, Any], mode: FakeTensorMode
) -> tuple[nn.Module, ModelInfo, tuple[tuple[Any, ...], Any], Probed | None]:
    """Return what is exported, its description, its example call, and what a run has shown of a model of text."""
    model = meta_model.model
    if meta_model.kind == "pair":
        program, args, shapes = pair_program(model, meta_model.folder, meta_model.name, facts["max_positions"])
        return program, ModelInfo(**facts | {"kind": "module"}), (args, shapes), None
    if meta_model.kind == "ctc":
        program, info, args, shapes = ctc_program(meta_model, facts)
        return program, info, (args, shapes), None
    if meta_model.kind == "module":
        facts |= {"vocab_size": 0, "max_positions": 0, "class_names": class_names(model.config)}
        program, args, shapes = image_program(model, meta_model.folder, meta_model.name)
        return program, ModelInfo(**facts), (args, shapes), None
    found = probe_seq2seq if meta_model.kind == "seq2seq" else probe
    probed = found(meta_model, facts["max_positions"])
    info = ModelInfo(**{**facts, **probed.facts})
    with mode:
        return probed.program, info, example_call(info, limited=probed.self_made), probed


def _bind(
    graph: fx.Graph, layout: Normalized, read: Callable[[str], Tensor], buffers: set[str], info: ModelInfo
) -> GraphModule:
    """Give the graph its tensors, each in the form that its users expect."""
    tensors: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        name, tensor = node.target, read(node.target).detach()
        if name in buffers and not ((info.kind == "seq2seq" or info.labels_frames) and _is_large(tensor)):
            tensors[name] = tensor
            continue
        if name in layout.transposed:
            tensor = tensor.t()
        if tensor.is_floating_point() and not keeps_storage(node):
            tensor = tensor.float()
        if name in layout.plus_one:
            tensor = tensor + 1
        tensors[name] = nn.Parameter(tensor, requires_grad=False)
    cast_half_embeddings(graph, {name: tensor.dtype for name, tensor in tensors.items()})
    module = GraphModule(tensors, graph, class_name=info.architecture)
    store_decays(module)
    drop_dead_parameters(module)
    count = sum(parameter.numel() for parameter in module.parameters())
    module.meta["model"] = ModelInfo(**{**vars(info), "parameters": count})
    module.meta["rules"] = layout.outcomes
    return module


def _is_large(buffer: Tensor) -> bool:
    """Return whether a buffer is too large for a constant of the kernels' program, and is stored with the weights."""
    return buffer.is_floating_point() and buffer.nbytes > _LARGE_BUFFER_BYTES


def _example(given: Any) -> tuple[Any, ...]:
    args = (given,) if isinstance(given, Tensor) else given
    found = f"is {given!r:.80}"
    if isinstance(args, tuple | list) and args:
        wrong = [type(x).__name__ for x in args if not isinstance(x, Tensor)]
        if not wrong and all(x.numel() for x in args):
            return tuple(args)
        found = f"holds {', '.join(wrong) or 'a tensor without elements'}"
    raise CaptureError(f"the example {found}; give a tensor, or a tuple of the tensors that the module takes")


def _capture_module(
    module: nn.Module,
    example: Any,
    dynamic_shapes: Any,
    weights: bool,
    given_name: str = "",
    stored: Mapping[str, Tensor] | None = None,  # in place of parameters of these names, in the types of a file
) -> GraphModule:
    name, args = given_name or type(module).__name__, _example(example)
    if isinstance(dynamic_shapes, list | tuple | dict) and not dynamic_shapes:  # torch.export takes it for None
        dynamic_shapes = None
    tensors = named_tensors(module)
    wrong = sorted({str(t.dtype) for t in tensors.values() if t.is_floating_point() and t.dtype != torch.float32})
    if wrong:
        raise CaptureError(
            f"{name} has {', '.join(wrong)} parameters; arithmetic is float32: call module.float() first"
        )
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with recurrent_modules_unrolled(module):
            exported = export_program(module, args, dynamic_shapes, name)
    finally:
        for part, training in modes:
            part.training = training
    rename = {alias: first for first, names in tied_groups(module).items() for alias in names}
    named = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = named[: len(args)] if len(named) >= len(args) else [f"input_{i}" for i in range(len(args))]
    graph, constants = unlift(exported, rename, names)
    outputs = flatten_outputs(graph, exported.call_spec.out_spec, names, name)
    layout = normalize(graph)
    buffers = {*dict(module.named_buffers(remove_duplicate=False)), *constants}
    held = {
        name: t if weights or name in buffers else t.to("meta")
        for name, t in {**tensors, **constants, **(stored or {})}.items()
    }
    captured = _bind(graph, layout, held.__getitem__, buffers, ModelInfo("module", name, type(module).__name__))
    return _as_module(captured, args, shapes_of_arguments(module, args, dynamic_shapes), outputs)


def _as_module(graph: GraphModule, args: tuple[Any, ...], shapes: Any, outputs: list[str] | None) -> GraphModule:
    """Rewrite the convolutions of a bound graph, and note how it is called and, of a classifier, what it reads."""
    graph.meta["rules"] += rewrite_convolutions(graph)
    if graph.meta["model"].pair is not None:
        graph.meta["notes"], outputs = pair_notes(graph.meta["model"]), ["pictures", "texts"]
    if graph.meta["model"].labels_frames:
        graph.meta["notes"] = ctc_notes(graph.meta["model"])
    graph.meta["inputs"], graph.meta["outputs"] = (args, shapes), outputs
    read = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    given = [leaf.meta["val"] for leaf in graph.graph.output_node().all_input_nodes]
    if (len(read), len(given)) == (1, 1) and (read[0].dim(), given[0].dim()) == (4, 2):
        sizes = (*read[0].shape[1:], given[0].shape[1])
        if all(type(size) is int for size in sizes) and read[0].is_floating_point():
            info = graph.meta["model"]
            graph.meta["model"] = replace(info, image_shape=sizes[:3], classes=sizes[3])
    return graph
