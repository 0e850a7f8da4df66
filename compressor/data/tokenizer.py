"""Open the tokenizer of a model folder: a ``tokenizer.json``, or a slow one that transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import UsageError, first_line
from compressor.host.json_files import read_object

_SPECIAL = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
"""Tokens that spell nothing, with the names that transformers gives them."""


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


def frames_tokenizer(folder: Path) -> Any:
    """Return a ``tokenizers.Tokenizer`` that spells the tokens of frames (CTC), without special tokens.

    It is made of ``vocab.json``, with the word delimiter and the case of tokenizer_config.json, unless the folder has a
    tokenizer.json.

    Raises:
        UsageError: there is neither, or no single vocabulary.
    """
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    file, config_file, whole = (folder / name for name in ("vocab.json", "tokenizer_config.json", "tokenizer.json"))
    if whole.is_file() or not file.is_file():
        if not whole.is_file():
            raise UsageError(f"{folder}: no vocab.json; put the model's tokenizer files beside its weights")
        return Tokenizer.from_file(str(whole))
    config = read_object(config_file) if config_file.is_file() else {}
    vocab: Any = read_object(file)
    language = config.get("target_lang")
    vocab = vocab.get(language) if isinstance(language, str) else vocab
    if not isinstance(vocab, dict) or not vocab or not all(type(number) is int for number in vocab.values()):
        raise UsageError(f"{file}: not one vocabulary, token to number; state its language as `target_lang`")
    named = {name: config.get(f"{name}_token", default) for name, default in _SPECIAL.items()}
    special = [token for name in _SPECIAL if (token := content(named[name])) in vocab]
    lower = {
        token if token in special or not config.get("do_lower_case") else token.lower(): n for token, n in vocab.items()
    }
    if len(lower) != len(vocab):
        raise UsageError(f"{file}: tokens that differ in case only, and `do_lower_case`; remove one of them")
    tokenizer = Tokenizer(WordLevel(lower, unk_token=content(named["unk"])))
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(content(config.get("word_delimiter_token", "|")), " "), decoders.Fuse()]
    )
    return tokenizer


def load_frames_tokenizer(folder: Path | None) -> TextTokens:
    """Open the tokenizer of a model that gives frames tokens.

    Raises:
        UsageError: as :func:`frames_tokenizer`.
    """
    if folder is None:
        raise UsageError("calibration: the model has no folder to find a tokenizer in; capture it from a folder or id")
    return _of(frames_tokenizer(folder))


def content(token: Any) -> str:
    """Return the text of a token, which configurations write alone or with how it is matched."""
    return str(token.get("content", "") if isinstance(token, dict) else token)


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
    return _of(tokenizer)


def _of(tokenizer: Any) -> TextTokens:
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
