"""Write a model's tokenizer as tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from compressor.data.tokenizer import frames_tokenizer
from compressor.errors import CompressorError
from compressor.host.json_files import read_object


def write_tokenizer(source: Path, file: Path, vocab_size: int, frames: bool = False) -> None:
    """Copy the tokenizer of a model folder as tokenizer.json, converted through transformers if it has an older form.

    Args:
        frames: its tokens are those of a sound's frames.
    Raises:
        CompressorError: there is none, or it makes ids that a model of ``vocab_size`` (0: unknown) does not know.
    """
    from tokenizers import Tokenizer

    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", file)
    elif frames:
        frames_tokenizer(source).save(str(file))
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
            tokenizer.backend_tokenizer.save(str(file))
        except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
            raise CompressorError(
                f"{source}: no tokenizer.json, and no tokenizer that transformers can convert to one ({error}); "
                "put the model's tokenizer files beside its weights"
            ) from error
    try:
        largest = max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False).values(), default=0)
    except Exception as error:  # tokenizers raises nothing more precise
        raise CompressorError(f"{source / 'tokenizer.json'}: not a tokenizer: {error}") from error
    if vocab_size and largest >= vocab_size:  # added tokens may lie beyond: some models never see theirs
        raise CompressorError(
            f"{source}: the tokenizer makes ids up to {largest}, the model knows {vocab_size}; "
            "give the tokenizer that belongs to this model"
        )


def write_chat_template(source: Path, file: Path) -> None:
    """Write a model folder's chat template with the special tokens that it may name, if there is one.

    Raises:
        CaptureError: tokenizer_config.json cannot be read.
    """
    settings = source / "tokenizer_config.json"
    known = read_object(settings) if settings.is_file() else {}
    template: Any = known.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if (source / "chat_template.jinja").is_file():  # transformers takes this one before the other
        template = (source / "chat_template.jinja").read_text(encoding="utf-8")
    if not isinstance(template, str):
        return
    named = {name: known[name] for name in sorted(known) if name.endswith("_token")}
    tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    content = {"template": template, "special_tokens": {n: t for n, t in tokens.items() if isinstance(t, str)}}
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
