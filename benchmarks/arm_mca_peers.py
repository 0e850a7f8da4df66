"""Model the inner loops of others' kernels for ARM with llvm-mca, as benchmarks/arm_mca.py models ours.

    python benchmarks/arm_mca_peers.py --kleidiai DIR --xnnpack DIR --llama DIR [FILE.md]

The folders are their source trees; FILE.md is benchmarks/results/arm_mca_peers.md where it is not given.  Needs
Debian's g++-aarch64-linux-gnu and llvm-19.  A source in C is compiled by this GCC with -O3.  The loop without another
in it that has most products is taken, of a file or of a function.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from arm_mca import CORES, PRODUCTS, Loop, bound, counts, linear, modelled

from compressor.codegen.neon import DOTPROD, I8MM

RESULTS = Path(__file__).parent / "results" / "arm_mca_peers.md"
_KAI = "kai/ukernels/matmul/matmul_clamp_f32_"
_XNN = "src/qd8-f32-"
_GGML = "ggml/src/ggml-cpu/arch/arm/"


@dataclass(frozen=True)
class Peer:
    """A kernel of another project.

    Attributes:
        project, source: its tree and file.
        ours: the format of ours that stores and computes most nearly the same.
        tokens: as of :class:`arm_mca.Loop`.
        function: of several in one file, else empty.
    """

    project: str
    source: str
    level: str
    ours: str
    tokens: str
    function: str = ""


def _kai(kind: str, name: str, level: str, ours: str, tokens: str) -> Peer:
    return Peer("kleidiai", f"{_KAI}{kind}/kai_matmul_clamp_f32_{name}", level, ours, tokens)


PEERS = [
    _kai("qai8dxp_qsi8cxp", "qai8dxp1x4_qsi8cxp4x4_1x4_neon_dotprod_asm.S", "dotprod", "W8A8", "1"),
    _kai("qai8dxp_qsi8cxp", "qai8dxp4x4_qsi8cxp4x4_16x4_neon_dotprod.c", "dotprod", "W8A8", "prompt"),
    _kai("qai8dxp_qsi8cxp", "qai8dxp4x8_qsi8cxp4x8_16x4_neon_i8mm_asm.S", "i8mm", "W8A8", "prompt"),
    _kai("qai8dxp_qsi4c32p", "qai8dxp1x8_qsi4c32p8x8_1x8x32_neon_dotprod_asm.S", "dotprod", "W4A8_G32", "1"),
    _kai("qai8dxp_qsi4c32p", "qai8dxp4x4_qsi4c32p4x4_16x4_neon_dotprod_asm.S", "dotprod", "W4A8_G32", "prompt"),
    _kai("qai8dxp_qsi4c32p", "qai8dxp4x8_qsi4c32p4x8_16x4x32_neon_i8mm_asm.S", "i8mm", "W4A8_G32", "prompt"),
    *(
        Peer("xnnpack", f"{_XNN}{kind}-gemm/gen/qd8-f32-{kind}-gemm-{name}", level, ours, tokens)
        for kind, name, level, ours, tokens in (
            ("qc8w", "1x16-minmax-asm-aarch64-neondot-ld128.S", "dotprod", "W8A8", "1"),
            ("qc8w", "4x16c4-minmax-asm-aarch64-neondot-ld128.S", "dotprod", "W8A8", "prompt"),
            ("qc8w", "8x16c4-minmax-neondot.c", "dotprod", "W8A8", "prompt"),
            ("qc8w", "8x16c8-minmax-neoni8mm.c", "i8mm", "W8A8", "prompt"),
            ("qb4w", "1x16c4-minmax-neondot.c", "dotprod", "W4A8_G32", "1"),
            ("qb4w", "4x16c4-minmax-neondot.c", "dotprod", "W4A8_G32", "prompt"),
            ("qb4w", "4x16c8-minmax-neoni8mm.c", "i8mm", "W4A8_G32", "prompt"),
        )
    ),
    *(
        Peer("llama", _GGML + source, level, ours, tokens, function)
        for source, function, level, ours, tokens in (
            ("quants.c", "ggml_vec_dot_q8_0_q8_0", "dotprod", "W8A8_G32", "1"),
            ("quants.c", "ggml_vec_dot_q4_0_q8_0", "dotprod", "W4A8_G32", "1"),
            ("repack.cpp", "ggml_gemv_q4_0_4x4_q8_0", "dotprod", "W4A8_G32", "1"),
            ("repack.cpp", "ggml_gemm_q4_0_4x4_q8_0", "dotprod", "W4A8_G32", "prompt"),
            ("repack.cpp", "ggml_gemm_q4_0_4x8_q8_0", "i8mm", "W4A8_G32", "prompt"),
        )
    ),
]
ISAS = {"dotprod": DOTPROD, "i8mm": I8MM}
MARCH = {"dotprod": "armv8.2-a+dotprod+fp16", "i8mm": "armv8.2-a+dotprod+fp16+i8mm"}


def disassembled(peer: Peer, tree: Path, work: Path) -> str:
    """Compile or assemble a source, and return its instructions."""
    includes = ["", "src", "include", "ggml/include", "ggml/src", "ggml/src/ggml-cpu"]
    compiler = "aarch64-linux-gnu-g++" if peer.source.endswith("cpp") else "aarch64-linux-gnu-gcc"
    (work / "pthreadpool.h").write_text(
        "typedef struct pthreadpool* pthreadpool_t;\n"
    )  # all that XNNPACK's header asks
    folders = [f"-I{work}", *(f"-I{tree / name}" for name in includes)]
    command = [compiler, "-O3", "-w", f"-march={MARCH[peer.level]}", *folders]
    subprocess.run([*command, "-c", str(tree / peer.source), "-o", str(work / "peer.o")], check=True)
    dump = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(work / "peer.o")]
    return subprocess.run(dump, capture_output=True, text=True, check=True).stdout


def loops(text: str, function: str) -> Iterator[list[str]]:
    """Yield the instructions of each loop without another in it, of the functions whose name begins so."""
    for part in re.split(r"\n(?=[0-9a-f]{16} <)", text):
        named = re.match(r"[0-9a-f]{16} <(?:_Z\d+)?(\w+)", part)
        if named is None or not named[1].startswith(function):
            continue
        lines = [(int(at, 16), line.split("//")[0].strip()) for at, line in re.findall(r"\n *([0-9a-f]+):\t(.+)", part)]
        back = [
            (int(found[1], 16), at)
            for at, line in lines
            if (found := re.match(r"(?:b\.\w+|cbn?z|tbn?z)\s.*?\b([0-9a-f]+) <", line)) and int(found[1], 16) < at
        ]
        for first, last in back:
            if not any(first <= other and end < last for other, end in back):
                yield [re.sub(r"[0-9a-f]+ <.*>", ".L0", line) for at, line in lines if first <= at <= last]


def peer_loop(peer: Peer, tree: Path) -> Loop:
    """Return the loop of a peer's kernel that has most products."""
    with tempfile.TemporaryDirectory() as work:
        text = disassembled(peer, tree, Path(work))
    isa = ISAS[peer.level]
    found = [Loop(peer.project, peer.tokens, isa, "", loop) for loop in loops(text, peer.function)]
    # KleidiAI has the same loop twice, for groups of 32 with their scales inside
    best = max(found, key=lambda loop: (loop.products, counts(loop.lines)["scvtf"]))
    product = max((name for name in PRODUCTS if name in counts(best.lines)), key=lambda name: counts(best.lines)[name])
    return Loop(Path(peer.source).stem + f" {peer.function}".rstrip(), peer.tokens, isa, product, best.lines)


def table(trees: dict[str, Path]) -> str:
    """Model every loop on the cores of its level, beside ours of the same level, format and tokens."""
    rows = []
    own = {
        (level, name, loop.tokens): loop
        for level, isa in ISAS.items()
        for name in dict.fromkeys(peer.ours for peer in PEERS)
        for loop in linear(name, isa)
    }
    for peer in PEERS:
        loop, ours = peer_loop(peer, trees[peer.project]), own[peer.level, peer.ours, peer.tokens]
        for core in CORES[peer.level]:
            rate, other = (one.products / modelled(one.lines, one.isa, core) for one in (ours, loop))
            most, theirs = bound(loop.isa, loop.product, core), f"`{loop.family}` ({loop.product})"
            cells = core, f"{peer.ours}, {peer.tokens}", rate, theirs, other, most, rate / other
            rows.append(f"| {' | '.join(cell if isinstance(cell, str) else f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(sorted(rows)) + "\n"


_HEADING = """\
# Inner loops for ARM beside others', modelled

Made by `python benchmarks/arm_mca_peers.py`: multiply-accumulates a cycle, by llvm-mca 19, every load a hit, as in
[arm_mca.md](arm_mca.md); evidence: modelled. Loops are those of KleidiAI (`kai_...`), XNNPACK (`qd8-...`) and llama.cpp
(a source and a function); GCC 12 compiled sources in C with -O3. Each is beside our kernel of the level, format and
number of tokens that are most nearly the same. Instructions outside the innermost loop are not counted. Scales of
groups of 32 are inside for our prompts, KleidiAI's prompts and all of llama.cpp. They are outside for one token in ours
and KleidiAI's, and for XNNPACK, which looks better by that.

| core | ours, tokens | rate | theirs | rate | bound of theirs | ours over theirs |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for project in ("kleidiai", "xnnpack", "llama"):
        parser.add_argument(f"--{project}", type=Path, required=True)
    parser.add_argument("markdown", type=Path, nargs="?", default=RESULTS)
    options = parser.parse_args()
    text = table({name: getattr(options, name) for name in ("kleidiai", "xnnpack", "llama")})
    options.markdown.write_text(_HEADING + text)
    print(text)


if __name__ == "__main__":
    main()
