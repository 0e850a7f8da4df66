"""Time the candidates of a batch on this machine's GPU: ``python run.py [--seconds N] [--output results.json]``.

A batch is what ``compress tune RECIPE --export-batch DIR`` made; ``compress tune --import-results FILE`` takes the
results home.  It needs Linux on x86-64, an NVIDIA GPU with a driver of version 580 or later, and the packages numpy,
apache-tvm-ffi (the version that ``batch.json`` names) and nvidia-cuda-runtime 13.0, or another libcudart.so.13.

Each candidate is called by CUDA graphs that take one copy of the weights after another, so that these come from
memory; rounds over all candidates alternate, and the median counts.  All candidates of a kernel must compute the same
numbers.  One that fails is named, and the others go on in a fresh process.  What is measured is on disk after each
kernel: a run that is stopped, or that reaches ``--seconds``, leaves results that say that they are partial.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_S, CANDIDATE_S = 120.0, 60.0  # that a worker may take to start, and for one candidate, before it is ended
_LINE = "@"  # begins what a worker says, among what libraries print


def sha256(data: bytes) -> str:
    """Return a digest as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def content_digest(content: Mapping[str, Any]) -> str:
    """Digest results, without the digest itself."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def main(arguments: Sequence[str] | None = None, worker: type[Any] | None = None) -> int:
    """Measure; return the exit code: 0 all, 1 a part, 2 nothing."""
    parser = argparse.ArgumentParser(description="Time the candidates of a batch on this machine's GPU.")
    parser.add_argument("--seconds", type=float, default=600.0, help="end after so many, with what there is [600]")
    parser.add_argument("--output", type=Path, default=Path("results.json"))
    parser.add_argument("--device", type=int, default=0, help="number of the GPU [0]")
    parser.add_argument("--copies", type=int, default=64, help="copies of the weights, at most [64]")
    parser.add_argument("--rounds", type=int, default=9, help="of which the median counts [9]")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    raw = (HERE / "batch.json").read_bytes()
    batch = json.loads(raw)
    if given.worker:
        return serve(batch, given)
    if damaged := [name for name, digest in batch["files"].items() if not _is(name, digest)]:
        print(f"this batch is damaged: {', '.join(damaged)}; copy it anew", file=sys.stderr)
        return 2
    with (worker or Worker)(given) as answer:
        return _measure_all(batch, sha256(raw), answer, given.output, time.monotonic() + given.seconds)


def _is(name: str, digest: str) -> bool:
    file = HERE / name
    return file.is_file() and sha256(file.read_bytes()) == digest


def _measure_all(batch: Mapping[str, Any], digest: str, answer: Any, output: Path, end: float) -> int:
    """Measure kernel after kernel, and write what there is after each."""
    kernels, began = batch["kernels"], time.monotonic()
    work, done = sum(len(kernel["candidates"]) for kernel in kernels), 0
    content: dict[str, Any] = {
        "format": "compressor tuning results",
        "schema_version": 1,
        "batch": digest,
        "kernels_digest": batch["kernels_digest"],
        "device": None,
        "complete": False,
        "kernels": {},
    }
    try:
        for index, kernel in enumerate(kernels):
            measured = _measure_kernel(index, kernel, answer, end)
            if measured is None:
                print("the time is over", file=sys.stderr)
                break
            content["kernels"][kernel["kernel"]] = measured
            content |= {"device": answer.facts(), "complete": len(content["kernels"]) == len(kernels)}
            content["sha256"] = content_digest(content)
            partial = output.with_name(f".{output.name}.partial")
            partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
            partial.replace(output)
            done += len(kernel["candidates"])
            seconds = time.monotonic() - began
            left = seconds / done * (work - done)
            times = [one["microseconds"] for one in measured["candidates"] if "microseconds" in one]
            best = f"{min(times):.1f} us, default {_text(measured['candidates'][0])}" if times else "all failed"
            print(f"[{seconds:6.1f} s, {left:4.0f} s left] {kernel['kernel']}: {best}", file=sys.stderr, flush=True)
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    count = len(content["kernels"])
    print(f"{count} of {len(kernels)} kernels measured" + (f": {output}" if count else ""))
    return 2 if not count else int(not content["complete"])


def _text(candidate: Mapping[str, Any]) -> str:
    return f"{candidate['microseconds']:.1f} us" if "microseconds" in candidate else "failed"


def _measure_kernel(index: int, kernel: Mapping[str, Any], answer: Any, end: float) -> dict[str, Any] | None:
    """Measure one kernel's candidates, again without those that end the worker; None where the time is over."""
    failed = {i: one["refused"] for i, one in enumerate(kernel["candidates"]) if "refused" in one}
    while True:
        left = end - time.monotonic()
        if left <= 0:
            return None
        measured, blamed, reason = answer(index, sorted(failed), left)
        if measured is not None:
            for i, why in failed.items():
                measured["candidates"][i] = {"error": why}
            return dict(measured)
        if blamed is None:
            if time.monotonic() >= end:
                return None
            raise RuntimeError(reason)
        print(f"  {kernel['kernel']}, candidate {blamed}: {reason}", file=sys.stderr)
        failed[blamed] = reason


class Worker:
    """The process that calls kernels: an error of the GPU ends it, not the run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._options = [f"--{name}={getattr(given, name)}" for name in ("device", "copies", "rounds")]
        self._process: subprocess.Popen[str] | None = None
        self._facts: dict[str, Any] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def facts(self) -> dict[str, Any]:
        """Return what is known of the GPU."""
        return self._facts

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        command = [sys.executable, str(HERE / "run.py"), "--worker", *self._options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._said: queue.Queue[str | None] = queue.Queue()
        stream, said = self._process.stdout, self._said

        def listen() -> None:
            for line in stream or ():
                if line.startswith(_LINE):
                    said.put(line[len(_LINE) :])
            said.put(None)

        threading.Thread(target=listen, daemon=True).start()
        first = self._next(START_S)
        if first is None or "facts" not in first:
            self._stop()
            raise RuntimeError((first or {}).get("error", "the worker process did not start"))
        self._facts = first["facts"]

    def _next(self, seconds: float) -> dict[str, Any] | None:
        try:
            line = self._said.get(timeout=max(0.1, seconds))
        except queue.Empty:
            return None
        return None if line is None else dict(json.loads(line))

    def __call__(self, index: int, skipped: list[int], seconds: float) -> tuple[dict[str, Any] | None, int | None, str]:
        """Have a kernel measured: what was, or else the candidate that ended the worker (None: none did), and why."""
        end, blamed = time.monotonic() + seconds, None
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({"kernel": index, "skipped": skipped}) + "\n")
        self._process.stdin.flush()
        while True:
            said = self._next(min(CANDIDATE_S, end - time.monotonic()))
            if said is None or "error" in said:
                self._stop()
                over = time.monotonic() >= end
                reason = "it did not end, or it ended the process" if said is None else str(said["error"])
                return None, None if over else blamed, reason
            if "measured" in said:
                return said["measured"], None, ""
            blamed = said["candidate"]


def say(**content: Any) -> None:
    """Tell the process that started this one."""
    print(_LINE + json.dumps(content), flush=True)


def serve(batch: Mapping[str, Any], given: argparse.Namespace) -> int:
    """Measure the kernels that stdin asks for, until it ends; an error is the last line."""
    sys.path.insert(0, str(HERE))
    try:
        from gpu_timing import Timer

        timer = Timer(HERE, given.device, given.copies, given.rounds)
        say(facts=timer.facts())
        for line in sys.stdin:
            asked = json.loads(line)
            kernel = batch["kernels"][asked["kernel"]]
            say(measured=timer.measure(kernel, set(asked["skipped"]), lambda index: say(candidate=index)))
    except Exception as error:  # of whatever kind: the GPU's errors stay, and another process goes on
        say(error=f"{type(error).__name__}: {error}"[:300])
        os._exit(3)  # a GPU that failed may keep destructors waiting
    return 0


if __name__ == "__main__":
    sys.exit(main())
