"""Find the two halves of a captured encoder-decoder in its dataflow.

    source, source_mask -> encoder -> memory -> keys, values --.
                                                               v
    ids, position, keep, k_cache, v_cache -> decoder: self-attention, cross-attention, ... -> logits, new keys, values

What depends on the source and on no input of the decoder is the encoder's half, wherever it stands: also the keys and
values of cross-attention, which stand among the decoder's nodes.  So they are computed once a source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compressor.errors import UsageError
from compressor.graph.model import ModelInfo

SOURCE, SOURCE_MASK = "source", "source_mask"
"""Names of the encoder's inputs; they come after the decoder's."""
SAMPLES = "samples"
"""Name of the one input of a model that gives each frame of a sound a token."""
_SAMPLES = 160_000  # ten seconds
_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True)
class Pair:
    """What an encoder hears, and the tokens that the decoder reads beside it; or a picture, and its caption's tokens.

    Attributes:
        source: float32 [1, ...].
        ids: int64 [1, S].
    """

    source: Tensor
    ids: Tensor


Batch: TypeAlias = Tensor | Pair
"""What a graph runs on at once: ids int64 [B, S]; a plain module's inputs float32 [B, ...]; sound, or a picture, with
tokens."""
SampleInputs: TypeAlias = Tensor | Sequence[Batch]
"""All of a calibration's samples: ids or inputs in one tensor, or one by one sounds, with their tokens or alone, or
pictures with theirs, each of its own length."""


def tokens_of(batch: Batch) -> Tensor:
    """Return what the first input of a graph takes: ids, or a plain module's inputs."""
    return batch.ids if isinstance(batch, Pair) else batch


def source_node(graph: GraphModule) -> Node | None:
    """Return the input that the encoder reads; None for other models."""
    return next((node for node in graph.graph.find_nodes(op="placeholder") if node.target == SOURCE), None)


def source_inputs(info: ModelInfo, batch: Batch) -> list[Tensor]:
    """Return the encoder's inputs: the sound; for text of which no translation is at hand, the decoder's own tokens.

    So the decoder predicts each token of a text from the tokens in front of it and from the whole text, as models that
    learned to restore text do.

    Args:
        batch: int64 [B, S], of the decoder, or a sound with these.
    Returns:
        Nothing for models that are not encoder-decoders.
    Raises:
        UsageError: the encoder reads sound, and there is none; or the other way round.
    """
    if info.hears != isinstance(batch, Pair):
        what = "sound, and the samples are text" if info.hears else "no sound, and the samples are sounds"
        raise UsageError(f"{info.name}: reads {what}; give samples of its own kind")
    if isinstance(batch, Pair):
        return [batch.source]
    return [] if info.encoder_source is None else [batch, torch.ones(batch.shape, dtype=torch.float32)]


def priced_source(info: ModelInfo, batch: int, tokens: int) -> list[Tensor]:
    """Return the encoder's inputs for estimates: so many tokens, or ten seconds of sound."""
    if info.encoder_source is None or info.encoder_source.reads == "tokens":
        return source_inputs(info, torch.zeros(batch, tokens, dtype=torch.int64))
    return [torch.zeros(batch, *info.encoder_source.sized(_SAMPLES))]


def encoder_nodes(graph: GraphModule) -> list[Node]:
    """List the nodes that depend on the source and on no input of the decoder, in order."""
    source = source_node(graph)
    if source is None:
        return []
    others = [n for n in graph.graph.find_nodes(op="placeholder") if n.target not in (SOURCE, SOURCE_MASK)]
    of_source, of_others = dependent(graph, [source]), set(dependent(graph, others))
    return [node for node in of_source if node not in of_others]


def memory_node(graph: GraphModule) -> Node | None:
    """Return the encoder's output, which all layers of the decoder read.

    It is the one tensor of the encoder's half that is read behind the first node that depends on the decoder's tokens.

    Returns:
        None for other models, and where several tensors are.
    """
    encoder = encoder_nodes(graph)
    if not encoder:
        return None
    inside, order = set(encoder), {node: i for i, node in enumerate(graph.graph.nodes)}
    ids = graph.graph.find_nodes(op="placeholder")[0]
    begin = min((order[node] for node in dependent(graph, [ids])), default=0)
    early = [node for node in encoder if order[node] < begin]
    live = [node for node in early if any(order[user] >= begin for user in node.users)]
    tensors = [node for node in live if isinstance(node.meta.get("val"), Tensor)]
    return tensors[0] if len(tensors) == 1 and tensors[0] in inside else None


def dependent(graph: GraphModule, roots: Iterable[Node]) -> list[Node]:
    """List the calls that depend on what some inputs hold, not on their shapes alone, in order."""
    found = dict.fromkeys(roots)
    inputs = set(found)
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is _SIZE and node.args[0].op == "placeholder":
            continue
        if any(source in found for source in node.all_input_nodes):
            found[node] = None
    return [node for node in found if node not in inputs]
