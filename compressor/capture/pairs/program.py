"""Build the program of a model that embeds pictures and texts into one space, as CLIP does.

    pictures -> picture embeddings --.
                                      >-- similarity, of each picture to each text
    ids, mask -> text embeddings  ---'

Both halves are one graph, which reads as many pictures as texts.  Compiled, each half is an entry of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from compressor.capture.images.classifier import image_size
from compressor.capture.images.image_attention import plain_masks
from compressor.capture.pairs.pooling_heads import heads_apart
from compressor.capture.recognition.evaluator import Evaluator
from compressor.errors import CaptureError
from compressor.graph.kinds.halves import needed_nodes
from compressor.graph.model import ModelInfo, PairInfo
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 5  # of an example


class PairProgram(nn.Module):
    """The contract: pictures float32 [B, channels, height, width], ids int64 [B, S], mask float32 [B, S] -> embeddings
    of pictures and texts, float32 [B, D] each, and their similarities, which are dropped after capture.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model
        self.takes_mask = "attention_mask" in inspect.signature(model.forward).parameters

    def forward(self, pictures: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Call the model."""
        extra = {"attention_mask": mask} if self.takes_mask else {}
        with heads_apart(), plain_masks():
            out = self.hf(pixel_values=pictures, input_ids=ids, **extra)
        return out.image_embeds, out.text_embeds, out.logits_per_image


def pair_program(
    model: PreTrainedModel, folder: Path | None, place: str, positions: int
) -> tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Return a model's program, an example of two pictures and texts, and its ``dynamic_shapes``.

    Args:
        positions: longest text in tokens.
    Raises:
        CaptureError: the model reads other inputs, or nothing says of which size its pictures are.
    """
    known = inspect.signature(model.forward).parameters
    if absent := [name for name in ("pixel_values", "input_ids") if name not in known]:
        raise CaptureError(f"{place}: {type(model).__name__}.forward takes no {', '.join(absent)}")
    vision, text = model.config.vision_config, model.config.text_config
    height, width = image_size(vision, folder, place)
    channels = getattr(vision, "num_channels", None)
    numbers = torch.Generator().manual_seed(0)
    pictures = torch.randn((2, channels if type(channels) is int else 3, height, width), generator=numbers)
    length = min(_TOKENS, positions or _TOKENS)
    ids = torch.randint(0, text.vocab_size, (2, length), generator=numbers)
    ends = text.eos_token_id
    if type(ends) is int and 0 <= ends < text.vocab_size:
        ids[0, -1] = ids[1, -2] = ends
    mask = torch.ones(2, length)
    mask[1, -1] = 0
    batch, tokens = Dim("batch", min=1), Dim("tokens", min=1, max=positions or None)
    of_text = {0: batch, 1: tokens}
    return PairProgram(model), (pictures, ids, mask), ({0: batch}, of_text, of_text)


def finish_pair(graph: fx.Graph, info: ModelInfo, text_config: Any, read: Callable[[str], Tensor]) -> ModelInfo:
    """Take the similarities out of a captured program, and put the half of the pictures in front of that of the texts.

    Args:
        text_config: of the half that reads texts.
        read: stored tensor of each name, on the meta device where weights are not read.
    Returns:
        The description, with what makes similarities of two embeddings, and how texts are filled up.
    Raises:
        CaptureError: similarities are not a linear function of the embeddings' products.
    """
    output = graph.output_node()
    returned: Any = output.args[0]
    *embeddings, similarities = returned
    scale, bias = _similarity(similarities, embeddings, read, info.name)
    output.args = (tuple(embeddings),)
    codegen: Any = graph._codegen
    known = codegen.pytree_info
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(known.orig_args, known.in_spec, pytree.tree_structure((0, 0)))))
    graph.eliminate_dead_code()
    _pictures_first(graph)
    pictures = graph.find_nodes(op="placeholder")[0].meta["val"]
    pad_id, is_filled = _filling(info.source, text_config)
    pair = PairInfo(scale, bias, pad_id, is_filled)
    return replace(info, pair=pair, image_shape=tuple(int(size) for size in pictures.shape[1:]))


def _pictures_first(graph: fx.Graph) -> None:
    """Put what depends on the texts behind the rest; the number of texts is that of the pictures."""
    pictures, *texts = graph.find_nodes(op="placeholder")
    output, of_texts = graph.output_node(), set(texts)
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.sym_size.int and node.args[0] in texts and node.args[1] == 0:
            node.args = (pictures, 0)
        if any(source in of_texts for source in node.all_input_nodes):
            of_texts.add(node)
            if node.op == "call_function":
                output.prepend(node)


def pair_notes(info: ModelInfo) -> list[str]:
    """Tell the user what the two halves read."""
    size = "x".join(map(str, info.image_shape))
    return [f"embeds pictures of {size} and texts of up to {info.max_positions} tokens: two entries, main and text"]


def _similarity(
    similarities: fx.Node, embeddings: Sequence[fx.Node], read: Callable[[str], Tensor], name: str
) -> tuple[float, float]:
    """Return a and b where similarities are a x + b, for x the products of the embeddings."""
    reach: dict[fx.Node, set[int]] = {}  # node -> which of the embeddings it is computed from
    for node in similarities.graph.nodes:
        reach[node] = {i for i, embedding in enumerate(embeddings) if node is embedding}
        reach[node].update(*(reach[source] for source in node.all_input_nodes))
    needed = needed_nodes([similarities], set())
    products = [
        n for n in reach if n in needed and len(reach[n]) == 2 and all(len(reach[s]) < 2 for s in n.all_input_nodes)
    ]
    if len(products) != 1:
        raise CaptureError(f"{name}: its similarities are not products of one picture's and one text's embedding")
    inside = needed_nodes([products[0]], set())
    stored = {str(n.target): read(str(n.target)) for n in needed - inside if n.op == "get_attr"}
    if any(tensor.is_meta for tensor in stored.values()):
        return 1.0, 0.0
    run = Evaluator({}, lambda which: stored[which].float() if which in stored else None)
    at = [float(run(similarities, {products[0]: torch.full((2, 2), x)}).flatten()[0]) for x in (0.0, 1.0, -0.5)]
    scale, bias = at[1] - at[0], at[0]
    if not abs(at[2] - (bias - 0.5 * scale)) <= 1e-5 * (abs(scale) + abs(bias)):
        raise CaptureError(f"{name}: its similarities are not a multiple of products, and a number")
    return scale, bias


def _filling(folder: Path | None, text_config: Any) -> tuple[int, bool]:
    """Return the token that fills texts up, and whether they always are: a tokenizer that gives no mask says so."""
    given = getattr(text_config, "pad_token_id", None)
    pad_id = given if type(given) is int and given >= 0 else 0
    file = None if folder is None else folder / "tokenizer_config.json"
    if file is None or not file.is_file():
        return pad_id, False
    content = read_object(file)
    inputs, pad = content.get("model_input_names"), content.get("pad_token")
    text = pad.get("content") if isinstance(pad, dict) else pad
    added: Any = content.get("added_tokens_decoder", {})
    if isinstance(added, dict):
        ids = [int(key) for key, entry in added.items() if key.isdecimal() and _content(entry) == text]
        pad_id = ids[0] if ids and text is not None else pad_id
    return pad_id, isinstance(inputs, list) and "attention_mask" not in inputs


def _content(entry: Any) -> Any:
    return entry.get("content") if isinstance(entry, dict) else None
