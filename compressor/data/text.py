"""Text to tokens: windows to calibrate on, and tokens to evaluate on.

``datasets``, ``tokenizers`` and ``transformers`` are imported when text is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compressor.data.tokenizer import check_vocabulary, load_tokenizer
from compressor.errors import CompressorError, UsageError, first_line
from compressor.graph.kinds.encoder_decoder import SampleInputs

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource, EvaluationSpec, TextSpec

_BLOCK_CHARACTERS = 1 << 18  # tokenised at once, cut at the end of a line
_SPARE_TOKENS = 1 << 20
LEAST_TOKENS = 64
"""Tokens that an evaluation needs at least."""

_SEPARATOR = "<|endoftext|>"  # of documents, in plain-text corpora


@dataclass(frozen=True)
class Samples:
    """Token windows to calibrate on, and the rest of the text; or a plain module's inputs.

    Attributes:
        ids: int64 [samples, sequence_length]; inputs are float32 [samples, ...]; sounds come with their tokens.
        rest: int64 [tokens], everything that was read and not sampled, in order.
        sha256: of ``ids``, as little-endian int64; of images and sounds as :class:`compressor.data.images.Images` and
            :class:`compressor.data.sounds.Sounds` say.
        source: where the text, the images or the sounds came from.
    """

    ids: SampleInputs
    rest: Tensor
    sha256: str
    source: str

    def facts(self) -> dict[str, str | int]:
        """Return source, number and SHA-256 of the samples, for the bundle's manifest."""
        ids = self.ids
        length = {"sequence_length": ids.shape[1]} if isinstance(ids, Tensor) and not ids.is_floating_point() else {}
        return {"source": self.source, "samples": len(ids), **length, "sha256": self.sha256}


def load_samples(spec: TextSpec, tokenizer_folder: Path | None, vocab_size: int = 0, spare: int = 0) -> Samples:
    """Read text, tokenise it, cut it in windows, and draw ``spec.samples`` of them.

    Documents end at ``<|endoftext|>`` (the rows of a data set are joined by blank lines).  Each gets the special
    tokens that the tokenizer puts around a text, unless the tokenizer knows the separator as a token itself.
    At most four times as many tokens as the samples have, and a million more, are read.

    Args:
        spec: what to read and how much to draw.
        tokenizer_folder: holds ``tokenizer.json``, or a slow tokenizer that transformers can read.
        vocab_size: rows of the model's embedding; 0 skips the check.
        spare: tokens that the samples must leave, for an evaluation without a text of its own.
    Raises:
        UsageError: the set is held out, missing, empty or too short, or the tokenizer is not the model's.
    """
    source, length = source_label(spec), spec.sequence_length
    if spec.held_out:
        raise UsageError(f"calibration: {source} is held out, for evaluation only; calibrate on other text")
    tokens = _read_tokens(spec, tokenizer_folder, vocab_size, 4 * spec.samples * length + _SPARE_TOKENS)
    count, usable = len(tokens) // length, max(0, len(tokens) - spare)
    if usable < spec.samples * length:
        beside = f" beside {spare} tokens for the evaluation" if spare else ""
        raise UsageError(
            f"calibration: {source} has {len(tokens)} tokens, {count} windows of {length}, and {spec.samples} samples "
            f"are wanted{beside}; {_fewer_samples(spec, usable)}"
        )
    windows = tokens[: count * length].view(count, length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(spec.seed))
    drawn = order[: spec.samples].sort().values
    left = torch.ones(count, dtype=torch.bool).index_fill(0, drawn, False)
    rest = torch.cat([windows[left].flatten(), tokens[count * length :]])
    ids = windows[drawn].contiguous()
    return Samples(ids, rest, tokens_sha256(ids), source)


def longest_window(spec: TextSpec, tokenizer_folder: Path | None, vocab_size: int, spare: int, at_most: int) -> int:
    """Return the ``sequence_length``, up to ``at_most``, of which a text has as many windows as samples are wanted.

    Raises:
        UsageError: as :func:`load_samples`, or no length will do.
    """
    wanted = spec.model_copy(update={"sequence_length": at_most})
    usable = max(0, len(_read_tokens(wanted, tokenizer_folder, vocab_size, at_most * spec.samples + spare)) - spare)
    if usable < 2 * spec.samples:
        load_samples(wanted, tokenizer_folder, vocab_size, spare)  # raises, and says what would do
    return min(at_most, usable // spec.samples)


def _fewer_samples(spec: TextSpec, tokens: int) -> str:
    """Name the settings with which so many tokens suffice."""
    count, length = tokens // spec.sequence_length, tokens // spec.samples
    settings = [f"samples to {count} or less"] if count else []
    if length >= 2:
        settings.append(f"sequence_length to {length} or less")
    return f"set {' or '.join(settings)}, or give more text" if settings else "give more text"


def load_evaluation(
    spec: EvaluationSpec, samples: Samples | None, tokenizer_folder: Path | None, vocab_size: int = 0
) -> tuple[Tensor, str]:
    """Tokens to evaluate on, int64 [at most ``spec.tokens``], and where they came from.

    Without a source of its own, the evaluation takes what calibration left over.

    Raises:
        UsageError: there is no text, or not even two tokens of it, or the tokenizer is not the model's.
    """
    if spec.kind is not None:
        tokens = _read_tokens(spec, tokenizer_folder, vocab_size, spec.tokens)[: spec.tokens]
        return _enough(tokens, source_label(spec)), source_label(spec)
    if samples is None:
        raise UsageError("evaluation: there is no text: name one, or calibrate on a text longer than the samples")
    if len(samples.rest) < min(LEAST_TOKENS, spec.tokens):
        raise UsageError(
            f"evaluation: calibration left {len(samples.rest)} tokens of {samples.source}; lower `samples`, or give "
            "evaluation its own text"
        )
    return samples.rest[: spec.tokens], f"{samples.source}, what calibration did not sample"


def _enough(tokens: Tensor, source: str) -> Tensor:
    if len(tokens) < LEAST_TOKENS:
        raise UsageError(
            f"evaluation: {len(tokens)} tokens of {source}: a figure of fewer than {LEAST_TOKENS} says nothing; give "
            "more text, and thousands of `tokens` for a figure to rely on"
        )
    return tokens


def load_texts(spec: EvaluationSpec, tokenizer_folder: Path | None, vocab_size: int, longest: int) -> list[Tensor]:
    """Return the first texts of a source that have ``spec.tokens`` tokens together, int64 [at most ``longest``] each.

    A text is a paragraph: blank lines, documents and rows end it.  Each gets the special tokens that the tokenizer
    puts around a text.  Longer texts are cut off, as by transformers.

    Raises:
        UsageError: there is no text, or the tokenizer is not the model's.
    """
    tokenizer = load_tokenizer(tokenizer_folder, longest)
    texts: list[Tensor] = []
    found = 0
    for text in _paragraphs(_texts(spec)):
        texts.append(torch.tensor(tokenizer.encode(text, True), dtype=torch.int64))
        found += len(texts[-1])
        if found >= spec.tokens:
            break
    if not texts:
        raise _no_text(spec)
    check_vocabulary(torch.cat(texts), vocab_size, tokenizer_folder)
    return texts


def encode_texts(
    texts: Iterable[str], tokenizer_folder: Path | None, vocab_size: int, longest: int | None
) -> list[Tensor]:
    """Return the tokens of each text, int64 [at most ``longest``], with the special tokens around it.

    Raises:
        UsageError: there is no tokenizer, or it is not the model's.
    """
    encode = load_tokenizer(tokenizer_folder, longest).encode
    found = [torch.tensor(encode(text, True), dtype=torch.int64) for text in texts]
    check_vocabulary(torch.cat(found), vocab_size, tokenizer_folder)
    return found


def source_label(spec: DataSource) -> str:
    """Return the name of a source for people."""
    return spec.name or ", ".join(spec.files) or str(spec.hub)


def tokens_sha256(ids: Tensor) -> str:
    """SHA-256 of tokens as little-endian int64."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()


def _read_tokens(spec: DataSource, folder: Path | None, vocab_size: int, enough: int) -> Tensor:
    """At least ``enough`` tokens, or all that there are; int64 [tokens]."""
    tokenizer = load_tokenizer(folder)
    parts: list[list[int]] = []
    found = 0
    for block, opens in _blocks(_texts(spec), "" if tokenizer.knows(_SEPARATOR) else _SEPARATOR):
        if block:
            parts.append(tokenizer.encode(block, opens))
            found += len(parts[-1])
        if found >= enough:
            break
    if found < 2:
        raise _no_text(spec)
    tokens = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64)
    check_vocabulary(tokens, vocab_size, folder)
    return tokens


def _no_text(spec: DataSource) -> UsageError:
    return UsageError(f"{source_label(spec)}: the text is empty; give one with more to read")


def _texts(spec: DataSource) -> Iterator[str]:
    """Rows of the source, streamed so that no cache is written: whole lines, or documents and a blank line."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    kind, field = spec.kind, "text" if spec.kind == "text" else spec.field
    if kind == "images":
        raise UsageError(f"{source_label(spec)}: images are for plain modules, and this model reads text; name a text")
    try:
        with TemporaryDirectory() as scratch:  # for a lock file that would otherwise stay in the user's cache
            options = {"streaming": True, "cache_dir": scratch}
            if kind == "hub":
                rows = load_dataset(str(spec.hub), spec.config, split=spec.split, **options)
            else:
                files = [str(path) for path in spec.find_files()]
                extra = {"keep_linebreaks": True} if kind == "text" else {}
                rows = load_dataset(str(kind), data_files=files, split="train", **options, **extra)
            for row in rows:
                if not isinstance(row.get(field), str):
                    known = ", ".join(row)
                    raise UsageError(f"{source_label(spec)}: no text in field {field!r}; the fields are {known}")
                yield row[field] if kind == "text" else row[field] + "\n\n"
    except CompressorError:
        raise
    except (DatasetNotFoundError, OSError, ValueError, UnicodeError) as error:
        raise UsageError(f"{source_label(spec)}: cannot be read as {kind}: {first_line(error)}") from error


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    """Yield paragraphs: the text between blank lines, documents or rows."""
    lines: list[str] = []
    for line in chain.from_iterable(text.replace(_SEPARATOR, "\n\n").splitlines() for text in texts):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def _blocks(texts: Iterable[str], separator: str) -> Iterator[tuple[str, bool]]:
    """Documents, long ones in blocks, each block with whether it opens a document."""
    parts: list[str] = []
    size, opens = 0, True
    for text in texts:
        first, *others = text.split(separator) if separator else [text]
        parts.append(first)
        for piece in others:
            yield "".join(parts).strip(), opens
            parts, size, opens = [piece], 0, True
        size += len(parts[-1])
        if size >= _BLOCK_CHARACTERS:
            yield "".join(parts), opens
            parts, size, opens = [], 0, False
    yield "".join(parts).strip(), opens
