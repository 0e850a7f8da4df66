"""Ours, for benchmarks/x86_models.py: FILES is a bundle's folder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.x86_bundle import BundleServer
from benchmarks.peers.x86_serve import Arrays, Network, serve


class Ours(BundleServer, Network):
    """A bundle of an encoder or a module."""

    def load(self) -> None:
        """And say which kernels were chosen."""
        super().load()
        self.settings = f"bundle {self.files.name}, {self.bundle.library}"

    def run(self, inputs: Arrays) -> NDArray[np.float32]:
        """By the method that users call."""
        call = self.bundle.encode if self.bundle.kind == "encoder" else self.bundle.run
        found: NDArray[np.float32] = call(*inputs.values())
        return found


if __name__ == "__main__":
    serve(Ours)
