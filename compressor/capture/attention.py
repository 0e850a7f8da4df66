"""Give a transformers model our own attention function, cache and mask while it is captured.

A model that runs with the attention implementation ``compressor`` calls :func:`_attend` in place of its own
attention, and finds a :class:`Recorder` in place of its cache.  Each attention layer then becomes one call of
``compressor.cached_attention`` (decoders) or ``compressor.masked_attention`` (encoders).  What our operators
cannot express is refused by name: nothing that changes the result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.capture.recurrence.states import StateKey, StateRecorder
from compressor.errors import CaptureError

ATTENTION_NAME = "compressor"


class SelfMadeAttention(CaptureError):
    """A layer does not attend through transformers' interface in a way that our operators can take."""


# Arguments that models hand to the attention function and that do not change what it computes for us:
# positions are already in the keys, and the mask and the cache are ours.
_NEUTRAL = frozenset(
    {"position_ids", "cache_position", "use_cache", "cache", "past_key_values", "position_embeddings", "return_dict"}
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskRequest:
    """The mask a model asks for, kept as its index function instead of being built."""

    def __init__(self, function: MaskFunction) -> None:
        self.function = function

    def __getitem__(self, _: object) -> MaskRequest:
        return self  # some models slice the mask to the keys' length


@dataclass(frozen=True)
class MaskRule:
    """Say which keys a query sees, beside causality or padding.

    Attributes:
        window: keys no further away than ``window - 1`` positions; 0 for all.
        chunk: keys of the query's own chunk of so many positions; 0 for all.
    """

    window: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        return f"window {self.window or 'none'}, chunk {self.chunk or 'none'}"


@dataclass(frozen=True)
class AttentionCall:
    """One attention layer, as the model called it."""

    module: str
    window: int
    mask: MaskRequest | None


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
        self.attended: set[int] = set()  # layers
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
        return keys, values

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
    layer = getattr(module, "layer_idx", None)
    if layer not in recorder.keys or layer in recorder.attended or recorder.keys[layer].shape[2] != key.shape[2]:
        raise SelfMadeAttention(f"{name} attends to keys and values that it did not store in its cache; not supported")
    recorder.attended.add(layer)
    if is_causal is False and request is None:
        raise CaptureError(f"{name} attends in both directions; a decoder must be causal")
    width, query, key, value = value.shape[-1], *_of_one_width(query, key, value)
    # Latent attention stores what keys and values are made of, token by token; they themselves are kept in its place.
    if width != key.shape[-1]:
        recorder.notes.add(f"values have {width} channels a head, and are cached with {key.shape[-1]}, as keys have")
    if recorder.keys[layer].shape[1] != key.shape[1]:
        recorder.notes.add("latent attention: whole keys and values are cached, not what they are made of")
    recorder.keys[layer], recorder.values[layer] = key, value
    if recorder.k_cache is None or recorder.v_cache is None:
        k_cache, v_cache = key, value  # shapes only
    else:
        k_cache, v_cache = recorder.k_cache[layer], recorder.v_cache[layer]
    args = (query, key, value, k_cache, v_cache, recorder.position, scale, rule.window, softcap or 0.0, s_aux)
    # Biases for pairs of new tokens: capture/recognition/distances.py puts those of distances in their place.
    out = torch.ops.compressor.cached_attention(*args, rule.chunk, None, position_bias)
    return out if width == out.shape[-1] else out[..., :width], None


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


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the narrower of keys and values up with zeros, which change neither products nor sums."""
    width = max(key.shape[-1], value.shape[-1])

    def fill(x: Tensor) -> Tensor:
        missing = width - x.shape[-1]
        return torch.cat([x, x.new_zeros((*x.shape[:-1], missing))], dim=-1) if missing else x

    return fill(query), fill(key), fill(value)


def mask_rules(calls: list[AttentionCall], *, causal: bool, positions: int) -> dict[str, MaskRule]:
    """Find the rule that expresses each mask that was asked for.

    Args:
        calls: the attention layers of one run inside :func:`mask_requests`.
        causal: True for ``cached_attention``, False for ``masked_attention``.
        positions: longest sequence to look at.
    Returns:
        For each module that asked for a mask, the rule that our operator gets.
    Raises:
        CaptureError: a layer hides or shows other keys than any rule does (prefix attention, two masks, ...).
    """
    verdicts: dict[tuple[int, int], MaskRule | None] = {}  # layers of a kind share one request
    rules: dict[str, MaskRule] = {}
    for call in calls:
        if call.mask is None:
            continue
        key = (id(call.mask), call.window)
        if key not in verdicts:
            verdicts[key] = find_rule(call.mask.function, call.window, causal=causal, positions=positions)
        rule = verdicts[key]
        if rule is None or rules.setdefault(call.module, rule) != rule:
            expected = "causal" if causal else "every token that is not padding"
            raise CaptureError(
                f"{call.module} wants a mask other than what its operator applies ({expected}, within a window or a "
                "chunk)"
            )
    return rules


def find_rule(function: MaskFunction, window: int, *, causal: bool, positions: int) -> MaskRule | None:
    """Return the rule of a mask, the stated window if that is the rule; None if no rule gives the mask."""
    candidates = [MaskRule(window), MaskRule()]
    try:
        if causal:
            # The first query that does not see the first key ends its window, or begins a chunk.
            low, high = 0, positions - 1
            while low < high:
                middle = (low + high) // 2
                if bool(_visible(function, torch.tensor([[middle]]), 1)[0, 0]):
                    low = middle + 1
                else:
                    high = middle
            candidates += [MaskRule(low), MaskRule(chunk=low)]
        else:
            candidates.append(MaskRule(int(_visible(function, torch.tensor([[0]]), positions).sum())))
        return next((rule for rule in candidates if _mask_agrees(function, rule, causal, positions)), None)
    except Exception:  # the mask depends on data of its own: whatever it is, it is not ours
        return None


def _visible(function: MaskFunction, q: Tensor, positions: int) -> Tensor:
    """Return which of the first keys the queries [N, 1] see, bool [N, positions]."""
    zero = torch.zeros((), dtype=torch.int64)
    wanted = torch.as_tensor(function(zero, zero, q, torch.arange(positions)[None, :]))
    return wanted.expand(len(q), positions)


def _mask_agrees(function: MaskFunction, rule: MaskRule, causal: bool, positions: int) -> bool:
    rows = {0, 1, 2, positions // 2, positions - 1}
    for step in (rule.window, rule.chunk):
        rows |= {step - 1, step, step + 1, 2 * step - 1, 2 * step, positions // max(step, 1) * step}
    q = torch.tensor(sorted(r for r in rows if 0 <= r < positions))[:, None]
    kv = torch.arange(positions)[None, :]
    expected = torch.ones(len(q), positions, dtype=torch.bool)
    if causal:
        expected = kv <= q
    if rule.window:
        expected = expected & ((q - kv).abs() < rule.window)
    if rule.chunk:
        expected = expected & (q // rule.chunk == kv // rule.chunk)
    return bool((_visible(function, q, positions) == expected).all())
