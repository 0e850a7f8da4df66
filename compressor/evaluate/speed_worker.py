"""Measure one model: ``python -m compressor.evaluate.speed_worker PATH PROMPT_TOKENS NEW_TOKENS THREADS``.

This process loads the model, reports that on stdout, and then answers requests from stdin, so that two such processes
can take turns: ``repeat`` measures once, ``finish`` returns the figures known at the end.
``drafts`` times texts with drafts beside plain ones.
Answers are JSON, one per line.  The process ends when stdin does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from compressor.errors import UsageError
from compressor.evaluate.source_steps import bundle_steps, dense_steps
from compressor.host.child import serve
from compressor.host.machine import peak_rss_bytes

Step: TypeAlias = Callable[[Any], Any]
"""Ids int64 [1, S] -> the likeliest next token, int64 [1, 1]."""

_DRAFTED_TEXTS = 6
_clock = time.perf_counter


@dataclass(frozen=True)
class Subject:
    """A loaded model: facts known at loading, a function that measures once, and one that returns the final figures.

    Attributes:
        drafts: kind and text file -> figures of :func:`compressor_runtime.speculation.measure.measure_drafts`; None
            of a model that drafts nothing.
    """

    loaded: dict[str, Any]
    repeat: Callable[[], dict[str, float]]
    finish: Callable[[], dict[str, Any]]
    drafts: Callable[[str, Path], dict[str, float]] | None = None


def decoder_repeat(start: Callable[[int], Step], ids: NDArray[np.int64], new_tokens: int) -> dict[str, float]:
    """Time one prompt, then greedy decoding of single tokens.

    Args:
        start: opens a sequence with capacity for the given number of tokens.
        ids: the prompt, int64 [1, P].
    """
    start(1)(ids[:, :1])  # untimed: another process may have evicted this one's caches
    begin = _clock()
    step = start(ids.shape[1] + new_tokens)
    opened = _clock()
    token = step(ids)
    ends = [_clock()]
    for _ in range(new_tokens):
        token = step(token)
        ends.append(_clock())
    return {
        "prefill_tokens_per_s": ids.shape[1] / (ends[0] - opened),
        "decode_tokens_per_s": new_tokens / (ends[-1] - ends[0]),
        "first_token_ms": 1e3 * (ends[0] - begin),
        "latency_ms": 1e3 * statistics.median(np.diff(ends).tolist()),
    }


def encoder_repeat(encode: Callable[[Any], Any], ids: NDArray[np.int64]) -> dict[str, float]:
    """Time one forward call on ids int64 [1, S]."""
    encode(ids[:, :1])  # untimed: another process may have evicted this one's caches
    begin = _clock()
    encode(ids)
    return {"latency_ms": 1e3 * (_clock() - begin)}


def bundle_subject(path: Path, prompt_tokens: int, new_tokens: int, threads: int) -> Subject:
    """Load a bundle, without torch."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it where it is installed
    from compressor_runtime import load
    from compressor_runtime.depth.prompts import read_prompt

    begin = _clock()
    bundle = load(path, threads=threads or None)
    loaded = {"load_s": _clock() - begin, "threads": bundle.threads}
    model = bundle.model
    if bundle.kind == "seq2seq" and model["encoder_source"]["reads"] != "tokens":
        raise UsageError(f"{path}: reads sound, and text is timed; time your own call of it")
    if bundle.kind == "module":
        raise UsageError(f"{path}: holds a plain module, whose inputs are not known; time your own call of it")
    ids = _random_ids(path, model["vocab_size"], model["max_positions"], prompt_tokens, new_tokens, bundle.kind)

    def start(capacity: int) -> Step:
        session = bundle.session(capacity=capacity)
        return lambda tokens: read_prompt(session, tokens).argmax(-1)

    opens = bundle_steps(bundle) if bundle.kind == "seq2seq" else start

    def finish_decoder() -> dict[str, Any]:
        peak = peak_rss_bytes()  # before the probe takes memory of its own
        positions = prompt_tokens + new_tokens / 2
        cache_bytes = model["cache_bytes_per_token"] * positions + model.get("state_bytes", 0)
        return {
            "bytes_per_token": int(model["weight_bytes_per_token"] + cache_bytes),
            "read_bandwidth_bytes_per_s": bundle.read_bandwidth(),
            "peak_rss_bytes": peak,
        }

    if bundle.kind == "encoder":
        return Subject(loaded, lambda: encoder_repeat(bundle.encode, ids), lambda: {"peak_rss_bytes": peak_rss_bytes()})

    def drafts(kind: str, text: Path) -> dict[str, float]:
        from compressor_runtime.speculation.measure import measure_drafts

        read = bundle.tokenizer.encode(text.read_text(encoding="utf-8")).ids
        return measure_drafts(bundle, kind, read, prompt_tokens, new_tokens, _DRAFTED_TEXTS)

    return Subject(loaded, lambda: decoder_repeat(opens, ids, new_tokens), finish_decoder, drafts)


def dense_subject(path: Path, prompt_tokens: int, new_tokens: int, threads: int) -> Subject:
    """Load a Hugging Face folder in PyTorch eager float32."""
    import torch
    from compressor_runtime import available_cores
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    from compressor.capture.meta_model import cache_argument, model_kind

    if not (path / "config.json").is_file():
        raise UsageError(f"{path}: has no config.json, and PyTorch is timed on Hugging Face folders; give one")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    threads = threads or available_cores()
    torch.set_num_threads(threads)  # this process exists for the measurement only
    torch.set_grad_enabled(False)
    untimed = UsageError(f"{path}: decoders and encoders are timed, this is another model; time your own call of it")
    if path.is_file():
        raise untimed
    kind = model_kind(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False), str(path))
    if kind == "module":
        raise untimed
    autos: dict[str, Any] = {"decoder": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}
    auto = autos.get(kind, AutoModel)
    begin = _clock()
    model = auto.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    model.eval()
    loaded = {"load_s": _clock() - begin, "threads": threads}
    positions = getattr(model.config, "max_position_embeddings", None) or 0
    ids = _random_ids(path, model.config.vocab_size, positions, prompt_tokens, new_tokens, kind)

    def start(_capacity: int) -> Step:
        cache, name = None, cache_argument(model)

        def step(tokens: Any) -> Any:
            nonlocal cache
            arguments = {name: cache, "use_cache": True, "logits_to_keep": 1}
            out = model(input_ids=torch.as_tensor(tokens), **arguments)
            cache = out[name]
            return out.logits[:, -1:].argmax(-1)

        return step

    opens = dense_steps(model, cache_argument(model)) if kind == "seq2seq" else start

    def encode(tokens: NDArray[np.int64]) -> None:
        inputs = torch.as_tensor(tokens)
        model(input_ids=inputs, attention_mask=torch.ones_like(inputs))

    def repeat() -> dict[str, float]:
        return encoder_repeat(encode, ids) if kind == "encoder" else decoder_repeat(opens, ids, new_tokens)

    return Subject(loaded, repeat, lambda: {"peak_rss_bytes": peak_rss_bytes()})


def _random_ids(
    path: Path, vocab_size: int, positions: int, prompt_tokens: int, new_tokens: int, kind: str
) -> NDArray[np.int64]:
    """Return ids int64 [1, P], equal in every process; ``positions`` is 0 if the model states no limit."""
    tokens = prompt_tokens + (new_tokens if kind == "decoder" else 0)
    if kind == "seq2seq":  # its source has positions of its own
        tokens = max(prompt_tokens, new_tokens + 2)
    if positions and tokens > positions:
        raise UsageError(f"{path}: {tokens} tokens are more than the model's {positions} positions; ask for fewer")
    return np.random.default_rng(0).integers(0, vocab_size, (1, prompt_tokens), dtype=np.int64)


def main() -> int:
    """Serve the requests and return the process's exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("numbers", type=int, nargs=3, help="prompt tokens, new tokens, threads (0: all)")
    parser.add_argument("--speculate", help="kind of the drafts that `drafts` times")
    parser.add_argument("--text", type=Path, help="text that they continue")
    options = parser.parse_args()
    make = bundle_subject if (options.path / "manifest.json").exists() else dense_subject

    def work(requests: BinaryIO, send: Callable[..., None]) -> None:
        subject = make(options.path, *options.numbers)
        send(subject.loaded)
        for request in requests:
            answers: dict[bytes, Callable[[], Any]] = {b"repeat": subject.repeat, b"finish": subject.finish}
            if subject.drafts is not None:
                answers[b"drafts"] = partial(subject.drafts, options.speculate, options.text)
            send(answers[request.strip()]())

    return serve(options.path, work)


if __name__ == "__main__":
    sys.exit(main())
