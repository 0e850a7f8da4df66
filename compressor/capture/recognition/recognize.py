"""Recognise attention in the graph of a model that does not attend through transformers' interface."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from compressor.capture.noops import DropNoOp
from compressor.capture.recognition.decoder import recognize_decoder
from compressor.capture.recognition.encoder import recognize_encoder
from compressor.capture.recognition.evaluator import Evaluator
from compressor.errors import CaptureError
from compressor.graph.model import ModelInfo
from compressor.graph.rules import apply


def recognize(graph: fx.Graph, info: ModelInfo, constant: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Rewrite in place.

    Args:
        graph: normalised.
        info: of the model; its layers are those that keep keys and values.
        constant: name -> buffer or constant of the graph; None for a parameter.
    Returns:
        New constants of the graph, by name.
    Raises:
        CaptureError: attention that no operator here computes, or none.
    """
    _read_sizes_of_tokens(graph)
    evaluator, constants = Evaluator({}, constant), dict[str, Tensor]()
    if info.kind == "decoder":
        constants = recognize_decoder(graph, info.layers, info.max_positions or 2048, evaluator)
    elif not recognize_encoder(graph, evaluator):
        raise CaptureError(
            f"no layer of {info.architecture} computes softmax(q k^T * scale + bias) v; capture it as a module with "
            "example inputs"
        )
    graph.eliminate_dead_code()
    apply([DropNoOp()], graph)  # results lie in another order in memory than before
    graph.lint()
    return constants


def _read_sizes_of_tokens(graph: fx.Graph) -> None:
    """Read batch and length from the tokens wherever another input, such as a state, has the same sizes."""
    tokens = graph.find_nodes(op="placeholder")[0]
    places = {str(size): dim for dim, size in enumerate(tokens.meta["val"].shape)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        if node.args[0].op == "placeholder" and str(node.meta["val"]) in places:
            node.args = (tokens, places[str(node.meta["val"])])
