"""Read how an encoder-decoder generates: what its decoder begins with, which tokens it never says, what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compressor.capture.seq2seq.audio import audio_source, whisper_start
from compressor.errors import CaptureError
from compressor.graph.model import SourceInfo

if TYPE_CHECKING:
    from compressor.capture.meta_model import MetaModel

_LONGEST = ("max_source_positions", "max_position_embeddings")
_UNUSED = {  # setting -> what leaves greedy generation as it is
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "sequence_bias": (None,),
    "return_timestamps": (None, False),
    "exponential_decay_length_penalty": (None,),
}
"""Settings of transformers' generation that a bundle does not apply."""


def source_info(meta_model: MetaModel, audio: str) -> SourceInfo:
    """Return what the encoder reads, and how the decoder generates as transformers' greedy generation does.

    Args:
        audio: name of the model's argument for sound; empty for a model of text.
    Raises:
        CaptureError: it is not stated what the decoder begins with.
    """
    config, given = meta_model.model.config, meta_model.generation
    suppressed = {*_ids(given, "suppress_tokens"), *_bad_words(given, meta_model.eos_ids)}
    forced_eos = given.get("forced_eos_token_id")
    read = audio_source(meta_model, audio) if audio else None
    longest = next(filter(None, (getattr(config, key, 0) for key in _LONGEST)), 0)
    return SourceInfo(
        reads="audio" if read else "tokens",
        shape=read.shape if read else (0,),
        max_positions=read.max_positions if read else longest,
        features=read.features if read else {},
        start_ids=_start(meta_model, given),
        suppressed_ids=tuple(sorted(suppressed)),
        first_suppressed_ids=tuple(_ids(given, "begin_suppress_tokens")),
        forced_eos_id=forced_eos[0] if isinstance(forced_eos, list) else forced_eos,
    )


def generation_notes(given: Mapping[str, Any]) -> list[str]:
    """Name the settings of a model's generation that a bundle leaves aside."""
    names = [name for name, neutral in _UNUSED.items() if given.get(name) not in neutral]
    names += ["bad_words_ids of several tokens"] if any(len(w) > 1 for w in given.get("bad_words_ids") or []) else []
    if not names:
        return []
    return [f"the model's generation asks for {', '.join(names)}; a bundle takes the likeliest token, without them"]


def _start(meta_model: MetaModel, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the decoder's first tokens: its start, and the token that is forced after it."""
    config = meta_model.model.config
    named = (given.get("decoder_start_token_id"), getattr(config, "decoder_start_token_id", None), meta_model.bos_id)
    start = next((number for number in named if number is not None), None)
    forced = given.get("forced_bos_token_id")
    for key, value in (("decoder_start_token_id", start), ("forced_bos_token_id", forced)):
        if type(value) is not int and not (value is None and key.startswith("forced")):
            raise CaptureError(f"{meta_model.name}: {key} is {value!r:.80}; state one token in generation_config.json")
    if "no_timestamps_token_id" in given or "forced_decoder_ids" in given:
        return whisper_start(start, given)
    return (start,) if forced is None else (start, forced)  # type: ignore[return-value]


def _ids(given: Mapping[str, Any], key: str) -> list[int]:
    value = given.get(key) or []
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise CaptureError(f"generation_config.json: {key} is {value!r:.80}; give a list of token ids")
    return value


def _bad_words(given: Mapping[str, Any], eos_ids: tuple[int, ...]) -> list[int]:
    """Return the tokens that alone are bad words; the end of a text cannot be one."""
    words = given.get("bad_words_ids") or []
    return [word[0] for word in words if len(word) == 1 and word[0] not in eos_ids]
