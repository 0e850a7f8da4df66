"""What a recipe's model is calibrated and evaluated on: text for models of text, images for plain modules."""

from __future__ import annotations

from torch import Tensor

from compressor.data.embedding_texts import Texts, load_embedding_texts
from compressor.data.images import Images, load_evaluation_images, load_image_samples
from compressor.data.text import LEAST_TOKENS, Samples, load_evaluation, load_samples
from compressor.errors import UsageError
from compressor.graph.model import ModelInfo
from compressor.recipe.gates import QUALITY
from compressor.recipe.recipe import Recipe


def load_data(recipe: Recipe, info: ModelInfo) -> tuple[Samples | None, Tensor | Texts | Images | None]:
    """Load the samples to calibrate on and the data to evaluate on: tokens, texts to embed or labelled images.

    Returns:
        Samples and evaluation data; None for each that the recipe does not have.

    Raises:
        UsageError: data of the wrong kind, or too little; a gate on quality and nothing to measure it on.
    """
    for key, spec in (("calibration", recipe.calibration), ("evaluation", recipe.evaluation)):
        if spec is not None and spec.kind is not None and (spec.kind == "images") != (info.kind == "module"):
            reads = "images, as a plain module" if info.kind == "module" else "text"
            raise UsageError(f"{key}: `{spec.kind}` does not fit: {info.name} is calibrated and evaluated on {reads}")
    given, wanted = recipe.calibration, recipe.evaluation
    if info.kind == "module":
        samples = None if given is None else load_image_samples(given)
        images = load_evaluation_images(wanted, given)
        if images is None and (gates := [gate.metric for gate in recipe.gates if gate.metric in QUALITY]):
            raise UsageError(f"gates.{gates[0]}: there are no labelled images to measure it on; add `evaluation:`")
        return samples, images
    spare = min(LEAST_TOKENS, wanted.tokens) if wanted.kind is None else 0
    samples = None if given is None else load_samples(given, info.source, info.vocab_size, spare)
    if wanted.kind is None and samples is None:
        return None, None
    if info.kind == "encoder":
        texts = load_embedding_texts(wanted, samples, info.source, info.vocab_size, info.max_positions)
        return samples, texts
    text, _ = load_evaluation(wanted, samples, info.source, info.vocab_size)
    return samples, text
