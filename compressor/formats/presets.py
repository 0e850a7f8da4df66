"""Names of the formats that ``compress list formats`` shows, kind by kind."""

from __future__ import annotations

from collections.abc import Iterator

_FLOATS = ("FP8_E4M3", "FP8_E5M2", "FP6_E3M2", "FP6_E2M3", "FP4_E2M1", "FP4_E1M2", "FP4_E3M0")


def _names() -> Iterator[str]:
    for bits in (2, 3, 4, 5, 6, 7, 8):
        for act in ("A16", "A8"):
            for symmetric in ("", "_ASYM"):
                yield from (f"W{bits}{act}{symmetric}_G{size}" for size in (32, 64, 128))
    for bits in (4, 8):
        for act in ("A16", "A8"):
            for symmetric in ("", "_ASYM"):
                yield from (f"W{bits}{act}{symmetric}{suffix}" for suffix in ("_C", "_T"))
    yield from (f"{name}{suffix}" for name in _FLOATS for suffix in ("_G32", "_G64", "_G128", "_C"))
    yield from ("NF4_G32", "NF4_G64", "NF4_G128", "NVFP4", "MXFP4")
    yield from (f"MX{name}" for name in _FLOATS[:4])
    yield from (f"LUT{bits}{suffix}" for bits in (2, 3, 4) for suffix in ("", "_G128", "_S0.45"))
    yield from ("W8A8_B128", "FP8_E4M3_B128", "FP8_E4M3_B128_AFP8_E4M3_AG128")
    yield from (f"BIP{bits}{side}_G128" for bits in range(1, 9) for side in ("A16", "A8"))
    yield from (f"{grid}{side}_G128" for grid in ("BIP2", "BAL2") for side in ("A2", "A4"))
    yield from ("BIP1A1_G128", "BAL1A16_G128", "BAL1A8_G128", "BAL2A16_G128", "BAL2A8_G128", "BIP4A4_G128")
    yield from ("W4A4_G128", "W6A6_G128", "W8A8_STATIC", "W4A8_G128_AG128", "W4A4_G128_AG128", "W4AFP8_E4M3_G128")
    yield from ("FP8_E4M3_AFP8_E4M3", "FP8_E4M3_AFP8_E4M3_STATIC", "FP8_E5M2_AFP8_E5M2")
    yield from ("FP4_E2M1_G128_AFP4_E2M1_STATIC", "MXFP4_AMXFP4", "MXFP6_E2M3_AMXFP6_E2M3", "MXFP8_E4M3_AMXFP8_E4M3")
    yield from ("NVFP4_ANVFP4", "W8A8_B16x1@80", "W8A16_B16x1@80", "W4A8_G64_B16x1@80", "W4A16_G64_B16x1@80")


PRESETS = tuple(_names())
"""In the order in which they are shown."""
