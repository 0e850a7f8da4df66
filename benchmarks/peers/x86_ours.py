"""Ours, for benchmarks/x86_llm.py: FILES is a bundle's folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.x86_serve import Runtime, serve

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it where it is installed
from compressor_runtime import load  # noqa: E402

_CAPACITY = 1024


class Ours(Runtime):
    """A bundle, without torch."""

    packages = ("compressor", "apache-tvm-ffi")

    def convert(self, out: Path) -> None:
        """Bundles are given."""
        raise SystemExit(f"{self.files}: no such bundle")

    def load(self) -> None:
        """With the comparison of all files with their sums, as everybody gets it."""
        self.bundle = load(self.files, threads=self.threads)
        cache = self.bundle.model["cache_format"]
        self.settings = f"bundle {self.files.name}, cache {cache}"

    def reset(self) -> None:
        """A new session."""
        self.session = self.bundle.session(capacity=_CAPACITY)

    def step(self, ids: list[int]) -> int:
        """Append tokens; the likeliest next one."""
        self._logits: NDArray[np.float32] = self.session.step(np.array([ids]))[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> NDArray[np.float32]:
        """Of the last step, [V]."""
        return self._logits

    def embedding_bytes(self) -> int:
        """The bundle says itself what a token reads."""
        return self.weight_bytes() - self.bytes_per_token()

    def weight_bytes(self) -> int:
        """Of the weights' file."""
        return (self.files / "weights.safetensors").stat().st_size

    def bytes_per_token(self) -> int:
        """As the manifest has it."""
        return int(self.bundle.model["weight_bytes_per_token"])

    def more(self, request: dict[str, Any]) -> dict[str, Any]:
        """The read bandwidth of the machine, with this many threads."""
        if request["do"] == "bandwidth":
            return {"bytes_per_s": self.bundle.read_bandwidth()}
        return super().more(request)


if __name__ == "__main__":
    serve(Ours)
