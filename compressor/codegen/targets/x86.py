"""x86-64 with AVX2, AVX512-VNNI or AMX: detection, TVM target, linking."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from compressor_runtime import allow_tiles

from compressor.codegen.isa import Isa
from compressor.codegen.linker import find_compiler, link_shared
from compressor.errors import UsageError
from compressor.host.machine import host_flags
from compressor.host.wheels import tvm_runtime

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class X86:
    """Linux on x86-64.

    Attributes:
        isa: ``native`` (the first of the next four that this machine has), ``amx``, ``avx512_vpopcntdq``,
            ``avx512_vnni``, ``avx2``; or ``any``: kernels for AMX, AVX512-VNNI and AVX2 in one bundle, which takes the
            best that it finds where it is loaded.
    """

    backend: ClassVar[str] = "compressor.run.native:NativeBackend"
    verifies: ClassVar[bool] = True

    isa: Literal["native", "any", "amx", "avx512_vpopcntdq", "avx512_vnni", "avx2"] = "native"

    def resolve(self) -> Isa:
        """Return the instruction set to generate for.

        Raises:
            UsageError: ``native`` on a machine that has none of them.
        """
        if self.isa == "any":
            return AVX2
        if self.isa != "native":
            return ISAS[self.isa]
        for isa in ISAS.values():
            if self.executes(isa):
                return isa
        raise UsageError(
            f"target x86: this machine ({platform.machine()}) has none of {', '.join(ISAS)}; "
            "name the target machine's: target: {x86: {isa: avx2}}"
        )

    def faster(self) -> tuple[Isa, ...]:
        """Those that ``any`` adds."""
        return (AMX, AVX512_VNNI) if self.isa == "any" else ()

    def executes(self, isa: Isa) -> bool:
        """Whether this machine can execute code for ``isa``."""
        return host_flags().issuperset(isa.cpu_flags) and (not isa.matrix_unit or allow_tiles())

    def launcher(self, isa: Isa) -> tuple[str, ...]:
        """Return nothing: what this machine lacks is compiled, not executed."""
        return ()

    def tvm_target(self, isa: Isa) -> tvm.target.Target:
        """TVM's target; LLVM takes the features from the name of a CPU generation that has just these, or lacks few."""
        import tvm

        fields = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": isa.mcpu}
        return tvm.target.Target({**fields, "mattr": list(isa.mattr)} if isa.mattr else fields)

    def tvm_runtime(self) -> Path:
        """Return the folder of TVM's run-time libraries."""
        return tvm_runtime("x86_64")

    def check_toolchain(self) -> None:
        """Raise ToolchainError unless there is a linker."""
        find_compiler()

    def link(self, output: str, objects: Sequence[str]) -> None:
        """Link with the C++ compiler on PATH, else with the ``ziglang`` package's.

        Raises:
            ToolchainError: there is neither, or the link failed.
        """
        link_shared(output, objects)


# Instructions; TVM is imported when a kernel is written.


def _vpdpbusd(acc: Any, codes: Any, activation: Any, _bits: int) -> Any:
    from tvm.script import tirx as T

    name = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpdpbusd.512")
    operands = (T.reinterpret(codes, dtype="int8x64"), T.reinterpret(activation, dtype="int8x64"))
    return T.call_llvm_pure_intrin(name, acc, *operands, dtype="int32x16")


def _vpmaddubsw(acc: Any, codes: Any, activation: Any, bits: int) -> Any:
    """Add pairs of products in 16 bits, then pairs of those; codes of 8 bits in two steps, as pairs may overflow."""
    from tvm.script import tirx as T

    from compressor.codegen.kernels.vector import splat

    a = T.reinterpret(activation, dtype="int8x32")

    def products(unsigned: Any) -> Any:
        pairs = T.call_llvm_pure_intrin(
            T.llvm_lookup_intrinsic_id("llvm.x86.avx2.pmadd.ub.sw"),
            T.reinterpret(unsigned, dtype="int8x32"),
            a,
            dtype="int16x16",
        )
        ones = T.broadcast(T.int16(1), 16)
        name = T.llvm_lookup_intrinsic_id("llvm.x86.avx2.pmadd.wd")
        return T.call_llvm_pure_intrin(name, pairs, ones, dtype="int32x8")

    if bits < 8:  # 2 * 127 * 127 fits the saturating 16-bit sum of pmaddubsw
        return acc + products(codes)
    low = products(T.bitwise_and(codes, splat(0x7F7F7F7F, 8)))
    high = products(T.bitwise_and(T.shift_right(codes, splat(7, 8)), splat(0x01010101, 8)))
    return acc + low + T.shift_left(high, splat(7, 8))


def _permute16(values: Sequence[float], index: Any) -> Any:
    from tvm.script import tirx as T

    permute = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.permvar.sf.512")
    return T.call_llvm_pure_intrin(permute, _table(values), index, dtype="float32x16")


def _permute8_twice(values: Sequence[float], index: Any) -> Any:
    """Look up in either half of the table, and choose by the index's fourth bit."""
    from tvm.script import tirx as T

    from compressor.codegen.kernels.vector import splat

    permute = T.llvm_lookup_intrinsic_id("llvm.x86.avx2.permps")
    low, high = (
        T.call_llvm_pure_intrin(permute, _table(part), index, dtype="float32x8") for part in (values[:8], values[8:])
    )
    is_low = T.EQ(T.bitwise_and(index, splat(8, 8)), splat(0, 8))
    return T.Select(is_low, low, high)


def _table(values: Sequence[float]) -> Any:
    from tvm.script import tirx as T

    return T.Shuffle([T.float32(value) for value in values], list(range(len(values))))


def _vpopcntd(word: Any) -> Any:
    from tvm.script import tirx as T

    return T.popcount(word)


def _pshufb(lanes: int, name: str) -> Callable[[Any], Any]:
    """Count the ones in each byte by a table of halves of a byte."""

    def ones_of_bytes(word: Any) -> Any:
        from tvm.script import tirx as T

        from compressor.codegen.kernels.vector import splat

        octets = f"int8x{4 * lanes}"
        words = [int.from_bytes([(4 * i + j).bit_count() for j in range(4)], "little") for i in range(4)]
        every = T.Shuffle([T.int32(words[i % 4]) for i in range(lanes)], list(range(lanes)))
        table = T.reinterpret(every, dtype=octets)

        def look_up(half: Any) -> Any:
            index = T.reinterpret(T.bitwise_and(half, splat(0x0F0F0F0F, lanes)), dtype=octets)
            return T.call_llvm_pure_intrin(T.llvm_lookup_intrinsic_id(name), table, index, dtype=octets)

        both = look_up(word) + look_up(T.shift_right(word, splat(4, lanes)))
        return T.reinterpret(both, dtype=f"int32x{lanes}")

    return ones_of_bytes


def _compress(lanes: int, kind: str) -> Callable[[Any, Any], Any]:
    """Squeeze a register by a mask: ``vpcompressd``, or ``vpcompressb``."""

    def squeeze(values: Any, mask: Any) -> Any:
        from tvm.script import tirx as T

        name = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.mask.compress")
        zeros, bits = T.broadcast(T.Cast(kind, 0), lanes), T.reinterpret(mask, dtype=f"uint1x{lanes}")
        return T.call_llvm_pure_intrin(name, values, zeros, bits, dtype=f"{kind}x{lanes}")

    return squeeze


def _vpexpandb(values: Any, mask: Any, others: Any) -> Any:
    from tvm.script import tirx as T

    name = T.llvm_lookup_intrinsic_id("llvm.x86.avx512.mask.expand")
    return T.call_llvm_pure_intrin(name, values, others, T.reinterpret(mask, dtype="uint1x64"), dtype="int8x64")


def _pdep(values: Any, flags: Any, others: Any) -> Any:
    """Spread eight bytes by ``pdep``, which all CPUs with AVX2 have (BMI2)."""
    from tvm.script import tirx as T

    def pdep(value: Any, mask: Any) -> Any:
        name = T.llvm_lookup_intrinsic_id("llvm.x86.bmi.pdep.64")
        return T.bind(T.call_llvm_pure_intrin(name, value, mask, dtype="uint64"))

    octets = T.bind(pdep(flags, T.uint64(0x0101010101010101)) * T.uint64(255))
    return T.bitwise_or(pdep(values, octets), T.bitwise_and(others, T.bitwise_not(octets)))


_PAGE_BYTES = 4096
"""Processors do not fetch beyond a page by themselves, and each page takes as long as a miss to begin with."""

AVX2 = Isa(
    "avx2",
    8,
    "haswell",
    ("avx2", "fma", "f16c"),
    dot4=_vpmaddubsw,
    lookup16=_permute8_twice,
    ones_of_bytes=_pshufb(8, "llvm.x86.avx2.pshuf.b"),
    spread_eight=_pdep,
    ahead_bytes=_PAGE_BYTES,
)
AVX512_VNNI = Isa(
    "avx512_vnni",
    16,
    "cascadelake",
    ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "fma", "f16c"),
    registers=32,
    dot4=_vpdpbusd,
    lookup16=_permute16,
    quick_lookup=True,
    ones_of_bytes=_pshufb(16, "llvm.x86.avx512.pshuf.b.512"),
    squeeze=_compress(16, "int32"),
    spread_eight=_pdep,
    ahead_bytes=_PAGE_BYTES,
)
AVX512_VPOPCNTDQ = replace(
    AVX512_VNNI,
    name="avx512_vpopcntdq",
    mcpu="icelake-server",
    cpu_flags=(*AVX512_VNNI.cpu_flags, "avx512_vpopcntdq", "avx512_bitalg", "avx512_vbmi2"),
    count_ones=_vpopcntd,
    squeeze_bytes=_compress(64, "int8"),
    spread=_vpexpandb,
)
"""Counts ones (bit planes) and squeezes bytes (blocks of columns) by an instruction: Ice Lake, Zen 4, and later."""
AMX = replace(
    AVX512_VNNI,
    name="amx",
    cpu_flags=(*AVX512_VNNI.cpu_flags, "amx_tile", "amx_int8", "amx_bf16", "avx512_vbmi2"),
    mattr=("+amx-tile", "+amx-int8", "+amx-bf16", "+avx512vbmi2"),
    squeeze_bytes=_compress(64, "int8"),
    spread=_vpexpandb,
    matrix_unit="amx",
)


ISAS = {isa.name: isa for isa in (AMX, AVX512_VPOPCNTDQ, AVX512_VNNI, AVX2)}
"""Those that ``native`` tries, in this order."""
