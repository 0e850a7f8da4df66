"""Embed pictures and texts, and compare them: what a bundle with a half for each is called with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import array, token_ids
from compressor_runtime.errors import RequestError

INPUTS = {"main": slice(0, 1), "text": slice(1, 3)}
"""Which of the model's inputs, pictures, ids and mask, each entry reads."""


def run_pair(model: dict[str, Any], run: Callable[..., Any], arrays: list[NDArray[Any]]) -> list[NDArray[np.float32]]:
    """Return embeddings of pictures and of texts, given pictures, ids and a mask.

    Raises:
        RequestError: there are not three arrays, or they have other types or shapes than the model reads.
    """
    if len(arrays) != 3:
        raise RequestError(f"{len(arrays)} inputs; the model takes 3: pictures, ids and a mask")
    return [run(arrays[:1]), embed_texts(model, run, _no_tokenizer, arrays[1], arrays[2])]


def embed_pictures(model: dict[str, Any], run: Callable[..., Any], pictures: ArrayLike) -> NDArray[np.float32]:
    """See :meth:`compressor_runtime.bundle.Bundle.embed_pictures`.

    Args:
        run: calls an entry of the kernels.
    """
    _check_pair(model)
    given = array("pictures", pictures)
    found: NDArray[np.float32] = run([given.astype(np.float32) if given.dtype == np.float64 else given])
    return found


def embed_texts(
    model: dict[str, Any], run: Callable[..., Any], tokenizer: Callable[[], Any], texts: Any, mask: ArrayLike | None
) -> NDArray[np.float32]:
    """See :meth:`compressor_runtime.bundle.Bundle.embed_texts`.

    Args:
        run: calls an entry of the kernels.
        tokenizer: gives the model's.
    """
    _check_pair(model)
    if isinstance(texts, str) or (isinstance(texts, list | tuple) and any(isinstance(text, str) for text in texts)):
        if mask is not None:
            raise RequestError("texts are filled up here: give a mask with token ids only")
        texts, mask = _encoded(model, tokenizer(), [texts] if isinstance(texts, str) else texts)
    ids = token_ids(texts, model["vocab_size"])
    shown = np.ones(ids.shape) if mask is None else array("mask", mask)
    limit: int = model["max_positions"] or ids.shape[1]
    if shown.shape != ids.shape or ids.shape[1] > limit:
        raise RequestError(
            f"ids {ids.shape}, mask {shown.shape}: they must agree, with at most {limit} tokens in a row"
        )
    found: NDArray[np.float32] = run([ids, shown.astype(np.float32)], entry="text")
    return found


def similarity(model: dict[str, Any], pictures: ArrayLike, texts: ArrayLike) -> NDArray[np.float32]:
    """See :meth:`compressor_runtime.bundle.Bundle.similarity`.

    Raises:
        RequestError: the bundle embeds no pictures with texts, or these are not embeddings of one width.
    """
    _check_pair(model)
    rows = [array(name, x).astype(np.float32) for name, x in (("pictures", pictures), ("texts", texts))]
    if any(x.ndim != 2 for x in rows) or rows[0].shape[1] != rows[1].shape[1]:
        raise RequestError(f"pictures {rows[0].shape}, texts {rows[1].shape}: give embeddings [B, D] of one width")
    found: NDArray[np.float32] = model["pair"]["scale"] * (rows[0] @ rows[1].T) + np.float32(model["pair"]["bias"])
    return found.astype(np.float32)


def _encoded(model: dict[str, Any], tokenizer: Any, texts: Iterable[str]) -> tuple[NDArray[np.int64], Any]:
    """Return ids and mask of texts, filled up as the model's tokenizer does."""
    facts, limit = model["pair"], model["max_positions"]
    try:
        rows = [tokenizer.encode(text).ids for text in texts]
    except (TypeError, UnicodeEncodeError) as error:
        raise RequestError(f"a text is not one, or cannot be written as UTF-8 ({error})") from error
    longest = max(map(len, rows))
    if limit and longest > limit:
        raise RequestError(f"a text has {longest} tokens, and the model reads at most {limit}; shorten it")
    width = limit if facts["is_filled"] and limit else longest
    ids = np.full((len(rows), width), facts["pad_id"], np.int64)
    mask = np.full(ids.shape, 1.0 if facts["is_filled"] else 0.0, np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return ids, mask


def _no_tokenizer() -> Any:
    raise RequestError("give token ids in place of texts")


def _check_pair(model: dict[str, Any]) -> None:
    if "pair" not in model:
        raise RequestError("the bundle's model does not embed pictures with texts")
