"""Run a bundle of ours without torch: the part that the drivers x86_ours.py and x86_network_ours.py share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.x86_serve import Server

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it where it is installed
from compressor_runtime import load  # noqa: E402


class BundleServer(Server):
    """FILES is a bundle's folder."""

    packages = ("compressor", "apache-tvm-ffi")

    def convert(self, out: Path) -> None:
        """Bundles are given."""
        raise SystemExit(f"{self.files}: no such bundle")

    def load(self) -> None:
        """With the comparison of all files with their sums, as everybody gets it."""
        self.bundle = load(self.files, threads=self.threads)

    def weight_bytes(self) -> int:
        """Return the bytes of the weights' file."""
        return (self.files / "weights.safetensors").stat().st_size

    def more(self, request: dict[str, Any]) -> dict[str, Any]:
        """Measure the read bandwidth of the machine, with this many threads."""
        if request["do"] == "bandwidth":
            return {"bytes_per_s": self.bundle.read_bandwidth()}
        return super().more(request)
