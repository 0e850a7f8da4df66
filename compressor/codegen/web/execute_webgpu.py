"""Run WebGPU programs from Python, through wgpu, on any adapter: for checks, not for speed.

The browser's run-time is ``export/web/runner.js``; this one reads the same program, so that kernels are executed and
measured where a bundle is made.  A software adapter suffices (Mesa's lavapipe: Debian's ``mesa-vulkan-drivers``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.codegen.web.kernel import evaluate, specialised
from compressor.errors import ToolchainError

HALF = "shader-f16"
"""WebGPU feature that lets shaders compute in float16."""
TIMESTAMPS = "timestamp-query"
"""WebGPU feature that gives the device's clock."""


@cache
def device() -> Any:
    """Return WebGPU's default device, with its default limits, as a browser gives it.

    Raises:
        ToolchainError: the package wgpu is missing, or finds no adapter.
    """
    try:
        import wgpu
    except ImportError as error:
        raise ToolchainError(
            "running WebGPU kernels needs the package wgpu: pip install 'compressor[webgpu]'"
        ) from error
    try:
        adapter = wgpu.gpu.request_adapter_sync()
    except RuntimeError as error:
        raise ToolchainError(
            f"no adapter for WebGPU ({error}); a software one is in Debian's mesa-vulkan-drivers and libvulkan1"
        ) from error
    wanted = [feature for feature in (HALF, TIMESTAMPS) if feature in adapter.features]
    return adapter.request_device_sync(
        required_features=wanted, required_limits={"max-storage-buffers-per-shader-stage": 8}
    )


def adapter_name() -> str:
    """Return the adapter's name for itself."""
    info = device().adapter.info
    return str(info["description"] or info["device"] or info["vendor"])


def has_half() -> bool:
    """Return whether the adapter computes in float16."""
    return HALF in device().features


def is_software() -> bool:
    """Return whether the adapter is a CPU that emulates a GPU."""
    return bool(device().adapter.info["adapter_type"] == "CPU")


def buffer_of(array: NDArray[Any]) -> Any:
    """Make a storage buffer with the bytes of an array, padded to whole words."""
    content = np.ascontiguousarray(array).tobytes()
    return _filled(content + bytes(-len(content) % 4))


def _filled(content: bytes) -> Any:
    import wgpu

    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    return device().create_buffer_with_data(data=content or bytes(4), usage=usage)


def empty_buffer(size_bytes: int) -> Any:
    """Make a storage buffer of zeros."""
    import wgpu

    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
    return device().create_buffer(size=max(4, -(-size_bytes // 4) * 4), usage=usage)


def read_buffer(buffer: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Return a copy of a buffer's content as an array."""
    count = int(np.prod(shape))
    content = device().queue.read_buffer(buffer)
    return np.frombuffer(content, dtype)[:count].reshape(shape).copy()


class Pipelines:
    """Compiled kernels of a program.

    Args:
        records: kernels by name, see :meth:`compressor.codegen.web.kernel.Kernel.record`.
        half: compute products of floats in float16; the adapter must have :data:`HALF`.
    """

    def __init__(self, records: Mapping[str, Mapping[str, Any]], *, half: bool = False) -> None:
        self.records, self._half = records, half
        self._compiled: dict[str, Any] = {}

    def dispatch(self, encoder: Any, names: Sequence[str], buffers: Sequence[Any], sizes: Sequence[int]) -> None:
        """Encode a step with the first of the alternative kernels whose limits the sizes keep."""
        name = next(n for n in names if self._serves(n, sizes))
        record = self.records[name]
        values = dict(zip(record["sizes"], sizes, strict=True)) | dict(record["constants"])
        groups = [evaluate(expression, values) for expression in record["groups"]]
        if not all(groups):
            return
        pipeline = self._pipeline(name)
        entries = [
            {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}} for i, b in enumerate(buffers)
        ]
        content = struct.pack(f"<{len(sizes)}I", *sizes)
        uniform = self._uniform(content + bytes(-len(content) % 16))
        entries.append({"binding": len(buffers), "resource": {"buffer": uniform, "offset": 0, "size": uniform.size}})
        group = device().create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*groups)
        compute.end()

    def _serves(self, name: str, sizes: Sequence[int]) -> bool:
        record = self.records[name]
        given = dict(zip(record["sizes"], sizes, strict=True))
        return all(given[key] <= most for key, most in record.get("limits", {}).items())

    @staticmethod
    def _uniform(content: bytes) -> Any:
        import wgpu

        return device().create_buffer_with_data(data=content, usage=wgpu.BufferUsage.UNIFORM)

    def _pipeline(self, name: str) -> Any:
        if name not in self._compiled:
            record = self.records[name]
            self._compiled[name] = compiled(record, record["constants"], half=self._half)
        return self._compiled[name]


def compiled(record: Mapping[str, Any], constants: Mapping[str, int], *, half: bool = False) -> Any:
    """Compile a kernel with the given constants in place of its own."""
    import wgpu

    module = device().create_shader_module(code=specialised(record["source"], constants, half=half))
    kinds = {"read": wgpu.BufferBindingType.read_only_storage, "write": wgpu.BufferBindingType.storage}
    types = [kinds[access] for access in record["buffers"]] + [wgpu.BufferBindingType.uniform]
    stage = wgpu.ShaderStage.COMPUTE
    layout = device().create_bind_group_layout(
        entries=[{"binding": i, "visibility": stage, "buffer": {"type": kind}} for i, kind in enumerate(types)]
    )
    return device().create_compute_pipeline(
        layout=device().create_pipeline_layout(bind_group_layouts=[layout]),
        compute={"module": module, "entry_point": record.get("entry", "main")},
    )


def run_kernels(
    records: Mapping[str, Mapping[str, Any]],
    inputs: Sequence[NDArray[Any]],
    sizes: Sequence[int],
    outputs: Mapping[int, tuple[str, Sequence[int]]],
    *,
    half: bool = False,
) -> list[NDArray[Any]]:
    """Dispatch one of several alternative kernels and return its outputs.

    Args:
        inputs: arrays in the order of the bindings, outputs left out.
        outputs: binding -> type and shape of each output.
        half: see :class:`Pipelines`.
    """
    given = iter(inputs)
    count = len(next(iter(records.values()))["buffers"])
    buffers = [
        empty_buffer(int(np.prod(outputs[i][1])) * np.dtype(outputs[i][0]).itemsize) if i in outputs
        else buffer_of(next(given))
        for i in range(count)
    ]  # fmt: skip
    encoder = device().create_command_encoder()
    Pipelines(records, half=half).dispatch(encoder, list(records), buffers, sizes)
    device().queue.submit([encoder.finish()])
    return [read_buffer(buffers[i], dtype, shape) for i, (dtype, shape) in outputs.items()]


class GpuProgram:
    """A program with its parameters on the device.

    Args:
        content: see :class:`compressor.codegen.web.lower.WebProgram`.
        tensors: parameters and constants by name.
        half: see :class:`Pipelines`.
    """

    def __init__(self, content: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], *, half: bool = False) -> None:
        self.content, self._pipelines = content, Pipelines(content["kernels"], half=half)
        self._tensors = {name: buffer_of(array) for name, array in tensors.items()}
        self._scratch: dict[str, dict[int, Any]] = {}

    empty, upload, read = staticmethod(empty_buffer), staticmethod(buffer_of), staticmethod(read_buffer)

    def free(self, buffer: Any) -> None:
        """Free a buffer."""
        buffer.destroy()

    def run(self, inputs: Mapping[str, Any], sizes: Mapping[str, int], entry: str = "main") -> Any:
        """Run all steps of an entry on buffers by the inputs' names and return the output's buffer, which the next run
        of it reuses.
        """
        program = self.content if entry == "main" else self.content[entry]
        return self._run(entry, program, [program["output"]], inputs, sizes)[0]

    def encode(self, inputs: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
        """Run the steps of ``encode``, and return copies of its outputs' buffers, by name."""
        outputs = self.content["encode"]["outputs"]
        found = self._run("encode", self.content["encode"], [out["buffer"] for out in outputs], inputs, sizes)
        shapes = [[evaluate(n, sizes) for n in out["shape"]] for out in outputs]
        arrays = [read_buffer(buffer, "float32", shape) for buffer, shape in zip(found, shapes, strict=True)]
        return {out["name"]: buffer_of(array) for out, array in zip(outputs, arrays, strict=True)}

    def _run(
        self,
        name: str,
        entry: Mapping[str, Any],
        outputs: Sequence[str],
        inputs: Mapping[str, Any],
        sizes: Mapping[str, int],
    ) -> list[Any]:
        """Run the steps of an entry, and return the buffers of its outputs."""
        scratch = self._scratch.setdefault(name, {})
        for number, size in enumerate(entry["scratch"]):
            size_bytes = evaluate(size, sizes)
            if number not in scratch or scratch[number].size < size_bytes:
                scratch[number] = empty_buffer(size_bytes)
        encoder = device().create_command_encoder()
        for step in entry["steps"]:
            numbers = [evaluate(size, sizes) for size in step["sizes"]]
            buffers = [self._buffer(reference, inputs, scratch) for reference in step["buffers"]]
            self._pipelines.dispatch(encoder, step["kernels"], buffers, numbers)
        device().queue.submit([encoder.finish()])
        return [self._buffer(output, inputs, scratch) for output in outputs]

    def _buffer(self, reference: str, inputs: Mapping[str, Any], scratch: Mapping[int, Any]) -> Any:
        kind, _, name = reference.partition(":")
        if kind == "scratch":
            return scratch[int(name)]
        return inputs[name] if kind == "input" else self._tensors[name]
