"""Checks a Compressor bundle where it is to run: its kernels against stored outputs, its speed and its memory.

Shipped in every bundle, beside the package compressor_runtime, whose only companions it needs.  From a shell:
``python compressor_selfcheck.py`` prints one JSON object and ends with 0, or with 4 when the kernels compute something
else than the model that they were made from.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.dont_write_bytecode = True  # nothing is added to the bundle

import compressor_runtime
import numpy as np
from compressor_runtime import Bundle, BundleError, DamagedBundleError, load, read_safetensors
from numpy.typing import NDArray

VECTORS = "vectors.safetensors"
_DECODED_TOKENS = 8
_LARGEST_GAP = 10.0  # in units of the tolerance and of the outputs' root mean square


def compare(bundle: Bundle) -> tuple[dict[str, float], float]:
    """Run a bundle on its stored inputs.

    A decoder takes its prompt at once and what follows token by token, all through one cache.  One that verifies
    drafted tokens takes what follows once more, at once and beside drafts that lead nowhere.

    Returns:
        Errors by name, and the largest that rounding explains.  ``output_0``: relative error (root mean square) of the
        stored columns of the first output; ``top_0``, of decoders: by how much another token than the expected one is
        the likeliest, as a fraction of ten times the logits' root mean square; with ``verify_`` in front, those of
        verified tokens, and with ``heads_``, of heads that draft.  NaN where an output is not a number.
    Raises:
        DamagedBundleError: the stored vectors are missing, or do not suit this model.
    """
    with _vectors(bundle) as stored:
        outputs, errors, tolerance = _run(bundle, stored), dict[str, float](), float(stored["tolerance"][0])
        if not 0 < tolerance < 1 or f"output_{len(outputs)}" in stored:
            raise ValueError(f"tolerance {tolerance}, {len(outputs)} outputs")
        for number, output in enumerate(outputs):
            table = np.asarray(output, np.float64).reshape(-1, np.shape(output)[-1] if np.ndim(output) else 1)
            errors.update(output_errors(table, stored, number))
        if "verify" in bundle.entries:
            logits = _verified(bundle, stored).astype(np.float64)
            found = output_errors(logits.reshape(-1, logits.shape[-1]), stored, 0)
            errors.update((f"verify_{name}", error) for name, error in found.items())
        if "heads" in bundle.entries:
            errors.update((f"heads_{name}", error) for name, error in _drafted(bundle, stored).items())
    return errors, tolerance


@contextmanager
def _vectors(bundle: Bundle) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the stored vectors to a block whose errors mean that they do not suit the model."""
    file = bundle.path / VECTORS
    if VECTORS not in bundle.manifest["files"]:
        raise DamagedBundleError(f"{bundle.path}: has no {VECTORS} to compare with; compress the model again")
    try:
        yield read_safetensors(file)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedBundleError(f"{file}: does not suit this model ({error}); compress the model again") from error


def _run(bundle: Bundle, stored: Mapping[str, NDArray[Any]]) -> list[Any]:
    if bundle.kind in ("decoder", "seq2seq"):
        ids, prompt = stored["ids"], int(stored["prompt"][0])
        session = bundle.session(len(ids), prompt, stored.get("source"), stored.get("source_mask"))  # must grow
        parts = [ids[:, :prompt], *(ids[:, [i]] for i in range(prompt, ids.shape[1]))]
        return [np.concatenate([session.step(part, np.arange(part.shape[1])) for part in parts], axis=1)]
    if bundle.kind == "encoder":
        return [bundle.encode(stored["ids"], stored["mask"])]
    outputs = bundle.run(*_inputs(stored))
    if isinstance(outputs, dict):
        return list(outputs.values())
    return outputs if isinstance(outputs, list) else [outputs]


def _verified(bundle: Bundle, stored: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return a decoder's logits [2, S, V] for the stored ids, of which those behind the prompt are verified at once.

    In front of each of these comes another token with the same parent, which nothing follows.
    """
    ids, prompt = stored["ids"], int(stored["prompt"][0])
    session = bundle.session(len(ids), prompt)
    first = session.step(ids[:, :prompt], np.arange(prompt))
    tokens, parent, slot = list[int](), list[int](), list[int]()
    paths: list[list[int]] = [[-1] for _ in ids]
    for column in ids[:, prompt:].T.tolist():
        for sequence, token in enumerate(column):
            tokens += [(token + 1) % bundle.model["vocab_size"], token]
            parent += [paths[sequence][-1]] * 2
            slot += [sequence] * 2
            paths[sequence].append(len(tokens) - 1)
    if not tokens:  # a model of very few positions
        return first
    logits = session.verify(tokens, parent, slot, [t for path in paths for t in path[1:]])
    return np.concatenate([first, logits.reshape(len(ids), -1, logits.shape[-1])], axis=1)


def _drafted(bundle: Bundle, stored: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return the errors of what heads compute of stored hidden states and tokens."""
    own = {name.removeprefix("heads_"): value for name, value in stored.items() if name.startswith("heads_")}
    logits = bundle.session(1, 0).hidden.heads(own["hidden"][0], own["next"][0]).astype(np.float64)
    return output_errors(logits.reshape(-1, logits.shape[-1]), own, 0)


def _inputs(stored: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [stored[f"input_{i}"] for i in range(sum(name.startswith("input_") for name in stored))]


def output_errors(table: NDArray[np.float64], stored: Mapping[str, NDArray[Any]], number: int) -> dict[str, float]:
    """Return the errors of one output, given as rows of its last dimension."""
    expected = stored[f"output_{number}"].astype(np.float64)
    rows, columns = stored[f"rows_{number}"], stored[f"columns_{number}"]
    difference, size = float(np.linalg.norm(table[rows][:, columns] - expected)), float(np.linalg.norm(expected))
    errors = {f"output_{number}": difference / size if size else difference}
    if (top := stored.get(f"top_{number}")) is not None:
        gaps = table[rows].max(axis=1) - table[rows, top]
        scale = _LARGEST_GAP * size / np.sqrt(expected.size)
        errors[f"top_{number}"] = float(gaps.max() / scale) if scale else float(gaps.max())
    return errors


def measure(bundle: Bundle) -> tuple[float, float | None]:
    """Measure the very first call and a token after it (median; decoders only), for one sequence; return milliseconds.

    The first call of a decoder has the stored prompt, that of another model all stored inputs.
    """
    with _vectors(bundle) as stored:
        begin = time.perf_counter()
        if bundle.kind not in ("decoder", "seq2seq"):
            _run(bundle, stored)
            return 1e3 * (time.perf_counter() - begin), None
        prompt = stored["ids"][:1, : int(stored["prompt"][0])]
        count = min(_DECODED_TOKENS, bundle.limit - prompt.shape[1])
        source = stored["source"][:1] if "source" in stored else None
        session = bundle.session(1, prompt.shape[1] + count, source)
        logits = session.step(prompt)
        ends = [time.perf_counter()]
        for _ in range(count):
            logits = session.step(logits[:, -1:].argmax(-1))
            ends.append(time.perf_counter())
    return 1e3 * (ends[0] - begin), 1e3 * float(np.median(np.diff(ends))) if count else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a bundle and print the findings; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Check a Compressor bundle on this machine.")
    here = Path(__file__).resolve().parent
    parser.add_argument("bundle", nargs="?", type=Path, default=here, help="the bundle's folder (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="worker threads (default: the physical cores available)")
    parser.add_argument("--isa", help="check the kernels for this instruction set (default: the best that runs here)")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    try:
        bundle = load(options.bundle, threads=options.threads, isa=options.isa)
        load_s = time.perf_counter() - begin
        first_token_ms, decode_ms = measure(bundle)
        errors, tolerance = compare(bundle)
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    runtime = Path(compressor_runtime.__file__).resolve()
    passed = all(error <= tolerance for error in errors.values())
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    found = {
        "passed": passed,
        "errors": {name: error if np.isfinite(error) else None for name, error in errors.items()},
        "tolerance": tolerance,
        "load_s": load_s,
        "first_token_ms": first_token_ms,
        "decode_ms": decode_ms,
        "peak_rss_bytes": int(status.split()[0]) * 1024,
        "threads": bundle.threads,
        "device": bundle.device.name,
        "runtime": str(runtime.relative_to(here) if runtime.is_relative_to(here) else runtime),  # seen from this script
    }
    print(json.dumps(found, allow_nan=False))
    return 0 if passed else DamagedBundleError.exit_code


if __name__ == "__main__":
    sys.exit(main())
