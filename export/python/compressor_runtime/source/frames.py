"""Read a text from the frames of a sound, each of which a model gives a token (CTC; Graves et al. 2006)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.errors import BundleError, RequestError
from compressor_runtime.source.encoding import source_of_prompt


def labels_frames(model: Mapping[str, Any]) -> bool:
    """Return whether a manifest's facts are those of a model that gives each frame a token."""
    facts = model.get("encoder_source")
    return isinstance(facts, dict) and facts.get("blank_id") is not None


def collapsed(tokens: ArrayLike, blank_id: int) -> list[int]:
    """Return tokens [frames] without repeats and then without blanks: what the frames spell."""
    found = np.asarray(tokens)
    changes = np.append(True, found[1:] != found[:-1])[: len(found)]
    return [int(token) for token in found[changes] if token != blank_id]


def frame_tokens(
    model: dict[str, Any],
    run: Callable[..., NDArray[np.float32]],
    prompt: Any,
    count: int,
    temperature: float,
    ends: Mapping[int, str],
) -> Generator[int, None, str]:
    """Yield the likeliest tokens of a sound; the generator's value tells why it ended.

    Args:
        model: the manifest's facts.
        run: calls the kernels: samples [1, N] -> logits [1, frames, tokens].
        prompt: a WAV file's path, or samples float32 in a row.
        count: at most so many tokens.
        temperature: 0; frames are not sampled.
        ends: tokens that end the text, each with the reason.
    Raises:
        RequestError: the sound cannot be used, or the temperature is another.
        BundleError: the logits are not finite.
    """
    if temperature:
        raise RequestError("temperature: this model takes the likeliest token of each frame of a sound; leave it at 0")
    logits = run([source_of_prompt(model, prompt, lambda _: [])])[0]
    if not np.isfinite(logits).all():
        raise BundleError("the model computed logits that are NaN or infinity; its weights may be damaged")
    found = collapsed(logits.argmax(-1), model["encoder_source"]["blank_id"])

    def tokens() -> Generator[int, None, str]:
        for token in found[:count]:
            if token in ends:
                return ends[token]
            yield token
        return "length" if len(found) > count else "eos_token"

    return tokens()
