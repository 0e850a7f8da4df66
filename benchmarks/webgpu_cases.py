"""Write the kernels for browsers, and what they should compute, for a machine with a graphics processor.

    python benchmarks/webgpu_cases.py FOLDER BUNDLE

FOLDER is what benchmarks/webgpu_device.py reads there; BUNDLE is a web bundle of the reference model.  Linears of all
formats come with the outputs that PyTorch computes, the bundle with logits of a software adapter.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compressor.codegen.web import execute_webgpu as gpu
from compressor.codegen.web.kernels.activations import Rounded, round_activations
from compressor.codegen.web.kernels.attention import cached_attention
from compressor.codegen.web.kernels.packed_linear import packed_linear, stored_parts, supports
from compressor.codegen.web.session import WebBundle
from compressor.formats.format import FORMATS, Format
from tests.support.kernel_cases import OPS, random_packed

TIMED = ("W4A16_G128", "W8A16", "NF4_G64", "W8A8", "W4A8_G128")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
TOKENS = (1, 64)
ROWS, COLUMNS, FIVE = 77, 200, 5  # of the linears that are compared
PROMPT = 32


def linear_check(name: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Make a linear of a ragged shape for five tokens; what rounds its activations comes as a kernel of its own."""
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(len(name))
    packed = random_packed(fmt, ROWS, COLUMNS, rng)
    x = torch.randn(1, FIVE, COLUMNS, generator=rng)
    expected = OPS.packed_linear(x, list(packed.parts.values()), None, name, COLUMNS, ROWS)
    rounding, given = None, [x.numpy()]
    if fmt.activations is not None:
        kernel = round_activations(COLUMNS, fmt)
        given += [packed.parts["input_scale"].numpy()] if "input_scale" in packed.parts else []
        outputs: list[tuple[str, list[int]]] = [("float32", [1, FIVE, COLUMNS])]
        if fmt.integer_products:
            layout = Rounded.of(COLUMNS, fmt)
            outputs = [("int32", [FIVE, layout.words]), ("float32", [FIVE, layout.numbers])]
        rounding = {"records": {kernel.name: kernel.record()}, "outputs": outputs, "inputs": len(given)}
    given += [packed.parts[part].numpy() for part in stored_parts(fmt)]
    for i, array in enumerate(given):
        arrays[f"{name}_{i}"] = np.ascontiguousarray(array)
    arrays[f"{name}_expected"] = expected.numpy()
    records = {kernel.name: kernel.record() for kernel in packed_linear(ROWS, COLUMNS, fmt, False)}
    return {"name": name, "records": records, "rounding": rounding, "inputs": len(given), "rows": ROWS}


def timed_linear(name: str, rows: int, columns: int) -> dict[str, Any]:
    """Describe a linear without its content, which is random where it is timed."""
    fmt = Format.parse(name)
    kinds = fmt.parts(rows, columns)
    layout = Rounded.of(columns, fmt) if fmt.integer_products else None
    inputs = [("float32", columns)] if layout is None else [("int32", layout.words), ("float32", layout.numbers)]
    kernels = packed_linear(rows, columns, fmt, False)
    return {
        "name": f"{name} {rows}x{columns}",
        "kernels": {tokens: kernel.record() for tokens, kernel in zip(TOKENS, kernels, strict=True)},
        "inputs": inputs,
        "weights": [(kinds[part][0], list(kinds[part][1])) for part in stored_parts(fmt)],
        "out": rows,
        "products": rows * columns,
    }


def timed_attention() -> dict[str, Any]:
    """Describe the attention of one query of 32 heads to 8,192 stored tokens of 8 heads of 128."""
    heads, kv_heads, width, context = 32, 8, 128, 8192
    kernel = cached_attention(heads, kv_heads, width, width**-0.5, 0, 0.0, False)[0]
    return {
        "name": f"attention {heads}/{kv_heads}x{width}, {context} tokens",
        "attention": {"buffers": [b.name for b in kernel.buffers], "context": context},
        "kernels": {1: kernel.record()},
        "shape": [heads, kv_heads, width],
        "products": 2 * heads * width * context,
    }


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("bundle", type=Path)
    given = parser.parse_args()
    if not gpu.is_software():
        sys.exit("a machine without a graphics processor makes the reference: here, kernels would check themselves")
    given.folder.mkdir(parents=True)
    arrays: dict[str, NDArray[Any]] = {}
    checks = [linear_check(name, arrays) for name, fmt in FORMATS.items() if not supports(fmt)]
    timed = [timed_linear(name, *shape) for name in TIMED for shape in SHAPES] + [timed_attention()]
    is_needless = shutil.ignore_patterns("*.js", "*.wasm", "*.html", "vendor")
    shutil.copytree(given.bundle, given.folder / "bundle", ignore=is_needless)
    ids = np.arange(PROMPT)[None] * 7 % 1000
    logits = WebBundle(given.bundle).session(1, 64).step(ids, np.arange(PROMPT))
    np.savez_compressed(given.folder / "arrays.npz", bundle_ids=ids, bundle_logits=logits, **arrays)
    (given.folder / "cases.json").write_text(json.dumps({"checks": checks, "timed": timed}))
    print(f"{len(checks)} formats to compare, {len(timed)} kernels to time")


if __name__ == "__main__":
    main()
