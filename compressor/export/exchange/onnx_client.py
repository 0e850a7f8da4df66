"""Load an exported folder in ONNX Runtime: ``python -m ...exchange.onnx_client FOLDER LOADING KIND``.

Nothing of Compressor's readers or kernels runs here.  Requests and answers are those of
:mod:`compressor.export.exchange.transformers_client`; of a plain module a request is ``{"shapes": [...]}``, and the
inputs follow it, float32.  Tokens are decoded with the model's own past and present; the outputs are those of one call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from compressor.host.child import serve


def main() -> int:
    """Serve the requests and return the process's exit code."""
    folder, kind = Path(sys.argv[1]), sys.argv[3]

    def work(requests: BinaryIO, send: Callable[..., None]) -> None:
        import numpy as np
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # It fuses DequantizeLinear and MatMul by itself, and rounds activations to 8 bits then unless told otherwise.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        send({"programs": [f"onnxruntime {version('onnxruntime')}"], "wrong": {}})
        while line := requests.readline():
            asked, tokens = json.loads(line), list[int]()
            if kind == "module":
                arrays = [np.frombuffer(requests.read(4 * int(np.prod(shape))), np.float32).reshape(shape)
                          for shape in asked["shapes"]]  # fmt: skip
                names = [given.name for given in session.get_inputs()]
                outputs = session.run(None, dict(zip(names, arrays, strict=True)))[0]
            elif kind == "encoder":
                ids = np.array([asked["ids"]], np.int64)
                outputs = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0]
            else:
                tokens = _continue(session, asked["ids"], asked["new"])
                outputs = _run(session, asked["ids"] + tokens, _empty(session))[0][0]
            send({"shape": outputs.shape, "tokens": tokens}, np.ascontiguousarray(outputs).data)

    return serve(folder, work)


def _empty(session: Any) -> list[Any]:
    import numpy as np

    shapes = [given.shape for given in session.get_inputs()[1:]]
    return [np.zeros((1, heads, 0, width), np.float32) for _, heads, _, width in shapes]


def _run(session: Any, ids: list[int], past: list[Any]) -> list[Any]:
    import numpy as np

    names = [given.name for given in session.get_inputs()]
    found: list[Any] = session.run(None, dict(zip(names, [np.array([ids], np.int64), *past], strict=True)))
    return found


def _continue(session: Any, ids: list[int], count: int) -> list[int]:
    """Decode greedily, without an end: the likeliest token, ``count`` times."""
    past, tokens = _empty(session), list[int]()
    for _ in range(count):
        logits, *past = _run(session, tokens[-1:] or ids, past)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


if __name__ == "__main__":
    sys.exit(main())
