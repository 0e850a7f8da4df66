"""Say what a model with a CTC head reads and writes (Graves et al. 2006): samples in, logits of each frame out."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from compressor.capture.images.image_attention import plain_masks
from compressor.capture.seq2seq.audio import audio_source
from compressor.errors import CaptureError
from compressor.graph.kinds.encoder_decoder import SAMPLES
from compressor.graph.model import ModelInfo, SourceInfo

if TYPE_CHECKING:
    from compressor.capture.meta_model import MetaModel

_EXAMPLE = 4000  # samples: more than the convolutions look at


class CtcProgram(nn.Module):
    """The contract: samples float32 [B, N] -> logits float32 [B, frames, tokens]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model

    def forward(self, samples: Tensor) -> Tensor:
        """Call the model."""
        with plain_masks():
            return cast(Tensor, self.hf(input_values=samples).logits)


def ctc_program(
    meta_model: MetaModel, facts: dict[str, Any]
) -> tuple[nn.Module, ModelInfo, tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Return a model's program, its description, two example sounds, and its ``dynamic_shapes``: sounds of any length.

    Raises:
        CaptureError: the model reads features that the run-time does not compute, or does not say which token is blank.
    """
    model, name = meta_model.model, meta_model.name
    argument = "input_values" if "input_values" in inspect.signature(model.forward).parameters else "input_features"
    source = audio_source(meta_model, argument)
    blank, vocab_size = getattr(model.config, "pad_token_id", None), facts["vocab_size"]
    if type(blank) is not int or not 0 <= blank < vocab_size:
        raise CaptureError(
            f"{name}: config.json: pad_token_id is {blank!r:.40}; state the blank token there, from 0 to "
            f"{vocab_size - 1}"
        )
    if getattr(model.config, "adapter_attn_dim", None) is not None:
        raise CaptureError(
            f"{name}: has adapters for languages, which are files of their own; save the model with one of them merged"
        )
    read = SourceInfo("audio", source.shape, source.max_positions, (), features=source.features, blank_id=blank)
    described = {**facts, "kind": "module", "max_positions": 0, "eos_ids": (), "bos_id": None}
    sounds = torch.randn(2, _EXAMPLE, generator=torch.Generator().manual_seed(0))
    info = ModelInfo(**described, encoder_source=read)
    return CtcProgram(model), info, (sounds,), ({0: Dim("batch", min=1), 1: Dim.DYNAMIC},)


def ctc_notes(info: ModelInfo) -> list[str]:
    """Tell the user what the model reads and writes."""
    assert info.encoder_source is not None
    least, rate = info.encoder_source.min_positions, info.encoder_source.features["sampling_rate"]
    return [
        f"writes what is said in a sound ({SAMPLES} at {rate} a second, {least} or more), a token of {info.vocab_size} "
        "for each frame (CTC)"
    ]
