"""Decode time of an expert model against the dense model of equal active size, in turns, and bytes a token.

    python benchmarks/experts.py [--scheme W4A8_G128] [--experts 16] [--each 4] [--layers 4] [--json FILE]

Both are Qwen 3 with random weights, hidden size 1,024: one with experts of width 512, of which a token takes ``each``;
the dense one with a perceptron of ``each`` times that width.  All linears but router and head are packed with RTN, and
kernels are tuned quickly.  In one process the two bundles decode 16 tokens in turns.  The ratio is that of each pair of
turns, and its median is what counts: on a busy machine neither time alone means much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bundles import write_bundle

import compressor
from compressor.capture.capture import capture
from compressor.recipe.recipe import Recipe

_HIDDEN, _WIDTH, _VOCABULARY, _STEPS, _PAST = 1024, 512, 1000, 16, 32


def main() -> None:
    """Write both bundles, time them in turns, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", default="W4A8_G128")
    for name, default in (("experts", 16), ("each", 4), ("layers", 4), ("repeats", 40), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch) / name for name in ("experts", "dense")}
        for name, folder in folders.items():
            _write(name, folder, options)
        found = _measure(folders, options)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _write(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Write the bundle of one of the two models."""
    sizes: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": options.each * _WIDTH,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 512,
    }
    config: Any = transformers.Qwen3Config(**sizes)
    if name == "experts":
        chosen = {"num_experts": options.experts, "num_experts_per_tok": options.each, "moe_intermediate_size": _WIDTH}
        config = transformers.Qwen3MoeConfig(**sizes, **chosen)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval().requires_grad_(False)
    recipe = Recipe.from_dict(
        {"model": "unused", "passes": [{"rtn": {"scheme": options.scheme, "ignore": ["lm_head"]}}], "target": "x86"}
    )
    write_bundle(capture(model), recipe, None, folder, options.threads, tune="quick")


def _measure(folders: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    bundles = {name: compressor.load(folder) for name, folder in folders.items()}
    ids = np.random.default_rng(0).integers(0, _VOCABULARY, (1, _PAST + _STEPS))
    times: dict[str, list[float]] = {name: [] for name in bundles}
    for _ in range(options.repeats):
        for name, bundle in bundles.items():
            session = bundle.session(batch=1)
            session.step(ids[:, :_PAST])
            begin = time.perf_counter()
            for i in range(_PAST, _PAST + _STEPS):
                session.step(ids[:, [i]])
            times[name].append((time.perf_counter() - begin) / _STEPS)
    ratios = [a / b for a, b in zip(times["experts"], times["dense"], strict=True)]
    facts = {name: bundle.manifest["model"] for name, bundle in bundles.items()}
    return {
        "scheme": options.scheme,
        "experts": options.experts,
        "each": options.each,
        "layers": options.layers,
        "threads": options.threads,
        "step_ms": {name: 1e3 * statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "weight_bytes": {name: bundle.manifest["weight_bytes"] for name, bundle in bundles.items()},
        "weight_bytes_per_token": {name: model["weight_bytes_per_token"] for name, model in facts.items()},
    }


if __name__ == "__main__":
    main()
