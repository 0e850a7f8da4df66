"""Train the reference model that ships with Compressor.

A small Llama with grouped-query attention and its own byte-level BPE vocabulary, trained on
English and code that every CPython installation carries: the language reference in
``pydoc_data.topics``, and the sources and docstrings of the standard library.  Modules and topics
are divided by the SHA-1 of their name: one in 32 goes to the held-out split, which is used for
evaluation only.

    python models/train_reference.py            # about an hour on two AMX cores

Writes ``models/reference/`` (an ordinary Hugging Face folder, fp16 safetensors),
``calibration/python_library.txt.gz`` (the training split), ``calibration/python_docs.txt`` (excerpts
of it) and ``calibration/python_docs_heldout.txt`` (excerpts of the held-out split).
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SEED = 20
SEQUENCE = 256
BATCH = 32
END = "<|endoftext|>"
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "lib2to3", "encodings", "ensurepip"}


def documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text): every topic, and every module's docstrings and source."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topic:{name}", text.strip()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.name.startswith(("_sysconfigdata", "pydoc_data")):
            continue
        if "pydoc_data" in relative.parts:
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, holders)]
        kept = [doc for doc in docs if doc and len(doc) > 80]
        if kept:
            yield f"module:{relative}", "\n\n".join(kept)
        yield f"module:{relative}", source.strip()


def is_held_out(name: str) -> bool:
    return hashlib.sha1(name.encode()).digest()[0] % 32 == 0


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.eos_token_id)
        ids.extend(tokenizer.backend_tokenizer.encode(text).ids)
    return torch.tensor(ids)


def write_compressed(path: Path, text: str) -> None:
    """Write a text with gzip, without its time and name, so that the same text gives the same bytes."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        file.write(text.encode())


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, ids: torch.Tensor, limit: int = 65536) -> float:
    """Perplexity over non-overlapping windows of SEQUENCE tokens, fp32."""
    windows = ids[: min(limit, len(ids)) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    losses = [model(w, labels=w, use_cache=False).loss.item() for w in windows.split(16)]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)

    pairs = list(documents())
    train = [text for name, text in pairs if not is_held_out(name)]
    held_out = [text for name, text in pairs if is_held_out(name)]
    tokenizer = train_tokenizer(train, 2048)
    train_ids, held_out_ids = encode(tokenizer, train), encode(tokenizer, held_out)
    print(f"{len(pairs)} documents, {len(train_ids):,} training tokens, {len(held_out_ids):,} held out", flush=True)

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=5,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95)
    )
    generator = torch.Generator().manual_seed(SEED)
    offsets = torch.arange(SEQUENCE + 1)
    start = time.monotonic()
    for step in range(1, options.steps + 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        rate = 3e-3 * min(1.0, step / 100) * (0.02 + 0.98 * cosine)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(train_ids) - SEQUENCE - 1, (BATCH, 1), generator=generator)
        batch = train_ids[starts + offsets]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            minutes = (time.monotonic() - start) / 60
            print(f"step {step}  {minutes:.1f} min  loss {loss.item():.3f}  rate {rate:.2e}", flush=True)

    model.eval().half()
    folder = ROOT / "models" / "reference"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    calibration = ROOT / "calibration"
    calibration.mkdir(exist_ok=True)
    spread = train[:: max(1, len(train) // 160)]
    (calibration / "python_docs.txt").write_text(f"\n{END}\n".join(text[:4000] for text in spread), encoding="utf-8")
    (calibration / "python_docs_heldout.txt").write_text(
        f"\n{END}\n".join(text[:8000] for text in held_out), encoding="utf-8"
    )
    write_compressed(calibration / "python_library.txt.gz", f"\n{END}\n".join(train))
    card = {
        "seed": SEED,
        "steps": options.steps,
        "tokens_seen": options.steps * BATCH * SEQUENCE,
        "training_tokens": len(train_ids),
        "training_sha256": hashlib.sha256("\0".join(train).encode()).hexdigest(),
        "hours": round((time.monotonic() - start) / 3600, 2),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "held_out_perplexity": round(perplexity(model.float(), held_out_ids), 4),
        "held_out_window": SEQUENCE,
    }
    (folder / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
