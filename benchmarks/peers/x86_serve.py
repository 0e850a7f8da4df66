"""Parts that the drivers of runtimes share: requests on stdin, answers on stdout, and the clock.

A driver runs in its runtime's environment, from the checkout's folder:

    PYTHON -m benchmarks.peers.x86_RUNTIME MODEL FILES VARIANT THREADS

MODEL is a folder that the benchmark made, FILES the folder of what the runtime makes of it.  Requests and answers are
JSON, a line each:

    {"do": "prepare"}   makes FILES, if it is not there
    {"do": "load"}      seconds, versions, bytes of weights
    {"do": "memory"}    resident bytes, now and at most

Of decoders, for benchmarks/x86_llm.py, whose MODEL is a Hugging Face folder:

    {"do": "check", "ids": [...], "out": "f.npy"} the logits behind a prompt, float32 [V]
    {"do": "prefill", "ids": [...]}               seconds for a prompt, its last logits included
    {"do": "decode", "ids": [...], "steps": 32}   seconds of each of so many greedy tokens after a prompt

Of models that are called once, for benchmarks/x86_models.py, whose MODEL has a task.json and arrays by input's name:

    {"do": "check", "inputs": "f.npz", "out": "f.npy"} the output, float32
    {"do": "time", "inputs": "f.npz", "runs": 20}      seconds of each of so many calls

Anything else that libraries print goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shutil
import sys
import time
import traceback
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]
_clock = time.perf_counter


class Server(ABC):
    """A model in one runtime."""

    packages: ClassVar[tuple[str, ...]]
    """Distributions whose versions are reported."""
    settings: str = ""
    """Storage and arithmetic of the model, in words."""

    def __init__(self, model: Path, files: Path, variant: str, threads: int) -> None:
        self.model, self.files, self.variant, self.threads = model, files, variant, threads

    @abstractmethod
    def convert(self, out: Path) -> None:
        """Write the quantised model into an empty folder."""

    @abstractmethod
    def load(self) -> None:
        """Make ready to compute."""

    def weight_bytes(self) -> int:
        """Return the bytes of the files that hold weights: all but texts."""
        texts = {".json", ".xml", ".py", ".md", ".txt", ".jinja"}
        return sum(f.stat().st_size for f in self.files.rglob("*") if f.is_file() and f.suffix not in texts)

    def facts(self) -> dict[str, Any]:
        """Return versions, settings and weight bytes of the loaded model."""
        here = [name for name in self.packages if any(importlib.metadata.distributions(name=name))]
        versions = {name: importlib.metadata.version(name) for name in here}
        return {"versions": versions, "settings": self.settings, "weight_bytes": self.weight_bytes()}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for."""
        what = request["do"]
        if what == "prepare":
            return self._prepare()
        if what == "load":
            begin = _clock()
            self.load()
            return {"load_s": _clock() - begin, **self.facts()}
        if what == "memory":
            return {"rss_bytes": _status("VmRSS"), "peak_rss_bytes": _status("VmHWM")}
        return self.more(request)

    def more(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request that only some runtimes know."""
        raise ValueError(f"{request}: unknown")

    def _prepare(self) -> dict[str, Any]:
        begin = _clock()
        if not self.files.exists():
            partial = self.files.with_name(self.files.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self.convert(partial)
            partial.rename(self.files)
        return {"seconds": _clock() - begin}


class Runtime(Server):
    """A decoder; ``embedding_bytes`` is the part of the files of which a token reads only a row."""

    def __init__(self, model: Path, files: Path, variant: str, threads: int) -> None:
        super().__init__(model, files, variant, threads)
        self.config: dict[str, Any] = json.loads((model / "config.json").read_text())
        self.embeddings: int = self.config["vocab_size"] * self.config["hidden_size"]

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""

    @abstractmethod
    def step(self, ids: list[int]) -> int:
        """Append tokens and return the likeliest next one."""

    @abstractmethod
    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, [V]."""

    @abstractmethod
    def embedding_bytes(self) -> int:
        """Return the bytes of the embedding table, if it is not the head's as well."""

    def bytes_per_token(self) -> int:
        """Bytes of weights that a token's step reads."""
        return self.weight_bytes() - self.embedding_bytes()

    def facts(self) -> dict[str, Any]:
        """With what a token reads."""
        return {**super().facts(), "bytes_per_token": self.bytes_per_token()}

    def more(self, request: dict[str, Any]) -> dict[str, Any]:
        """Prompts and tokens."""
        what = request["do"]
        if what == "check":
            self.reset()
            self.step(request["ids"])
            np.save(request["out"], self.logits())
            return {}
        if what == "prefill":
            return {"seconds": self._prefill(request["ids"])}
        if what == "decode":
            return {"seconds": self._decode(request["ids"], request["steps"])}
        return super().more(request)

    def _prefill(self, ids: list[int]) -> float:
        self.reset()
        self.step(ids[:1])  # untimed: another process had the caches of the CPU to itself
        self.reset()
        begin = _clock()
        self.step(ids)
        return _clock() - begin

    def _decode(self, ids: list[int], steps: int) -> list[float]:
        self.reset()
        token, ends = self.step(ids), [_clock()]
        for _ in range(steps):
            token = self.step([token])
            ends.append(_clock())
        return [end - begin for begin, end in itertools.pairwise(ends)]


class Network(Server):
    """A model that is called once, on arrays by their inputs' names, of any batch."""

    def __init__(self, model: Path, files: Path, variant: str, threads: int) -> None:
        super().__init__(model, files, variant, threads)
        self.task: dict[str, Any] = json.loads((model / "task.json").read_text())

    @abstractmethod
    def run(self, inputs: Arrays) -> NDArray[np.float32]:
        """Return the output, whose memory the next call may reuse."""

    def calibration(self) -> list[Arrays]:
        """Return the inputs that quantisation may use: batches of one."""
        arrays = read_arrays(self.model / "calibration.npz")
        count = len(next(iter(arrays.values())))
        return [{name: array[i : i + 1] for name, array in arrays.items()} for i in range(count)]

    def more(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return outputs and times."""
        what = request["do"]
        if what == "check":
            np.save(request["out"], self.run(read_arrays(Path(request["inputs"]))))
            return {}
        if what == "time":
            inputs = read_arrays(Path(request["inputs"]))
            self.run(inputs)  # untimed, as in a prompt
            ends = [_clock()]
            for _ in range(request["runs"]):
                self.run(inputs)
                ends.append(_clock())
            return {"seconds": [end - begin for begin, end in itertools.pairwise(ends)]}
        return super().more(request)


def read_arrays(file: Path) -> Arrays:
    """Arrays of an .npz by name."""
    with np.load(file) as stored:
        return {name: stored[name] for name in stored.files}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def serve(kind: type[Server]) -> None:
    """Answer requests until stdin ends; an error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like
    model, files, variant, threads = sys.argv[1:]
    runtime: Server | None = None
    for line in sys.stdin:
        try:
            runtime = runtime or kind(Path(model), Path(files), variant, int(threads))
            answer = runtime.answer(json.loads(line))
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # without the libraries' goodbyes, some of which crash
