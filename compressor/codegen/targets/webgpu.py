"""Browsers: kernels in WGSL and in WebAssembly, run by ``export/web/runner.js``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compressor.codegen.isa import Isa
from compressor.errors import ToolchainError

if TYPE_CHECKING:
    import tvm

WGSL = Isa("wgsl", 1)
"""Nothing of a CPU is asked for."""


@dataclass(frozen=True)
class Webgpu:
    """WebGPU, within the default limits that every browser gives.

    Attributes:
        wasm: the bundle also has the kernels in WebAssembly, for browsers without WebGPU and for Node.
    """

    backend: ClassVar[str] = "compressor.run.web:WebBackend"
    drafts: ClassVar[tuple[str, ...]] = ("lookup", "auto")
    """Kinds of drafts that the run-time has."""

    wasm: bool = True

    @property
    def verifies(self) -> bool:
        """Return that bundles can verify drafted tokens."""
        return True

    def resolve(self) -> Isa:
        """WGSL is the same everywhere."""
        return WGSL

    def faster(self) -> tuple[Isa, ...]:
        """None."""
        return ()

    def executes(self, isa: Isa) -> bool:
        """Whether the package wgpu is here and finds an adapter, be it a software one."""
        from compressor.codegen.web.execute_webgpu import device

        try:
            device()
        except ToolchainError:
            return False
        return True

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """TVM's target, with WebGPU's default limits."""
        import tvm

        from compressor.codegen.web.kernel import MOST_SHARED_BYTES, MOST_THREADS

        limits = {"max_num_threads": MOST_THREADS, "max_shared_memory_per_block": MOST_SHARED_BYTES}
        return tvm.target.Target({"kind": "webgpu", **limits}, host=tvm.target.Target("llvm"))

    def check_toolchain(self) -> None:
        """Raise ToolchainError where WebAssembly is to be linked and there is no linker; browsers compile WGSL."""
        if self.wasm:
            from compressor.codegen.web.wasm import find_linker

            find_linker()
