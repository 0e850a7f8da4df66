"""WebAssembly alone, for image classifiers in browsers and Node: their convolutions have no kernels in WGSL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from compressor.codegen.isa import Isa
from compressor.codegen.web.simd128 import SIMD128

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class Wasm:
    """WebAssembly with vectors of 128 bits, which every browser of today has."""

    backend: ClassVar[str] = "compressor.run.wasm:WasmBackend"

    def resolve(self) -> Isa:
        """Return the one instruction set."""
        return SIMD128

    def faster(self) -> tuple[Isa, ...]:
        """Return nothing."""
        return ()

    def executes(self, isa: Isa) -> bool:
        """Tell whether the package wasmtime is here."""
        from compressor.codegen.web.execute_wasm import is_available

        return is_available()

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """Return TVM's target."""
        from compressor.codegen.web.wasm import wasm_target

        return wasm_target(isa)

    def check_toolchain(self) -> None:
        """Raise ToolchainError unless there is a linker."""
        from compressor.codegen.web.wasm import find_linker

        find_linker()
