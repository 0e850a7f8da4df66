"""Ours, for benchmarks/x86_models.py: FILES is a bundle's folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.x86_serve import Arrays, Network, serve

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it where it is installed
from compressor_runtime import load  # noqa: E402


class Ours(Network):
    """A bundle, without torch."""

    packages = ("compressor", "apache-tvm-ffi")

    def convert(self, out: Path) -> None:
        """Bundles are made before."""
        raise SystemExit(f"{self.files}: no such bundle")

    def load(self) -> None:
        """With the comparison of all files with their sums, as everybody gets it."""
        self.bundle = load(self.files, threads=self.threads)
        self.settings = f"bundle {self.files.name}, {self.bundle.library}"

    def run(self, inputs: Arrays) -> NDArray[np.float32]:
        """By the method that users call."""
        call = self.bundle.encode if self.bundle.kind == "encoder" else self.bundle.run
        found: NDArray[np.float32] = call(*inputs.values())
        return found

    def weight_bytes(self) -> int:
        """Of the weights' file."""
        return (self.files / "weights.safetensors").stat().st_size

    def more(self, request: dict[str, Any]) -> dict[str, Any]:
        """The read bandwidth of the machine, with this many threads."""
        if request["do"] == "bandwidth":
            return {"bytes_per_s": self.bundle.read_bandwidth()}
        return super().more(request)


if __name__ == "__main__":
    serve(Ours)
