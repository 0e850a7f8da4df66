"""Give a transformers model our own attention function, cache and mask while it is captured.

A model that runs with the attention implementation ``compressor`` calls :func:`_attend` in place of its own
attention, and finds a :class:`Recorder` in place of its cache.  Each attention layer then becomes one call of
``compressor.cached_attention`` (decoders) or ``compressor.masked_attention`` (encoders).  What our operators
cannot express is refused by name: nothing that changes the result is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.capture.attention.masks import AttentionCall, MaskFunction, MaskRequest, MaskRule
from compressor.capture.recurrence.states import StateKey, StateRecorder
from compressor.errors import CaptureError

ATTENTION_NAME = "compressor"


class SelfMadeAttention(CaptureError):
    """A layer does not attend through transformers' interface in a way that our operators can take."""


class UnknownRequest(CaptureError, AttributeError):
    """A layer asks its cache for something that the stand-in lacks; models may ask whether it is there."""


# Arguments that models hand to the attention function and that do not change what it computes for us:
# positions are already in the keys, and the mask and the cache are ours.
_NEUTRAL = frozenset(
    {"position_ids", "cache_position", "use_cache", "cache", "past_key_values", "position_embeddings", "return_dict"}
)


class Recorder(StateRecorder):
    """Stands in for a transformers cache, and collects what the layers do.

    Caches by layer; None means that no cache is fed in (the first, shape-finding run, and encoders).
    """

    is_compileable = False

    def __init__(
        self,
        names: dict[nn.Module, str],
        *,
        position: Tensor | None = None,
        mask: Tensor | None = None,
        k_cache: Mapping[int, Tensor] | None = None,
        v_cache: Mapping[int, Tensor] | None = None,
        rules: Mapping[str, MaskRule] | None = None,
        states: Mapping[StateKey, Tensor] | None = None,
    ) -> None:
        super().__init__(states)
        self.names, self.position, self.mask, self.rules = names, position, mask, rules or {}
        self.k_cache, self.v_cache = k_cache, v_cache
        self.keys: dict[int, Tensor] = {}  # layer -> [B, Hkv, S, D]
        self.values: dict[int, Tensor] = {}
        self.stored: dict[int, Tensor] = {}  # layer -> keys as the layer stored them, before they were widened
        self.attended: set[int] = set()  # layers
        self.cache_size: tuple[int, int] | None = None  # heads and channels, where layers differ
        self.calls: list[AttentionCall] = []
        self.counts = True  # the cache tells how many tokens came before, from which models count positions
        self.notes: set[str] = set()  # what the user should know

    def is_bidirectional(self, module: str) -> bool:
        """Return whether the layer that attends now is an encoder's, whose mask is :attr:`mask`."""
        return self.mask is not None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Remember a layer's new keys and values, and hand them back alone: the operator reads the old ones."""
        if layer_idx in self.keys:
            raise CaptureError(f"attention layer {layer_idx} writes its cache twice in one step; not supported")
        self.keys[layer_idx], self.values[layer_idx] = keys, values
        self.stored[layer_idx] = keys
        return keys, values

    def __getattr__(self, name: str) -> Any:
        """Refuse what a layer asks of its cache and the stand-in does not have."""
        raise UnknownRequest(
            f"a layer asks its cache for `{name}`, which keeps something else than keys, values and the states of our "
            "operators; such layers are not supported: capture the part around them as a module with an example of "
            "its inputs"
        )

    def layer_of(self, module: nn.Module, keys: Tensor) -> int | None:
        """Return the layer whose cache holds the keys that a module attends to: its own, or one that it shares."""
        own = getattr(module, "layer_idx", None)
        if own in self.keys:
            return None if own in self.attended else own
        return next((layer for layer, stored in self.stored.items() if stored is keys), None)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the first new token's position, int64 without dimensions: models count from it."""
        return self.position[0] if self.counts and self.position is not None else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return zero: positions are given explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the keys that a mask would cover; ours is made in the operator."""
        return query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return -1: there is no limit."""
        return -1


_RECORDER: ContextVar[Recorder] = ContextVar("compressor_capture")


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Let the attention layers that run inside report to this recorder."""
    token = _RECORDER.set(recorder)
    try:
        yield recorder
    finally:
        _RECORDER.reset(token)


def register_attention() -> None:
    """Make the attention implementation ``compressor`` known to transformers (idempotent)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)


@contextmanager
def mask_requests() -> Iterator[None]:
    """Give models a :class:`MaskRequest` for each mask that they ask for inside; outside they get None."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    # The model asks the class-level mapping whether the name exists, so that is where it has to be.
    MASKS.register(ATTENTION_NAME, lambda *_, mask_function, **__: MaskRequest(mask_function))
    try:
        yield
    finally:
        del MASKS._global_mapping[ATTENTION_NAME]


@contextmanager
def masks_left_out() -> Iterator[list[MaskFunction]]:
    """Give eager models None for each mask that they ask for inside; yields the masks' functions as they come."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    wanted: list[MaskFunction] = []
    before = MASKS._global_mapping["eager"]
    MASKS._global_mapping["eager"] = lambda *_, mask_function, **__: wanted.append(mask_function)
    try:
        yield wanted
    finally:
        MASKS._global_mapping["eager"] = before


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskRequest | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [B, H, S, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv] -> [B, S, H, Dv]."""
    recorder = _RECORDER.get()
    name = recorder.names.get(module, type(module).__name__)
    unknown = [k for k, v in others.items() if k not in _NEUTRAL and v is not None and v is not False]
    if unknown:
        raise CaptureError(f"{name} asks its attention for {', '.join(unknown)}, which no operator here implements")
    if dropout:
        raise CaptureError(f"{name} asks for dropout in its attention; call model.eval() first")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    request = attention_mask if isinstance(attention_mask, MaskRequest) else None
    recorder.calls.append(AttentionCall(name, sliding_window or 0, request))
    rule = recorder.rules.get(name, MaskRule(sliding_window or 0))
    if recorder.is_bidirectional(name):
        if s_aux is not None:
            raise CaptureError(f"{name} asks its attention for s_aux, which masked_attention lacks")
        if rule.chunk:
            raise CaptureError(f"{name} attends within chunks, which masked_attention lacks")
        bias = _sum_biases(position_bias, attention_mask)
        given = (query, key, value, recorder.mask, scale, rule.window, bias, softcap or 0.0)
        return torch.ops.compressor.masked_attention(*given), None
    if isinstance(attention_mask, Tensor):
        raise SelfMadeAttention(f"{name} builds an attention mask of its own, which no operator here takes")
    layer = recorder.layer_of(module, key)
    if layer is None or recorder.keys[layer].shape[2] != key.shape[2]:
        raise SelfMadeAttention(f"{name} attends to keys and values that it did not store in its cache; not supported")
    if is_causal is False and request is None:
        raise CaptureError(f"{name} attends in both directions; a decoder must be causal")
    width = value.shape[-1]
    query, key, value = _stored(recorder, layer, query, key, value)
    if recorder.k_cache is None or recorder.v_cache is None:
        k_cache, v_cache = key, value  # shapes only
    else:
        k_cache, v_cache = recorder.k_cache[layer], recorder.v_cache[layer]
    args = (query, key, value, k_cache, v_cache, recorder.position, scale, rule.window, softcap or 0.0, s_aux)
    # Biases for pairs of new tokens: capture/recognition/distances.py puts those of distances in their place.
    out = torch.ops.compressor.cached_attention(*args, rule.chunk, None, position_bias)
    return out if width == out.shape[-1] else out[..., :width], None


def _stored(recorder: Recorder, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give queries, keys and values the size of the cache, and keep keys and values as the layer's."""
    width, heads = value.shape[-1], recorder.stored[layer].shape[1]
    query, key, value = _of_one_width(query, key, value, recorder.cache_size)
    # Latent attention stores what keys and values are made of, token by token; they themselves are kept in its place.
    if recorder.cache_size is None and width != key.shape[-1]:
        recorder.notes.add(f"values have {width} channels a head, and are cached with {key.shape[-1]}, as keys have")
    if recorder.cache_size is None and heads != key.shape[1]:
        recorder.notes.add("latent attention: whole keys and values are cached, not what they are made of")
    if layer in recorder.attended:  # another layer's, which it shares
        key, value = recorder.keys[layer], recorder.values[layer]
    recorder.attended.add(layer)
    recorder.keys[layer], recorder.values[layer] = key, value
    return query, key, value


def _sum_biases(*given: Tensor | MaskRequest | None) -> Tensor | None:
    """Add up what a model adds to its scores; a mask of bools shows what it is true for."""
    total: Tensor | None = None
    for bias in given:
        if not isinstance(bias, Tensor):
            continue
        if bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, torch.finfo(torch.float32).min)
        total = bias if total is None else total + bias
    return total


def _of_one_width(
    query: Tensor, key: Tensor, value: Tensor, size: tuple[int, int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the narrower of keys and values up with zeros, which change neither products nor sums.

    Args:
        size: heads and channels that keys and values shall have; each head is repeated for its queries.
    """
    heads, width = size or (key.shape[1], max(key.shape[-1], value.shape[-1]))

    def fill(x: Tensor) -> Tensor:
        missing = width - x.shape[-1]
        return torch.cat([x, x.new_zeros((*x.shape[:-1], missing))], dim=-1) if missing else x

    def repeat(x: Tensor) -> Tensor:
        times = heads // x.shape[1]
        return x if times == 1 else x.repeat_interleave(times, dim=1)

    return fill(query), repeat(fill(key)), repeat(fill(value))
