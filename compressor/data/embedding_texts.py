"""Load texts whose embeddings are compared, and how a model pools its hidden states into them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.text import load_texts
from compressor.errors import UsageError
from compressor.host.json_files import read_object

if TYPE_CHECKING:
    from compressor.data.text import Samples
    from compressor.recipe.data_spec import EvaluationSpec


Pooling: TypeAlias = Literal["mean", "cls", "max"]


_BATCH = 16  # texts that run at once, padded to the longest: what a mask must hide is there to see


_CONFIG = "*_Pooling/config.json"  # where sentence-transformers keeps it


_MODES: Mapping[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",  # the mean but for its length
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}


@dataclass(frozen=True)
class Texts:
    """Texts to embed.

    Attributes:
        ids: tokens of each, int64 [at least 1], special tokens included.
        pooling: what makes one vector of a text's hidden states.
    """

    ids: tuple[Tensor, ...]
    pooling: Pooling

    def facts(self) -> dict[str, str | int]:
        """Return number, pooling and SHA-256 of the texts, for the lock."""
        digest = hashlib.sha256()
        for ids in self.ids:
            digest.update(len(ids).to_bytes(8, "little") + ids.numpy().astype("<i8").tobytes())
        return {"texts": len(self.ids), "pooling": self.pooling, "sha256": digest.hexdigest()}

    def batches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield ids int64 [B, S], padded at the end, and masks float32 [B, S] of 1 for tokens and 0 for padding."""
        for first in range(0, len(self.ids), _BATCH):
            batch = self.ids[first : first + _BATCH]
            padded = torch.nn.utils.rnn.pad_sequence(list(batch), batch_first=True)
            lengths = torch.tensor([len(ids) for ids in batch])
            yield padded.numpy(), (torch.arange(padded.shape[1]) < lengths[:, None]).float().numpy()


def load_embedding_texts(
    spec: EvaluationSpec, samples: Samples | None, folder: Path | None, vocab_size: int, positions: int
) -> Texts:
    """Return the texts to embed: those of the specification, or windows that calibration did not sample.

    Args:
        folder: holds the tokenizer, and how the model pools.
        positions: of the model; 0 means that there is no limit.
    Raises:
        UsageError: there is no text, the tokenizer is not the model's, or the model pools in an unknown way.
    """
    window = min(spec.window, positions or spec.window)
    if spec.kind is not None:
        ids = load_texts(spec, folder, vocab_size, window)
    elif samples is not None and len(samples.rest):
        ids = list(torch.split(samples.rest[: spec.tokens], window))
    else:
        raise UsageError("evaluation: there is no text left to embed; name one")
    return Texts(tuple(ids), "mean" if folder is None else read_pooling(folder))


def read_pooling(folder: Path) -> Pooling:
    """How a model folder of sentence-transformers pools; the mean over a text's tokens where it does not say.

    Raises:
        UsageError: it pools in a way that is not known here.
        CaptureError: its configuration cannot be read.
    """
    files = sorted(folder.glob(_CONFIG))
    if not files:
        return "mean"
    asked = [key for key, value in read_object(files[0]).items() if key.startswith("pooling_mode") and value is True]
    if len(asked) != 1 or asked[0] not in _MODES:
        raise UsageError(
            f"{files[0]}: pools by {' and '.join(asked) or 'nothing known'}, and what can be measured is one of "
            f"{', '.join(_MODES)}; leave `evaluation` and gates on embeddings out"
        )
    return _MODES[asked[0]]
