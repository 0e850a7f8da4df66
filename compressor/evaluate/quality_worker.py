"""Run a bundle's kernels for an evaluation: ``python -m compressor.evaluate.quality_worker BUNDLE THREADS``.

This process imports neither torch nor the compiler, and its memory is not counted as the run's.  A request is a line of
JSON, ``[B, S]``, then the ids, int64 [B, S], and for an encoder the mask, float32 [B, S].
For a plain module it is the shape of its input, then the input, float32; of a model of pictures with texts either
pictures, of four dimensions, or ids, of two, with a mask.  The answer is a line of JSON with the shape
of the outputs, then the outputs, float32.  A model of speech is asked by ``{"source": shape, "ids": shape}`` for
logits, with the source, float32, and ids, int64; or by ``{"samples": N, "most": M}`` for what it says, with the
samples, float32: then the answer is a line with the tokens.  A decoder continues prompts, int64, after
``{"prompts": [B, S], "count": N}``: the answer is a line with the tokens.  Of a decoder in parts, ``{"parts": [B, S]}``
asks for their times behind a text, int64, and with ``"without"``, lists of parts, how often the others agree with all.
``{"lossy": [B, S], "count": N}`` asks how continuations of prompts, int64, with lossy drafts compare with others.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from compressor.evaluate.generation.greedy import continue_greedily
from compressor.host.child import serve


def main() -> int:
    """Serve the requests and return the process's exit code."""
    path, threads = Path(sys.argv[1]), int(sys.argv[2])

    def work(requests: BinaryIO, send: Callable[..., None]) -> None:
        from compressor_runtime import load

        bundle = load(path, threads=threads or None)
        send({"threads": bundle.threads})
        for line in requests:
            shape = json.loads(line)
            if isinstance(shape, dict) and "prompts" in shape:
                _continue(bundle, shape, requests, send)
                continue
            if isinstance(shape, dict) and "parts" in shape:
                _skip(bundle, shape, requests, send)
                continue
            if isinstance(shape, dict) and "lossy" in shape:
                _lose(bundle, shape, requests, send)
                continue
            if isinstance(shape, dict):
                _listen(bundle, shape, requests, send)
                continue
            if "pair" in bundle.model:
                outputs = _embed(bundle, shape, requests)
                send(outputs.shape, np.ascontiguousarray(outputs, np.float32).data)
                continue
            if bundle.kind == "module":
                x = np.frombuffer(requests.read(4 * math.prod(shape)), np.float32).reshape(shape)
                outputs = bundle.run(x)
                outputs = next(iter(outputs.values())) if isinstance(outputs, dict) else np.asarray(outputs)
                send(outputs.shape, np.ascontiguousarray(outputs, np.float32).data)
                continue
            batch, length = shape
            ids = np.frombuffer(requests.read(batch * length * 8), np.int64).reshape(batch, length)
            if bundle.kind == "decoder" and bundle.leaves_early:
                outputs = np.array([early_logits(bundle, row, length) for row in ids])
            elif bundle.kind == "decoder":
                outputs = bundle.session(batch, length).step(ids, keep=np.arange(length))
            elif bundle.kind == "seq2seq":
                outputs = bundle.session(batch, length, source=ids).step(ids, keep=np.arange(length))
            else:
                mask = np.frombuffer(requests.read(batch * length * 4), np.float32).reshape(batch, length)
                outputs = bundle.encode(ids, mask)
            send(outputs.shape, np.ascontiguousarray(outputs, np.float32).data)

    return serve(path, work)


def _listen(bundle: Any, asked: dict[str, Any], requests: BinaryIO, send: Callable[..., None]) -> None:
    """Answer a request to a model of speech."""
    if "samples" in asked:
        samples = np.frombuffer(requests.read(4 * asked["samples"]), np.float32)
        send([int(token) for token in bundle.generate_ids(samples, max_tokens=asked["most"])])
        return
    source = np.frombuffer(requests.read(4 * math.prod(asked["source"])), np.float32).reshape(asked["source"])
    ids = np.frombuffer(requests.read(8 * math.prod(asked["ids"])), np.int64).reshape(asked["ids"])
    count = ids.shape[1]
    logits = bundle.session(1, count, source).step(ids, keep=np.arange(count))
    send(logits.shape, np.ascontiguousarray(logits, np.float32).data)


def _continue(bundle: Any, asked: dict[str, Any], requests: BinaryIO, send: Callable[..., None]) -> None:
    """Answer a request for continuations: steps of one session, through its caches."""
    from compressor_runtime.depth.prompts import read_prompt

    batch, length = asked["prompts"]
    prompts = np.frombuffer(requests.read(8 * batch * length), np.int64).reshape(batch, length)
    if bundle.leaves_early:
        found = [_continued_early(bundle, row[None], asked["count"]) for row in prompts]
        send(np.concatenate(found).tolist())
        return
    session = bundle.session(batch, length + asked["count"])
    send(continue_greedily(lambda ids: read_prompt(session, ids)[:, -1], prompts, asked["count"]).tolist())


def _skip(bundle: Any, asked: dict[str, Any], requests: BinaryIO, send: Callable[..., None]) -> None:
    """Answer a request about the parts that drafts of a model by itself may leave out."""
    from compressor_runtime.speculation.kinds.skips import CHAIN
    from compressor_runtime.speculation.measure import agreements, part_times, verification_times
    from compressor_runtime.speculation.pace import on_lines

    ids = np.frombuffer(requests.read(8 * math.prod(asked["parts"])), np.int64).reshape(asked["parts"])
    if "without" in asked:
        send(agreements(bundle, ids, asked["without"]))
        return
    prompt = ids[0, : ids.shape[1] // 2].tolist()
    times = verification_times(bundle, prompt)
    known = sorted({**times, 1: times[0]}.items())[1:]
    verification = [on_lines(known, 1 + rows) / times[0] for rows in range(1, CHAIN + 1)]
    names = [part["entry"] for part in bundle.model["parts"][1:-1]]
    seconds = part_times(bundle, prompt)
    send({"names": names, "seconds": seconds, "step_s": times[0], "verification": verification})


def _lose(bundle: Any, asked: dict[str, Any], requests: BinaryIO, send: Callable[..., None]) -> None:
    """Answer a request about lossy drafts."""
    from compressor_runtime.speculation.measure import lossy_texts

    prompts = np.frombuffer(requests.read(8 * math.prod(asked["lossy"])), np.int64).reshape(asked["lossy"])
    send(lossy_texts(bundle, prompts.tolist(), asked["count"]))


def early_logits(bundle: Any, ids: Any, room: int) -> Any:
    """Return logits [S, V] of what comes after each token, step by step, where tokens leave early."""
    from compressor_runtime.depth.tokens import early_steps
    from compressor_runtime.generation import Depth

    steps = early_steps(bundle.session(1, room), bundle.model, Depth(bundle.model["exits"]["of"]))
    return np.array([steps.prompt(ids[None, :1]), *(steps.step(int(token)) for token in ids[1:])])


def _continued_early(bundle: Any, prompt: Any, count: int) -> Any:
    """Return the likeliest next tokens [1, count] of a prompt [1, S], where they leave early; none is given up."""
    from compressor_runtime.depth.tokens import early_steps
    from compressor_runtime.generation import Depth

    session = bundle.session(1, prompt.shape[1] + count)
    steps = early_steps(session, bundle.model, Depth(bundle.model["exits"]["of"]))

    def step(ids: Any) -> Any:
        return (steps.step(int(ids[0, 0])) if session.position else steps.prompt(ids))[None]

    return continue_greedily(step, prompt, count)


def _embed(bundle: Any, shape: list[int], requests: BinaryIO) -> Any:
    """Return embeddings of pictures, or of texts."""
    if len(shape) == 4:
        return bundle.embed_pictures(np.frombuffer(requests.read(4 * math.prod(shape)), np.float32).reshape(shape))
    ids = np.frombuffer(requests.read(8 * math.prod(shape)), np.int64).reshape(shape)
    mask = np.frombuffer(requests.read(4 * math.prod(shape)), np.float32).reshape(shape)
    return bundle.embed_texts(ids, mask)


if __name__ == "__main__":
    sys.exit(main())
