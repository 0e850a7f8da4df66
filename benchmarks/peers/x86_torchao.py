"""PyTorch, for benchmarks/x86_llm.py.  VARIANT: int4, by torchao, compiled; or bfloat16, which is plain and eager."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import quantize_
from torchao.quantization.utils import recommended_inductor_config_setter
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.peers.x86_serve import Runtime, serve

_CAPACITY = 1024


class Torch(Runtime):
    """A transformers model in bfloat16."""

    packages = ("torch", "transformers", "torchao")

    def convert(self, out: Path) -> None:
        """Save the whole module as a pickle, since torchao's linears cannot be saved in a Hugging Face folder."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16).eval()
        if self.variant == "bfloat16":
            model.save_pretrained(out)
            return
        quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=128))
        for module in model.modules():
            vars(module).pop("extra_repr", None)  # bound to the module by torchao, which a pickle cannot have
        torch.save(model, out / "model.pt")

    def load(self) -> None:
        """Compiled on the first calls, of which the kernels stay beside the model."""
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        if self.variant == "bfloat16":
            self.network: Any = AutoModelForCausalLM.from_pretrained(self.files, dtype=torch.bfloat16).eval()
            self.settings = "bfloat16 weights and arithmetic, eager, sdpa"
            self.forward: Any = self.network
            return
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.files.with_name(f"{self.files.name}-inductor-{self.threads}"))
        recommended_inductor_config_setter()
        self.network = torch.load(self.files / "model.pt", weights_only=False)
        self.forward = torch.compile(self.network.forward, dynamic=False)
        self.settings = f"int4 asym g128 (tinygemm), head int4, embeddings bfloat16, compiled, cache of {_CAPACITY}"

    def reset(self) -> None:
        """Empty the cache; compiled code needs one of a fixed size."""
        config = self.network.config
        if self.variant == "bfloat16":
            self.cache: Any = DynamicCache(config=config)
        else:
            self.cache = StaticCache(config=config, max_cache_len=_CAPACITY)

    def step(self, ids: list[int]) -> int:
        """Append tokens and return the likeliest next one."""
        inputs = torch.tensor([ids])
        out = self.forward(input_ids=inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self._logits = out.logits[0, -1]
        return int(self._logits.argmax())

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, [V]."""
        return self._logits.float().numpy()

    def embedding_bytes(self) -> int:
        """In bfloat16."""
        return 2 * self.embeddings


if __name__ == "__main__":
    serve(Torch)
