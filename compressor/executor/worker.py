"""A process of the local pool: a job a line, an answer a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from compressor.host.threads import wait_passively

wait_passively()  # before torch is imported

import torch  # noqa: E402

from compressor.executor.jobs import answer  # noqa: E402
from compressor.host.child import serve  # noqa: E402


def _work(requests: BinaryIO, send: Callable[..., None]) -> None:
    torch.set_num_threads(int(sys.argv[1]))
    send({"loaded": True})
    for request in requests:
        send(json.loads(answer(request.decode())))


if __name__ == "__main__":
    sys.exit(serve(Path("worker"), _work))
