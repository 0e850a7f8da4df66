"""Time attention of the target cuda on a GPU, beside PyTorch's, and check it there.

    python benchmarks/cuda/attention.py --export DIR [--wheel WHEEL]    where TVM and nvcc are
    python benchmarks/cuda/attention.py --measure DIR                   where the GPU is; no TVM is installed
    compute-sanitizer --tool racecheck python benchmarks/cuda/attention.py --check DIR      short contexts, not timed

As benchmarks/cuda/linears.py, whose folder, wheel and way of timing it shares.  The position is in device memory: one
kernel serves every length of a context up to its capacity.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from linears import bandwidth, compile_kernel, lay_out, load_runtime, timed

WIDTH, CAPACITY, COPIES = 128, 32768, 2
HEADS = {"32 heads, 8 of keys": (32, 8), "32 heads": (32, 32)}
CACHES = ("FP32", "INT8", "INT4")
ONE_TOKEN = ((1, 511), (1, 4095), (1, 32767), (8, 4095))  # batch, position
PROMPTS = (128, 1024, 4096)


def export(folder: Path, wheel: Path | None) -> None:
    """Compile the kernels, and lay them beside what runs them."""
    from compressor.codegen.gpu.attention import kernels, packed
    from compressor.formats.cache import CacheFormat

    lay_out(folder, wheel)
    cases = []
    for shape, (heads, kv_heads) in HEADS.items():
        for cache in CACHES:
            arguments = heads, kv_heads, WIDTH, WIDTH**-0.5, 0, 0.0, False
            if cache == "FP32":
                function = kernels.cached_attention(*arguments)
            else:
                function = packed.packed_attention(*arguments, CacheFormat.parse(cache), False)
            cases.append({"file": f"{len(cases)}.so", "shape": shape, "cache": cache})
            usage = compile_kernel(function, folder / cases[-1]["file"])
            print(shape, cache, {name: (one.registers, one.spill_bytes) for name, one in usage.items()}, flush=True)
    (folder / "cases.json").write_text(json.dumps(cases, indent=1))


class Case:
    """Caches of random rows, and the same as floats."""

    def __init__(self, shape: str, cache: str, batch: int) -> None:
        from compressor.formats.cache import CacheFormat
        from compressor.formats.layouts.packed_cache import dequantize_cache, pack_cache, quantize_cache

        self.heads, self.kv_heads = HEADS[shape]
        self.batch, self.cache = batch, cache
        rows = [torch.randn(batch, self.kv_heads, CAPACITY // batch, WIDTH, device="cuda") for _ in range(2 * COPIES)]
        self.floats = rows[:2]
        if cache != "FP32":
            fmt = CacheFormat.parse(cache)
            rows = [pack_cache(*quantize_cache(x, fmt), fmt) for x in rows]
            self.floats = [dequantize_cache(x, fmt, WIDTH).float() for x in rows[:2]]
        self.caches = [rows[2 * i : 2 * i + 2] for i in range(COPIES)]

    def operands(self, past: int, new: int) -> list[list[torch.Tensor]]:
        """Return the operands of a call for each copy of the caches, whose rows the call writes again."""
        q = torch.randn(self.batch, self.heads, new, WIDTH, device="cuda")
        position = torch.arange(past, past + new, device="cuda")
        out = torch.full((self.batch, new, self.heads, WIDTH), float("nan"), device="cuda")
        found = []
        for pair in self.caches:
            fresh = [x[:, :, past : past + new].contiguous() for x in pair]
            found.append([q, *fresh, *pair, position, out])
        return found

    def error(self, kernel: Any, past: int, new: int) -> float:
        """Return the error of a call, of the largest output."""
        operands = self.operands(past, new)[0]
        kernel(*operands)
        torch.cuda.synchronize()
        worst, largest, repeat = 0.0, 0.0, self.heads // self.kv_heads
        seen = torch.arange(past + new, device="cuda")[None] <= operands[-2][:, None]
        for h in range(self.heads):
            q, keys, values = (
                operands[0][:, h].double(),
                *(x[:, h // repeat, : past + new].double() for x in self.floats),
            )
            scores = (q @ keys.transpose(1, 2) * WIDTH**-0.5).masked_fill(~seen, float("-inf"))
            expected = scores.softmax(-1) @ values
            worst = max(worst, float((operands[-1][:, :, h] - expected).abs().nan_to_num(float("inf")).max()))
            largest = max(largest, float(expected.abs().max()))
        return worst / largest

    def bytes(self, past: int) -> int:
        """Return the bytes of keys and values that one token reads."""
        return sum(x[0, 0, 0].nbytes for x in self.caches[0]) * self.batch * self.kv_heads * past


def rival(case: Case, past: int, new: int, dtype: torch.dtype) -> float:
    """Return the microseconds of PyTorch's attention over the same keys."""
    q = torch.randn(case.batch, case.heads, new, WIDTH, device="cuda", dtype=dtype)
    rows = [x[:, :, : past + new].to(dtype).contiguous() for x in case.floats]
    run = torch.nn.functional.scaled_dot_product_attention
    grouped = case.heads != case.kv_heads
    return timed(lambda _i: run(q, *rows, is_causal=new > 1, enable_gqa=grouped), lambda _s: torch.cuda.device(0))


def measure(folder: Path) -> None:
    """Check and time all kernels, and print a table."""
    ffi = load_runtime(folder)
    device = ffi.device("cuda", 0)

    def use_stream(stream: Any) -> Any:
        return ffi.use_raw_stream(device, stream.cuda_stream)

    read = bandwidth()["read"]
    print(f"{torch.cuda.get_device_name()}: read {read / 1e12:.2f} TB/s\n")
    print("| heads | cache | batch | past | tokens | error | us | of bandwidth | TFLOP/s | PyTorch bf16, fp32, us |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for one in json.loads((folder / "cases.json").read_text()):
        kernel = ffi.load_module(str(folder / one["file"]))["kernel"]
        for batch in (1, 8):
            case = Case(one["shape"], one["cache"], batch)
            wanted = [(past, 1) for b, past in ONE_TOKEN if b == batch]
            wanted += [(0, new) for new in PROMPTS if batch == 1]
            for past, new in wanted:
                error = case.error(kernel, past, new)
                operands = case.operands(past, new)
                us = timed(lambda i, k=kernel, o=operands: k(*o[i % COPIES]), use_stream)
                others = ""
                if one["cache"] == "FP32":
                    others = ", ".join(f"{rival(case, past, new, d):.1f}" for d in (torch.bfloat16, torch.float32))
                flops = 4 * batch * case.heads * WIDTH * (new * past + new * (new + 1) / 2) / us * 1e-6
                part = f"{case.bytes(past) / us * 1e6 / read:.0%}" if new == 1 else ""
                print(
                    f"| {one['shape']} | {one['cache']} | {batch} | {past} | {new} | {error:.1e} | {us:.1f} | {part} | "
                    f"{flops:.1f} | {others} |",
                    flush=True,
                )


def check(folder: Path) -> None:
    """Run all kernels on short contexts, and print their errors."""
    ffi = load_runtime(folder)
    for one in json.loads((folder / "cases.json").read_text()):
        kernel, case = ffi.load_module(str(folder / one["file"]))["kernel"], Case(one["shape"], one["cache"], 8)
        errors = [f"{case.error(kernel, past, new):.1e}" for past, new in ((511, 1), (0, 40), (100, 90))]
        print(one["shape"], one["cache"], *errors, flush=True)


def main() -> None:
    """Export or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--check", type=Path)
    given = parser.parse_args()
    if given.export is not None:
        export(given.export, given.wheel)
    elif given.check is not None:
        check(given.check)
    else:
        measure(given.measure)


if __name__ == "__main__":
    main()
