"""Functions of transformers' recurrent layers, and our operators in their place.

transformers writes each recurrence once, as a function of a module, so that a faster kernel may take its place
(``use_kernel_func_from_hub_with_fallback``).  That is the seam: while a model is captured, the functions below replace
those of the same name in the modules that its layers come from.  In the first run each is compared with the original
on random numbers, so that another version of transformers cannot be captured wrongly.

    causal_conv1d_fn                     becomes   causal_convolution, and the activation function
    mamba_selective_scan                 becomes   selective_scan over one head, gate and skip
    mamba2_chunk_scan                    becomes   selective_scan over heads, and skip
    torch_chunk_gated_delta_rule         becomes   gated_delta_rule of normalised queries and keys
    chunk_kimi_delta_attention           becomes   the same, with a decay for each channel of the keys
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from torch.utils._pytree import tree_map_only

from compressor.capture.recurrence.rwkv import shifts_replaced, weigh_tokens
from compressor.capture.recurrence.states import StateRecorder
from compressor.errors import CaptureError

_OPS = torch.ops.compressor
_TOLERANCE = 1e-4  # of the outputs' root mean square: float32 sums in another order
_NORM_EPS = 1e-6  # of transformers' l2norm


def _convolve(
    recorder: StateRecorder,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    **_: Any,
) -> Tensor:
    """Convolve [B, C, S]."""
    key, x, (channels, width) = recorder.of_convolution(hidden_states), hidden_states.transpose(1, 2), weight.shape
    state = recorder.state(key, x, x.shape[0], width - 1, channels)
    y, state = _OPS.causal_convolution(x, weight, bias, state)
    recorder.keep(key, state)
    turned: Tensor = y.transpose(1, 2)
    if activation is None:
        return turned
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](turned)
    return activated


def _scan_channels(
    recorder: StateRecorder,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    return_last_state: bool,
    **_: Any,
) -> Any:
    """Scan [B, C, S] with ``dt`` alike, ``A`` [C, N], ``B`` and ``C`` [B, N, S]."""
    x, steps, write, read = (part.transpose(1, 2).unsqueeze(2) for part in (hidden_states, dt, B, C))
    steps = steps if delta_bias is None else steps + delta_bias
    steps = softplus(steps) if delta_softplus else steps
    key = recorder.of_scan()
    state = recorder.state(key, x, x.shape[0], 1, A.shape[1], A.shape[0])
    y, state = _OPS.selective_scan(x, steps, A.transpose(0, 1).unsqueeze(0), write, read, state)
    recorder.keep(key, state)
    y = (y if D is None else y + x * D).squeeze(2).transpose(1, 2)
    y = y if z is None else y * silu(z)
    return (y, state) if return_last_state else y


def _scan_heads(
    recorder: StateRecorder,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    return_final_states: bool,
    **_: Any,
) -> Any:
    """Scan [B, S, H, P] with ``dt`` [B, S, H], ``A`` and ``D`` [H], ``B`` and ``C`` [B, S, G, N]."""
    steps = dt if dt_bias is None else dt + dt_bias
    steps = softplus(steps) if dt_softplus else steps
    if tuple(dt_limit) != (0.0, float("inf")):
        steps = torch.clamp(steps, *dt_limit)
    key, (batch, _length, heads, width) = recorder.of_scan(), hidden_states.shape
    state = recorder.state(key, hidden_states, batch, heads, B.shape[-1], width)
    y, state = _OPS.selective_scan(hidden_states, steps.unsqueeze(-1), A.view(-1, 1, 1), B, C, state)
    recorder.keep(key, state)
    y = y if D is None else y + hidden_states * D.view(heads, -1)
    return (y, state) if return_final_states else y


def _delta_rule(
    recorder: StateRecorder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with queries and keys [B, S, Hk, Dk], values [B, S, H, Dv], ``beta`` [B, S, H], ``g`` alike or for each
    channel of the keys.
    """
    place, (batch, _length, heads, width) = recorder.of_scan(), value.shape
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    state = recorder.state(place, value, batch, heads, key.shape[-1], width)
    y, state = _OPS.gated_delta_rule(query, key, value, g if g.dim() == 4 else g.unsqueeze(-1), beta, state)
    recorder.keep(place, state)
    return y, state if output_final_state else None


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "mamba_selective_scan": _scan_channels,
    "mamba2_chunk_scan": _scan_heads,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "rwkv_linear_attention": weigh_tokens,
}


@contextmanager
def functions_replaced(model: nn.Module, recorder: StateRecorder) -> Iterator[None]:
    """Let the layers of a model call our operators inside, with the states of a recorder."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    before = [(m, name, vars(m)[name]) for m in modules for name in _FUNCTIONS if name in vars(m)]
    try:
        for module, name, original in before:
            setattr(module, name, _replacement(original, name, recorder))
        with shifts_replaced(model, recorder):
            yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


def _replacement(original: Callable[..., Any], name: str, recorder: StateRecorder) -> Callable[..., Any]:
    ours, signature = _FUNCTIONS[name], inspect.signature(original)
    checked: set[str] = set()

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CaptureError(f"transformers' {name} takes other arguments than it did: {error}") from error
        bound.apply_defaults()
        given = {key: value for key, value in bound.arguments.items() if key != "kwargs"}
        about = str({k: v.shape if isinstance(v, Tensor) else v for k, v in given.items()})
        if recorder.states is None and about not in checked:
            checked.add(about)
            _compare(inspect.unwrap(original), ours, name, given)
        return ours(recorder, **given)

    return call


def _compare(original: Callable[..., Any], ours: Callable[..., Any], name: str, given: Mapping[str, Any]) -> None:
    """Run the original and ours on random numbers of the shapes that were given.

    Raises:
        CaptureError: they differ.
    """
    rng = torch.Generator().manual_seed(0)
    drawn = tree_map_only(Tensor, lambda x: 0.5 * torch.randn(tuple(x.shape), generator=rng), dict(given))
    trial = StateRecorder()
    trial.get_recurrent_state(0)
    if "weight" in drawn:
        trial.update_conv_state(drawn["hidden_states"], 0)
    try:
        found = [ours(trial, **drawn), original(**drawn)]
    except TypeError as error:
        raise CaptureError(f"transformers' {name} takes other arguments than it did: {error}") from error
    got, expected = (part[0] if isinstance(part, tuple) else part for part in found)
    if got.shape != expected.shape or not float((got - expected).norm()) <= _TOLERANCE * float(expected.norm()):
        raise CaptureError(f"transformers' {name} computes something else than the operator that it would become")
