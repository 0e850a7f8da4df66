"""Encode a source, and say how a decoder that reads it begins and ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import array, token_ids
from compressor_runtime.errors import RequestError
from compressor_runtime.source.features import source_of
from compressor_runtime.source.wave_file import read_wave
from compressor_runtime.tensors import to_tvm

_SETTINGS = {
    "samples": ("sampling_rate", "normalize"),
    "filter_banks": ("sampling_rate", "num_mel_bins", "normalize_means", "normalize_vars"),
    "log_mel": ("sampling_rate", "feature_size", "n_fft", "hop_length", "chunk_length"),
}
"""Numbers that each kind of features is computed with."""


def encode_source(
    model: dict[str, Any],
    call: Callable[..., Any],
    source: Any,
    mask: Any,
    batch: int,
    put: Callable[[NDArray[Any]], Any] = to_tvm,
) -> list[Any]:
    """Run the encoder, and return what the decoder reads of it in each step, as the kernels take it.

    Args:
        model: the manifest's facts.
        call: the library's ``encode``.
        source: whole numbers [B, N]; of models of sound, what :func:`source_of` gives, one or several of one length.
        mask: [B, N], 1 for tokens and 0 for padding, at least one token a row; None for no padding.
        put: takes arrays to where the kernels compute.
    Raises:
        RequestError: shapes that do not agree, ids out of range, or more tokens than the encoder has positions.
    """
    facts = model["encoder_source"]
    if source is None:
        raise RequestError("an encoder-decoder's session begins with a source: give token ids [batch, tokens]")
    if facts["reads"] == "audio":
        inputs = [_sound(facts, source, mask)]
    else:
        inputs = _tokens(facts, model["vocab_size"], source, mask)
    if len(inputs[0]) != batch:
        raise RequestError(f"a source of {len(inputs[0])} sequences, for a session of {batch}")
    given = [put(x) for x in inputs]
    found = call(*given)
    crossing = found if isinstance(found, list) else [found]
    return [*given[1:], *(put(x) for x in crossing)]


def _tokens(facts: dict[str, Any], vocab_size: int, source: ArrayLike, mask: ArrayLike | None) -> list[NDArray[Any]]:
    tokens = token_ids(source, vocab_size)
    kept = np.ones(tokens.shape, np.float32) if mask is None else array("source_mask", mask).astype(np.float32)
    limit = facts["max_positions"] or tokens.shape[1]
    if kept.shape != tokens.shape or tokens.shape[1] > limit:
        raise RequestError(
            f"source {tokens.shape}, mask {kept.shape}: they must agree, with at most {limit} tokens in a row"
        )
    if not (kept != 0).any(axis=1).all():
        raise RequestError("source_mask: a row is all padding; give each at least one token")
    return [tokens, kept]


def _sound(facts: dict[str, Any], source: ArrayLike, mask: ArrayLike | None) -> NDArray[np.float32]:
    values = array("source", source)
    shape, least = facts["shape"], facts.get("min_positions", 1)
    fits = values.ndim == 1 + len(shape) and values.dtype.kind == "f"
    fits = fits and all(n == size if size else n >= least for n, size in zip(values.shape[1:], shape, strict=True))
    if not fits or mask is not None:
        wanted = ["batch", *(size or f"{least} or more" for size in shape)]
        raise RequestError(f"source: {values.dtype} {list(values.shape)}; give float32 {wanted}, and no mask")
    return values.astype(np.float32)


def source_of_prompt(model: dict[str, Any], prompt: Any, tokenize: Callable[[Any], list[int]]) -> Any:
    """Return the source that a prompt stands for: token ids of a text; of sound, in a file or as samples, its features.

    Args:
        tokenize: text, or token ids in a row -> checked token ids.
    Raises:
        RequestError: the sound cannot be used.
    """
    facts = model["encoder_source"]
    if facts["reads"] == "tokens":
        return np.array([tokenize(prompt)])
    if isinstance(prompt, str | os.PathLike):
        return source_of(read_wave(prompt, facts["features"]["sampling_rate"]), facts)
    samples = array("prompt", prompt)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise RequestError(
            f"prompt: {samples.dtype} {list(samples.shape)}; give a WAV file, or samples float32 in a row"
        )
    return source_of(samples.astype(np.float32), facts)


def without(logits: NDArray[np.float32], facts: dict[str, Any] | None, first: bool) -> NDArray[np.float32]:
    """Return logits [V] with those of tokens that are never generated, or not first, at minus infinity."""
    banned = [] if facts is None else [*facts["suppressed_ids"], *(facts["first_suppressed_ids"] if first else ())]
    if not banned:
        return logits
    left = logits.copy()
    left[banned] = -np.inf
    return left


def tokens_left(facts: dict[str, Any] | None, most: int, room: int) -> int:
    """Return how many tokens are computed where ``most`` are wanted and there is room for ``room``.

    One less where a model's last token is always the end of the text, as transformers puts it.
    """
    forced = facts is not None and facts["forced_eos_id"] is not None
    return min(most - 1 if forced else most, room)


def wrong_source(model: dict[str, Any]) -> bool:
    """Return whether the manifest's entry about the source holds something that cannot be.

    A decoder begins with some tokens; where each frame of a sound gets a token, there is a blank in their place.
    """
    facts, vocab_size = model.get("encoder_source"), model.get("vocab_size", 0)
    if not isinstance(facts, dict) or facts.get("reads") not in ("tokens", "audio"):
        return True
    lists = [facts.get(name) for name in ("start_ids", "suppressed_ids", "first_suppressed_ids")]
    known = all(isinstance(ids, list) and all(type(n) is int and 0 <= n < vocab_size for n in ids) for ids in lists)
    numbers = type(facts.get("max_positions")) is int and type(facts.get("forced_eos_id")) in (int, type(None))
    shape = facts.get("shape")
    sizes = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    blank = facts.get("blank_id")
    known = known and (bool(facts["start_ids"]) if blank is None else type(blank) is int and 0 <= blank < vocab_size)
    known = known and (blank is not None) == (model.get("layers") == 0) and (blank is None or facts["reads"] == "audio")
    return not (known and numbers and sizes) or (facts["reads"] == "audio" and _wrong(facts))


def _wrong(facts: dict[str, Any]) -> bool:
    """Return whether the settings of a model's features cannot be."""
    given = facts.get("features")
    if not isinstance(given, dict) or type(facts.get("min_positions")) is not int:
        return True
    method = given.get("method")
    needed = _SETTINGS.get(method) if isinstance(method, str) else None
    if needed is None:
        return True
    return not all(type(given.get(name)) in (int, float, bool) and 0 <= given[name] <= 1 << 20 for name in needed)
