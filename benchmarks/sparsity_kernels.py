"""Time linears with blocks left out against dense ones, ours and others', in one run, by turns.

    python benchmarks/sparsity_kernels.py [--threads 1] [--rounds 9] [--shapes 4096x4096,2048x2048] [--isa NAME]
        [--peers SITE_PACKAGES ...] [--libxsmm FOLDER] [--json FILE] [--markdown FILE]

One token is timed with weights from memory: a turn goes through copies of 128 MB together, and all others take turns
before they are read again.  Prompts have 128 tokens and one copy.  Every contender takes a turn in each round and its
shortest turn counts; ratios are those of these.  Beside a figure stand its bound, the larger of its bytes at the best
bandwidth and its products at the best rate that anything reached in the same run, and the fraction of the bound that
was reached.  Prints Markdown, with the CPU, the instruction set, and the load average before and after.  Peers that are
not installed here are looked for in the folders of ``--peers``.  LIBXSMM is built by hand (benchmarks/peers/README.md);
it has one thread, and of other numbers of tokens beside each other the quicker one counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from compressor_runtime import configure_threads
from peers.libxsmm import Product
from peers.libxsmm import load as load_libxsmm

from compressor.codegen.kernels.linear import packed as packed_linear
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets.x86 import ISAS, X86
from compressor.formats.extras import ColumnBlocks
from compressor.formats.format import Format
from compressor.formats.packing import leave_out
from compressor.host.machine import cpu_name
from compressor.numerics.nearest import rtn_quantize
from compressor.numerics.sparsity.block_sparsity import largest_blocks

SPARSITIES = (70, 80, 90, 95)
SHAPES = ("4096x4096", "2048x2048", "512x2048", "5632x2048", "2048x5632")  # the last four are the 852 M Llama's
TOKENS, WORKING_SET_BYTES, LARGE_BYTES = 128, 128 << 20, 512 << 20
MOST_SESSIONS = 16  # of a peer that takes long to make one: small weights are then in its caches, which favours it
DENSE = ("W8A8", "W4A8_G128")
TILES = "W8A8_B32x64"  # blocks that AMX skips
LIBXSMM_BLOCKS, LIBXSMM_PACKED = ((16, 4), (32, 64)), (16, 32)  # 64 and 128 are wrong in LIBXSMM's own sample too


@dataclass(frozen=True)
class Contender:
    """One way to compute a linear.

    Attributes:
        calls: calls with different copies of the weight.
        bytes: of the weight.
        share: of the dense products that are computed.
    """

    name: str
    calls: list[Callable[[], Any]]
    bytes: int
    share: float


def ours(name: str, rows: int, columns: int, tokens: int, isa: Any) -> Iterator[Contender]:
    """Our kernel for a format: each of the schedules that the tuner would try first, as contenders of one name."""
    fmt, rng = Format.parse(name), torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=rng)
    if (blocks := fmt.extra(ColumnBlocks)) is not None:
        kept = largest_blocks(weight, None, fmt.stored_columns(columns), blocks)
        part = torch.randn(rows, kept.shape[1], generator=rng)
        packed = leave_out(rtn_quantize(part, fmt.of_kept), kept, columns, blocks)
    else:
        packed = rtn_quantize(weight, fmt)
    tiles = -(-rows // 16)
    firsts = packed_linear.gemv_space(tiles, fmt, isa)[:3]
    space = firsts if tokens == 1 else packed_linear.gemm_space(tiles, firsts[0].gemv_tiles, fmt, isa)[:4]
    x = tvm.runtime.tensor(np.random.default_rng(0).standard_normal((1, tokens, columns)).astype("float32"))
    y = tvm.runtime.tensor(np.zeros((1, tokens, rows), "float32"))
    copies = copies_of(packed.nbytes, tokens)
    operands = [[tvm.runtime.tensor(part.numpy()) for part in packed.parts.values()] for _ in range(copies)]
    for schedule in space[:1] if fmt.extras and tokens > 1 else space:
        func = packed_linear.packed_linear(rows, columns, fmt, False, isa, schedule)
        module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
        kernel = tvm.compile(module, target=X86().tvm_target(isa), tir_pipeline=PIPELINE)["kernel"]
        calls = [lambda parts=parts, kernel=kernel: kernel(x, *parts, y) for parts in operands]  # type: ignore[misc]
        yield Contender(name, calls, packed.nbytes, fmt.stored_columns(columns) / columns)


def others(rows: int, columns: int, tokens: int, sparsity: int) -> Iterator[Contender]:
    """torch's int8 product (dense), scipy's CSR in float32, and ONNX Runtime's dynamic int8, where they are there."""
    rng = np.random.default_rng(1)
    dense = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
    if sparsity == 0:
        x8 = torch.from_numpy(rng.integers(-127, 128, (max(tokens, 32), columns)).astype(np.int8))
        turned = [torch.from_numpy(dense).t().contiguous() for _ in range(copies_of(dense.nbytes, tokens))]
        name = "torch _int_mm, int8 in, int32 out" + (", 32 tokens" if tokens == 1 else "")
        yield Contender(name, [lambda w=w: torch._int_mm(x8, w) for w in turned], dense.nbytes, 1.0)  # type: ignore[misc]
        yield from onnx_runtime(dense, tokens)
        yield from openvino(dense, tokens)
        return
    try:
        from scipy import sparse
    except ImportError:
        say("scipy is not installed: no CSR")
        return
    blocks = np.repeat(rng.random((-(-rows // 16), columns)) * 100 >= sparsity, 16, axis=0)[:rows]
    x = rng.standard_normal((columns, tokens)).astype(np.float32)
    csr = [
        sparse.csr_matrix((dense * blocks).astype(np.float32)) for _ in range(copies_of(int(blocks.sum()) * 8, tokens))
    ]
    size = csr[0].data.nbytes + csr[0].indices.nbytes + csr[0].indptr.nbytes
    parts = [map(torch.from_numpy, (w.indptr, w.indices, w.data)) for w in csr]
    torch_csr, given = [torch.sparse_csr_tensor(*three, (rows, columns)) for three in parts], torch.from_numpy(x)
    calls = [lambda w=w: w @ given for w in torch_csr]  # type: ignore[misc]
    yield Contender(f"torch CSR float32 {sparsity}%", calls, size, 1 - sparsity / 100)
    yield Contender(f"scipy CSR float32 {sparsity}%", [lambda w=w: w @ x for w in csr], size, 1 - sparsity / 100)  # type: ignore[misc]


def libxsmm(library: Any, rows: int, columns: int, tokens: int, sparsity: int) -> Iterator[Contender]:
    """LIBXSMM's int8 product with blocks that are left out, on activations that are rounded and laid out already."""
    for block in LIBXSMM_BLOCKS:
        kept = rows * columns * (100 - sparsity) // 100
        for packed in (1,) if tokens == 1 else LIBXSMM_PACKED:
            one = Product(library, (rows, columns), tokens, packed, block, sparsity, copies_of(kept, tokens))
            calls = [partial(one, copy) for copy in range(len(one.parts))]
            name = f"LIBXSMM int8 {block[0]}x{block[1]} {sparsity}%"
            yield Contender(name, calls, one.bytes, 1 - sparsity / 100)


def onnx_runtime(dense: np.ndarray[Any, Any], tokens: int) -> Iterator[Contender]:
    """ONNX Runtime with DynamicQuantizeLinear and MatMulInteger, one thread a session as is set for all."""
    try:
        import onnx
        import onnxruntime as ort
        from onnx import TensorProto, helper
    except ImportError as error:
        say(f"no ONNX Runtime: {error}\n")
        return
    rows, columns = dense.shape
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "s"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "linear", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [tokens, columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [tokens, rows])],
        [onnx.numpy_helper.from_array(np.ascontiguousarray(dense.T), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    sessions = [
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for _ in range(min(MOST_SESSIONS, copies_of(dense.nbytes, tokens)))
    ]
    x = np.random.default_rng(0).standard_normal((tokens, columns)).astype(np.float32)
    calls = [lambda s=s: s.run(None, {"x": x}) for s in sessions]  # type: ignore[misc]
    yield Contender("ONNX Runtime MatMulInteger", calls, dense.nbytes, 1.0)


def openvino(dense: np.ndarray[Any, Any], tokens: int) -> Iterator[Contender]:
    """OpenVINO with int8 weights that it decompresses; its sparse decompression needs AMX, and is left off."""
    try:
        import openvino as ov
        from openvino import opset13 as ops
    except ImportError as error:
        say(f"no OpenVINO: {error}\n")
        return
    rows, columns = dense.shape
    given = ops.parameter([tokens, columns], np.float32)
    weight = ops.multiply(
        ops.convert(ops.constant(dense), np.float32), ops.constant(np.full((rows, 1), 0.01, np.float32))
    )
    model = ov.Model([ops.matmul(given, weight, False, True)], [given])
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    x = np.random.default_rng(0).standard_normal((tokens, columns)).astype(np.float32)
    requests = [
        ov.compile_model(model, "CPU", settings).create_infer_request()
        for _ in range(min(MOST_SESSIONS, copies_of(dense.nbytes, tokens)))
    ]
    calls = [lambda r=r: r.infer([x], share_inputs=True) for r in requests]  # type: ignore[misc]
    yield Contender("OpenVINO, int8 weights", calls, dense.nbytes, 1.0)


LINES: list[str] = []


def say(line: str) -> None:
    """Print a line of the report, and keep it."""
    print(line, flush=True)
    LINES.append(line)


def race(contenders: list[Contender], rounds: int) -> dict[str, float]:
    """Return the shortest seconds of a call of each name; all take turns."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for contender in contenders:
            begin = time.perf_counter()
            for call in contender.calls:
                call()
            took = (time.perf_counter() - begin) / len(contender.calls)
            best[contender.name] = min(best.get(contender.name, took), took)
    return best


def copies_of(size: int, tokens: int) -> int:
    """Return how many copies of a weight a turn goes through."""
    return max(1, WORKING_SET_BYTES // size) if tokens == 1 else 1


def bandwidth(threads: int) -> float:
    """Return bytes a second that summing a large array reads, the best of several."""
    torch.set_num_threads(threads)
    large, best = torch.ones(LARGE_BYTES // 8, dtype=torch.int64), 0.0
    for _ in range(5):
        begin = time.perf_counter()
        large.sum()
        best = max(best, large.nbytes / (time.perf_counter() - begin))
    return best


def table(shape: str, tokens: int, rounds: int, isa: Any, read: float, library: Any) -> list[dict[str, Any]]:
    """Time all contenders for one shape, and print them."""
    rows, columns = map(int, shape.split("x"))
    names = [*DENSE, *(f"{name}_B16x1@{sparsity}" for name in DENSE for sparsity in SPARSITIES)]
    names += [f"{TILES}@{sparsity}" for sparsity in SPARSITIES]
    contenders = [one for name in names for one in ours(name, rows, columns, tokens, isa)]
    contenders += [one for sparsity in (0, *SPARSITIES) for one in others(rows, columns, tokens, sparsity)]
    if library is not None:
        contenders += [one for sparsity in SPARSITIES for one in libxsmm(library, rows, columns, tokens, sparsity)]
    best, known = race(contenders, rounds), {one.name: one for one in contenders}
    read = max(read, *(one.bytes / best[one.name] for one in contenders)) if tokens == 1 else read
    dense = 2 * rows * columns * tokens
    peak = max(known[name].share * dense / best[name] for name in names) if tokens > 1 else math.inf
    say(f"\n### {shape}, {tokens} token{'s' * (tokens > 1)}\n")
    say("| | ms | times dense W8A8 | times dense W4A8 | bound ms | reached |\n|---|---|---|---|---|---|")
    found = []
    for name, seconds in best.items():
        one = known[name]
        bound = max(one.bytes / read, one.share * dense / peak)
        ratios = [best[plain] / seconds for plain in DENSE]
        cells = [f"{1e3 * seconds:.3f}", *(f"{ratio:.2f}" for ratio in ratios), f"{1e3 * bound:.3f}"]
        say(f"| {name} | {' | '.join(cells)} | {bound / seconds:.0%} |")
        found.append({"shape": shape, "tokens": tokens, "name": name, "seconds": seconds, "bound": bound})
    return found


def main() -> None:
    """Time all shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--isa", default=X86().resolve().name, choices=list(ISAS))
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders of packages, behind our own")
    parser.add_argument("--libxsmm", type=Path, metavar="FOLDER", help="of its sources, where it is built")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if args.libxsmm is not None and args.threads != 1:
        parser.error("--libxsmm has one thread; give --threads 1")
    sys.path += map(str, args.peers)
    say("# Linears with blocks left out\n")
    say(f"`python benchmarks/sparsity_kernels.py --threads {args.threads} --rounds {args.rounds} --isa {args.isa}`\n")
    torch.set_num_threads(args.threads)
    configure_threads(args.threads)
    read, isa = bandwidth(args.threads), ISAS[args.isa]
    at = f"{cpu_name()}, {isa.name}, {args.threads} thread(s)"
    say(f"{at}, reads {read / 1e9:.1f} GB/s, load average {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as work:
        library = None if args.libxsmm is None else load_libxsmm(args.libxsmm, Path(work))
        if library is not None:
            say(f"LIBXSMM generates code for {library.target().decode()}.")
        found = [
            row
            for shape in args.shapes.split(",")
            for tokens in (1, TOKENS)
            for row in table(shape, tokens, args.rounds, isa, read, library)
        ]
    say(f"\nLoad average at the end: {os.getloadavg()[0]:.2f}")
    if args.markdown:
        args.markdown.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
