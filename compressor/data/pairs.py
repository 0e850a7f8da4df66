"""Pictures with texts, for models that embed both: samples to calibrate on, and classes to tell by their names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compressor.data.images import Images, load_evaluation_images, load_image_samples
from compressor.data.text import Samples, encode_texts, tokens_sha256
from compressor.errors import UsageError
from compressor.graph.kinds.encoder_decoder import Pair
from compressor.graph.model import ModelInfo

if TYPE_CHECKING:
    from compressor.recipe.data_spec import DataSource, EvaluationSpec, TextSpec


@dataclass(frozen=True)
class ZeroShot:
    """Labelled pictures, and a text for each class: the most similar one is the prediction.

    Attributes:
        images: with labels.
        ids, mask: int64 and float32 [classes, tokens], of the classes' texts.
        scale, bias: that the model makes similarities with.
    """

    images: Images
    ids: Tensor
    mask: Tensor
    scale: float
    bias: float

    def facts(self) -> dict[str, str | int]:
        """Return the number of pictures and classes, and a digest, for the lock."""
        digest = hashlib.sha256((self.images.sha256 + tokens_sha256(self.ids)).encode()).hexdigest()
        return {"images": len(self.images), "classes": len(self.ids), "sha256": digest}


def load_zero_shot(wanted: EvaluationSpec, given: TextSpec | None, info: ModelInfo) -> ZeroShot | None:
    """Return labelled pictures and their classes, those that calibration left over where evaluation names none.

    Raises:
        UsageError: there are pictures and no classes, or as for :func:`compressor.data.images.load_images`.
    """
    named = next((spec for spec in (wanted, given) if spec is not None and spec.classes is not None), None)
    if named is None and wanted.kind is not None:
        raise no_classes("evaluation", info)
    if named is None or (wanted.kind is None and given is None):
        return None
    images = load_evaluation_images(wanted, given, with_classes(info, named))
    return None if images is None else zero_shot(images, named, info)


def no_classes(key: str, info: ModelInfo) -> UsageError:
    """Return the error for pictures without names of classes."""
    return UsageError(f"{key}: {info.name} tells pictures apart by their classes' names: list them in `classes`")


def with_classes(info: ModelInfo, spec: DataSource) -> ModelInfo:
    """Return the model as a classifier of the classes that a specification names."""
    return replace(info, classes=len(spec.classes or ()), class_names=spec.classes or ())


def zero_shot(images: Images, spec: DataSource, info: ModelInfo) -> ZeroShot:
    """Return images with the texts of the classes that a specification names."""
    assert info.pair is not None
    return ZeroShot(images, *encode_captions(_class_texts(spec), info), info.pair.scale, info.pair.bias)


def load_pair_samples(spec: TextSpec | None, info: ModelInfo) -> Samples | None:
    """Return ``spec.samples`` pictures, each with a caption, or with the text of a class; these take turns.

    Raises:
        UsageError: there are neither captions nor classes.
    """
    if spec is None:
        return None
    if spec.captions is not None:
        lines = [line.strip() for file in spec.find_captions() for line in _lines(file.read_bytes(), str(file))]
        texts = list(filter(None, lines))
    elif spec.classes is not None:
        texts = _class_texts(spec)
    else:
        raise UsageError(
            f"calibration: {info.name} reads pictures and texts: name a file of `captions`, one a line, or `classes`"
        )
    if not texts:
        raise UsageError("calibration: `captions` holds no text; give a file with a caption a line")
    images = load_image_samples(spec, with_classes(info, spec) if spec.classes else info)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(spec.seed)).tolist()
    captions = [encode_captions([text], info)[0] for text in texts]
    ids = [captions[order[i % len(texts)]] for i in range(len(images.ids))]
    pairs = [Pair(picture[None], tokens) for picture, tokens in zip(images.ids, ids, strict=True)]
    digest = hashlib.sha256("".join([images.sha256, *map(tokens_sha256, ids)]).encode()).hexdigest()
    return replace(images, ids=pairs, sha256=digest)


def encode_captions(texts: Sequence[str], info: ModelInfo) -> tuple[Tensor, Tensor]:
    """Return ids int64 [n, S] and a mask float32 [n, S], filled up at the end as the model's tokenizer does.

    Longer texts are cut off, as by transformers.

    Raises:
        UsageError: the model has no tokenizer, or another model's.
    """
    assert info.pair is not None
    positions = info.max_positions or None
    found = encode_texts(texts, info.source, info.vocab_size, positions)
    lengths = torch.tensor([len(ids) for ids in found])
    width = positions if info.pair.is_filled and positions else int(lengths.max())
    ids = torch.full((len(found), width), info.pair.pad_id, dtype=torch.int64)
    for row, tokens in zip(ids, found, strict=True):
        row[: len(tokens)] = tokens
    shown = torch.ones(ids.shape) if info.pair.is_filled else (torch.arange(width) < lengths[:, None]).float()
    return ids, shown


def _class_texts(spec: DataSource) -> list[str]:
    return [spec.template.replace("{}", name) for name in spec.classes or ()]


def _lines(content: bytes, name: str) -> list[str]:
    try:
        return content.decode().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not a text in UTF-8 ({error}); save it as one") from error
