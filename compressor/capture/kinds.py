"""Tell what kind of model a configuration names: by transformers' tables of classes, and by methods of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from compressor.errors import CaptureError

_HALVES = ("get_image_features", "get_text_features")  # transformers' names
_COMPOSED = {"EncoderDecoderModel", "SpeechEncoderDecoderModel"}  # their halves are any two models


def seq2seq_kind(config: Any, place: str, architecture: str) -> Literal["seq2seq"]:
    """Return the kind of an encoder-decoder.

    Raises:
        CaptureError: its class has no head that predicts tokens, or its two halves are models of their own.
    """
    text, speech = _classes()
    if (architecture or text.get(config.model_type, "")) in {*text.values(), *speech.values()} - _COMPOSED:
        return "seq2seq"
    raise CaptureError(
        f"{place}: {architecture or config.model_type} is an encoder-decoder that does not predict tokens, or is made "
        "of two models; capture one half as a module with example inputs"
    )


def is_pair(config: Any, architecture: str) -> bool:
    """Return whether a configuration names a model with a half for pictures and one for texts."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    named: Any = architecture or MODEL_MAPPING_NAMES.get(config.model_type, "")
    cls = getattr(transformers, named, None) if isinstance(named, str) else None
    return all(hasattr(cls, half) for half in _HALVES)


def is_decoder(config: Any, architecture: str) -> bool:
    """Return whether a configuration names a model that predicts the next token; it may read pictures or sounds too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    if architecture:
        causal = architecture in CAUSAL.values() or architecture.endswith(("ForCausalLM", "LMHeadModel"))
        return causal or reads_more_than_text(architecture)
    return config.model_type in CAUSAL and config.model_type not in MASKED


def reads_more_than_text(architecture: str) -> bool:
    """Return whether a class reads pictures or sounds beside the tokens that it goes on with."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as PICTURES

    text, speech = _classes()
    return architecture in {*PICTURES.values(), *text.values(), *speech.values()}


def text_notes(model: Any) -> tuple[str, ...]:
    """Tell the user that the half of a model that reads texts is all that is captured."""
    name = type(model).__name__
    if not reads_more_than_text(name) or model.config is model.config.get_text_config():
        return ()
    return (
        f"{name} reads more than texts: what it makes of pictures and sounds is left out, its text half is captured",
    )


def is_ctc(config: Any, architecture: str) -> bool:
    """Return whether a configuration names a model with a CTC head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING_NAMES as CTC

    return architecture in CTC.values() or (not architecture and config.model_type in CTC)


def auto_class(config: Any) -> Any:
    """Return transformers' class that builds an encoder-decoder of this configuration."""
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    return AutoModelForSeq2SeqLM if config.model_type in _classes()[0] else AutoModelForSpeechSeq2Seq


def _classes() -> tuple[Mapping[str, str], Mapping[str, str]]:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as TEXT,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as SPEECH,
    )

    return TEXT, SPEECH
