"""Choose what a training computes on: this processor, or an NVIDIA GPU.

The graph stays in memory, and so do orders, noise and checkpoints, which are the processor's: two devices differ in
nothing but their arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from compressor.errors import CompressorError, ResourceError, UsageError

DeviceName: TypeAlias = Literal["cpu", "cuda"]
"""Where a pass trains: on the processor, or on the GPU that PyTorch calls by this name."""

_WORKSPACE, _REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
_FULL = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")  # of libraries, which take memory of their own


def gpu_facts(asked_by: str) -> dict[str, str]:
    """Return the GPU and the libraries that decide the bits of a training, for locks and keys of caches.

    Args:
        asked_by: name of the pass, for messages.
    Raises:
        UsageError: PyTorch sees no GPU.
    """
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            why = f"PyTorch {torch.__version__} is built for none; install one that is"
        else:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "which is not set")
            why = f"PyTorch sees none; look whether `nvidia-smi` lists it, and at CUDA_VISIBLE_DEVICES, {shown!r}"
        raise UsageError(f"{asked_by}: device cuda needs a GPU, and {why}; or set `device: cpu`")
    libraries = {"cuda": torch.version.cuda or torch.version.hip, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    facts = {"name": torch.cuda.get_device_name(), "torch": torch.__version__, **libraries}  # with its build: +cu130
    return {key: str(value) for key, value in facts.items()}


def gpu_bytes() -> int:
    """Return the memory of the GPU."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


class Device:
    """Device that a pass trains on, and copies there of the graphs' tensors, of each one.

    Args:
        name: of the device.
    """

    def __init__(self, name: DeviceName = "cpu") -> None:
        self.torch = torch.device(name)
        self.is_cpu = name == "cpu"
        self._copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def of(self, held: Tensor) -> Tensor:
        """Return a tensor of a graph, which does not change: itself on the CPU, else a copy that is made once.

        Graphs that share a tensor share its copy, as a student does with its teacher.
        """
        if self.is_cpu:
            return held
        key = (held.data_ptr(), held.dtype, held.shape, held.stride())
        if key not in self._copies:  # the tensor is kept too: its address would be another's once it is gone
            self._copies[key] = held, held.detach().to(self.torch)
        return self._copies[key][1]

    def release(self) -> None:
        """Let go of the copies."""
        self._copies.clear()

    def placed(self, arguments: Any) -> Any:
        """Return arguments of an operator with every tensor and every device among them on this one."""
        return arguments if self.is_cpu else map_aggregate(arguments, self._place)

    def _place(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.torch)
        return self.torch if isinstance(value, torch.device) else value

    @contextmanager
    def computing(self, pass_name: str, advice: Sequence[str]) -> Iterator[None]:
        """Compute so that a second run has the same bits, and explain what only a GPU can run into.

        On the CPU nothing changes.  Elsewhere PyTorch's settings, which are the process's, are put back at the end.

        Args:
            advice: what takes less memory, for messages.
        Raises:
            ResourceError: the GPU's memory is full.
            CompressorError: an operator has no repeatable implementation there.
        """
        if self.is_cpu:
            yield
            return
        try:
            with _repeatable():
                yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _FULL):
                free, total = torch.cuda.mem_get_info()
                raise ResourceError(
                    f"{pass_name}: the memory of {torch.cuda.get_device_name()}, {total / 2**30:.1f} GiB, of which "
                    f"{free / 2**30:.1f} GiB are left, is too small for this training; {', or '.join(advice)}, "
                    "or set `device: cpu`"
                ) from error
            if "deterministic" in str(error):
                first = str(error).partition(". ")[0]
                raise CompressorError(
                    f"{pass_name}: on a GPU this model cannot be trained to the same bits twice ({first}); "
                    "set `device: cpu`"
                ) from error
            raise
        finally:
            self.release()


@contextmanager
def _repeatable() -> Iterator[None]:
    """Let CUDA's libraries compute float32 in float32, and in the same order each time."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic
    fills, precision = deterministic.fill_uninitialized_memory, torch.get_float32_matmul_precision()
    workspace, libraries = os.environ.get(_WORKSPACE), torch.backends.cudnn
    if workspace not in _REPEATABLE:
        os.environ[_WORKSPACE] = _REPEATABLE[0]
    try:
        with libraries.flags(libraries.enabled, benchmark=False, deterministic=True, allow_tf32=False):
            torch.set_float32_matmul_precision("highest")
            torch.use_deterministic_algorithms(True)
            deterministic.fill_uninitialized_memory = False  # nothing reads it
            yield
    finally:
        deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_float32_matmul_precision(precision)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace
