"""llama.cpp by llama-cpp-python, for benchmarks/exports_peers.py: its quantiser, and its own greedy tokens.

    PYTHON -m benchmarks.peers.llamacpp quantize WHOLE.gguf OUT.gguf KIND [IMATRIX.gguf]
    PYTHON -m benchmarks.peers.llamacpp greedy MODEL.gguf COUNT ID [ID ...]

The head and the table of embeddings keep the type that WHOLE has.  The imatrix is read by the package gguf, and each
sum is divided by its count, as llama-quantize does.  Answers are JSON, the last line of stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import gguf
import llama_cpp
import numpy as np


def importance(file: str) -> tuple[object, int]:
    """Return llama.cpp's array of importances, which ends with an entry without a name, and the number of entries."""
    tensors = {tensor.name: np.array(tensor.data, np.float32).reshape(-1) for tensor in gguf.GGUFReader(file).tensors}
    names = [name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")]
    array = (llama_cpp.llama_model_imatrix_data * (len(names) + 1))()
    for entry, name in zip(array, names, strict=False):
        values = tensors[f"{name}.in_sum2"] / tensors[f"{name}.counts"][0]
        entry.name, entry.size = name.encode(), values.size
        entry.data = (ctypes.c_float * values.size)(*values)
    return array, len(names)


def quantize(whole: str, out: str, kind: str, matrix: str = "") -> dict[str, object]:
    """Quantise a file, and return the number of importances that were given."""
    parameters, entries = llama_cpp.llama_model_quantize_default_params(), 0
    table = next(t for t in gguf.GGUFReader(whole).tensors if t.name == "token_embd.weight")
    parameters.ftype, parameters.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    parameters.token_embedding_type = parameters.output_tensor_type = int(table.tensor_type)
    if matrix:
        array, entries = importance(matrix)
        parameters.imatrix = ctypes.cast(array, type(parameters.imatrix))
    if failed := llama_cpp.llama_model_quantize(os.fsencode(whole), os.fsencode(out), parameters):
        raise RuntimeError(f"llama_model_quantize: {failed}")
    return {"entries": entries, "version": llama_cpp.__version__}


def greedy(file: str, count: str, *prompt: str) -> dict[str, object]:
    """Continue a prompt by the likeliest tokens, without an end."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params())
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 512, 1, 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError("llama_init_from_model failed")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    given, found = [int(text) for text in prompt], list[int]()
    for _ in range(int(count)):
        given = found[-1:] or given
        tokens = (llama_cpp.llama_token * len(given))(*given)
        if failed := llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(given))):
            raise RuntimeError(f"llama_decode: {failed}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (size,))
        found.append(int(logits.argmax()))
    return {"tokens": found, "version": llama_cpp.__version__}


if __name__ == "__main__":
    print(json.dumps({"quantize": quantize, "greedy": greedy}[sys.argv[1]](*sys.argv[2:])))
