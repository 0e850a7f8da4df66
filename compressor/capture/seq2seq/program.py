"""Run an encoder-decoder of transformers with our attention, a stand-in for its two caches, and explicit positions.

    (ids, position, keep, k_cache, v_cache, source, source_mask) -> (logits, new keys, new values)

Its layers attend in three ways: in the encoder, in the decoder over a cache, and from the decoder to the encoder's
output.  Each writes its keys to a cache before it attends, but for those of the encoder: that is how they are told
apart.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from compressor.capture.attention.interface import Recorder, mask_requests, recording
from compressor.capture.attention.masks import MaskRule
from compressor.capture.meta_model import cache_argument

_POSITIONS = ("decoder_position_ids",)
_AUDIO = ("input_values", "input_features")


class SourceRecorder(Recorder):
    """A recorder that knows which layers attend in both directions; its base is the one of decoders.

    Args:
        source_mask: float32 [B, N], of the source; None where it has no padding.
    """

    def __init__(
        self, names: dict[nn.Module, str], *, position: Tensor, source_mask: Tensor | None, **given: Any
    ) -> None:
        super().__init__(names, position=position, mask=source_mask, **given)
        self.bidirectional: set[str] = set()
        self.crossing: set[str] = set()
        self._next = ""  # the kind of cache that was just written to

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Remember a layer's new keys and values, and that its attention is the next."""
        self._next = "self"
        return super().update(keys, values, layer_idx)

    def cross(self) -> None:
        """Note that keys and values of the encoder's output were written, and the attention to them is the next."""
        self._next = "cross"

    def is_bidirectional(self, module: str) -> bool:
        """Return whether the layer that attends now sees all keys: an encoder's, or one that looks at its output."""
        kind, self._next = self._next, ""
        if kind != "self":
            self.bidirectional.add(module)
        if kind == "cross":
            self.crossing.add(module)
        return kind != "self"


class _Crossing:
    """Stands in for the cache of an encoder's keys and values, of which each source has its own."""

    def __init__(self, recorder: SourceRecorder) -> None:
        self._recorder = recorder

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._recorder.cross()
        return keys, values


def _both_caches(recorder: SourceRecorder) -> Any:
    """Return a stand-in for the pair of caches; models ask for its class."""
    from transformers import EncoderDecoderCache

    class Both(EncoderDecoderCache):
        is_compileable = False
        is_sliding: Any = ()
        is_linear: Any = ()
        is_dummy: Any = ()

        def __init__(self) -> None:
            caches: Any = (recorder, _Crossing(recorder))
            self.self_attention_cache, self.cross_attention_cache = caches
            self.is_updated = {}

        def __len__(self) -> int:
            return 1  # of a truth value

        def get_query_offset(self, layer_idx: int = 0) -> int:
            return recorder.get_query_offset()

    return Both()


class Seq2SeqProgram(nn.Module):
    """The contract of an encoder-decoder: see the module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hf = model
        self.names = {module: name for name, module in model.named_modules()}
        known = inspect.signature(model.forward).parameters
        self.audio = next((name for name in _AUDIO if name in known), "")
        self.positions = next((name for name in _POSITIONS if name in known), "")
        self.cache_argument = cache_argument(model)
        self.rules: dict[str, MaskRule] = {}

    def forward(
        self,
        ids: Tensor,
        position: Tensor,
        keep: Tensor,
        k_cache: list[Tensor],
        v_cache: list[Tensor],
        source: Tensor,
        source_mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """See :func:`compressor.capture.capture.capture` for the shapes."""
        given = {"k_cache": k_cache, "v_cache": v_cache, "rules": self.rules}
        recorder = SourceRecorder(self.names, position=position, source_mask=source_mask, **given)
        return self.run(recorder, ids, keep, source)

    def run(
        self, recorder: SourceRecorder, ids: Tensor, keep: Tensor, source: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Call the model with stand-ins for its caches."""
        assert recorder.position is not None
        extra: dict[str, Any] = {self.cache_argument: _both_caches(recorder)}
        if self.positions:
            extra[self.positions] = recorder.position[None]
        read = {self.audio: source} if self.audio else {"input_ids": source, "attention_mask": recorder.mask}
        # With a mask, models do not ask whether there are several tokens, which would fix their number.
        with recording(recorder), mask_requests():
            out = self.hf(**read, decoder_input_ids=ids, use_cache=True, **extra)
        layers = sorted(recorder.keys)
        logits = out.logits[:, keep]
        return logits, [recorder.keys[i] for i in layers], [recorder.values[i] for i in layers]
