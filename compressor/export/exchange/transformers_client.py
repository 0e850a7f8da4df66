"""Load an exported folder as its users do: ``python -m ...exchange.transformers_client FOLDER LOADING KIND``.

Nothing of Compressor's readers or kernels runs here.  The first line of the answers names the programs and the missing
or unexpected names.  A request is a line of JSON, ``{"ids": [S], "new": N}``; the answer is the shape of the outputs
and the N tokens that greedy decoding continues with, then the outputs of all S + N positions, float32.  Of an encoder N
is 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from compressor.host.child import serve

_PACKAGES = ("transformers", "compressed-tensors", "gptqmodel", "gguf", "torch")


def main() -> int:
    """Serve the requests and return the process's exit code."""
    folder, loading, kind = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]

    def work(requests: BinaryIO, send: Callable[..., None]) -> None:
        import numpy as np
        import torch
        from transformers import AutoModel, AutoModelForCausalLM, CompressedTensorsConfig

        cls = AutoModelForCausalLM if kind == "decoder" else AutoModel
        more: dict[str, Any] = (
            {"quantization_config": CompressedTensorsConfig(dequantize=True)} if loading["dequantize"] else {}
        )
        if loading["file"]:
            more |= {"gguf_file": loading["file"], **_experts(folder / loading["file"])}
        dtype = getattr(torch, loading["dtype"])
        loaded: Any = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True, **more)
        model, told = loaded
        wrong = {key: sorted(map(str, names)) for key, names in told.items() if names}
        send({"programs": _programs(), "wrong": wrong})
        for line in requests:
            asked = json.loads(line)
            with torch.no_grad():
                tokens = _continue(model, asked["ids"], asked["new"]) if asked["new"] else []
                found = model(torch.tensor([asked["ids"] + tokens]))
            outputs = (found.logits if kind == "decoder" else found.last_hidden_state)[0].float().numpy()
            send({"shape": outputs.shape, "tokens": tokens}, np.ascontiguousarray(outputs).data)

    return serve(folder, work)


def _experts(file: Path) -> dict[str, Any]:
    """Return the width of a GGUF file's experts, which transformers 5.24 does not read: it takes 768."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    found = next((field for key, field in fields.items() if key.endswith(".expert_feed_forward_length")), None)
    return {} if found is None else {"moe_intermediate_size": int(found.contents())}


def _programs() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _continue(model: Any, ids: list[int], count: int) -> list[int]:
    """Decode greedily, with the model's own cache and without an end: the likeliest token, ``count`` times."""
    import torch

    given, past, tokens = torch.tensor([ids]), None, list[int]()
    for _ in range(count):
        found = model(given, past_key_values=past, use_cache=True)
        past = found.past_key_values
        tokens.append(int(found.logits[0, -1].argmax()))
        given = torch.tensor([tokens[-1:]])
    return tokens


if __name__ == "__main__":
    sys.exit(main())
