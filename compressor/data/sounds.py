"""Sounds with their texts: what models of speech are calibrated and evaluated on.

The decoder reads what it begins with and then the text's tokens, and is to predict these tokens and the end.  A model
that gives frames tokens (CTC) reads the sound alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.images import drawn
from compressor.data.pictures import Encoded
from compressor.data.sound_files import find_sounds
from compressor.data.text import Samples, source_label
from compressor.data.tokenizer import TextTokens, check_vocabulary, load_frames_tokenizer, load_tokenizer
from compressor.errors import UsageError
from compressor.graph.kinds.encoder_decoder import Batch, Pair
from compressor.graph.model import ModelInfo, SourceInfo
from compressor.runtime import RequestError, source_of, wave_samples

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource, EvaluationSpec, TextSpec


@dataclass(frozen=True)
class Sounds:
    """Sounds as they are stored, and how a model hears and writes them.

    Attributes:
        stored: WAV files.
        places: int64 [n], which of them these are.
        texts: of all that are stored.
        tokenizer: of the model.
        reads: what the encoder reads, and what the decoder begins with.
        eos_id: the token that ends a text; None for none.
        source: where they came from.
    """

    stored: Encoded
    places: Tensor
    texts: tuple[str, ...]
    tokenizer: TextTokens
    reads: SourceInfo
    eos_id: int | None
    source: str

    def __len__(self) -> int:
        """Return their number."""
        return len(self.places)

    def name(self, number: int) -> str:
        """Return what messages call a sound."""
        return self.stored.name(int(self.places[number]))

    def text(self, number: int) -> str:
        """Return what is said in a sound."""
        return self.texts[int(self.places[number])]

    def samples(self, number: int) -> NDArray[np.float32]:
        """Return the samples of a sound, float32 [N] from -1 to 1.

        Raises:
            UsageError: it is not a WAV file, mono, at the model's rate.
        """
        encoded = self.stored.encoded(int(self.places[number]))
        try:
            return wave_samples(encoded, self.name(number), self.reads.features["sampling_rate"])
        except RequestError as error:
            raise UsageError(str(error)) from error

    def heard(self, number: int) -> NDArray[np.float32]:
        """Return the source that the encoder reads for a sound, float32 [1, ...].

        Raises:
            UsageError: as :meth:`samples`, or it is too long or too short for the model.
        """
        try:
            return source_of(self.samples(number), dataclasses.asdict(self.reads))
        except RequestError as error:
            raise UsageError(f"{self.name(number)}: {error}") from error

    def spoken(self, number: int) -> Tensor:
        """Return all tokens of a sound, int64 [start + text + end]: the decoder reads all but the last."""
        end = [] if self.eos_id is None else [self.eos_id]
        return torch.tensor(
            [*self.reads.start_ids, *self.tokenizer.encode(self.text(number), False), *end], dtype=torch.int64
        )

    def batch(self, number: int) -> Batch:
        """Return what the model reads of a sound: a decoder is told the right text."""
        if self.reads.blank_id is not None:
            return torch.from_numpy(self.heard(number))
        return Pair(torch.from_numpy(self.heard(number)), self.spoken(number)[None, :-1])

    def picked(self, places: Tensor) -> Sounds:
        """Return the sounds at ``places``, int64 [m], in their order."""
        return dataclasses.replace(self, places=self.places[places])

    @property
    def sha256(self) -> str:
        """Digest of the stored sounds, their texts, and how they are heard and written."""
        digest = hashlib.sha256()
        self.stored.hash_into(digest, self.places.tolist())
        for number in range(len(self)):
            if self.reads.blank_id is None:
                spoken = self.spoken(number).numpy().astype("<i8").tobytes()
                digest.update(len(spoken).to_bytes(8, "little") + spoken)
            digest.update(self.text(number).encode() + b"\0")
        digest.update(json.dumps(dict(self.reads.features), sort_keys=True).encode())
        return digest.hexdigest()


def load_sounds(spec: DataSource, info: ModelInfo, most: int | None) -> Sounds:
    """Find sounds and texts, and read each once to know that it can be.

    Args:
        spec: a folder, parquet files, or a data set of the hub.
        info: of the model.
        most: sounds to take, the first ones; None takes all.
    Raises:
        UsageError: a file or a text cannot be used; it is named.
    """
    assert info.encoder_source is not None
    stored, texts = find_sounds(spec, most)
    sounds = Sounds(
        stored=stored,
        places=torch.arange(len(texts)),
        texts=tuple(texts),
        tokenizer=load_frames_tokenizer(info.source) if info.labels_frames else load_tokenizer(info.source),
        reads=info.encoder_source,
        eos_id=next(iter(info.eos_ids), None),
        source=source_label(spec),
    )
    if not texts:
        raise UsageError(f"{sounds.source}: there is no sound; give a table with some")
    for number in range(len(sounds)):
        name = sounds.name(number)
        if not sounds.text(number).strip():
            raise UsageError(f"{name}: its text is empty; give what is said in it, or leave the file out")
        if not info.labels_frames:
            _check_tokens(sounds.spoken(number), name, info)
        sounds.heard(number)
    return sounds


def _check_tokens(tokens: Tensor, name: str, info: ModelInfo) -> None:
    check_vocabulary(tokens, info.vocab_size, info.source)
    if info.max_positions and len(tokens) - 1 > info.max_positions:
        raise UsageError(
            f"{name}: its text has {len(tokens) - 1} tokens, with those that the decoder begins with, and "
            f"{info.name} has {info.max_positions} positions; cut the sound and its text"
        )


def load_sound_samples(spec: TextSpec, info: ModelInfo) -> Samples:
    """Return ``spec.samples`` sounds to calibrate on, drawn with ``spec.seed``.

    Raises:
        UsageError: as :func:`load_sounds`; the set is held out, or has fewer sounds.
    """
    label = source_label(spec)
    if spec.held_out:
        raise UsageError(f"calibration: {label} is held out, for evaluation only; calibrate on other sounds")
    sounds = _calibration_sounds(spec, info)
    if len(sounds) < spec.samples:
        raise UsageError(
            f"calibration: {label} has {len(sounds)} sounds, and {spec.samples} samples are wanted; set samples to "
            "fewer, or give more sounds"
        )
    chosen = sounds.picked(drawn(spec, len(sounds))[0])
    batches = tuple(chosen.batch(number) for number in range(len(chosen)))
    return Samples(batches, torch.empty(0, dtype=torch.int64), chosen.sha256, label)


def load_evaluation_sounds(spec: EvaluationSpec, calibration: TextSpec | None, info: ModelInfo) -> Sounds | None:
    """Return sounds to evaluate on.

    Without a source of its own, the evaluation takes those that calibration left over; None if there are none.

    Raises:
        UsageError: as :func:`load_sounds`.
    """
    if spec.kind is not None:
        return load_sounds(spec, info, spec.limit)
    if calibration is None:
        return None
    sounds = _calibration_sounds(calibration, info)
    left = drawn(calibration, len(sounds))[1][: spec.limit]
    return sounds.picked(left) if len(left) else None


def _calibration_sounds(spec: TextSpec, info: ModelInfo) -> Sounds:
    """Return all sounds to draw from: of rows, of which there may be millions, eight times the samples."""
    return load_sounds(spec, info, None if spec.kind == "audio" else 8 * spec.samples)
