"""The process that runs a bundle's kernels for an evaluation: ``python -m compressor.evaluate_child BUNDLE THREADS``.

It knows neither torch nor the compiler, and what it maps and computes takes no memory of the run's own process.  A
request is a line of JSON, ``{"shape": [B, S], "mask": false}``, then the ids, int64, and the mask, float32, where there
is one.  The answer is a line of JSON with the shape of the outputs, and these, float32.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from compressor.errors import UsageError


def main() -> int:
    """Serve the requests; the process's exit code."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi would import it where it is installed
    from compressor_runtime import load

    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    requests = sys.stdin.buffer
    try:
        bundle = load(path, threads=threads or None)
        if bundle.kind == "module":
            raise UsageError(f"{path}: holds a plain module; there is no text to evaluate it on")
        answers.write(json.dumps({"threads": bundle.threads}).encode() + b"\n")
        answers.flush()
        for line in requests:
            request = json.loads(line)
            batch, length = request["shape"]
            ids = np.frombuffer(requests.read(batch * length * 8), np.int64).reshape(batch, length)
            if bundle.kind == "decoder":
                outputs = bundle.session(batch, length).step(ids, keep=np.arange(length))
            else:
                mask = np.frombuffer(requests.read(batch * length * 4), np.float32).reshape(batch, length)
                outputs = bundle.encode(ids, mask)
            answers.write(json.dumps({"shape": outputs.shape}).encode() + b"\n")
            answers.write(np.ascontiguousarray(outputs, np.float32).data)
            answers.flush()
    except Exception as error:  # the parent shows one line, whatever it was
        place = "" if hasattr(error, "exit_code") else f"{path}: "  # errors of ours say it themselves
        print(f"error: {place}{error}", file=sys.stderr)
        return int(getattr(error, "exit_code", 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
