"""Measure the price of each unit of work on this machine: seconds of the real functions, kept in the cache folder.

Each unit of work has a price in seconds.  Plans multiply these prices by amounts of work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError
from compressor.host.cache import cache_folder, merge_entries, read_entries
from compressor.host.machine import cpu_name
from compressor.progress import Reporter
from compressor.version import __version__

UNITS: Mapping[str, str] = {
    "matmul_flop": "one operation of a float32 matrix product",
    "bfloat16_flop": "the same by way of bfloat16, where the CPU has AMX (compressor.numerics.products.bfloat16)",
    "int8_op": "one operation of an int8 matrix product",
    "matmul64_flop": "one operation of a float64 matrix product",
    "factor64_flop": "one operation of a float64 Cholesky factorisation or triangular solve",
    "stream_byte": "one byte read or written by an element-wise operation",
    "fresh_byte": "one byte written by an element-wise operation to memory that the process just got",
    "read_byte": "one byte read from memory",
    "peak_flop": "one operation of a product of floats at most, from registers (compressor.codegen.peaks)",
    "peak_int8_op": "the same of int8",
    "peak_read_byte": "one byte read from memory at most",
    "cached_read_byte": "one byte read from the second-level caches at most",
    "hash_byte": "one byte of SHA-256",
    "write_byte": "one byte written to the cache folder's disk",
    "rtn_element": "one weight rounded to nearest and packed",
    "grid_element": "one weight held against one candidate grid",
    "sweep_element": "one weight that GPTQ rounds, and the errors it spreads within its block",
    "sweep_column": "one column that GPTQ rounds, whatever its length",
    "dequantize_element": "one packed weight turned into float32",
    "node": "one operator of PyTorch, however small, interpreted",
    "custom_op": "what an operator of ours takes longer than that",
    "python": "one turn of a loop in Python",
    "import_bundle": "a process that imports the bundle's run-time",
    "import_dense": "a process that imports PyTorch and transformers",
    "import_all": "a process that imports all that a run needs",
}
"""The units of work, each priced in seconds."""

_SECONDS_EACH = 0.2
_LEAST_REPEATS = 3
_AT_MOST = {"peak_flop": "matmul_flop", "peak_int8_op": "int8_op"}
"""Prices of peaks, and of what has reached them at most: other work may stop the threads that measure a peak."""

_CHILD = """
import time; begin = time.perf_counter()
def mark(name):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(name, time.perf_counter() - begin, int(status["VmRSS"].split()[0]) * 1024)
import sys; sys.modules["torch"] = None
import compressor.evaluate.speed, compressor_runtime
mark("bundle")
del sys.modules["torch"]
import torch, transformers.models.auto.modeling_auto
mark("dense")
import compressor.run.job
mark("all")
from compressor.plan.prices import compute
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
torch.set_grad_enabled(False)
print(compute())
"""


@dataclass(frozen=True)
class Prices:
    """Prices of work on one machine.

    Attributes:
        cpu: the processor's model name.
        threads: PyTorch's threads while measuring.
        seconds: price of each of :data:`UNITS`.
        spread: how far the median of one measurement's repeats lies above the least, which is its price; the median
            over all measurements.
        bundle_bytes, dense_bytes, all_bytes: resident memory of a process after the three imports.
    """

    cpu: str
    threads: int
    seconds: Mapping[str, float]
    spread: float
    bundle_bytes: int
    dense_bytes: int
    all_bytes: int

    def cost(self, work: Mapping[str, float]) -> float:
        """Return the seconds that amounts of work, by unit, take."""
        return sum(self.seconds[unit] * amount for unit, amount in work.items())


def machine_prices(measure: bool = False, reporter: Reporter | None = None) -> Prices:
    """Return this machine's prices from the cache folder's ``machine.json``, or measure them, in about ten seconds.

    Kept by processor, threads, and the versions of PyTorch, TVM and Compressor.  A cache folder that cannot be written
    to costs the next plan these seconds, and this one nothing.

    Args:
        measure: whatever is kept, measure now.
        reporter: told that measuring begins.
    Raises:
        CompressorError: the process that tries the imports failed.
    """
    import torch

    versions = (torch.__version__, importlib.metadata.version("apache-tvm"), __version__)
    key = "|".join((cpu_name(), f"{torch.get_num_threads()} threads", *versions))
    file = cache_folder() / "machine.json"
    if not measure:
        try:
            kept = Prices(**read_entries(file)[key])
            if set(kept.seconds) == set(UNITS) and all(kept.seconds[a] <= kept.seconds[b] for a, b in _AT_MOST.items()):
                return kept
        except (KeyError, TypeError):
            pass  # not measured yet, or by another version of this file
    if reporter is not None:
        reporter.note("this machine is measured for what plans need, which takes about ten seconds and is kept")
    found = probe()
    with contextlib.suppress(OSError):
        merge_entries(file, {key: dataclasses.asdict(found)})
    return found


def probe() -> Prices:
    """Measure this machine, in a process of its own: it takes memory, and random numbers.

    Raises:
        CompressorError: the process failed.
    """
    import torch

    threads = torch.get_num_threads()
    command = [sys.executable, "-c", _CHILD, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "; ".join((done.stdout + done.stderr).strip().splitlines()[-3:])  # TVM says some errors on stdout
        raise CompressorError(f"measuring this machine failed: {said}")
    *lines, computed = done.stdout.splitlines()
    imports = {name: (float(taken), int(size)) for name, taken, size in (line.split() for line in lines)}
    found = json.loads(computed)
    seconds = found["seconds"] | {f"import_{name}": taken for name, (taken, _) in imports.items()}
    sizes = {f"{name}_bytes": size for name, (_, size) in imports.items()}
    return Prices(cpu_name(), threads, seconds, statistics.median(found["spreads"]), **sizes)


def compute() -> str:
    """Measure in the probe's process; returns JSON: ``seconds`` of each unit, ``spreads`` of the measurements."""
    seconds, spreads = _compute()
    return json.dumps({"seconds": seconds, "spreads": spreads})


def _compute() -> tuple[dict[str, float], list[float]]:
    """Seconds of each unit that this process measures itself, and the spreads of the measurements."""
    import torch

    from compressor.codegen.peaks import measure_peaks
    from compressor.formats.format import Format
    from compressor.formats.packing import dequantize
    from compressor.numerics.nearest import rtn_quantize
    from compressor.numerics.products.bfloat16 import bfloat16_products
    from compressor.numerics.range_search import search_grid

    spreads: list[float] = []

    def price(amount: float, run: Callable[[], Any]) -> float:
        times = _times(run)
        spreads.append((statistics.median(times) - times[0]) / times[0])
        return times[0] / amount  # the least: whatever else the machine does only adds to it

    x, w = torch.randn(2048, 512), torch.randn(512, 512)
    codes = torch.randint(-8, 8, (512, 512), dtype=torch.int8)
    square = torch.randn(512, 512, dtype=torch.float64)
    definite = square @ square.t() + 512 * torch.eye(512, dtype=torch.float64)
    eye = torch.eye(512, dtype=torch.float64)
    rows, large = torch.ones(2048, 1024), torch.ones(32 << 20)
    fmt = Format.parse("W4A16_G128")
    weight = torch.randn(4096, 2048)  # large enough for its temporary tensors to be memory that the process just got
    packed = rtn_quantize(weight, fmt)
    factored = 512**3 / 3 + 512**3

    def factor() -> None:
        torch.linalg.solve_triangular(torch.linalg.cholesky_ex(definite)[0], eye, upper=False)

    def rounded() -> None:
        with bfloat16_products():
            x @ w

    seconds = {
        "matmul_flop": price(2 * 2048 * 512**2, lambda: x @ w),
        "bfloat16_flop": price(2 * 2048 * 512**2, rounded),
        "int8_op": price(2 * 512**3, lambda: torch._int_mm(codes, codes)),
        "matmul64_flop": price(2 * 512**3, lambda: square @ square),
        "factor64_flop": price(factored, factor),
        "stream_byte": price(2 * rows.nbytes, lambda: rows * 2.0),
        "fresh_byte": price(large.nbytes, lambda: large * 2.0),
        "read_byte": price(large.nbytes, large.sum),
        "rtn_element": price(weight.numel(), lambda: rtn_quantize(weight, fmt)),
        "dequantize_element": price(weight.numel(), lambda: dequantize(packed)),
        "python": price(100_000, _loop),
    }
    column, importance = weight[:1024, :128].contiguous(), torch.rand(128)
    seconds["grid_element"] = price(29 * column.numel(), lambda: search_grid(column, importance, fmt))
    seconds |= _calls(price)
    seconds |= _sweeps(seconds)
    seconds |= measure_peaks(torch.get_num_threads())
    seconds |= {peak: min(seconds[peak], seconds[reached]) for peak, reached in _AT_MOST.items()}
    return seconds | _files(price), spreads


def _calls(price: Callable[..., float]) -> dict[str, float]:
    """Price the call of an operator of PyTorch and of one of ours, whatever it computes."""
    import torch

    from compressor.ops.norm import rms_norm

    small = torch.randn(4, 16)

    def nodes() -> None:
        for _ in range(200):
            small.add(small)

    def operators() -> None:
        for _ in range(50):
            rms_norm(small, small[0], 1e-6)

    # An operator through the interpreter takes about six times its bare call.
    bare = price(200, nodes)
    return {"node": 6 * bare, "custom_op": price(50, operators) - 5 * bare}


def _loop() -> int:
    return sum(i * i for i in range(100_000))


def _times(run: Callable[[], Any]) -> list[float]:
    """Seconds of each repeat, sorted; the first call, which warms up, is left out."""
    run()
    times: list[float] = []
    end = time.perf_counter() + _SECONDS_EACH
    while len(times) < _LEAST_REPEATS or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)


def _sweeps(seconds: Mapping[str, float]) -> dict[str, float]:
    """Prices of GPTQ's inner loop: what two calls take beyond the work that has a price already."""
    import torch

    from compressor.formats.format import Format
    from compressor.numerics.obs import gptq_work
    from compressor.passes.gptq import gptq_quantize

    # Few columns and many rows: most of the time goes into the inner loop.
    fmt, columns, sizes = Format.parse("W4A16_G128"), 128, (16, 2048)
    x = torch.randn(2 * columns, columns)
    hessian, left = x.t() @ x, []
    for rows in sizes:
        weight = torch.randn(rows, columns)
        times = _times(lambda weight=weight: gptq_quantize(weight, hessian, fmt))  # type: ignore[misc]
        work = gptq_work(rows, columns, fmt, observer="mse", match_dense=False)
        known = sum(seconds[unit] * amount for unit, amount in work.items() if unit in seconds)
        left.append(max(0.0, times[0] - known))
    element = max(0.0, left[1] - left[0]) / ((sizes[1] - sizes[0]) * columns)
    return {"sweep_element": element, "sweep_column": max(0.0, left[0] / columns - sizes[0] * element)}


def _files(price: Callable[..., float]) -> dict[str, float]:
    """Prices of hashing, and of writing to the cache folder's disk (to the temporary folder's, if it is read-only)."""
    data = bytes(16 << 20)

    def write(folder: Path | None) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    folder: Path | None = cache_folder()
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        write(folder)
    except OSError:
        folder = None
    hashing = price(len(data), lambda: hashlib.sha256(data).digest())
    return {"hash_byte": hashing, "write_byte": price(len(data), lambda: write(folder))}
