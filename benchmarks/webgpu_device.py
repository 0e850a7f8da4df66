"""Check and time the kernels for browsers on a graphics processor, through wgpu and the machine's Vulkan driver.

    python benchmarks/webgpu_cases.py FOLDER BUNDLE     where Compressor is installed; BUNDLE is a web bundle
    python benchmarks/webgpu_device.py FOLDER [--seconds 100] [--kernels REGEX] [--json FILE] [--markdown FILE]

The second command needs numpy and wgpu, neither torch nor TVM, so that FOLDER and this checkout can be carried to a
machine that has nothing else.  It compares the linear of every format, and the bundle's logits, with what PyTorch and
a software adapter computed at export.  Then it times linears and attention with the constants that are shipped and
with the others of their spaces, by the device's own clock: one pass of many calls, which take turns through copies of
the weight that exceed the caches.  A figure's bound is the larger of its bytes at the bandwidth of a copy and its
products at the rate of the fastest kernel seen, which is said.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.codegen.web import execute_webgpu as gpu
from compressor.codegen.web.kernel import evaluate

TOLERANCE = 3e-6  # of the largest output, as in the tests
LOGITS_TOLERANCE = 2e-5
WORKING_SET_BYTES = 200 << 20  # copies of a weight together: more than the caches of a data centre's GPU
CALLS = 60
WORSE = 1.5  # a variant that takes so many times the best one's time in ten calls is not timed longer
PROMPT = 32


def check(case: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> float:
    """Return the relative error of a linear, for one token and for all five, whichever is larger."""
    given = [arrays[f"{case['name']}_{i}"] for i in range(case["inputs"])]
    expected, rounding = arrays[f"{case['name']}_expected"], case["rounding"]
    errors = []
    for tokens in (1, 5):
        x = np.ascontiguousarray(given[0][:, :tokens])
        inputs, rest = [x], given[1:]
        if rounding is not None:
            read = [x, *given[1 : rounding["inputs"]]]
            shapes = [(kind, [tokens if n == 5 else n for n in shape]) for kind, shape in rounding["outputs"]]
            outputs = {len(read) + i: (kind, tuple(shape)) for i, (kind, shape) in enumerate(shapes)}
            inputs, rest = gpu.run_kernels(rounding["records"], read, [tokens], outputs), given[rounding["inputs"] :]
        out = {len(inputs) + len(rest): ("float32", (1, tokens, case["rows"]))}
        (got,) = gpu.run_kernels(case["records"], [*inputs, *rest], [tokens], out)
        errors.append(float(np.abs(got - expected[:, :tokens]).max() / np.abs(expected).max()))
    return max(errors)


@dataclass(frozen=True)
class Dispatch:
    """A kernel with constants, and the groups of buffers that its calls take turns through."""

    pipeline: Any
    groups: Sequence[Any]
    size: Sequence[int]


def prepared(record: Mapping[str, Any], constants: Mapping[str, int], sets: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Compile a kernel with some constants; ``sets`` are its buffers, in several copies."""
    import wgpu

    device = gpu.device()
    pipeline = gpu.compiled(record, constants)
    content = struct.pack(f"<{len(sizes)}I", *sizes)
    uniform = device.create_buffer_with_data(data=content + bytes(-len(content) % 16), usage=wgpu.BufferUsage.UNIFORM)
    groups = [
        device.create_bind_group(
            layout=pipeline.get_bind_group_layout(0),
            entries=[{"binding": i, "resource": {"buffer": b}} for i, b in enumerate([*buffers, uniform])],
        )
        for buffers in sets
    ]
    names = dict(zip(record["sizes"], sizes, strict=True)) | dict(constants)
    return Dispatch(pipeline, groups, [evaluate(n, names) for n in record["groups"]])


class Clock:
    """The device's clock."""

    def __init__(self) -> None:
        import wgpu

        device = gpu.device()
        self._set = device.create_query_set(type=wgpu.QueryType.timestamp, count=2)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        self._resolved = device.create_buffer(size=16, usage=usage)

    def seconds(self, one: Dispatch, calls: int) -> float:
        """Return the seconds of a call, the mean of one pass of ``calls``."""
        encoder = gpu.device().create_command_encoder()
        stamps = {"query_set": self._set, "beginning_of_pass_write_index": 0, "end_of_pass_write_index": 1}
        compute = encoder.begin_compute_pass(timestamp_writes=stamps)
        compute.set_pipeline(one.pipeline)
        for i in range(calls):
            compute.set_bind_group(0, one.groups[i % len(one.groups)])
            compute.dispatch_workgroups(*one.size)
        compute.end()
        encoder.resolve_query_set(self._set, 0, 2, self._resolved, 0)
        gpu.device().queue.submit([encoder.finish()])
        first, last = struct.unpack("<2Q", bytes(gpu.device().queue.read_buffer(self._resolved)))
        return (last - first) * 1e-9 / calls


def best_of(clock: Clock, one: Dispatch, calls: int = CALLS, repeats: int = 3, best: float = math.inf) -> float:
    """Return the shortest of some passes, after one that warms up; the first alone where it is far above ``best``."""
    clock.seconds(one, 3)
    first = clock.seconds(one, 10)
    return first if first > WORSE * best else min(clock.seconds(one, calls) for _ in range(repeats))


def buffers_of(case: Mapping[str, Any], tokens: int) -> tuple[list[list[Any]], list[int], int]:
    """Return sets of buffers with random content, the sizes of a call, and the bytes that it reads and writes."""
    rng = np.random.default_rng(0)
    if "attention" in case:
        heads, kv_heads, width = case["shape"]
        context = case["attention"]["context"]
        sizes_of = {
            "q": heads * width, "k": kv_heads * width, "v": kv_heads * width, "y": heads * width,
            "k_cache": kv_heads * width * context, "v_cache": kv_heads * width * context,
        }  # fmt: skip
        sets = []
        for _ in range(3):
            buffers = []
            for name in case["attention"]["buffers"]:
                if name == "position":
                    buffers.append(gpu.buffer_of(np.array([context - 1], np.int32)))
                else:
                    buffers.append(gpu.buffer_of(rng.standard_normal(sizes_of[name], np.float32)))
            sets.append(buffers)
        return sets, [1, 1, context], 8 * kv_heads * width * context
    arrays = [rng.standard_normal((tokens, n), np.float32) if kind == "float32"
              else rng.integers(-(2**31), 2**31, (tokens, n), np.int32) for kind, n in case["inputs"]]  # fmt: skip
    given = [gpu.buffer_of(x) for x in arrays]
    parts = []
    for kind, shape in case["weights"]:
        integers = np.dtype(kind).kind in "iu"
        values = rng.integers(0, 2**8, shape) if integers else rng.uniform(0.01, 0.02, shape)
        parts.append((values * 0x01010101 if kind == "int32" else values).astype(kind))
    size_bytes = sum(part.nbytes for part in parts)
    copies = max(2, min(24, -(-WORKING_SET_BYTES // size_bytes)))
    out = gpu.empty_buffer(4 * tokens * case["out"])
    sets = [[*given, *map(gpu.buffer_of, parts), out] for _ in range(copies)]
    moved = size_bytes + sum(x.nbytes for x in arrays) + 4 * tokens * case["out"]
    return sets, [tokens], moved


def race(case: Mapping[str, Any], clock: Clock, deadline: float) -> list[dict[str, Any]]:
    """Time one kernel with all constants, the shipped ones first, until the time is up."""
    found = []
    for tokens, record in case["kernels"].items():
        sets, sizes, moved = buffers_of(case, int(tokens))
        variants = [record["constants"]]
        variants += [dict(zip(record["constants"], one, strict=True)) for one in record.get("space", [])]
        times: list[tuple[float, dict[str, int]]] = []
        for constants in variants:
            if times and time.perf_counter() > deadline:
                break
            best = min((t for t, _ in times), default=math.inf)
            times.append((best_of(clock, prepared(record, constants, sets, sizes), best=best), constants))
        fastest, winner = min(times, key=lambda pair: pair[0])
        entry = {
            "kernel": case["name"], "tokens": int(tokens), "bytes": moved, "products": case["products"] * int(tokens),
            "shipped_us": times[0][0] * 1e6, "shipped": times[0][1], "best_us": fastest * 1e6, "best": winner,
            "tried": len(times), "of": len(variants), "all_us": [(round(t * 1e6, 2), c) for t, c in times],
        }  # fmt: skip
        found.append(entry)
        print(f"{entry['kernel']}, {tokens} tokens: {times[0][0] * 1e6:.1f} -> {fastest * 1e6:.1f} us {winner}")
        for buffer in {id(b): b for buffers in sets for b in buffers}.values():
            buffer.destroy()
    return found


COPY = """
const LANES: u32 = 256u;
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
struct Sizes { N: u32 }
@group(0) @binding(2) var<uniform> sizes: Sizes;
@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  var sum = vec4<f32>(0.0);
  let step = groups.x * LANES;
  for (var i = id.x; i < sizes.N; i += 4u * step) {
    sum += x[i] + x[min(i + step, sizes.N - 1u)] + x[min(i + 2u * step, sizes.N - 1u)]
      + x[min(i + 3u * step, sizes.N - 1u)];
  }
  if (sum.x == 1234.5) { y[0] = sum.y + sum.z + sum.w; }
}
"""


def read_bandwidth(clock: Clock) -> float:
    """Return the bytes per second at which a kernel reads memory, in buffers as large as a binding may be."""
    size_bytes, sets = 128 << 20, []
    for _ in range(4):
        sets.append([gpu.empty_buffer(size_bytes), gpu.empty_buffer(4)])
    record = {"source": COPY, "buffers": ["read", "write"], "sizes": ["N"], "groups": [2112, 1, 1]}
    return size_bytes / best_of(clock, prepared(record, {}, sets, [size_bytes // 16]), 20)


def bundle_error(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> tuple[float, float]:
    """Return the relative error of the bundle's logits, of a prompt at once and of one token after another."""
    from compressor.codegen.web.session import WebBundle

    ids, expected = arrays["bundle_ids"], arrays["bundle_logits"]
    bundle, largest = WebBundle(folder / "bundle"), float(np.abs(expected).max())
    whole = bundle.session(1, 64).step(ids, np.arange(PROMPT))
    session = bundle.session(1, 64)
    single = np.concatenate([session.step(ids[:, i : i + 1]) for i in range(PROMPT)], axis=1)
    return float(np.abs(whole - expected).max()) / largest, float(np.abs(single - expected).max()) / largest


def measure(folder: Path, seconds: float, kernels: str) -> dict[str, Any]:
    """Run all checks, then time as many kernels as there is time for."""
    begin = time.perf_counter()
    if gpu.is_software():
        print("a software adapter: times say nothing")
    cases, arrays = json.loads((folder / "cases.json").read_text()), np.load(folder / "arrays.npz")
    errors = {case["name"]: check(case, arrays) for case in cases["checks"]}
    whole, single = bundle_error(folder, arrays)
    print(f"{len(errors)} formats, largest error {max(errors.values()):.2g}; bundle {whole:.2g}, {single:.2g}")
    clock = Clock()
    result = {
        "adapter": gpu.device().adapter.info["device"], "driver": gpu.device().adapter.info, "errors": errors,
        "bundle_error": whole, "bundle_error_by_token": single, "read_bandwidth": read_bandwidth(clock), "timed": [],
    }  # fmt: skip
    print(f"{result['adapter']}: reads {result['read_bandwidth'] / 1e9:.0f} GB/s")
    for case in (case for case in cases["timed"] if re.search(kernels, case["name"])):
        if time.perf_counter() - begin > seconds:
            break
        result["timed"] += race(case, clock, begin + seconds)
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """Return the tables."""
    worst = max(result["errors"].items(), key=lambda pair: pair[1])
    rate = max((entry["products"] / entry["best_us"] for entry in result["timed"]), default=1.0)
    lines = [
        "# Kernels for browsers on a graphics processor", "",
        "Made by `python benchmarks/webgpu_device.py`, through wgpu and Vulkan. "
        f"{result['adapter']}; a kernel that only reads reaches {result['read_bandwidth'] / 1e9:.0f} GB/s.", "",
        f"- {len(result['errors'])} formats: the largest error of a linear is {worst[1]:.2g} ({worst[0]}), of the "
        f"largest output (allowed: {TOLERANCE:g}).",
        f"- Bundle of the reference model against a software adapter: {result['bundle_error']:.2g} for a prompt of "
        f"{PROMPT}, {result['bundle_error_by_token']:.2g} token by token (allowed: {LOGITS_TOLERANCE:g}).", "",
        "Bound: the larger of bytes at that bandwidth, and products at the best rate of this table "
        f"({rate / 1e6:.1f} T multiply-adds a second).", "",
        "| kernel | tokens | shipped, us | best, us | bound, us | shipped reaches | best reaches | constants | tried |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for entry in result["timed"]:
        bound = max(entry["bytes"] / result["read_bandwidth"] * 1e6, entry["products"] / rate)
        constants = " ".join(f"{name}={value}" for name, value in entry["best"].items())
        lines.append(
            f"| {entry['kernel']} | {entry['tokens']} | {entry['shipped_us']:.1f} | {entry['best_us']:.1f} | "
            f"{bound:.1f} | {bound / entry['shipped_us']:.0%} | {bound / entry['best_us']:.0%} | {constants} | "
            f"{entry['tried']} of {entry['of']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--kernels", default="", help="regular expression of the kernels to time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    result = measure(given.folder, given.seconds, given.kernels)
    if given.json:
        given.json.write_text(json.dumps(result, default=str))
    text = markdown(result)
    if given.markdown:
        given.markdown.write_text(text)
    print(text)
    errors = [*result["errors"].values()]
    if max(errors) > TOLERANCE or max(result["bundle_error"], result["bundle_error_by_token"]) > LOGITS_TOLERANCE:
        sys.exit("an error is too large")


if __name__ == "__main__":
    main()
