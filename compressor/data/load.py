"""Load the data that a recipe calibrates and evaluates on: text, images for modules, sound for models of speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from torch import Tensor

from compressor.data.embedding_texts import Texts, load_embedding_texts
from compressor.data.images import Images, load_evaluation_images, load_image_samples
from compressor.data.pairs import ZeroShot, load_pair_samples, load_zero_shot
from compressor.data.sounds import Sounds, load_evaluation_sounds, load_sound_samples
from compressor.data.text import LEAST_TOKENS, Samples, load_evaluation, load_samples, longest_window
from compressor.errors import UsageError
from compressor.graph.model import ModelInfo
from compressor.recipe.data_spec import OF_DECODERS, PROMPT_TOKENS, DataSource, EvaluationSpec, Kind
from compressor.recipe.gates import QUALITY
from compressor.recipe.recipe import Recipe

_T = TypeVar("_T")
EvaluationData: TypeAlias = Tensor | Texts | Images | Sounds | ZeroShot
"""Tokens, texts to embed, labelled images, sounds with their texts, or pictures to tell by texts."""
_LEAST_NEW = 3  # with the last token, which needs no position, a 4-gram
_FOR_TEXT = ("sequence_length", "tokens", "window", "stride", *OF_DECODERS)
_FOR_IMAGES = ("mean", "std", "resize", "crop", "label")
_FOR_PAIRS = ("classes", "template", "captions")
_READS: Mapping[str, tuple[str, tuple[Kind, ...], tuple[str, ...]]] = {
    "images": ("images, as a plain module", ("images", "parquet", "hub"), (*_FOR_TEXT, *_FOR_PAIRS)),
    "pictures": ("images, and names of their classes", ("images", "parquet", "hub"), _FOR_TEXT),
    "sound": ("sound with its text", ("audio", "parquet", "hub"), (*_FOR_TEXT, *_FOR_IMAGES, *_FOR_PAIRS)),
    "text": ("text", ("text", "json", "parquet", "hub"), (*_FOR_IMAGES, *_FOR_PAIRS, "limit")),
}
"""Map what a model reads to its description, the sources that hold it, and the keys that it gives no meaning."""


def load_data(recipe: Recipe, info: ModelInfo) -> tuple[Samples | None, EvaluationData | None]:
    """Load the samples to calibrate on and the data to evaluate on.

    Returns:
        Samples and evaluation data; None for each that the recipe does not have.

    Raises:
        UsageError: data of the wrong kind, or too little; a gate on quality and nothing to measure it on.
    """
    given, wanted = recipe.calibration, recipe.evaluation
    for key, spec in (("calibration", given), ("evaluation", wanted)):
        if spec is not None:
            check_kind(key, spec, info)
    if info.pair is not None:
        data = load_zero_shot(wanted, given, info)
        return load_pair_samples(given, info), _for_gates(recipe, data, "labelled images with `classes`")
    if info.hears:
        samples = None if given is None else load_sound_samples(given, info)
        return samples, _for_gates(recipe, load_evaluation_sounds(wanted, given, info), "sounds left")
    if info.kind == "module":
        samples = None if given is None else load_image_samples(given, info)
        return samples, _for_gates(recipe, load_evaluation_images(wanted, given, info), "labelled images")
    samples = None if given is None else load_samples(given, info.source, info.vocab_size, _spare(recipe))
    if wanted.kind is None and samples is None:
        return None, None
    if info.kind == "encoder":
        texts = load_embedding_texts(wanted, samples, info.source, info.vocab_size, info.max_positions)
        return samples, texts
    text, _ = load_evaluation(wanted, samples, info.source, info.vocab_size)
    check_continuations(wanted, len(text))
    return samples, text


def check_continuations(spec: EvaluationSpec, tokens: int) -> None:
    """Refuse an evaluation of more continuations than a text has prompts for.

    Raises:
        UsageError: the text has fewer tokens than they take.
    """
    if spec.continuations and tokens < spec.continuations * PROMPT_TOKENS:
        raise UsageError(
            f"evaluation: continuations: {spec.continuations} prompts of {PROMPT_TOKENS} tokens need "
            f"{spec.continuations * PROMPT_TOKENS}, and the text has {tokens}; lower `continuations`"
        )


def _for_gates(recipe: Recipe, data: _T | None, what: str) -> _T | None:
    """Return the data, or refuse gates on quality where there is none."""
    if data is None and (gates := [gate.metric for gate in recipe.gates if gate.metric in QUALITY]):
        raise UsageError(f"gates.{gates[0]}: there are no {what} to measure it on; add `evaluation:`")
    return data


def _spare(recipe: Recipe) -> int:
    """Return the tokens that calibration must leave, for an evaluation without a text of its own."""
    return min(LEAST_TOKENS, recipe.evaluation.tokens) if recipe.evaluation.kind is None else 0


def longest_samples(recipe: Recipe, info: ModelInfo) -> int:
    """Return the longest ``sequence_length`` that both the model's positions and the text to calibrate on allow.

    A data set on the hub is not fetched for it.

    Raises:
        UsageError: the text cannot be read, or is too short for any.
    """
    given = recipe.calibration
    if given is None or given.kind == "hub":
        return info.max_positions
    return longest_window(given, info.source, info.vocab_size, _spare(recipe), info.max_positions)


def check_kind(key: str, spec: DataSource, info: ModelInfo) -> None:
    """Check that a source, and the keys given with it, fit what a model reads.

    Parquet files and data sets of the hub hold text, images or sound; the others say by their key which.

    Args:
        key: ``calibration`` or ``evaluation``, for messages.
    Raises:
        UsageError: they do not.
    """
    what = "sound" if info.hears else "images" if info.kind == "module" else "text"
    reads, kinds, unfitting = _READS["pictures" if info.pair is not None else what]
    if spec.kind is not None and spec.kind not in kinds:
        raise UsageError(
            f"{key}: `{spec.kind}` does not fit: {info.name} is calibrated and evaluated on {reads}; give "
            f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        )
    unfit = [name for name in unfitting if spec.changes(name)]
    if unfit:
        raise UsageError(
            f"{key}: `{unfit[0]}` has no meaning: {info.name} is calibrated and evaluated on {reads}; remove it"
        )
    for name in OF_DECODERS if info.kind != "decoder" else ():
        if spec.changes(name):
            raise UsageError(f"{key}: `{name}` has no meaning: {info.name} is not a decoder; remove it")
    if isinstance(spec, EvaluationSpec) and spec.continuations and 0 < info.max_positions < PROMPT_TOKENS + _LEAST_NEW:
        raise UsageError(
            f"{key}: continuations: {info.name} has {info.max_positions} positions, and prompts take {PROMPT_TOKENS}; "
            "leave it out"
        )
