"""llama.cpp by llama-cpp-python, for benchmarks/x86_llm.py.  VARIANT: Q4_0, Q4_K_M or F16."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.x86_serve import Runtime, serve

_CAPACITY, _BATCH = 1024, 512


class LlamaCpp(Runtime):
    """A GGUF file; the context's memory is the cache."""

    packages = ("llama-cpp-python", "gguf")

    def convert(self, out: Path) -> None:
        """By way of float16."""
        from benchmarks.peers.x86_gguf import write

        whole, small = out / "F16.gguf", out / f"{self.variant}.gguf"
        write(self.model, whole)
        if self.variant == "F16":
            return
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{self.variant}")
        parameters.nthread = os.cpu_count() or 1
        failed = llama_cpp.llama_model_quantize(os.fsencode(whole), os.fsencode(small), parameters)
        if failed:
            raise RuntimeError(f"llama_model_quantize: {failed}")
        whole.unlink()

    def load(self) -> None:
        """With this many threads for prompts and for single tokens."""
        file = self.files / f"{self.variant}.gguf"
        llama_cpp.llama_backend_init()
        self.loaded = llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params())
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = _CAPACITY, _BATCH, _BATCH
        parameters.n_threads = parameters.n_threads_batch = self.threads
        self.context = llama_cpp.llama_init_from_model(self.loaded, parameters)
        if not self.context:
            raise RuntimeError("llama_init_from_model failed")
        info = llama_cpp.llama_print_system_info().decode()
        on = [part.split(" = ")[0].split(": ")[-1].strip() for part in info.split("|") if part.strip().endswith("= 1")]
        self.settings = f"{self.variant}, cache f16; built with {', '.join(on)}"

    def reset(self) -> None:
        """Empty the cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def step(self, ids: list[int]) -> int:
        """Append tokens, which llama.cpp places by itself, and return the likeliest next one."""
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        failed = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        if failed:
            raise RuntimeError(f"llama_decode: {failed}")
        return int(self.logits().argmax())

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, [V]."""
        row = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(row, (int(self.config["vocab_size"]),))

    def embedding_bytes(self) -> int:
        """Return the bytes of the embedding table in the file."""
        from gguf import GGUFReader

        reader = GGUFReader(self.files / f"{self.variant}.gguf")
        return next(int(tensor.n_bytes) for tensor in reader.tensors if tensor.name == "token_embd.weight")


if __name__ == "__main__":
    serve(LlamaCpp)
