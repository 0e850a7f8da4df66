"""Load an exported folder with mlx-lm: ``python -m ...exchange.mlx_client FOLDER LOADING KIND``.

Requests and answers are those of :mod:`.transformers_client`.
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
    folder = Path(sys.argv[1])

    def work(requests: BinaryIO, send: Callable[..., None]) -> None:
        import mlx.core as mx
        import numpy as np
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        model: Any = load_model(folder, strict=True)[0]  # refuses names that are missing or too many
        send({"programs": [f"{name} {version(name)}" for name in ("mlx", "mlx-lm")], "wrong": {}})
        for line in requests:
            asked = json.loads(line)
            tokens, given, past = list[int](), asked["ids"], make_prompt_cache(model)
            for _ in range(asked["new"]):
                tokens.append(int(mx.argmax(model(mx.array([given]), cache=past)[0, -1])))
                given = tokens[-1:]
            found = model(mx.array([asked["ids"] + tokens]))[0].astype(mx.float32)
            outputs = np.ascontiguousarray(np.array(found))
            send({"shape": outputs.shape, "tokens": tokens}, outputs.data)

    return serve(folder, work)


if __name__ == "__main__":
    sys.exit(main())
