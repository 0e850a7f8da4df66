"""Open the tokenizer of a model folder: a ``tokenizer.json``, or a slow one that transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import UsageError, first_line


@dataclass(frozen=True)
class TextTokens:
    """A tokenizer.

    Attributes:
        encode: (text, whether with the special tokens around it) -> ids.
        decode: ids -> text, without special tokens.
        knows: whether a piece of text is a token of its own.
    """

    encode: Callable[[str, bool], list[int]]
    decode: Callable[[list[int]], str]
    knows: Callable[[str], bool]


def load_tokenizer(folder: Path | None, longest: int | None = None) -> TextTokens:
    """Open the tokenizer of a model.

    Args:
        folder: of the model.
        longest: tokens that a text is cut to; None never cuts.
    Raises:
        UsageError: there is no tokenizer in it.
    """
    if folder is None:
        raise UsageError("calibration: the model has no folder to find a tokenizer in; capture it from a folder or id")
    file = folder / "tokenizer.json"
    return _fast(file, longest) if file.is_file() else _slow(folder, longest)


def _slow(folder: Path, longest: int | None) -> TextTokens:
    from transformers import AutoTokenizer

    try:
        slow: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UsageError(
            f"{folder}: no tokenizer: there is no tokenizer.json, nor anything that transformers can read "
            f"({first_line(error)}); put the model's tokenizer files beside its weights"
        ) from error
    cut = {"truncation": longest is not None, "max_length": longest}
    return TextTokens(
        lambda text, special: list(slow.encode(text, add_special_tokens=special, **cut)),
        lambda ids: str(slow.decode(ids, skip_special_tokens=True)),
        lambda piece: piece in slow.get_vocab(),
    )


def _fast(file: Path, longest: int | None) -> TextTokens:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise UsageError(f"{file}: not a tokenizer: {first_line(error)}; get the file again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if longest is not None:
        tokenizer.enable_truncation(longest)
    return TextTokens(
        lambda text, special: list(tokenizer.encode(text, add_special_tokens=special).ids),
        lambda ids: str(tokenizer.decode(ids)),
        lambda piece: tokenizer.token_to_id(piece) is not None,
    )


def check_vocabulary(tokens: Tensor, vocab_size: int, folder: Path | None) -> None:
    """Raise a UsageError where a tokenizer gives tokens that the model does not have; 0 of these skips the check."""
    largest = int(tokens.max())
    if vocab_size and largest >= vocab_size:
        raise UsageError(
            f"{folder}: the tokenizer does not match the model: it gives token {largest} (so has at least "
            f"{largest + 1} tokens) and the model's vocabulary has {vocab_size}; use the model's own tokenizer"
        )
