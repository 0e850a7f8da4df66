"""Fuzz the readers of untrusted files, guided by coverage: recipes, manifests and packed weights.

A reader may accept an input, or refuse it with an error of its own that has a message.  Everything else is a finding:
another exception, a hang, memory out of proportion, a file opened outside the folder, a process, library or socket.
The seeds are the repository's own recipes and data sets, and a bundle that its own export wrote.

    pip install -e '.[fuzz]'
    python benchmarks/fuzz.py --reader recipe|manifest|weights [--seconds 600] [--findings FOLDER]
    python benchmarks/fuzz.py --reader manifest --input FILE        (one input, such as a finding, once more)

Prints one JSON object; the exit code is 1 when there is a finding, whose input is kept in the folder of findings.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S, LIMIT_BYTES, LARGEST_INPUT_BYTES = 30, 1 << 30, 1 << 16
OPENED_BY_BUNDLES = ("/proc/cpuinfo", "/sys/")
FORBIDDEN = re.compile(
    r"(os\.(system|exec|posix_spawn|fork|spawn|remove|rename|mkdir|chmod|symlink)|subprocess|socket)"
)
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 16, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"), float("inf"),
    "", ".", "..", "../outside", "/etc/passwd", "/dev/zero", "fifo", "loop", "outward", "a\0b", "\ud800", "\x1b[2J",
    "model.so", "./model.so", "lib", "x" * 300, "F32", "U8", "decoder", "module", [], {}, [[]], [0], [1, 2], {"a": 1},
    "W4A16_G128", "re:(.*)*x", "<= 1e999GB", "python_docs", "quickstart", "rtn", "gptq", "base.yaml", "text.txt", "é",
]  # fmt: skip
NUMBERS = [b"0", b"-1", b"1e999", b"1e-400", b"99999999999", b"9" * 400, b"0.5", b"18446744073709551615", b"\xd9\xa4"]
SNIPPETS = [
    b"passes: [rtn: {scheme: W4A16}]\n", b"  - gptq:\n      scheme: W4A16_G64\n", b"extends: base.yaml\n",
    b"calibration: {text: text.txt, samples: 3}\n", b"evaluation: {hub: a/b, split: test}\n", b"seed: 1\n",
    b"gates: {weight_bytes: '<= 3MB'}\n", b"a: &a [*a]\n", b"x: !!python/name:os.system y\n", b"output: ../x\n",
    b"'\\U00110000'", b'"\\ud800"', b"? [a]\n: b\n", b"<<: *a\n", b"%YAML 1.2\n---\n", b"|\n", b">\n",
    b"target: {x86: {isa: avx2}}\n", b"\0passes.0.scheme=W8A8", b"\0seed=3", b"\xef\xbb\xbf",
]  # fmt: skip


class Finding(BaseException):
    """The reader did something that no input may make it do; no reader catches this."""


def make_seeds(reader: str, folder: Path) -> list[bytes]:
    """Fill the folder that the reader works in, and return its first inputs."""
    folder.joinpath("outside").write_text("beside the folder of the reader")
    inside = folder / "inside"
    if reader == "recipe":
        inside.mkdir()
        shipped = [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "calibration").glob("*.yaml")]
        pages = [ROOT / "README.md", ROOT / "docs" / "recipes.md"]
        blocks = [m.encode() for page in pages for m in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
        (inside / "base.yaml").write_bytes((ROOT / "recipes" / "quickstart.yaml").read_bytes())
        (inside / "text.txt").write_text("some text\n")
        seeds = [file.read_bytes() for file in sorted(shipped)] + blocks
        seeds += [
            seeds[0] + b"\0passes.0.ignore=[a, b]\0seed=7",
            b"extends: base.yaml\npasses: [rtn: {scheme: W8A8}]\n",
        ]
    else:
        make_bundle(inside)
        seeds = [(inside / {"manifest": "manifest.json", "weights": "weights.safetensors"}[reader]).read_bytes()]
    os.mkfifo(inside / "fifo")  # whoever opens it waits for ever
    (inside / "loop").symlink_to("loop")
    (inside / "outward").symlink_to("../outside")
    return seeds


def make_bundle(folder: Path) -> None:
    """Write a bundle with a packed linear and an embedding, as export does; its libraries are placeholders."""
    import torch

    from compressor.export.bundle import write_bundle
    from compressor.export.facts import BundleFacts
    from compressor.export.native import NativeParts, write_native
    from compressor.export.publish import publishing
    from compressor.formats.format import Format
    from compressor.host.wheels import tvm_runtime
    from compressor.numerics.nearest import rtn_quantize

    random_numbers = torch.Generator().manual_seed(0)
    packed = rtn_quantize(torch.randn(20, 64, generator=random_numbers), Format.parse("W4A16_ASYM_G32"))
    graph = torch.nn.Module()
    tensors = {**packed.parts, "table": torch.ones(40, 8).half()}
    for name, tensor in {**tensors, "bias": torch.ones(5).double()}.items():
        graph.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    library = folder.with_name("library")
    library.write_bytes(b"no library")
    facts = {"vocab_size": 40, "layers": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 64}
    parts = NativeParts(
        name="tiny",
        graph=graph,
        parameters=[*tensors, "bias"],
        library=library,
        vectors={"tolerance": torch.ones(1)},
        kernels=[{"name": "main", "evidence": "executed"}],
        cpu_features=["sse2"],
        tvm_runtime=tvm_runtime("x86_64"),
    )
    described = BundleFacts(
        model={"kind": "decoder", "name": "tiny", "architecture": "Tiny", **facts, "eos_ids": [1], "bos_id": 0},
        recipe={"passes": [{"rtn": {"scheme": "W4A16_ASYM_G32"}}]},
        sites=[{"site": "linear", "format": "W4A16_ASYM_G32", "bytes_before": 5120, "bytes_after": packed.nbytes}],
        dense_weight_bytes=6000,
    )
    with publishing(folder) as partial:
        write_bundle(partial, write_native(partial, parts), described)
    manifest = json.loads((folder / "manifest.json").read_text())
    big = folder / "lib" / "libtvm_runtime.so"  # hashed for every input: a small one will do
    big.write_bytes(b"no library")
    manifest["files"]["lib/libtvm_runtime.so"] = manifest["files"]["model.so"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))


def load_tvm() -> None:
    """Load TVM's own run-time library first, as an import of TVM would, so that the bundle's placeholder is not
    loaded.
    """
    tvm = importlib.util.find_spec("tvm")
    assert tvm is not None and tvm.origin is not None
    ctypes.CDLL(str(Path(tvm.origin).parent / "lib" / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)


def read_recipe(folder: Path, data: bytes) -> None:
    """Read a recipe and overrides, separated by NUL; a recipe that loads must survive a round trip."""
    from compressor.errors import CompressorError
    from compressor.recipe.recipe import Recipe, load_recipe

    text, *overrides = data.split(b"\0")
    (folder / "recipe.yaml").write_bytes(text)
    try:
        recipe = load_recipe(folder / "recipe.yaml", [o.decode(errors="replace") for o in overrides[:3]])
    except CompressorError as error:
        check_message(error)
        return
    plain = recipe.resolved()
    if Recipe.from_dict(plain).resolved() != plain:
        raise Finding("another recipe after a round trip")
    try:
        recipe.check_files()
    except CompressorError as error:
        check_message(error)


def refuses(read: Callable[[Path], object], path: Path) -> bool:
    """Return whether a reader of bundles refuses the path with a printable message."""
    from compressor_runtime import BundleError

    try:
        read(path)
    except BundleError as error:
        check_message(error)
        return True
    return False


def read_manifest(folder: Path, data: bytes) -> None:
    """Read the manifest of a bundle whose other files are whole."""
    from compressor_runtime import load

    from compressor.cli.contents import inspect_path

    (folder / "manifest.json").write_bytes(data)
    refuses(inspect_path, folder)
    if not refuses(load, folder):
        raise Finding("a bundle without a library was loaded")


def read_weights(folder: Path, data: bytes) -> None:
    """Read weights under a manifest that agrees with their hash, as their maker could write it."""
    from compressor_runtime import load, read_safetensors, sha256

    (folder / "weights.safetensors").write_bytes(data)
    if refuses(read_safetensors, folder / "weights.safetensors"):
        return
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["weights.safetensors"] = {"bytes": len(data), "sha256": sha256(folder / "weights.safetensors")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if not refuses(load, folder):
        raise Finding("a bundle without a library was loaded")


def check_message(error: Exception) -> None:
    """Check that an error for the user has a message that is short and printable."""
    message = str(error)
    message.encode()
    if not message.strip() or len(message) > 100_000 or re.search("[\0-\x08\x0b-\x1f]", message):
        raise Finding(f"an unfit message of {len(message)} characters: {message!r:.300}") from error


def mutate_text(data: bytes, choose: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """Move, repeat or drop lines of a recipe, or give them other values."""
    lines = data.splitlines(keepends=True) or [b""]
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(len(lines) + 1)
        kind = choose.randrange(7)
        if kind == 0:
            lines.insert(at, choose.choice(SNIPPETS))
        elif kind == 5 and at < len(lines):
            lines[at] = re.sub(rb"\d+(\.\d+)?", choose.choice(NUMBERS), lines[at], count=1)
        elif kind == 1:
            lines.insert(at, choose.choice(lines or [b""]))
        elif kind == 2 and at < len(lines):
            del lines[at]
        elif kind == 3 and at < len(lines):
            key, colon, _ = lines[at].partition(b":")
            lines[at] = key + colon + b" " + json.dumps(choose.choice(JUNK)).encode() + b"\n"
        elif kind == 4 and at < len(lines):
            lines[at] = b" " * choose.randint(0, 8) + lines[at].lstrip()
        else:
            return mutate(b"".join(lines))
    return b"".join(lines)


def mutate_json(data: bytes, choose: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """Replace, drop, move or nest a value of a JSON text."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate(data)
    for _ in range(choose.randint(1, 3)):
        holder, key = _some_place(content, choose)
        if holder is None:
            return json.dumps(choose.choice(JUNK)).encode()
        kind = choose.randrange(7)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[str(choose.choice([*JUNK, *holder]))] = holder[key] if choose.random() < 0.5 else holder.pop(key)
        elif kind == 2:
            holder[key] = [holder[key]]
        elif kind == 3 and type(holder[key]) is int:
            holder[key] += choose.choice([-1, 1, 8, -8, 64, holder[key], 2**32])
        elif kind == 4:
            other, name = _some_place(content, choose)
            holder[key] = json.loads(json.dumps(other[name])) if other is not None else None
        else:
            holder[key] = copy.deepcopy(choose.choice(JUNK))  # the next mutation may change it in place
    text = json.dumps(content, ensure_ascii=choose.random() < 0.5).encode(errors="surrogatepass")
    return mutate(text) if choose.random() < 0.1 else text


def _some_place(content: Any, choose: random.Random) -> tuple[Any, Any]:
    """Choose a container and a key in it, the deeper the rarer; (None, None) if there is none."""
    holder, key = None, None
    while isinstance(content, dict | list) and content and (holder is None or choose.random() < 0.8):
        holder, key = content, choose.choice(list(content) if isinstance(content, dict) else range(len(content)))
        content = content[key]
    return holder, key


def mutate_weights(data: bytes, choose: random.Random, mutate: Callable[[bytes], bytes]) -> bytes:
    """Change the header of a safetensors file as JSON, its length, or the data after it."""
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    kind = choose.randrange(8)
    if kind == 0 or length > len(data):
        return mutate(data)
    if kind == 1:
        rest = rest[: choose.randrange(len(rest) + 1)] if choose.random() < 0.5 else rest + bytes(choose.randrange(99))
    else:
        header = mutate_json(header, choose, mutate)
    claimed = len(header) if choose.random() < 0.9 else choose.choice([0, 1, len(data), 2**32, 2**63, 2**64 - 1])
    return claimed.to_bytes(8, "little") + header + rest


Mutator = Callable[[bytes, random.Random, Callable[[bytes], bytes]], bytes]


@dataclass(frozen=True)
class Reader:
    """One of the three readers: a function that runs an input in a folder, and one that mutates an input."""

    run: Callable[[Path, bytes], None]
    mutate: Mutator


READERS = {
    "recipe": Reader(read_recipe, mutate_text),
    "manifest": Reader(read_manifest, mutate_json),
    "weights": Reader(read_weights, mutate_weights),
}


class Guard:
    """Guard that makes opening other files, processes and sockets findings, by Python's audit events."""

    def __init__(self, folder: Path, reads_anything: bool) -> None:
        self.folder, self.reads_anything, self.on = str(folder.resolve()), reads_anything, False
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if FORBIDDEN.match(event):
            raise Finding(f"{event} {arguments!r:.300}")
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, writes = os.path.abspath(os.fsdecode(arguments[0])), (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            inside = path.startswith(f"{self.folder}{os.sep}") and not path.endswith(("/fifo", "/outward"))
            known = path.startswith((*OPENED_BY_BUNDLES, sys.prefix, sys.base_prefix, str(ROOT)))
            if not inside and (writes or not (known or self.reads_anything)):
                raise Finding(f"opens {path!r:.300}")


def fuzz(reader: Reader, folder: Path, guard: Guard, arguments: list[str]) -> None:
    """Run libFuzzer, which ends the process."""
    import atheris

    def test(data: bytes) -> None:
        guard.on = True
        try:
            reader.run(folder, data)
        finally:
            guard.on = False

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        choose = random.Random(seed)
        plainly = choose.random() < 0.2
        native = lambda given: bytes(atheris.Mutate(given, max(len(given), most_bytes)))  # noqa: E731
        return (native(data) if plainly else reader.mutate(data, choose, native))[:most_bytes]

    atheris.Setup([sys.argv[0], *arguments], test, custom_mutator=mutate)
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + LIMIT_BYTES, -1))  # a bomb is a MemoryError
    atheris.Fuzz()


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def child(options: argparse.Namespace) -> None:
    """Run the process that fuzzes: instrument, import everything by running the seeds, and start."""
    import atheris

    with atheris.instrument_imports(
        include=["compressor", "compressor_runtime", "yaml"], exclude=["compressor.codegen"]
    ):
        import compressor_runtime  # noqa: F401

        import compressor.cli.catalogue
        import compressor.recipe.recipe  # noqa: F401

    load_tvm()

    points = importlib.metadata.entry_points()  # read from disk for every pass otherwise: nine tenths of the time
    importlib.metadata.entry_points = lambda **wanted: points.select(**wanted)  # type: ignore[assignment]
    reader, folder = READERS[options.reader], options.child / "inside"
    for seed in sorted((options.child / "corpus").iterdir()):
        reader.run(folder, seed.read_bytes())
    guard = Guard(folder, reads_anything=options.reader == "recipe")
    if options.input is not None:
        guard.on = True
        reader.run(folder, options.input.read_bytes())
        return
    limits = [f"-max_total_time={options.seconds}", f"-timeout={LIMIT_S}", f"-max_len={LARGEST_INPUT_BYTES}"]
    limits += ["-rss_limit_mb=4096", "-print_final_stats=1", f"-artifact_prefix={options.findings.resolve()}/"]
    fuzz(reader, folder, guard, [*limits, "-verbosity=1", str(options.child / "corpus")])


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a reader.")
    parser.add_argument("--reader", choices=sorted(READERS), required=True)
    parser.add_argument("--seconds", type=int, default=600, help="how long (default: %(default)s)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="folder (default: %(default)s)")
    parser.add_argument("--input", type=Path, help="run this input only")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options)
        return 0
    options.findings.mkdir(parents=True, exist_ok=True)
    before = set(options.findings.iterdir())
    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch, "corpus")
        corpus.mkdir()
        for number, seed in enumerate(make_seeds(options.reader, Path(scratch))):
            (corpus / f"seed_{number}").write_bytes(seed)
        begin, log = time.monotonic(), options.findings / f"{options.reader}.log"
        with log.open("wb") as stream:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", scratch]
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
        text, seconds = log.read_text(errors="replace"), time.monotonic() - begin
        inputs = len(list(corpus.iterdir()))
    found = sorted(str(file) for file in set(options.findings.iterdir()) - before - {log})
    states = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text) or [("0", "0", "0")]
    summary: dict[str, Any] = {
        "reader": options.reader,
        "seconds": round(seconds),
        "exit_code": code,
        "findings": found,
    }
    for name in ("number_of_executed_units", "average_exec_per_sec", "peak_rss_mb"):
        with contextlib.suppress(IndexError):
            summary[name] = int(re.findall(rf"stat::{name}:\s+(\d+)", text)[-1])
    summary |= dict(zip(("edges", "features", "corpus"), map(int, states[-1]), strict=True)) | {"kept_inputs": inputs}
    print(json.dumps(summary))
    if code or found:
        print(text[-4000:], file=sys.stderr)
    return 1 if code or found else 0


if __name__ == "__main__":
    sys.exit(main())
