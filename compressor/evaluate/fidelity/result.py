"""State what an evaluation found, by the names of the JSON output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COMPARED = ("perplexity_increase", "accuracy_drop", "word_error_increase", "character_error_increase")


@dataclass(frozen=True)
class EvalResult:
    """Measured quality, by the names of the JSON output; None is a figure that was not measured.

    Attributes:
        perplexity, dense_perplexity: exp of the mean negative log-likelihood of a token.
        kl_divergence: mean over tokens, or images, of KL(dense || compressed), in nats.
        top1_agreement: fraction of tokens, or images, whose likeliest prediction is the dense model's.
        accuracy, dense_accuracy: fraction of labelled images whose likeliest class is the label.
        embedding_cosine, embedding_cosine_min: encoders' mean and smallest cosine similarity, over texts, to the dense
            model's embedding.
        word_error_rate, character_error_rate: edits that turn what a model of speech heard into what was said, over the
            words or characters of that; likewise of the dense model.
        continuation_agreement: share of the tokens of greedy continuations in front of the first that is not the dense
            model's, over prompts of the text.
        overfit_gap: increase of the loss, over the dense model's, on this text less that on text that it was calibrated
            on, in nats a token.
        swept_kl_divergence, swept_temperature: the largest KL divergence over temperatures, in nats, and where it is.
        repetition, dense_repetition: share of 4-grams in continuations that were in them before; likewise of the dense
            model.
        continuations, continuation_tokens: number of prompts, and of tokens that continue each.
        tokens, texts, images, sounds: number of scored tokens, texts, images or sounds.
        window, stride: size and stride of the sliding window, in tokens.
        intervals: of figures that are means, 95% confidence: over tokens by bootstrap over blocks of text
            (:class:`compressor.evaluate.mean.BlockMean`), over images as if these were independent.
    """

    perplexity: float | None = None
    dense_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    accuracy: float | None = None
    dense_accuracy: float | None = None
    embedding_cosine: float | None = None
    embedding_cosine_min: float | None = None
    word_error_rate: float | None = None
    dense_word_error_rate: float | None = None
    character_error_rate: float | None = None
    dense_character_error_rate: float | None = None
    overfit_gap: float | None = None
    swept_kl_divergence: float | None = None
    swept_temperature: float | None = None
    continuation_agreement: float | None = None
    repetition: float | None = None
    dense_repetition: float | None = None
    continuations: int | None = None
    continuation_tokens: int | None = None
    texts: int | None = None
    sounds: int | None = None
    images: int | None = None
    tokens: int | None = None
    window: int | None = None
    stride: int | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def perplexity_increase(self) -> float | None:
        """Increase of the perplexity relative to dense: 0.03 is 3% more."""
        if self.perplexity is None or self.dense_perplexity is None:
            return None
        return self.perplexity / self.dense_perplexity - 1

    @property
    def accuracy_drop(self) -> float | None:
        """Accuracy lost relative to the dense model, as a difference of fractions: 0.003 is 0.3 points."""
        return _difference(self.dense_accuracy, self.accuracy)

    @property
    def word_error_increase(self) -> float | None:
        """Word error rate above the dense model's, as a difference of fractions: 0.01 is one more in 100 words."""
        return _difference(self.word_error_rate, self.dense_word_error_rate)

    @property
    def character_error_increase(self) -> float | None:
        """Character error rate above the dense model's, as a difference of fractions."""
        return _difference(self.character_error_rate, self.dense_character_error_rate)

    def metrics(self) -> dict[str, Any]:
        """Return everything that was measured, by JSON name; intervals as ``<name>_interval``, [low, high]."""
        values = {key: value for key, value in vars(self).items() if key != "intervals"}
        values |= {f"{name}_interval": list(ends) for name, ends in self.intervals.items()}
        values |= {name: getattr(self, name) for name in _COMPARED}
        return {name: value for name, value in values.items() if value is not None}


def _difference(more: float | None, less: float | None) -> float | None:
    return None if more is None or less is None else more - less
