"""Count the instructions of a token under emulation: this project's bundles beside llama.cpp, level by level.

    python benchmarks/arm_instructions.py --llama DIR --work DIR [FILE.md]

The first folder is llama.cpp's source tree, the second keeps what is built and counted; FILE.md is
benchmarks/results/arm_instructions.md where it is not given.  Needs CMake, Ninja, Debian's g++-aarch64-linux-gnu and
qemu-user-static.

QEMU logs each block of instructions when it translates it (`-d in_asm`) and each time that it runs (`-d exec`, with
`nochain` so that none is left out): every block's length times its runs is exact, and needs no plugin, which Debian's
QEMU 7.2 is built without.  A token's instructions are the difference of two runs that differ by tokens only.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from bundles import write_bundle
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.codegen.targets.arm import EMULATED
from compressor.data.text import load_evaluation
from compressor.evaluate.quality import GraphLogits
from compressor.export.exchange.bundle_graph import bundle_graph
from compressor.export.exchange.job import export_bundle
from compressor.export.foreign.gguf import FILE_NAME, Gguf
from compressor.recipe.recipe import Recipe

RESULTS = Path(__file__).parent / "results" / "arm_instructions.md"
REFERENCE = Path(__file__).parents[1] / "models" / "reference"
NATIVE = Path(__file__).parents[1] / "export" / "native"
FORMATS = ("W4A16_G32", "W4A8_G32", "W8A16_G32", "W8A8")
PEERS = {"Q4_0": "W4A16_G32", "Q8_0": "W8A16_G32"}
"""llama.cpp's types, and the bundle that each is an export of: the same weights."""
ARCHITECTURES = {"neon": "armv8-a", "dotprod": "armv8.2-a+dotprod", "i8mm": "armv8.6-a+i8mm"}
TEXT = {"model": "reference", "passes": [], "evaluation": {"text": "python_docs_heldout.txt", "tokens": 256}}
TOKENS, PROMPT = 8, 64
"""Tokens that a run generates, and of its prompt; the other run generates twice as many."""
FIRST, LAST = "<!-- table -->\n", "<!-- end -->\n"
HEAD = """\
| level | what | instructions a token, millions | greedy tokens as PyTorch's |
|---|---|---|---|
"""
_OFF = ("LLAMA_BUILD_COMMON", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER",
        "LLAMA_BUILD_APP", "LLAMA_OPENSSL", "GGML_NATIVE", "GGML_OPENMP", "GGML_CCACHE")  # fmt: skip
_PIPE_BYTES = 1 << 20
_TRANSLATED = re.compile(rb"^IN: [^\n]*\n((?:0x[^\n]*\n)+)", re.M)
_EXECUTED = re.compile(rb"Trace [^/]*/([0-9a-f]+)/[0-9a-f]+/([0-9a-f]+)")
"""A block's address, and its flags, of which nine bits limit its length where it must end early."""


@dataclass(frozen=True)
class Run:
    """An emulated process: its instructions, and the token ids that it wrote."""

    instructions: int
    ids: list[int]


def counted(cpu: str, command: Sequence[str], libraries: str = "") -> Run:
    """Run a program of aarch64 under QEMU and count its instructions.

    Raises:
        RuntimeError: it failed, or code changed too much to tell.
    """
    here, there = os.pipe()
    fcntl.fcntl(there, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    emulator = ["qemu-aarch64-static", "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu"]
    emulator += ["-E", f"LD_LIBRARY_PATH={libraries}", "-d", "exec,nochain,in_asm", "-D", f"/dev/fd/{there}"]
    process = subprocess.Popen(
        [*emulator, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[there]
    )
    os.close(there)
    runs, lengths = Counter[bytes](), defaultdict[int, set[int]](set)
    for piece in _pieces(here):
        runs.update(piece.split(b"\n"))  # a block's lines are alike
        for block in _TRANSLATED.findall(piece) if b"IN: " in piece else ():
            lengths[int(block[2 : block.index(b":")], 16)].add(block.count(b"\n"))
    out, said = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} on {cpu}: exit code {process.returncode}: {said[-500:]}")
    total, doubt = 0, 0
    for line, count in runs.items():
        if executed := _EXECUTED.match(line):
            found, most = lengths[int(executed[1], 16)], int(executed[2], 16) % 512  # CF_COUNT_MASK
            total += count * (most or max(found))
            doubt += 0 if most else count * (max(found) - min(found - {1} or found))
    if doubt > total / 1000:
        raise RuntimeError(f"{command[0]}: blocks at one address have several lengths: {doubt} of {total} instructions")
    return Run(total, [int(token) for token in out.split(",")])


def _pieces(log: int) -> Iterator[bytes]:
    """Yield a log in pieces that end with a line of a block that is executed."""
    rest = b""
    with open(log, "rb", buffering=0) as stream:
        while chunk := stream.read(_PIPE_BYTES):
            time.sleep(0.02 if len(chunk) < _PIPE_BYTES // 2 else 0)  # not to be woken for each line
            rest += chunk
            whole = rest.rfind(b"\n") + 1
            if (last := rest.rfind(b"\nTrace ", 0, whole - 1)) >= 0:
                end = rest.find(b"\n", last + 1) + 1
                yield rest[:end]
                rest = rest[end:]
    yield rest


def make_bundle(name: str, folder: Path) -> None:
    """Compress the reference model to one format for all levels of ARM, its tables to eight bits."""
    passes = [{"rtn": {"scheme": name, "targets": "Linear", "ignore": ["lm_head"]}}, {"embedding": {"scheme": "W8A16"}}]
    recipe = Recipe.from_dict({"model": "reference", "passes": passes, "tune": "off", "target": "arm"})
    write_bundle(capture(REFERENCE), recipe, None, folder, threads=1)


def build_runner(work: Path) -> Path:
    """Build the C++ runner for aarch64."""
    options = [f"-DCMAKE_TOOLCHAIN_FILE={NATIVE / 'aarch64-linux.cmake'}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-S", NATIVE, "-B", work / "runner", *options], check=True)
    subprocess.run(["cmake", "--build", work / "runner"], check=True)
    return work / "runner" / "compressor_run"


def build_llama(source: Path, work: Path) -> Path:
    """Build llama.cpp with kernels for each level, and the program that calls it; return the program.

    A level's libraries come to lie in ``work/<level>``: of these, libggml-cpu.so has the kernels.
    """
    for level, architecture in ARCHITECTURES.items():
        if (work / level).is_dir():
            continue
        options = [f"-D{name}=OFF" for name in _OFF] + ["-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_TYPE=Release"]
        options += [f"-DCMAKE_TOOLCHAIN_FILE={NATIVE / 'aarch64-linux.cmake'}", f"-DGGML_CPU_ARM_ARCH={architecture}"]
        subprocess.run(["cmake", "-G", "Ninja", "-S", source, "-B", work / "llama", *options], check=True)
        subprocess.run(["cmake", "--build", work / "llama", "--target", "llama"], check=True)
        shutil.copytree(work / "llama" / "bin", work / level, symlinks=True)
    program = work / "llama_tokens"
    include = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
    libraries = [f"-L{work / 'neon'}", "-lllama", "-lggml", "-lggml-cpu", "-lggml-base"]
    text = Path(__file__).parent / "peers" / "llama_tokens.cpp"
    compiler = ["aarch64-linux-gnu-g++", "-std=c++17", "-O2", *include, str(text), "-o", str(program)]
    subprocess.run([*compiler, *libraries, f"-Wl,-rpath-link,{work / 'neon'}"], check=True)
    return program


def likeliest(graph: GraphModule, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt with PyTorch."""
    logits, ids = GraphLogits(graph), list(prompt)
    for _ in range(count):
        ids.append(int(torch.as_tensor(logits(torch.tensor([ids]).numpy()))[0, -1].argmax()))
    return ids[len(prompt) :]


def agreeing(ids: list[int], expected: list[int]) -> int:
    """Count the tokens before the first that differs."""
    pairs = enumerate(zip(ids, expected, strict=True))
    return next((place for place, (one, other) in pairs if one != other), len(expected))


def prepared(work: Path) -> list[int]:
    """Make what is missing of bundles, GGUF files and PyTorch's texts; return the text's token ids."""
    text, _ = load_evaluation(Recipe.from_dict(TEXT).evaluation, None, REFERENCE, 2048)
    ids: list[int] = text.tolist()
    for name in FORMATS:
        if not (work / name).is_dir():
            make_bundle(name, work / name)
        if not (work / f"{name}.json").is_file():
            likely = likeliest(bundle_graph(work / name), ids[:PROMPT], 2 * TOKENS)
            (work / f"{name}.json").write_text(json.dumps(likely))
    for kind, name in PEERS.items():
        if not (work / kind).is_dir():
            export_bundle(work / name, Gguf(), work / kind, check=False)
    return ids


def row(kind: str, level: str, command: Sequence[str], options: Sequence[str], ids: list[int], work: Path) -> str:
    """Count two runs of a program; return a line of the table.

    Args:
        options: what stands before the number of tokens, behind the prompt.
    """

    def run(count: int) -> Run:
        asked = [*command, ",".join(map(str, ids[:PROMPT])), *options, str(count)]
        return counted(EMULATED[level], asked, str(work / level))

    with ThreadPoolExecutor() as pool:
        short, long = pool.map(run, (TOKENS, 2 * TOKENS))
    token = (long.instructions - short.instructions) / TOKENS / 1e6
    expected = json.loads((work / f"{PEERS.get(kind, kind)}.json").read_text())
    right = f"{agreeing(long.ids, expected)} of {2 * TOKENS}"
    who = f"llama.cpp {kind}" if kind in PEERS else kind
    return f"| {level} | {who} | {token:.2f} | {right} |\n"


def rows(work: Path, source: Path) -> Iterator[str]:
    """Build and run what is missing in ``work``; yield the lines of the table."""
    runner, llama, ids = build_runner(work), build_llama(source, work), prepared(work)
    for level in ARCHITECTURES:
        for kind in (*PEERS, *FORMATS):
            kept = work / f"{level}-{kind}.txt"
            if not kept.is_file():
                theirs, ours = [str(llama), str(work / kind / FILE_NAME)], [str(runner), str(work / kind), "--ids"]
                options = ["--threads", "1", "--speculate", "off", "--max-tokens"]
                command, more = (theirs, []) if kind in PEERS else (ours, options)
                kept.write_text(row(kind, level, command, more, ids, work))
            yield kept.read_text()


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    found = []
    for line in rows(arguments.work.resolve(), arguments.llama.resolve()):
        print(line, end="", flush=True)
        found.append(line)
    before, rest = arguments.results.read_text(encoding="utf-8").split(FIRST)
    arguments.results.write_text(before + FIRST + HEAD + "".join(found) + LAST + rest.split(LAST)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
