r"""Say in GGUF's metadata how a byte-level BPE tokenizer (tokenizer.json) spells text.

tokens, merges, token types   as tokenizer.json has them, by id; ids without a token are marked as unused
pre                           llama.cpp's name for how text is cut before merges: it has the expressions, not the file
bos, eos, add_bos, add_eos    as the tokenizer itself surrounds a text

Source: llama.cpp, ``convert_hf_to_gguf.py: get_vocab_base`` and ``src/llama-vocab.cpp: llm_tokenizer_bpe``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compressor.errors import UsageError
from compressor.host.json_files import read_object

NO_TOKENIZER = "none"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTE_LEVEL, _DIGITS = "ByteLevel's own", "digits one by one"
_PRE = {  # how text is cut, and whether whole words are looked up before merges -> llama.cpp's name
    ((_BYTE_LEVEL,), False): "gpt-2",
    ((_DIGITS, _BYTE_LEVEL), False): "smollm",
    ((_WORDS + r"\p{N}" + _OTHERS,), False): "qwen2",
    ((_WORDS + r"\p{N}{1,3}" + _OTHERS,), True): "llama-bpe",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Names of special tokens in GGUF, and in a configuration."""
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")


def tokenizer_metadata(folder: Path, config: Any, pre: str = "") -> dict[str, Any]:
    """Return the metadata of a model's tokenizer.

    Args:
        folder: of the model.
        config: its configuration of transformers, for ``vocab_size`` and ids of special tokens.
        pre: name of the pre-tokenizer where it is not known here; ``none`` leaves the tokenizer out.
    Raises:
        UsageError: the tokenizer is another kind, or the way in which it cuts text has no name here.
    """
    file = folder / "tokenizer.json"
    if pre == NO_TOKENIZER or not file.is_file():
        other = next((found for pattern in _OTHER_FILES for found in folder.glob(pattern)), None)
        if pre != NO_TOKENIZER and other is not None:
            raise UsageError(f"{other}: only a tokenizer.json is read for GGUF; {_way_out()}")
        return {"tokenizer.ggml.model": "none"} | _special_ids({}, {}, config)
    content = read_object(file)
    model = content.get("model") or {}
    _check_kind(file, content, model)
    stated = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    added = {token["content"]: token for token in content.get("added_tokens") or ()}
    ids = {**model["vocab"], **{text: token["id"] for text, token in added.items()}}
    tokens, types = _tokens(file, ids, added, config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre or _pre_tokenizer(file, content, model),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **_special_ids(ids, stated, config),
    }
    found |= _surroundings(file, found)
    template = folder / "chat_template.jinja"
    chat = template.read_text(encoding="utf-8") if template.is_file() else stated.get("chat_template")
    return found | ({"tokenizer.chat_template": chat} if isinstance(chat, str) else {})


def _way_out() -> str:
    return f"leave the tokenizer out: --set pre={NO_TOKENIZER}"


def _check_kind(file: Path, content: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse tokenizers that are not byte-level BPE: their tokens mean something else."""
    normalizer = (content.get("normalizer") or {}).get("type")
    last = list(_steps(content.get("pre_tokenizer") or {}))[-1:]
    problems = [
        (model.get("type") != "BPE", f"its model is {model.get('type')}"),
        (bool(model.get("byte_fallback")), "it falls back to bytes"),
        (bool(model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")), "it marks parts of words"),
        (normalizer not in (None, "NFC"), f"its normalizer is {normalizer}"),
        (not last or last[0].get("type") != "ByteLevel", "it does not end in bytes (ByteLevel)"),
        (bool(last) and bool(last[0].get("add_prefix_space")), "it puts a space in front of a text"),
    ]
    for wrong, problem in problems:
        if wrong:
            raise UsageError(f"{file}: only byte-level BPE is written to GGUF, and {problem}; {_way_out()}")


def _steps(pre_tokenizer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        for each in pre_tokenizer["pretokenizers"]:
            yield from _steps(each)
    elif pre_tokenizer:
        yield pre_tokenizer


def _pre_tokenizer(file: Path, content: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the expressions by which text is cut."""
    cuts = []
    for step in _steps(content.get("pre_tokenizer") or {}):
        kind = step.get("type")
        if kind == "ByteLevel":
            cuts += [_BYTE_LEVEL] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            cuts.append(_DIGITS)
        elif kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            cuts.append(str(step["pattern"].get("Regex")))
        else:
            cuts.append(f"{kind} with other options")
    name = _PRE.get((tuple(cuts), bool(model.get("ignore_merges"))))
    if name is None:
        raise UsageError(
            f"{file}: llama.cpp's name for its pre-tokenizer is not known here ({', '.join(cuts):.80}; known are "
            f"{', '.join(_PRE.values())}); name it: --set pre=NAME, or {_way_out()}"
        )
    return name


def _tokens(
    file: Path, ids: Mapping[str, int], added: Mapping[str, Mapping[str, Any]], size: int
) -> tuple[list[str], list[int]]:
    """Return the token of each id and its type."""
    if ids and max(ids.values()) >= size:
        raise UsageError(f"{file}: has the id {max(ids.values())}, and the model {size} rows of embeddings: fetch both")
    tokens, types = [f"[PAD{place}]" for place in range(size)], [_UNUSED] * size
    for text, place in ids.items():
        special = text in added and added[text].get("special")
        tokens[place] = text
        types[place] = _CONTROL if special else _USER_DEFINED if text in added else _NORMAL
    return tokens, types


def _special_ids(ids: Mapping[str, int], stated: Mapping[str, Any], config: Any) -> dict[str, int]:
    """Return ids of special tokens: the tokenizer's, or else the configuration's, of several the first."""
    found = {}
    for name, short in _SPECIAL.items():
        text = stated.get(f"{short}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = ids.get(text) if isinstance(text, str) else getattr(config, f"{short}_token_id", None)
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and number >= 0:
            found[f"tokenizer.ggml.{name}_token_id"] = number
    return found


def _surroundings(file: Path, found: Mapping[str, Any]) -> dict[str, bool]:
    """Say whether the tokenizer puts its first and last token around a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    plain, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    before = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    around = {"bos": whole[:before], "eos": whole[before + len(plain) :]}
    for name, ids in around.items():
        if ids not in ([], [found.get(f"tokenizer.ggml.{name}_token_id")]):
            raise UsageError(f"{file}: puts the ids {ids} around a text, which GGUF has no word for; {_way_out()}")
    return {f"tokenizer.ggml.add_{name}_token": bool(ids) for name, ids in around.items()}
