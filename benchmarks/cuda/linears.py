"""Time the linears of the target cuda on a GPU, beside PyTorch's, and race their schedules.

    python benchmarks/cuda/linears.py --export DIR [--wheel WHEEL] [--quick]    where TVM and nvcc are
    python benchmarks/cuda/linears.py --measure DIR [--save FILE]               where the GPU is; no TVM is installed

DIR takes along the kernels, TVM's run-time libraries and the wheel of tvm_ffi for the Python over there (``pip download
--no-deps --python-version 3.12 --platform manylinux_2_28_x86_64 --only-binary=:all: apache-tvm-ffi==...``).  A time is
that of one call among 50 in a CUDA graph, which go through copies of the weights larger than the GPU's second-level
cache: the median of nine replays.  Results are checked against float64.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # only formats are imported where it measures

RUNTIME = ("libtvm_runtime.so", "libtvm_runtime_cuda.so")
CALLS, REPLAYS, CACHE = 50, 9, 160 << 20
TOKENS = (1, 4, 16, 128, 1024)
SHAPES = {
    "4096x4096": ([4096], 4096),
    "14336x4096": ([14336], 4096),
    "4096x14336": ([4096], 14336),
    "qkv": ([4096, 1024, 1024], 4096),
    "gate, up": ([14336, 14336], 4096),
}
RACED = {
    "W4A16_G128": ("4096x4096", "14336x4096", "qkv"),
    "W8A8": ("4096x4096", "14336x4096"),
}
PLAIN = {
    "W4A16_G128": ("4096x14336", "gate, up"),
    "W8A8": ("4096x14336", "gate, up"),
    "W8A16": ("4096x4096", "14336x4096"),
    "W4A8_G128": ("4096x4096", "14336x4096"),
    "W4A16_ASYM_G128": ("4096x4096",),
    "FP8_E4M3": ("4096x4096",),
    "MXFP4": ("4096x4096",),
    "W3A16_G128": ("4096x4096",),
}


def export(folder: Path, wheel: Path | None, is_quick: bool) -> None:
    """Compile all kernels, and lay them beside what runs them."""
    from compressor.codegen.gpu.linear import kernel, packed
    from compressor.formats.format import Format

    lay_out(folder, wheel)
    spaces = (
        kernel.one_token_space(), kernel.few_tokens_space(), kernel.some_tokens_space(), kernel.many_tokens_space(),
        kernel.most_tokens_space(),
    )  # fmt: skip
    schedules = [kernel.Schedule(), *(kernel.Schedule(*parts) for parts in zip(*spaces, strict=True))]
    wanted = [(f, s, i) for f, shapes in RACED.items() for s in shapes for i in range(len(schedules))]
    wanted += [(f, s, 0) for f, shapes in PLAIN.items() for s in shapes]
    if is_quick:
        wanted = [one for one in wanted if one[2] == 0 and one[1] == "4096x4096"]
    cases = []
    for i, (fmt, shape, which) in enumerate(wanted):
        rows, columns = SHAPES[shape]
        function = packed.fused_linear(rows, columns, Format.parse(fmt), False, schedules[which])
        usage = compile_kernel(function, folder / f"{i}.so")
        spilled = {name: one.spill_bytes for name, one in usage.items() if one.spill_bytes}
        text = re.sub(r"\w+=(?=\d)", "", repr(schedules[which]))
        cases.append({"file": f"{i}.so", "format": fmt, "shape": shape, "which": which, "schedule": text})
        print(f"{i + 1}/{len(wanted)} {fmt} {shape} {which}", f"spills {spilled}" if spilled else "", flush=True)
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 1e6:.1f} MB")


def lay_out(folder: Path, wheel: Path | None) -> None:
    """Make a folder with TVM's run-time libraries, and with tvm_ffi out of a wheel."""
    from compressor.export.native import copy_tvm_runtime

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_tvm_runtime(folder / "lib", RUNTIME)
    if wheel is None:
        return
    zipfile.ZipFile(wheel).extractall(folder / "python")
    for unused in ("include", "share", "3rdparty", "src", "cython"):
        path = folder / "python" / "tvm_ffi" / unused
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def compile_kernel(function: Any, library: Path) -> dict[str, Any]:
    """Compile a kernel for Hopper into a library; return what ptxas reports of its functions."""
    import tvm

    from compressor.codegen.gpu.toolchain import device_code
    from compressor.codegen.machine_code.tir_pipeline import PIPELINE
    from compressor.codegen.targets.cuda import Cuda

    target = Cuda("sm_90")
    module = tvm.IRModule({"kernel": function.with_attr("global_symbol", "kernel")})
    with device_code(target.resolve().archs) as usage:
        executable = tvm.compile(module, target=target.tvm_target(target.resolve()), tir_pipeline=PIPELINE)
    executable.export_library(str(library))
    return usage


def load_runtime(folder: Path) -> Any:
    """Load TVM's run-time and return tvm_ffi."""
    sys.path.insert(0, str(folder / "python"))
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # it would be compiled there
    import tvm_ffi

    try:
        ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
    except OSError:
        import nvidia

        found = [next(Path(p).rglob("libcudart.so.13"), None) for p in nvidia.__path__]
        ctypes.CDLL(str(next(path for path in found if path is not None)), ctypes.RTLD_GLOBAL)
    for name in RUNTIME:
        ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
    return tvm_ffi


def timed(run: Callable[[int], Any], use_stream: Callable[[Any], Any]) -> float:
    """Return the microseconds of one call: ``run(i)`` for copy ``i``, 50 of them in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), use_stream(stream):
        for i in range(3):
            run(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        for i in range(CALLS):
            run(i)
        graph.capture_end()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) * 1e3 / CALLS


class Weight:
    """Random packed weights of a shape, with copies that fill more than the cache, and their dense values."""

    def __init__(self, format_name: str, shape: str, take: Callable[[torch.Tensor], Any]) -> None:
        from compressor.formats.format import Format
        from compressor.formats.packing import PackedWeight, dequantize

        self.take = take
        self.fmt = Format.parse(format_name)
        self.rows, self.columns = SHAPES[shape]
        self.bytes = sum(self.fmt.packed_bytes(n, self.columns) for n in self.rows)
        self.copies = [self._random() for _ in range(max(2, -(-CACHE // self.bytes)))]
        self.dense = []
        for n, parts in zip(self.rows, self.copies[0], strict=True):
            packed = PackedWeight.of([part.cpu() for part in parts], self.fmt, (n, self.columns))
            self.dense.append(dequantize(packed).cuda())

    def _random(self) -> list[list[torch.Tensor]]:
        fmt, found = self.fmt, []
        for n in self.rows:
            parts = []
            for name, (kind, shape) in fmt.parts(n, self.columns).items():
                if name == "codes":
                    part = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device="cuda").int()
                    if fmt.element is not None and fmt.element.name == "E4M3":
                        part &= 0x77777777  # no NaN
                elif kind == "float16":
                    part = (torch.rand(shape, device="cuda") * 0.02 + 0.001).half()
                elif name == "scales":
                    part = torch.randint(118, 124, shape, dtype=torch.uint8, device="cuda")
                else:
                    part = torch.randint(0, fmt.levels, shape, dtype=torch.uint8, device="cuda")
                parts.append(part)
            found.append(parts)
        return found

    def check(self, kernel: Any, tokens: int) -> float:
        """Return the error of some tokens, of the largest output."""
        from compressor.formats.rounded_activations import round_activations

        x = torch.randn(1, tokens, self.columns, device="cuda")
        ys = [torch.full((1, tokens, n), float("nan"), device="cuda") for n in self.rows]
        torch.cuda.synchronize()
        kernel(self.take(x), *(self.take(part) for parts in self.copies[0] for part in parts), *map(self.take, ys))
        torch.cuda.synchronize()
        # On the CPU: on a GPU, PyTorch multiplies by the inverse of a constant where it should divide by it.
        rounded = round_activations(x.cpu(), self.fmt.activations).cuda().double()
        errors = []
        for dense, y in zip(self.dense, ys, strict=True):
            expected = rounded @ dense.double().T
            errors.append(float((y - expected).abs().max() / expected.abs().max()))
        return max(errors) if all(e == e for e in errors) else float("nan")

    def time(self, kernel: Any, tokens: int, use_stream: Any) -> float:
        """Return the microseconds of a call."""
        x = torch.randn(1, tokens, self.columns, device="cuda")
        ys = [torch.empty(1, tokens, n, device="cuda") for n in self.rows]
        torch.cuda.synchronize()
        given, outputs = self.take(x), [self.take(y) for y in ys]
        flat = [[self.take(part) for parts in copy for part in parts] for copy in self.copies]
        return timed(lambda i: kernel(given, *flat[i % len(flat)], *outputs), use_stream)


def plain_stream(_stream: Any) -> Any:
    import contextlib

    return contextlib.nullcontext()


def bandwidth() -> dict[str, float]:
    """Return bytes a second of reading and of copying 1 GiB."""
    big, other = torch.ones(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    found = {}
    for name, run, size in (
        ("read", lambda: torch.sum(big), 1 << 30), ("copy", lambda: other.copy_(big), 2 << 30),
    ):  # fmt: skip
        times = []
        for _ in range(8):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            run()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b) * 1e-3)
        found[name] = size / statistics.median(times[2:])
    return found


def peers(rows: list[int], columns: int, tokens: int) -> dict[str, float]:
    """Return the microseconds of PyTorch's linears of one shape."""
    n = sum(rows)
    found: dict[str, float] = {}

    def attempt(name: str, make: Callable[[], Callable[[int], Any]]) -> None:
        try:
            found[name] = timed(make(), plain_stream)
        except Exception as error:
            found[name] = float("nan")
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"  {name} {n}x{columns}, {tokens} tokens: {reason[:150]}")
        torch.cuda.empty_cache()

    def copies(size_bytes: int) -> int:
        return max(2, -(-CACHE // size_bytes))

    def bf16() -> Callable[[int], Any]:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(n, columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * n * columns))]
        return lambda i: torch.nn.functional.linear(x, weights[i % len(weights)])

    def int4() -> Callable[[int], Any]:
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        count, group = copies(n * columns // 2), 128
        codes = [torch.randint(0, 255, (n, columns // 2), device="cuda", dtype=torch.uint8) for _ in range(count)]
        weights = [torch.ops.aten._convert_weight_to_int4pack(c, 8) for c in codes]
        scales = torch.rand(columns // group, n, 2, device="cuda").bfloat16()
        return lambda i: torch.ops.aten._weight_int4pack_mm(x, weights[i % count], group, scales)

    def int8() -> Callable[[int], Any]:
        x = torch.randint(-127, 127, (tokens, columns), device="cuda", dtype=torch.int8)
        count = copies(n * columns)
        weights = [torch.randint(-127, 127, (n, columns), device="cuda", dtype=torch.int8) for _ in range(count)]
        return lambda i: torch._int_mm(x, weights[i % count].t())

    def fp8() -> Callable[[int], Any]:
        x = torch.randn(tokens, columns, device="cuda").to(torch.float8_e4m3fn)
        count = copies(n * columns)
        weights = [torch.randn(n, columns, device="cuda").to(torch.float8_e4m3fn) for _ in range(count)]
        a, b = torch.ones(tokens, 1, device="cuda"), torch.ones(1, n, device="cuda")
        return lambda i: torch._scaled_mm(x, weights[i % count].t(), a, b, out_dtype=torch.bfloat16)

    attempt("bf16", bf16)
    attempt("int4", int4)
    if tokens > 16:
        attempt("int8", int8)
    attempt("fp8", fp8)
    return found


def measure(folder: Path, save: Path | None) -> None:
    """Check and time all kernels, and print tables."""
    began = time.perf_counter()
    ffi = load_runtime(folder)
    device = ffi.device("cuda", 0)

    def use_stream(stream: Any) -> Any:
        return ffi.use_raw_stream(device, stream.cuda_stream)

    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}: read {speed['read'] / 1e12:.2f} TB/s, copy {speed['copy'] / 1e12:.2f} TB/s")
    cases = json.loads((folder / "cases.json").read_text())
    results: dict[tuple[str, str], dict[int, list[tuple[float, int, str]]]] = {}
    weight, last = None, None
    for case in sorted(cases, key=lambda one: (one["format"], one["shape"], one["which"])):
        key = case["format"], case["shape"]
        if key != last:
            weight, last = Weight(*key, ffi.from_dlpack), key
        assert weight is not None
        kernel = ffi.load_module(str(folder / case["file"]))["kernel"]
        for tokens in TOKENS:
            if tokens == 1024 and case["shape"] not in ("4096x4096", "14336x4096"):
                continue
            try:
                error = weight.check(kernel, tokens) if tokens < 1024 else 0.0
                if not error < 2e-5:
                    print(f"WRONG {key} {tokens} tokens, schedule {case['which']}: {error:.1e}")
                us = weight.time(kernel, tokens, use_stream)
            except Exception as problem:
                print(f"FAILED {key} {tokens} tokens, schedule {case['which']}: {str(problem).strip()[-300:]}")
                continue
            results.setdefault(key, {}).setdefault(tokens, []).append((us, case["which"], case["schedule"]))
    print(f"kernels: {time.perf_counter() - began:.0f} s\n")
    others = {}
    for name in ("4096x4096", "14336x4096"):
        for tokens in TOKENS:
            others[name, tokens] = peers(*SHAPES[name], tokens)
    print("\n| format | shape | tokens | us | of reading | TFLOP/s | default, us | best schedule | PyTorch, us |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (fmt, shape), by_tokens in results.items():
        rows, columns = SHAPES[shape]
        from compressor.formats.format import Format

        size = sum(Format.parse(fmt).packed_bytes(n, columns) for n in rows)
        for tokens, found in by_tokens.items():
            us, which, _text = min(found)
            default = next((one[0] for one in found if one[1] == 0), float("nan"))
            rival = ", ".join(f"{k} {v:.1f}" for k, v in others.get((shape, tokens), {}).items())
            part = size / (us * 1e-6) / speed["read"]
            flops = 2 * tokens * sum(rows) * columns / us * 1e-6
            cells = f"{us:.1f} | {part:.0%} | {flops:.0f} | {default:.1f} | {which} | {rival}"
            print(f"| {fmt} | {shape} | {tokens} | {cells} |")
    print("\nraces: microseconds of each schedule, by number")
    for (fmt, shape), by_tokens in results.items():
        for tokens, found in by_tokens.items():
            if len(found) > 1:
                print(f"{fmt} {shape} {tokens}:", " ".join(f"{which}:{us:.1f}" for us, which, _ in found))
    for case in {one["which"]: one for one in cases}.values():
        print(case["which"], case["schedule"])
    print(f"in all: {time.perf_counter() - began:.0f} s")
    if save is not None:
        texts = {" ".join(key): found for key, found in results.items()}
        peers_text = {f"{name} {tokens}": found for (name, tokens), found in others.items()}
        save.write_text(json.dumps({"ours": texts, "peers": peers_text, "bandwidth": speed}, indent=1))


def main() -> None:
    """Export or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    if given.export is not None:
        export(given.export, given.wheel, given.quick)
    else:
        assert given.measure is not None
        measure(given.measure, given.save)


if __name__ == "__main__":
    main()
