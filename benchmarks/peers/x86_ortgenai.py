"""ONNX Runtime GenAI, for benchmarks/x86_llm.py: int4 by its model builder."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime_genai
from numpy.typing import NDArray

from benchmarks.peers.x86_serve import Runtime, serve

_CAPACITY = 1024


class OrtGenAI(Runtime):
    """A model folder of the builder."""

    packages = ("onnxruntime-genai", "onnxruntime", "transformers", "torch")
    settings = "int4 sym, blocks of 32 with float32 scales, accuracy level 4 (int8 products), head int4, embeddings f32"

    def convert(self, out: Path) -> None:
        """Only the last position's logits, as the others compute; the rest is the builder's default."""
        extra = ["int4_block_size=32", "int4_accuracy_level=4", "prune_lm_head=true"]
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", "none", "-i", str(self.model)]
        with tempfile.TemporaryDirectory(dir=out.parent) as cache:
            command = [*builder, "-o", str(out), "-p", "int4", "-e", "cpu", "-c", cache, "--extra_options", *extra]
            subprocess.run(command, check=True, stdout=sys.stderr)

    def load(self) -> None:
        """With this many threads in an operator."""
        config = onnxruntime_genai.Config(str(self.files))
        options = {"intra_op_num_threads": self.threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.loaded = onnxruntime_genai.Model(config)
        self.parameters = onnxruntime_genai.GeneratorParams(self.loaded)
        self.parameters.set_search_options(max_length=_CAPACITY, do_sample=False)

    def reset(self) -> None:
        """Make a new generator; the first token of a prompt finds it empty."""
        self.generator = onnxruntime_genai.Generator(self.loaded, self.parameters)
        self.chosen = False

    def step(self, ids: list[int]) -> int:
        """Append tokens and return the likeliest next one; a chosen token is computed when the next one is asked
        for.
        """
        if not self.chosen:
            self.generator.append_tokens(ids)
        self.generator.generate_next_token()
        self.chosen = True
        return int(self.generator.get_next_tokens()[0])

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, [V]."""
        return np.asarray(self.generator.get_output("logits"), np.float32)[0, -1]

    def embedding_bytes(self) -> int:
        """Return the bytes of the table, which the builder stores in float32."""
        return 4 * self.embeddings


if __name__ == "__main__":
    serve(OrtGenAI)
