"""PyTorch, for benchmarks/x86_models.py.  VARIANT: f32, eager, whose outputs are what the others' are compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.x86_network import torch_network
from benchmarks.peers.x86_serve import Arrays, Network, serve


class Torch(Network):
    """The model as it came."""

    packages = ("torch", "transformers")
    settings = "float32 weights and arithmetic, eager, sdpa"

    def convert(self, out: Path) -> None:
        """There is nothing to convert."""

    def load(self) -> None:
        """Load it as its users do."""
        torch.set_num_threads(self.threads)
        self.network = torch_network(self.task)

    @torch.inference_mode()
    def run(self, inputs: Arrays) -> NDArray[np.float32]:
        """Return the output."""
        found: NDArray[np.float32] = self.network(*map(torch.from_numpy, inputs.values())).numpy()
        return found

    def weight_bytes(self) -> int:
        """Return the bytes of the parameters."""
        return sum(p.numel() * p.element_size() for p in self.network.parameters())


if __name__ == "__main__":
    serve(Torch)
