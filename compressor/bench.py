"""Speed and memory, each measured in a process of its own: a bundle without torch, a dense model in PyTorch.

The child is ``python -m compressor.bench``, which prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import CompressorError, UsageError, VerificationError

_ERRORS = {kind.exit_code: kind for kind in (UsageError, VerificationError)}

Generate = Callable[[Any, int], tuple[float, float]]
"""prompt int64 [1, P], n -> seconds from the prompt to its last logits, seconds for n greedy single-token steps."""


def bench(
    path: Path, *, threads: int | None = None, prompt_tokens: int = 128, new_tokens: int = 64, repeats: int = 5
) -> dict[str, Any]:
    """Measure a bundle, or a Hugging Face folder in PyTorch eager float32, one sequence at a time.

    Returns:
        ``prefill_tokens_per_s`` and ``decode_tokens_per_s`` (medians; ``*_spread`` is (max - min) / median),
        ``peak_rss_bytes``, ``load_s``, ``threads``; for a bundle also ``bytes_per_token`` (weights, keys and values
        that one decode step reads), ``read_bandwidth_bytes_per_s`` and ``bandwidth_fraction``.
    Raises:
        CompressorError: the child failed; its message and exit code are passed on.
    """
    if prompt_tokens < 1 or new_tokens < 1 or repeats < 1:
        raise UsageError("bench: prompt tokens, new tokens and repeats must be at least 1")
    numbers = [str(n) for n in (prompt_tokens, new_tokens, repeats, threads or 0)]
    command = [sys.executable, "-m", "compressor.bench", str(path.absolute()), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        error = _ERRORS.get(done.returncode, CompressorError)
        raise error(f"bench: {reason[-1].removeprefix('error: ')}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _measure(
    generate: Generate, vocab_size: int, prompt_tokens: int, new_tokens: int, repeats: int
) -> dict[str, float]:
    """Medians over the repeats, after one warm-up; the prompt is the same random ids for all."""
    prompt = np.random.default_rng(0).integers(0, vocab_size, (1, prompt_tokens), dtype=np.int64)
    generate(prompt, new_tokens)
    runs = [generate(prompt, new_tokens) for _ in range(repeats)]
    result: dict[str, float] = {}
    for index, (name, tokens) in enumerate((("prefill", prompt_tokens), ("decode", new_tokens))):
        rates = [tokens / run[index] for run in runs]
        middle = statistics.median(rates)
        result[f"{name}_tokens_per_s"] = middle
        result[f"{name}_spread"] = (max(rates) - min(rates)) / middle
    return result


def _bench_bundle(path: Path, prompt_tokens: int, new_tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    from compressor_runtime import load

    begin = time.perf_counter()
    bundle = load(path, threads=threads or None)
    load_s = time.perf_counter() - begin

    def generate(prompt: Any, count: int) -> tuple[float, float]:
        session = bundle.session(capacity=prompt.shape[1] + count)
        begin = time.perf_counter()
        logits = session.step(prompt)
        middle = time.perf_counter()
        for _ in range(count):
            logits = session.step(logits[:, -1:].argmax(-1))
        return middle - begin, time.perf_counter() - middle

    model = bundle.model
    _check_length(prompt_tokens + new_tokens, model["max_positions"], path)
    result: dict[str, Any] = _measure(generate, model["vocab_size"], prompt_tokens, new_tokens, repeats)
    peak_rss_bytes = _peak_rss_bytes()  # before the probe takes memory of its own
    bandwidth = bundle.read_bandwidth()
    positions = prompt_tokens + new_tokens / 2
    cache_bytes = 2 * 4 * model["layers"] * model["kv_heads"] * model["head_dim"] * positions
    bytes_per_token = model["weight_bytes_per_token"] + cache_bytes
    return {
        **result,
        "bytes_per_token": int(bytes_per_token),
        "read_bandwidth_bytes_per_s": bandwidth,
        "bandwidth_fraction": bytes_per_token * result["decode_tokens_per_s"] / bandwidth,
        "peak_rss_bytes": peak_rss_bytes,
        "load_s": load_s,
        "threads": bundle.threads,
    }


def _bench_dense(path: Path, prompt_tokens: int, new_tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    import torch
    from compressor_runtime import available_cores
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = threads or available_cores()
    torch.set_num_threads(threads)  # this process exists for the measurement only
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model.eval()  # type: ignore[no-untyped-call]
    load_s = time.perf_counter() - begin
    _check_length(prompt_tokens + new_tokens, getattr(model.config, "max_position_embeddings", None), path)

    @torch.no_grad()
    def generate(prompt: Any, count: int) -> tuple[float, float]:
        begin = time.perf_counter()
        out = model(input_ids=torch.as_tensor(prompt), use_cache=True, logits_to_keep=1)
        middle = time.perf_counter()
        for _ in range(count):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        return middle - begin, time.perf_counter() - middle

    result: dict[str, Any] = _measure(generate, model.config.vocab_size, prompt_tokens, new_tokens, repeats)
    return {**result, "peak_rss_bytes": _peak_rss_bytes(), "load_s": load_s, "threads": threads}


def _check_length(tokens: int, positions: int | None, path: Path) -> None:
    if positions and tokens > positions:
        raise UsageError(f"{path}: {tokens} tokens are more than the model's {positions} positions; ask for fewer")


def _peak_rss_bytes() -> int:
    """VmHWM: unlike ``ru_maxrss`` it does not begin with the size of the parent process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise CompressorError("bench: /proc/self/status has no VmHWM; speed and memory are measured on Linux only")


def _main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("numbers", type=int, nargs=4, help="prompt tokens, new tokens, repeats, threads (0: all)")
    options = parser.parse_args()
    measure = _bench_bundle if (options.path / "manifest.json").exists() else _bench_dense
    try:
        print(json.dumps(measure(options.path, *options.numbers)))
    except Exception as error:  # the parent shows one line, whatever it was
        place = "" if hasattr(error, "exit_code") else f"{options.path}: "  # errors of ours say it themselves
        print(f"error: {place}{error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
