"""Load the data that a recipe calibrates and evaluates on: text for models of text, images for modules."""

from __future__ import annotations

from torch import Tensor

from compressor.data.embedding_texts import Texts, load_embedding_texts
from compressor.data.images import Images, load_evaluation_images, load_image_samples
from compressor.data.pairs import ZeroShot, load_pairs
from compressor.data.text import LEAST_TOKENS, Samples, load_evaluation, load_samples, longest_window
from compressor.errors import UsageError
from compressor.graph.model import ModelInfo
from compressor.recipe.data_spec import DataSource
from compressor.recipe.gates import QUALITY
from compressor.recipe.recipe import Recipe

_FOR_TEXT = ("sequence_length", "tokens", "window", "stride")
_FOR_IMAGES = ("mean", "std", "resize", "crop", "label", "limit")
_FOR_PAIRS = ("classes", "template", "captions")


def load_data(recipe: Recipe, info: ModelInfo) -> tuple[Samples | None, Tensor | Texts | Images | ZeroShot | None]:
    """Load the samples to calibrate on and the data to evaluate on: tokens, texts to embed, or labelled images.

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
        return load_pairs(recipe, info)
    if info.kind == "module":
        samples = None if given is None else load_image_samples(given, info)
        images = load_evaluation_images(wanted, given, info)
        if images is None and (gates := [gate.metric for gate in recipe.gates if gate.metric in QUALITY]):
            raise UsageError(f"gates.{gates[0]}: there are no labelled images to measure it on; add `evaluation:`")
        return samples, images
    samples = None if given is None else load_samples(given, info.source, info.vocab_size, _spare(recipe))
    if wanted.kind is None and samples is None:
        return None, None
    if info.kind == "encoder":
        texts = load_embedding_texts(wanted, samples, info.source, info.vocab_size, info.max_positions)
        return samples, texts
    text, _ = load_evaluation(wanted, samples, info.source, info.vocab_size)
    return samples, text


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

    Parquet files and data sets of the hub hold text or images; the others say by their key which.

    Args:
        key: ``calibration`` or ``evaluation``, for messages.
    Raises:
        UsageError: they do not.
    """
    if info.hears and (spec.kind is not None or key == "calibration"):
        raise UsageError(
            f"{key}: {info.name} reads sound, on which nothing is calibrated or evaluated here; leave `{key}` out, and "
            "take passes that need no calibration, such as rtn"
        )
    reads_images = info.kind == "module"
    kinds = ("images", "parquet", "hub") if reads_images else ("text", "json", "parquet", "hub")
    reads = "images, as a plain module" if reads_images else "text"
    reads = reads if info.pair is None else "images, and names of their classes"
    if spec.kind is not None and spec.kind not in kinds:
        raise UsageError(
            f"{key}: `{spec.kind}` does not fit: {info.name} is calibrated and evaluated on {reads}; give "
            f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        )
    unfitting = (_FOR_TEXT if reads_images else _FOR_IMAGES) + (() if info.pair is not None else _FOR_PAIRS)
    unfit = [name for name in unfitting if spec.changes(name)]
    if unfit:
        raise UsageError(
            f"{key}: `{unfit[0]}` has no meaning: {info.name} is calibrated and evaluated on {reads}; remove it"
        )
