"""Ours, for benchmarks/x86_llm.py: FILES is a bundle's folder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.x86_bundle import BundleServer
from benchmarks.peers.x86_serve import Runtime, serve

_CAPACITY = 1024


class Ours(BundleServer, Runtime):
    """A bundle of a decoder."""

    def load(self) -> None:
        """And say how keys and values are kept."""
        super().load()
        self.settings = f"bundle {self.files.name}, cache {self.bundle.model['cache_format']}"

    def reset(self) -> None:
        """Start a new session."""
        self.session = self.bundle.session(capacity=_CAPACITY)

    def step(self, ids: list[int]) -> int:
        """Append tokens and return the likeliest next one."""
        self._logits: NDArray[np.float32] = self.session.step(np.array([ids]))[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, [V]."""
        return self._logits

    def embedding_bytes(self) -> int:
        """Return the bytes that a token does not read, which follow from the manifest."""
        return self.weight_bytes() - self.bytes_per_token()

    def bytes_per_token(self) -> int:
        """Return the manifest's figure."""
        return int(self.bundle.model["weight_bytes_per_token"])


if __name__ == "__main__":
    serve(Ours)
