"""Give a transformers model our own attention function, cache and mask while it is captured.

A model that runs with the attention implementation ``compressor`` calls :func:`_attend` in place of its own
attention, and finds a :class:`Recorder` in place of its cache.  Each attention layer then becomes one call of
``compressor.cached_attention`` (decoders) or ``compressor.masked_attention`` (encoders).  What our operators
cannot express is refused by name: nothing that changes the result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import compressor.ops  # noqa: F401  (registers the operators)
from compressor.errors import CaptureError

ATTENTION_NAME = "compressor"

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
class AttentionCall:
    """One attention layer, as the model called it."""

    module: str
    window: int
    mask: MaskRequest | None


class Recorder:
    """Stands in for a transformers cache, and collects what the attention layers do.

    A cache entry list of None means that no cache is fed in (the first, shape-finding run, and encoders).
    """

    is_compileable = False

    def __init__(
        self,
        names: dict[nn.Module, str],
        *,
        position: Tensor | None = None,
        mask: Tensor | None = None,
        k_cache: list[Tensor] | None = None,
        v_cache: list[Tensor] | None = None,
    ) -> None:
        self.names, self.position, self.mask = names, position, mask
        self.k_cache, self.v_cache = k_cache, v_cache
        self.keys: dict[int, Tensor] = {}  # layer -> [B, Hkv, S, D]
        self.values: dict[int, Tensor] = {}
        self.calls: list[AttentionCall] = []

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Remember a layer's new keys and values, and hand them back alone: the operator reads the old ones."""
        if layer_idx in self.keys:
            raise CaptureError(f"attention layer {layer_idx} writes its cache twice in one step; not supported")
        self.keys[layer_idx], self.values[layer_idx] = keys, values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return zero: positions are given explicitly."""
        return 0

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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [B, H, S, D], key and value [B, Hkv, S, D] -> [B, S, H, D]."""
    recorder = _RECORDER.get()
    name = recorder.names.get(module, type(module).__name__)
    unknown = [k for k, v in others.items() if k not in _NEUTRAL and v is not None and v is not False]
    if unknown:
        raise CaptureError(f"{name} asks its attention for {', '.join(unknown)}, which no operator here implements")
    if dropout:
        raise CaptureError(f"{name} asks for dropout in its attention; call model.eval() first")
    if isinstance(attention_mask, Tensor):
        raise CaptureError(f"{name} builds an attention mask of its own, which no operator here takes")
    if query.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise CaptureError(
            f"{name} has keys of width {key.shape[-1]} and values of width {value.shape[-1]}; they must be equal"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    recorder.calls.append(AttentionCall(name, sliding_window or 0, attention_mask))
    if recorder.mask is not None:
        for what, given in {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}.items():
            if given is not None:
                raise CaptureError(f"{name} asks its attention for {what}, which masked_attention lacks")
        return torch.ops.compressor.masked_attention(query, key, value, recorder.mask, scale), None
    layer = getattr(module, "layer_idx", None)
    if layer is None or recorder.keys.get(layer) is not key or recorder.values.get(layer) is not value:
        raise CaptureError(f"{name} attends to keys and values that it did not store in its cache; not supported")
    if is_causal is False:
        raise CaptureError(f"{name} attends in both directions; a decoder must be causal")
    if recorder.k_cache is None or recorder.v_cache is None:
        k_cache, v_cache = key, value  # shapes only
    else:
        k_cache, v_cache = recorder.k_cache[layer], recorder.v_cache[layer]
    out = torch.ops.compressor.cached_attention(
        query, key, value, k_cache, v_cache, recorder.position, scale, sliding_window or 0, softcap or 0.0, s_aux
    )
    return out, None


def check_masks(calls: list[AttentionCall], *, causal: bool, positions: int) -> None:
    """Compare each mask that was asked for with the one our operator applies.

    Args:
        calls: the attention layers of one run inside :func:`mask_requests`.
        causal: True for ``cached_attention``, False for ``masked_attention``.
        positions: longest sequence to look at.
    Raises:
        CaptureError: a layer hides or shows other keys (chunked or prefix attention, a window that the
            attention function was not told of, ...).
    """
    verdicts: dict[tuple[int, int], bool] = {}  # layers of a kind share one request
    for call in calls:
        if call.mask is None:
            continue
        key = (id(call.mask), call.window)
        if key not in verdicts:
            verdicts[key] = _mask_agrees(call.mask.function, call.window, causal, positions)
        if not verdicts[key]:
            expected = f"causal, window {call.window or 'none'}" if causal else "every token that is not padding"
            raise CaptureError(f"{call.module} wants a mask other than what its operator applies ({expected})")


def _mask_agrees(function: MaskFunction, window: int, causal: bool, positions: int) -> bool:
    rows = {0, 1, 2, positions // 2, positions - 1, window - 1, window, window + 1}
    q = torch.tensor(sorted(r for r in rows if 0 <= r < positions))[:, None]
    kv = torch.arange(positions)[None, :]
    zero = torch.zeros((), dtype=torch.int64)
    expected = torch.ones(len(q), positions, dtype=torch.bool)
    if causal:
        expected = (kv <= q) & (q - kv < window if window else expected)
    try:
        wanted = torch.as_tensor(function(zero, zero, q, kv)).expand_as(expected)
        return bool((wanted == expected).all())
    except Exception:  # the mask depends on data of its own: whatever it is, it is not ours
        return False
