"""Call the candidates of one kernel on a GPU: do they agree, and how long do they take."""

from __future__ import annotations

import contextlib
import ctypes
import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from compressor_runtime.device.driver import Driver
from compressor_runtime.vm import tvm_ffi
from numpy.typing import NDArray

ROUND_S = 1e-3  # that a round takes at least
LEAST_CALLS = 16  # of a graph, or as many as there are copies of the weights
TOLERANCE = 2e-5  # of the largest output
_ATTRIBUTES = {
    "multiprocessors": 16,
    "l2_bytes": 38,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
}
_SMI = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"
_BITS = 0xBBBBBBBB - (1 << 32)  # without the first bit of exponents: no code is infinite or NaN
Args = Sequence[Any]


class Timer:
    """A GPU, and TVM's run-time over it.

    Args:
        folder: of the batch.
        copies: of the weights, at most.
        rounds: in which all candidates are timed in turns.
    """

    def __init__(self, folder: Path, device: int, copies: int, rounds: int) -> None:
        self._folder, self.driver, self._copies, self._turns = folder, Driver(device), copies, rounds
        for name, function in (
            ("libtvm_runtime.so", "runtime.config_threadpool"),
            ("libtvm_runtime_cuda.so", "device_api.cuda"),
        ):
            if tvm_ffi.get_global_func(function, allow_missing=True) is None:
                ctypes.CDLL(str(folder / "lib" / name), ctypes.RTLD_GLOBAL)
        from compressor_runtime.device.gpu import Gpu

        self.gpu = Gpu(self.driver)
        self._l2_bytes = self._attribute("l2_bytes") or 64 << 20
        self._bandwidth: float | None = None

    def _attribute(self, name: str) -> int | None:
        value = ctypes.c_int()
        try:
            self.driver.call("cudaDeviceGetAttribute", ctypes.byref(value), _ATTRIBUTES[name], self.driver.index)
        except Exception:  # an attribute that this driver does not know
            return None
        return value.value

    def facts(self) -> dict[str, Any]:
        """Return the GPU's name, compute capability, sizes, clocks and bandwidth, as far as they are known."""
        name = ctypes.create_string_buffer(256)
        ctypes.CDLL(None).cuDeviceGetName(name, 256, self.driver.index)  # the driver's library is loaded
        version, (free, total) = ctypes.c_int(), self.driver.memory()
        with contextlib.suppress(Exception):
            self.driver.call("cudaDriverGetVersion", ctypes.byref(version))
        self._bandwidth = self.gpu.read_bandwidth(None, min(1 << 28, free // 16), 3)
        facts = {
            "name": name.value.decode(errors="replace"),
            "capability": list(self.driver.capability),
            "cuda_driver": version.value,
            "memory_bytes": total,
            "copy_bytes_per_s": self._bandwidth,
            **{name: self._attribute(name) for name in _ATTRIBUTES},
        }
        clock, bits = facts["memory_clock_khz"], facts["memory_bus_bits"]
        facts["peak_bytes_per_s"] = 2e3 * clock * bits / 8 if clock and bits else None
        return {**facts, "nvidia_smi": self._smi()}

    def _smi(self) -> dict[str, str]:
        command = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader", "-i", str(self.driver.index)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return dict(zip(_SMI.split(","), done.stdout.strip().split(", "), strict=False))
        return {}

    def measure(self, kernel: Mapping[str, Any], skipped: set[int], begin: Callable[[int], None]) -> dict[str, Any]:
        """Measure all candidates of a kernel but the skipped ones.

        Args:
            begin: called with a candidate's index before it runs.
        Returns:
            ``candidates``: microseconds, or an error, of each; ``is_cold``: the weights do not fit into the L2 cache.
        """
        module = tvm_ffi.load_module(str(self._folder / kernel["library"]))
        arrays = random_operands(kernel)
        weights = [i for i, operand in enumerate(kernel["operands"]) if operand["role"] == "weight"]
        weight_bytes = sum(arrays[i].nbytes for i in weights)
        wanted = -(-2 * self._l2_bytes // max(1, weight_bytes))
        free = self.driver.memory()[0]
        copies = max(1, min(wanted, self._copies, int(free * 0.8) // max(1, weight_bytes)))
        first = [self.gpu.put(array) for array in arrays]
        sets = [first, *([*first] for _ in range(copies - 1))]
        for own in sets[1:]:
            for i in weights:
                own[i] = self.gpu.put(arrays[i])
        names: dict[str, list[int]] = {}
        for i, candidate in enumerate(kernel["candidates"]):
            if i not in skipped:
                names.setdefault(candidate["function"], []).append(i)
        found: list[dict[str, Any]] = [{"error": "not run"} for _ in kernel["candidates"]]
        with self.gpu.running():
            outputs = {}
            for _ in range(2):  # the second time, workspaces have the size that they keep
                for name, members in names.items():
                    begin(members[0])
                    outputs[name] = self._output(module[name], first)
            good = agreeing(outputs)
            graphs = {}
            for name, members in names.items():
                begin(members[0])
                if name in good:
                    graphs[name] = self._graph(module[name], sets)
            times = self._rounds(graphs, names, begin)
        for name, members in names.items():
            for i in members:
                found[i] = times[name] if name in good else {"error": "it computes other numbers than the others"}
        return {"candidates": found, "is_cold": copies * weight_bytes >= 2 * self._l2_bytes, "copies": copies}

    def _output(self, function: Any, arguments: Args) -> NDArray[np.float32]:
        output = arguments[-1]
        size = int(np.prod([int(n) for n in output.shape]))
        self.driver.call(
            "cudaMemsetAsync", ctypes.c_void_p(output.data_ptr()), 0xFF, ctypes.c_size_t(4 * size),
            ctypes.c_void_p(self.gpu.stream),
        )  # fmt: skip
        function(*arguments)
        found: NDArray[np.float32] = self.gpu.get(output)
        return found

    def _graph(self, function: Any, sets: Sequence[Args]) -> tuple[int, int]:
        """Record calls with one copy of the weights after another; return the graph and the number of calls."""
        calls = len(sets) * -(-min(LEAST_CALLS, self._copies) // len(sets))
        self.driver.begin_capture(self.gpu.stream)
        try:
            for i in range(calls):
                function(*sets[i % len(sets)])
        finally:
            graph = self.driver.end_capture(self.gpu.stream)
        return graph, calls

    def _rounds(
        self, graphs: Mapping[str, tuple[int, int]], names: Mapping[str, list[int]], begin: Callable[[int], None]
    ) -> dict[str, dict[str, Any]]:
        """Time the graphs in turns."""
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in events:
            self.driver.call("cudaEventCreate", ctypes.byref(event))
        launches, times = {}, {name: list[float]() for name in graphs}
        for turn in range(self._turns + 1):  # the first one says how often to launch
            for name, (graph, calls) in graphs.items():
                begin(names[name][0])
                count = launches.get(name, 1)
                seconds = self._elapsed(graph, count, events)
                if turn:
                    times[name].append(seconds / count / calls * 1e6)
                else:
                    launches[name] = max(1, min(200, int(ROUND_S / max(seconds, 1e-7))))
        for graph, _ in graphs.values():
            self.driver.free_graph(graph)
        for event in events:
            self.driver.call("cudaEventDestroy", event)
        return {
            name: {"microseconds": statistics.median(us), "least": min(us), "most": max(us), "rounds": len(us)}
            for name, us in times.items()
        }

    def _elapsed(self, graph: int, launches: int, events: Sequence[Any]) -> float:
        """Return the seconds of so many launches one after another."""
        stream = ctypes.c_void_p(self.gpu.stream)
        self.driver.launch(graph, self.gpu.stream)  # warm, and the host is ahead
        self.driver.call("cudaEventRecord", events[0], stream)
        for _ in range(launches):
            self.driver.launch(graph, self.gpu.stream)
        self.driver.call("cudaEventRecord", events[1], stream)
        self.driver.wait(self.gpu.stream)
        milliseconds = ctypes.c_float()
        self.driver.call("cudaEventElapsedTime", ctypes.byref(milliseconds), *events)
        return milliseconds.value / 1e3


def random_operands(kernel: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return a kernel's arguments: numbers that kernels read as finite values, the same ones in each run."""
    rng = np.random.default_rng(int.from_bytes(json.dumps(kernel["kernel"]).encode()[-8:], "little"))
    return [_random(operand, rng) for operand in kernel["operands"]]


def _random(operand: Mapping[str, Any], rng: np.random.Generator) -> NDArray[Any]:
    shape, kind, fill = operand["shape"], operand["dtype"], operand["fill"]
    if operand["role"] == "output":
        return np.full(shape, np.nan, kind)
    if kind == "int32":  # codes
        return rng.integers(-(1 << 31), 1 << 31, shape, dtype=np.int32) & np.int32(_BITS)
    if kind == "uint8":  # scales as exponents or small floats, or zero points
        low = 118 if fill else 0
        return rng.integers(low, low + 4, shape, dtype=np.uint8)
    values = rng.standard_normal(shape) if fill == 0 or operand["role"] == "input" else rng.uniform(0.5, 1.5, shape)
    if kind == "uint16":  # the first half of float32
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(kind)


def agreeing(outputs: Mapping[str, NDArray[np.float32]]) -> set[str]:
    """Return the names of the largest group of equal outputs, up to rounding; the first of two as large."""
    groups: list[tuple[NDArray[np.float32], list[str]]] = []
    for name, output in outputs.items():
        for known, members in groups:
            if _agree(known, output):
                members.append(name)
                break
        else:
            groups.append((output, [name]))
    finite = [members for output, members in groups if np.isfinite(output).all()]
    return set(max(finite, key=len, default=[]))


def _agree(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    largest = float(np.abs(one).max()) if one.size else 0.0
    return bool(np.isfinite(other).all() and np.abs(one - other).max() <= TOLERANCE * largest)
