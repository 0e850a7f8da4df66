"""Measure what a model of speech writes: errors of words and characters, and fidelity to the dense model."""

from __future__ import annotations

import dataclasses

import torch

from compressor.data.sounds import Sounds
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.fidelity.token_scores import TokenScores
from compressor.evaluate.speech.error_rates import ErrorRates
from compressor.evaluate.speech.listeners import Listener
from compressor.progress import Reporter, Silent


def _of_frames(result: EvalResult) -> EvalResult:
    """Leave out what has no meaning where no token is right for a frame: perplexities, and the number of tokens."""
    intervals = {name: ends for name, ends in result.intervals.items() if not name.startswith("perplexity")}
    return dataclasses.replace(result, perplexity=None, dense_perplexity=None, tokens=None, intervals=intervals)


@torch.no_grad()
def measure_speech(
    model: Listener,
    sounds: Sounds,
    *,
    most: int,
    dense: Listener | None = None,
    reporter: Reporter | None = None,
) -> EvalResult:
    """Measure error rates of what a model says, and how it predicts the right tokens while it is told them.

    Args:
        most: tokens that a model may say at most.
        dense: the reference model.
    """
    labels_frames = sounds.reads.blank_id is not None
    scores, ours, theirs, write = TokenScores(), ErrorRates(), ErrorRates(), sounds.tokenizer.decode
    with (reporter or Silent()).task("evaluate", len(sounds)) as task:
        for number in range(len(sounds)):
            samples, batch, said = sounds.samples(number), sounds.batch(number), sounds.text(number)
            logits, reference = model.told(batch), None if dense is None else dense.told(batch)
            if labels_frames:
                targets = (logits if reference is None else reference).argmax(1)
            else:
                targets = sounds.spoken(number)[len(sounds.reads.start_ids) :]
                logits = logits[-len(targets) :]
                reference = None if reference is None else reference[-len(targets) :]
            scores.add(targets, logits, reference)
            ours.add(said, write(model.said(samples, most)))
            if dense is not None:
                theirs.add(said, write(dense.said(samples, most)))
            task.advance()
    result = dataclasses.replace(
        _of_frames(scores.result()) if labels_frames else scores.result(),
        sounds=len(sounds),
        word_error_rate=ours.of_words,
        character_error_rate=ours.of_characters,
    )
    if dense is None:
        return result
    return dataclasses.replace(
        result, dense_word_error_rate=theirs.of_words, dense_character_error_rate=theirs.of_characters
    )
