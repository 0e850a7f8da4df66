"""Write the reference model's function with many more weights, so that decoding it is bound by memory.

    python benchmarks/widened.py FOLDER [--residual 8] [--heads 2] [--inner 16] [--check TEXT]

The reference model fits into the caches of a processor, where a step costs what its products cost.  A model of which a
step waits for memory is what drafts are for, and to train one takes days.  So each channel of the residual, each head
and each unit of the feed-forward layers is copied, as function-preserving widening does (Net2Net, arXiv:1511.05641,
section 2.2): a copy computes what the original does, and what reads it has its weight divided among the copies.

- Shares are uneven and differ between columns, so that no two columns of a weight are alike.
- They are taken such that their sum is the original weight exactly, in float16 too: b = w - a has no rounding error
  where w / 2 <= a <= 2 w (Sterbenz).
- RMSNorm divides by the mean of the squares, which copies leave as it is.  The last norm's gains are divided by the
  number of copies, as the embedding that is also the output has no shares: a power of two, therefore.
- Heads keep their size, so rotations keep their frequencies; a head's keys and values are copied with it.

Sums of floats have other rounding errors than before, and nothing else differs.  ``--check`` compares logits, in
float32, and greedy texts behind passages of TEXT.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RATIO = 0.625
LOGIT_TOLERANCE = 1e-4  # of logits between -20 and 20
PASSAGES, PASSAGE, CONTINUED = 4, 96, 64


def divided(weight: torch.Tensor, copies: int) -> torch.Tensor:
    """Return a weight [out, in] as [out, copies * in], whose copies of a column sum to it exactly."""
    pieces = [weight]
    while len(pieces) < copies:
        pieces.sort(key=lambda piece: -float(piece.abs().mean()))
        largest = pieces.pop(0)
        first = (largest.float() * RATIO).to(weight.dtype)
        pieces += [first, largest - first]
    stacked = torch.stack(pieces)  # [copies, out, in]
    columns = torch.arange(weight.shape[1])
    turned = [stacked[(columns + copy) % copies, :, columns].T for copy in range(copies)]
    return torch.cat(turned, dim=1).contiguous()


def widened(state: dict[str, torch.Tensor], residual: int, heads: int, inner: int) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama with tied embeddings whose widths are so many times those of ``state``."""
    copies_of = {  # of what a linear reads, and of what it writes
        "q_proj": (residual, heads),
        "k_proj": (residual, heads),
        "v_proj": (residual, heads),
        "o_proj": (heads, residual),
        "gate_proj": (residual, inner),
        "up_proj": (residual, inner),
        "down_proj": (inner, residual),
    }
    found = {}
    for name, weight in state.items():
        kind = name.split(".")[-2]
        if kind in copies_of:
            read, written = copies_of[kind]
            found[name] = divided(weight, read).repeat(written, 1)
        elif kind == "embed_tokens":
            found[name] = weight.repeat(1, residual)
        elif name == "model.norm.weight":
            found[name] = weight.repeat(residual) / residual
        elif kind in ("input_layernorm", "post_attention_layernorm"):
            found[name] = weight.repeat(residual)
        else:
            raise ValueError(f"{name}: widening knows Llama without biases, with tied embeddings, and no other weights")
    return found


def write_widened(source: Path, folder: Path, residual: int, heads: int, inner: int) -> None:
    """Write a Hugging Face folder of the widened model.

    Raises:
        ValueError: not a Llama with tied embeddings, or ``residual`` is not a power of two.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or not config["tie_word_embeddings"] or residual & (residual - 1):
        raise ValueError(f"{source}: give a Llama with tied embeddings, and a power of two for the residual")
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name, copies in {
        "hidden_size": residual,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": inner,
    }.items():
        config[name] *= copies
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    state = widened(load_file(source / "model.safetensors"), residual, heads, inner)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def compared(source: Path, folder: Path, text: str) -> dict[str, Any]:
    """Return the largest difference of logits behind passages, and how many greedy texts are equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    starts = [(len(ids) - PASSAGE) * number // PASSAGES for number in range(PASSAGES)]
    passages = torch.stack([ids[start : start + PASSAGE] for start in starts])
    logits, texts = [], []
    for path in (source, folder):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(passages).logits)
            options = {"do_sample": False, "max_new_tokens": CONTINUED, "eos_token_id": None, "pad_token_id": 0}
            texts.append(model.generate(passages, attention_mask=torch.ones_like(passages), **options))
    equal = int((texts[0] == texts[1]).all(dim=1).sum())
    difference = float((logits[0] - logits[1]).abs().max())
    return {"logits_differ_by": difference, "equal_texts": equal, "texts": PASSAGES, "tokens": CONTINUED}


def main() -> None:
    """Write a widened model, and compare it where a text is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "models" / "reference")
    parser.add_argument("--residual", type=int, default=8)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--inner", type=int, default=16)
    parser.add_argument("--check", type=Path, help="text file")
    given = parser.parse_args()
    begin = time.perf_counter()
    write_widened(given.model, given.folder, given.residual, given.heads, given.inner)
    size = (given.folder / "model.safetensors").stat().st_size
    print(f"{size / 1e6:.0f} MB in {time.perf_counter() - begin:.1f} s", flush=True)
    if given.check:
        found = compared(given.model, given.folder, given.check.read_text(encoding="utf-8"))
        print(json.dumps(found))
        if found["logits_differ_by"] > LOGIT_TOLERANCE or found["equal_texts"] < PASSAGES:
            raise SystemExit(f"not the same function: logits may differ by {LOGIT_TOLERANCE}, and texts not at all")


if __name__ == "__main__":
    main()
