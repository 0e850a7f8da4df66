"""GPUs of NVIDIA: machine code for sm_80, sm_90 and sm_100, and PTX for later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from compressor_runtime.device.driver import capability_here, serves

from compressor.codegen.isa import Isa
from compressor.codegen.linker import find_compiler, link_shared
from compressor.errors import UsageError
from compressor.host.wheels import tvm_runtime

if TYPE_CHECKING:
    import tvm

Arch = Literal["sm_80", "sm_90", "sm_100"]
_ARCHS: tuple[Arch, ...] = ("sm_80", "sm_90", "sm_100")
_THREADS, _SHARED_BYTES, _WARP = 1024, 48 << 10, 32


@dataclass(frozen=True)
class Cuda:
    """NVIDIA GPUs of compute capability 8.0 and later, in Linux on x86-64.

    Attributes:
        arch: GPUs that the bundle has machine code for: ``sm_80`` (A100, and others of 8.x), ``sm_90`` (H100, H200),
            ``sm_100`` (B200), or a list of them; or ``any``: all three, and PTX, which the driver compiles for later
            ones.
    """

    backend: ClassVar[str] = "compressor.run.cuda:CudaBackend"

    arch: Literal["any"] | Arch | tuple[Arch, ...] = "any"

    def resolve(self) -> Isa:
        """Return the GPUs to generate for.

        Raises:
            UsageError: the list is empty.
        """
        named = _ARCHS if self.arch == "any" else (self.arch,) if isinstance(self.arch, str) else self.arch
        if not named:
            raise UsageError(f"target cuda: arch names no GPU; give `any`, or some of {', '.join(_ARCHS)}")
        archs: list[str] = [arch for arch in _ARCHS if arch in named]
        return Isa("cuda", _WARP, archs=(*archs, *(["compute_100"] if self.arch == "any" else [])))

    def faster(self) -> tuple[Isa, ...]:
        """Return nothing: one library has the code for all GPUs."""
        return ()

    def launcher(self, isa: Isa) -> tuple[str, ...]:
        """Return nothing: where there is no GPU, kernels are compiled, not executed."""
        return ()

    def executes(self, isa: Isa) -> bool:
        """Tell whether there is a GPU here that runs this code."""
        capability = capability_here()
        return capability is not None and serves(isa.archs, capability)

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """Return TVM's target, with the limits that all of these GPUs have, and any x86-64 as the host."""
        import tvm

        limits = {"max_threads_per_block": _THREADS, "max_shared_memory_per_block": _SHARED_BYTES}
        host = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"})
        fields = {"kind": "cuda", "arch": isa.archs[0], "thread_warp_size": _WARP, **limits}
        return tvm.target.Target(fields, host=host)

    def tvm_runtime(self) -> Path:
        """Return the folder of TVM's run-time libraries."""
        return tvm_runtime("x86_64")

    def check_toolchain(self) -> None:
        """Raise ToolchainError unless there are nvcc and a linker."""
        from compressor.codegen.gpu.toolchain import find_nvcc

        find_nvcc()
        find_compiler()

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link with the C++ compiler, as for the CPU: the GPUs' code is data in it.

        Raises:
            ToolchainError: there is none, or the link failed.
        """
        link_shared(output, objects)
