"""Train a sentence encoder with 80% of the blocks of its linears left out, and measure what its bundle computes.

    python benchmarks/sparse_minilm.py pack MODEL FOLDER TEXT [TEXT ...]
    python benchmarks/sparse_minilm.py train FOLDER WEIGHTS.npz [--device cuda] [--seconds 100] [--batch 96]
    python benchmarks/sparse_minilm.py measure MODEL WEIGHTS.npz TEXT [TEXT ...] [--threads 1] [--turns 25]

MODEL and TEXTs are those of benchmarks/minilm.py, whose 200 texts are held out.  `pack` writes the weights in float16,
of the table of tokens only the rows that occur, and 24,000 windows of 96 tokens of the other sentences, half of them
with 10% of the tokens replaced by others, which the dense model labels as well as any text.  FOLDER is small enough to
be carried to a machine with a GPU, where `train` needs PyTorch and transformers alone: it is the pass `sparse_train`.
`measure` packs the weights into a bundle with W8A8 linears, and compares its embeddings with those of transformers in
float32, and its time for 128 tokens with the dense W8A8 bundle's, by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from compressor.capture.capture import capture
from compressor.data.text import Samples, tokens_sha256
from compressor.graph.model import clone_graph
from compressor.passes.sparse_train import SparseTrain
from compressor.pipeline.context import Context

SCHEME = "W8A8_B16x1@80"
WINDOWS, LENGTH, REPLACED = 24_000, 96, 0.1
TABLE = "embeddings.word_embeddings.weight"


def pack(model: Path, folder: Path, files: list[Path]) -> None:
    """Write what training needs."""
    from minilm import load_bert, load_texts

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    _, others = load_texts(model, files)
    encoded = tokenizer(others, add_special_tokens=False)["input_ids"]
    rng = np.random.default_rng(0)
    inner = LENGTH - 2
    row = np.concatenate([np.asarray(ids, np.int32) for ids in encoded])
    used = np.unique(np.concatenate([row, [tokenizer.cls_token_id, tokenizer.sep_token_id]]))
    begins = rng.integers(0, len(row) - inner, WINDOWS)
    ids = row[begins[:, None] + np.arange(inner)]
    where = rng.random(ids.shape) < REPLACED
    where[WINDOWS // 2 :] = False
    ids = np.where(where, rng.choice(row, ids.shape), ids)
    column = np.ones((WINDOWS, 1), np.int32)
    ids = np.concatenate([tokenizer.cls_token_id * column, ids, tokenizer.sep_token_id * column], axis=1)
    state = {name: value.numpy() for name, value in load_bert(model).state_dict().items()}
    stored = {name: value.astype(np.float16) for name, value in state.items() if name != TABLE}
    folder.mkdir(parents=True)
    np.savez(folder / "model.npz", used=used, table=state[TABLE][used].astype(np.float16), **stored)
    np.save(folder / "windows.npy", ids[rng.permutation(WINDOWS)].astype(np.uint16))
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    print(f"{len(row):,} tokens, {len(used):,} different ones, {WINDOWS:,} windows of {LENGTH}")


def train(folder: Path, weights: Path, seconds: float, options: dict[str, Any]) -> None:
    """Run `sparse_train` with as many steps as there is time for, and write all parameters but the table of tokens."""
    config = transformers.BertConfig.from_pretrained(folder / "config.json")
    bert = transformers.BertModel(config, add_pooling_layer=True).eval().requires_grad_(False)
    content = dict(np.load(folder / "model.npz"))
    state = {name: torch.from_numpy(value.astype(np.float32)) for name, value in content.items() if name != "used"}
    table = torch.zeros(config.vocab_size, config.hidden_size)
    table[torch.from_numpy(content["used"]).long()] = state.pop("table")
    missing = bert.load_state_dict({**state, TABLE: table}, strict=False)
    assert not missing.missing_keys, missing
    ids = torch.from_numpy(np.load(folder / "windows.npy").astype(np.int64))
    graph = capture(bert)
    context = Context(samples=Samples(ids, ids.flatten(), tokens_sha256(ids), "sentences"))
    context.dense = graph

    def run(steps: int) -> tuple[Any, float]:
        every = {"evaluate_every": max(1, steps // 8), "checkpoint_every": 10**6}
        step = SparseTrain(scheme=SCHEME, steps=steps, warmup=0.02, held_out=0.02, hidden=1.0, **every, **options)
        begin = time.perf_counter()
        return step.run(clone_graph(graph), context), time.perf_counter() - begin

    run(8)  # compiles and allocates
    few, more = run(8)[1], run(40)[1]
    steps = max(60, int((seconds - few) / ((more - few) / 32)))
    after, took = run(steps)
    found = {name: value.detach().numpy() for name, value in after.named_parameters() if value.shape[0] < 30_000}
    np.savez_compressed(weights, **{name: value.astype(np.float16) for name, value in found.items()})
    print(json.dumps({"seconds": took, "steps": steps, **options, "notes": context.notes}))


def measure(model: Path, weights: Path, files: list[Path], threads: int, turns: int) -> None:
    """Make the bundle, and compare it with the dense one."""
    from bundles import write_bundle
    from minilm import embedded, load_bert, load_texts

    from compressor.data.text import load_samples
    from compressor.evaluate.models import BundleProcess
    from compressor.recipe.recipe import Recipe

    texts, others = load_texts(model, files)
    bert = load_bert(model)

    @torch.no_grad()
    def oracle(ids: Any, mask: Any) -> Any:
        return bert(input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask)).last_hidden_state

    expected, _ = embedded(oracle, texts)
    dense = capture(model)
    trained = capture(model)
    content = np.load(weights)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if name in content:
                parameter.copy_(torch.from_numpy(content[name].astype(np.float32)))
    sparse = [{"magnitude": {"scheme": SCHEME, "targets": "Linear"}}]
    rows = {"dense W8A8": (dense, [{"rtn": {"scheme": "W8A8"}}]), SCHEME: (trained, sparse)}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        bundles, cosines = [], {}
        (Path(scratch) / "others.txt").write_text("\n".join(others), encoding="utf-8")
        text = {"text": str(Path(scratch) / "others.txt"), "samples": 32, "sequence_length": 128}
        for i, (name, (graph, passes)) in enumerate(rows.items()):
            recipe = Recipe.from_dict({"calibration": text, "passes": passes, "tune": "quick"})
            assert recipe.calibration is not None
            samples = load_samples(recipe.calibration, model, dense.meta["model"].vocab_size)
            write_bundle(graph, recipe, samples, Path(scratch) / str(i), threads, "quick")
            bundles.append(stack.enter_context(BundleProcess(Path(scratch) / str(i), threads)))
            found, _ = embedded(bundles[-1].hidden, texts)
            cosines[name] = torch.cosine_similarity(found, expected)
        ids, mask = np.arange(1000, 1128)[None], np.ones((1, 128), np.float32)
        times: list[list[float]] = []
        for _ in range(turns):
            turn = []
            for process in bundles:
                begin = time.perf_counter()
                process.hidden(ids, mask)
                turn.append(1e3 * (time.perf_counter() - begin))
            times.append(turn)
    print("| bundle | mean cosine | least | ms of 128 tokens | of dense, in speed |\n|---|---|---|---|---|")
    for i, (name, found) in enumerate(cosines.items()):
        ms, ratio = statistics.median(t[i] for t in times[3:]), statistics.median(t[0] / t[i] for t in times[3:])
        print(f"| {name} | {float(found.mean()):.4f} | {float(found.min()):.4f} | {ms:.2f} | {ratio:.2f}x |")


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing, training, measuring = (commands.add_parser(name) for name in ("pack", "train", "measure"))
    packing.add_argument("model", type=Path)
    packing.add_argument("folder", type=Path)
    packing.add_argument("text", type=Path, nargs="+")
    training.add_argument("folder", type=Path)
    training.add_argument("weights", type=Path)
    training.add_argument("--device", default="cpu")
    training.add_argument("--seconds", type=float, default=100.0)
    training.add_argument("--batch", type=int, default=96)
    training.add_argument("--learning-rate", type=float, default=5e-4)
    measuring.add_argument("model", type=Path)
    measuring.add_argument("weights", type=Path)
    measuring.add_argument("text", type=Path, nargs="+")
    measuring.add_argument("--threads", type=int, default=1)
    measuring.add_argument("--turns", type=int, default=25)
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.model, given.folder, given.text)
    elif given.command == "train":
        options = {"device": given.device, "batch": given.batch, "learning_rate": given.learning_rate}
        train(given.folder, given.weights, given.seconds, options)
    else:
        torch.set_num_threads(given.threads)
        measure(given.model, given.weights, given.text, given.threads, given.turns)


if __name__ == "__main__":
    main()
