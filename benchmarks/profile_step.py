"""Where one step of a decoder's bundle spends its time, by kernel.

    python benchmarks/profile_step.py BUNDLE [--tokens 1] [--context 128] [--threads 2] [--repeats 20] [--json]

TVM's virtual machine calls back before and after each kernel and built-in; what the calls cost themselves is in the
line `between`.  Medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from compressor_runtime import load


def profile(bundle: Path, tokens: int, context: int, threads: int | None, repeats: int) -> dict[str, Any]:
    """Milliseconds and calls of each kernel in a step of so many tokens after so many others."""
    loaded = load(bundle, threads=threads)
    ids = np.random.default_rng(0).integers(3, loaded.model["vocab_size"], (1, max(tokens, context)))
    session = loaded.session(capacity=tokens + context)
    if context:
        session.step(ids[:, :context])
    steps: list[dict[str, list[float]]] = []
    begun = [0.0]

    def watch(_function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> None:
        if before:
            begun[0] = time.perf_counter()
        else:
            steps[-1][name].append(time.perf_counter() - begun[0])

    whole = []
    loaded._machine["set_instrument"](tvm_ffi.convert(watch))
    for _ in range(repeats + 3):
        steps.append(defaultdict(list))
        begin = time.perf_counter()
        session.step(ids[:, :tokens])
        whole.append(time.perf_counter() - begin)
        session.position = context
    counted, whole = steps[3:], whole[3:]  # the first ones find memory and threads cold
    kernels = [
        {"kernel": name, "calls": len(counted[0][name]), "ms": 1e3 * statistics.median(sum(s[name]) for s in counted)}
        for name in counted[0]
    ]
    kernels.sort(key=lambda entry: -entry["ms"])
    total = 1e3 * statistics.median(whole)
    between = total - sum(entry["ms"] for entry in kernels)
    kernels.append({"kernel": "between", "calls": sum(entry["calls"] for entry in kernels), "ms": between})
    return {"bundle": bundle.name, "tokens": tokens, "context": context, "threads": loaded.threads, "ms": total,
            "library": loaded.library, "kernels": kernels}  # fmt: skip


def main() -> None:
    """Profile, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    found = profile(**options)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print("{bundle}, {library}: {tokens} token(s) after {context}, {threads} thread(s): {ms:.2f} ms\n".format(**found))
    print("| kernel | calls | ms | of the step |\n|---|---|---|---|")
    for entry in found["kernels"]:
        if entry["ms"] >= found["ms"] / 200:
            print("| `{kernel}` | {calls} | {ms:.2f} | ".format(**entry) + f"{entry['ms'] / found['ms']:.1%} |")


if __name__ == "__main__":
    main()
