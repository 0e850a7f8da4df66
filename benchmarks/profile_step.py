"""Profile one step of a decoder's bundle, or one call of another bundle, by kernel.

    python benchmarks/profile_step.py BUNDLE [--tokens 1] [--context 128] [--threads 2] [--repeats 20] [--json]
    python benchmarks/profile_step.py BUNDLE --inputs FILE.npz [--threads 2] [--repeats 20] [--json] [--cpu]

An encoder or a plain module is called with the file's arrays in order, such as a case that benchmarks/x86_models.py
left in its folder.  TVM's virtual machine calls back before and after each kernel and built-in; what the calls cost
themselves is in the line `between`.  Medians over the repeats.  `--cpu` counts what the process computed, in place of
what passed: with one thread, others on the machine change it little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from compressor_runtime import load


def decoder_step(loaded: Any, tokens: int, context: int) -> Callable[[], None]:
    """Return a call that decodes ``tokens`` tokens after ``context`` others, always the same."""
    ids = np.random.default_rng(0).integers(3, loaded.model["vocab_size"], (1, max(tokens, context)))
    session = loaded.session(capacity=tokens + context)
    if context:
        session.step(ids[:, :context])

    def step() -> None:
        session.position = context
        session.step(ids[:, :tokens])

    return step


def network_call(loaded: Any, inputs: Path) -> Callable[[], None]:
    """Return a call with the same arrays each time."""
    with np.load(inputs) as stored:
        arrays = [stored[name] for name in stored.files]

    def call() -> None:
        (loaded.encode if loaded.kind == "encoder" else loaded.run)(*arrays)

    return call


def profile(loaded: Any, call: Callable[[], None], repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return milliseconds and number of calls of each kernel in a call."""
    steps: list[dict[str, list[float]]] = []
    begun = [0.0]

    def watch(_function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> None:
        if before:
            begun[0] = clock()
        else:
            steps[-1][name].append(clock() - begun[0])

    whole = []
    loaded.vm.functions["set_instrument"](tvm_ffi.convert(watch))
    for _ in range(repeats + 3):
        steps.append(defaultdict(list))
        begin = clock()
        call()
        whole.append(clock() - begin)
    counted, whole = steps[3:], whole[3:]  # the first ones find memory and threads cold
    kernels: list[dict[str, Any]] = [
        {"kernel": name, "calls": len(counted[0][name]), "ms": 1e3 * statistics.median(sum(s[name]) for s in counted)}
        for name in counted[0]
    ]
    kernels.sort(key=lambda entry: -entry["ms"])
    total = 1e3 * statistics.median(whole)
    between = total - sum(entry["ms"] for entry in kernels)
    kernels.append({"kernel": "between", "calls": sum(entry["calls"] for entry in kernels), "ms": between})
    return {"threads": loaded.threads, "ms": total, "library": loaded.library, "kernels": kernels}


def main() -> None:
    """Profile, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--inputs", type=Path, help="arrays for an encoder or a plain module")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="time of the process on all cores")
    options = parser.parse_args()
    loaded = load(options.bundle, threads=options.threads)
    if options.inputs is not None:
        call, what = network_call(loaded, options.inputs), options.inputs.stem
    elif loaded.kind == "decoder":
        call = decoder_step(loaded, options.tokens, options.context)
        what = f"{options.tokens} token(s) after {options.context}"
    else:
        parser.error(f"{options.bundle} is not a decoder: give its --inputs")
    clock = time.process_time if options.cpu else time.perf_counter
    found = {"bundle": options.bundle.name, "what": what, **profile(loaded, call, options.repeats, clock)}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print("{bundle}, {library}: {what}, {threads} thread(s): {ms:.2f} ms\n".format(**found))
    print("| kernel | calls | ms | of the step |\n|---|---|---|---|")
    for entry in found["kernels"]:
        if entry["ms"] >= found["ms"] / 200:
            print("| `{kernel}` | {calls} | {ms:.2f} | ".format(**entry) + f"{entry['ms'] / found['ms']:.1%} |")


if __name__ == "__main__":
    main()
