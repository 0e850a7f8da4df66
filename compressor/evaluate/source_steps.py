"""Step an encoder-decoder as a decoder is timed: the first call encodes a source and gives the first token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from compressor_runtime import Bundle

Step: TypeAlias = Callable[[Any], Any]
"""A source int64 [1, N] at first, then the token before, int64 [1, 1] -> the likeliest token, int64 [1, 1]."""


def bundle_steps(bundle: Bundle) -> Callable[[int], Step]:
    """Return what opens a sequence of a bundle, with room for a number of tokens."""
    first = np.array([bundle.model["encoder_source"]["start_ids"]])

    def start(capacity: int) -> Step:
        session = None

        def step(tokens: Any) -> Any:
            nonlocal session
            if session is None:
                session = bundle.session(1, min(capacity, bundle.limit), tokens)
                tokens = first
            return session.step(tokens).argmax(-1)

        return step

    return start


def dense_steps(model: Any, cache_name: str) -> Callable[[int], Step]:
    """Return what opens a sequence of a model of transformers; the encoder runs in the first step only."""
    import torch

    given = model.generation_config.decoder_start_token_id
    first = torch.tensor([[model.config.eos_token_id if given is None else given]])

    def start(_capacity: int) -> Step:
        state: dict[str, Any] = {}

        def step(tokens: Any) -> Any:
            ids = torch.as_tensor(tokens)
            if not state:
                state["encoder_outputs"] = model.get_encoder()(ids)
                ids = first
            out = model(decoder_input_ids=ids, use_cache=True, **state)
            state[cache_name] = out[cache_name]
            return out.logits[:, -1:].argmax(-1)

        return step

    return start
