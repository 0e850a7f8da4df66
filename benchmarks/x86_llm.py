"""An 852 M-parameter Llama on this CPU in 4 bits: ours, and other runtimes, in turns on the same shapes.

    python benchmarks/x86_llm.py WORK_FOLDER --ours W4A8_G128=BUNDLE [--ours ...] --peers FOLDER [--threads 1,2]
    python benchmarks/x86_llm.py WORK_FOLDER --peers FOLDER --smoke

Makes the checkpoint (benchmarks/llama_852m.py) in WORK_FOLDER if it is not there, has each peer convert and quantise it
there, once, and writes benchmarks/results/x86_llm.json and .md.  Each runtime is a process of its own in its own
environment (benchmarks/peers/README.md); all of one number of threads are loaded together, and in each repetition
each is measured in turn, so that a disturbance of the machine falls on all.  When memory runs short, a process ends
after its turn and is loaded again for its next one.  The first round of a process is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from llama_852m import RECIPE, make_model
from x86_child import PEERS, REFERENCE, ROOT, Child, ChildError, Runtime, available_bytes, peak_int8
from x86_table import table

PROMPTS, DECODE_PROMPT, STEPS = (128, 512), 128, 32
SPARE_BYTES = 4 << 30  # left to the others
SETTLE_S = 0.5  # threads of the runtime before wait for work, spinning


class Race:
    """All runtimes with one number of threads."""

    def __init__(self, runtimes: list[Runtime], options: argparse.Namespace, model: Path, threads: int) -> None:
        self.options, self.model, self.threads = options, model, threads
        self.runtimes, self.children = runtimes, dict[str, Child]()
        self.rows: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}
        self.bandwidths: list[float] = []
        self.peaks: list[dict[str, float]] = []
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        generator = random.Random(0)
        self.ids = [generator.randrange(3, vocabulary) for _ in range(max(PROMPTS))]

    def run(self, repeats: int) -> None:
        """A round to warm up, then those that count."""
        try:
            for repeat in range(-1, repeats):
                for runtime in self.runtimes:
                    if runtime.name in self.missing:
                        continue
                    try:
                        self._turn(runtime, counted=repeat >= 0)
                    except ChildError as error:
                        self.missing[runtime.name] = str(error)
                        self._stop(runtime.name)
                        print(f"{runtime.name}: {error}", file=sys.stderr, flush=True)
                self.peaks.append(peak_int8(self.options.folder, self.threads))
        finally:
            for name in list(self.children):
                self._stop(name)

    def _turn(self, runtime: Runtime, counted: bool) -> None:
        child = self.children.get(runtime.name) or self._start(runtime)
        time.sleep(SETTLE_S)
        if counted:
            row = self.rows[runtime.name]
            for name, value in self._measure(child).items():
                row.setdefault(name, []).append(value)
            print(f"{self.threads} threads, {runtime.name}: " + ", ".join(
                f"{name} {row[name][-1]:.4g}" for name in ("prefill_128_s", "prefill_512_s", "decode_s")
            ), file=sys.stderr, flush=True)  # fmt: skip
            if runtime is self._meter():
                self.bandwidths.append(child.ask("bandwidth")["bytes_per_s"])
        if available_bytes() < SPARE_BYTES:
            self._stop(runtime.name)

    def _meter(self) -> Runtime | None:
        """Whose process measures the read bandwidth: the first of ours."""
        ours = (r for r in self.runtimes if not r.environment and r.name not in self.missing)
        return next(ours, None)

    def _start(self, runtime: Runtime) -> Child:
        options = self.options
        files = Path(runtime.files).absolute()
        if runtime.environment:
            files = options.folder / f"{self.model.name}-{runtime.files}"
        log = options.folder / f"{runtime.driver}-{runtime.variant}.log"
        arguments = (runtime, options.peers, self.model, files, self.threads, log)
        if not files.exists():
            print(f"{runtime.name}: converting", file=sys.stderr, flush=True)
            preparing = Child(*arguments)  # a process of its own: its memory is not the model's
            try:
                preparing.ask("prepare")
            finally:
                preparing.stop()
        child = self.children[runtime.name] = Child(*arguments)
        loaded = child.ask("load")
        row = self.rows.setdefault(runtime.name, {name: loaded[name] for name in loaded if name != "load_s"})
        row.setdefault("load_s", []).append(loaded["load_s"])
        begin = time.perf_counter()
        logits = options.folder / "logits.npy"
        child.ask("check", ids=self.ids[: PROMPTS[0]], out=str(logits))
        row.setdefault("logits", np.load(logits).astype(np.float64).ravel())
        self._measure(child)
        row.setdefault("warm_s", time.perf_counter() - begin)
        return child

    def _measure(self, child: Child) -> dict[str, float]:
        found = {f"prefill_{n}_s": child.ask("prefill", ids=self.ids[:n])["seconds"] for n in PROMPTS}
        steps = child.ask("decode", ids=self.ids[:DECODE_PROMPT], steps=STEPS)["seconds"]
        return {**found, "decode_s": statistics.median(steps), **child.ask("memory")}

    def _stop(self, name: str) -> None:
        child = self.children.pop(name, None)
        if child:
            child.stop()

    def result(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        reference = self.rows.get(REFERENCE, {}).get("logits")
        rows = {}
        for name, row in self.rows.items():
            logits = row.pop("logits", None) if row is not self.rows.get(REFERENCE) else reference
            kept = {key: value for key, value in row.items() if key != "logits"}
            if reference is not None and logits is not None:
                kept["cosine"] = float(logits @ reference / np.linalg.norm(logits) / np.linalg.norm(reference))
            if name not in self.missing:
                rows[name] = kept
        peaks = {kind: max(p.get(kind, 0.0) for p in self.peaks) * self.threads for kind in self.peaks[0]}
        bandwidth = max(self.bandwidths, default=None)
        return {"bandwidth_bytes_per_s": bandwidth, "peak_int8_ops_per_s": peaks, "runtimes": rows,
                "missing": self.missing}  # fmt: skip


def linear_weights(model: Path) -> dict[str, int]:
    """Weights of the linears that every token of a prompt passes, and of the head, which only the last one does."""
    config = json.loads((model / "config.json").read_text())
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    attention = 2 * hidden * hidden * (1 + config["num_key_value_heads"] / heads)
    body = config["num_hidden_layers"] * int(attention + 3 * hidden * wide)
    return {"body": body, "head": hidden * config["vocab_size"]}


def machine() -> dict[str, Any]:
    """What was measured on, and of what."""
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith(("model name", "flags"))]
    flags = next((x.split() for x in names if x.startswith("flags")), [])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "cpu": next((x.split(":")[1].strip() for x in names if x.startswith("model name")), "unknown"),
        "cpus": os.cpu_count(), "amx": "amx_int8" in flags, "avx512_vnni": "avx512_vnni" in flags,
        "load_average_before": os.getloadavg()[0], "commit": commit.strip(),
    }  # fmt: skip


def smoke_bundle(model: Path, folder: Path) -> Runtime:
    """The small model, rounded to nearest by us."""
    bundle, recipe = folder / "smoke-bundle", folder / "smoke.yaml"
    if not bundle.exists():
        recipe.write_text(RECIPE.format(model=model.absolute(), scheme="W4A8_G128", tune="off"))
        compress = [sys.executable, "-c", "from compressor.cli import main; main()", "run", str(recipe)]
        subprocess.run([*compress, "-o", str(bundle)], check=True, stdout=sys.stderr)
    return Runtime("ours W4A8_G128", "", "x86_ours", "bundle", str(bundle))


def main() -> None:
    """Make, convert, take turns, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=BUNDLE")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder of the peers' environments")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="parts of runtimes' names, by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="once, on a small model; results stay in WORK_FOLDER")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.folder / ("llama-smoke" if options.smoke else "llama-852m")
    if not (model / "config.json").exists():
        make_model(model, **({"hidden": 512, "layers": 2} if options.smoke else {}))
    named = [text.partition("=") for text in options.ours]
    ours = [Runtime(f"ours {name}", "", "x86_ours", "bundle", bundle) for name, _, bundle in named]
    if options.smoke:
        options.repeats, options.out = 1, options.folder
        ours = ours or [smoke_bundle(model, options.folder)]
    wanted = [part for part in options.only.split(",") if part]
    runtimes = [r for r in (*ours, *PEERS) if not wanted or any(part.lower() in r.name.lower() for part in wanted)]
    result: dict[str, Any] = {"model": model.name, "linear_weights": linear_weights(model), "machine": machine(),
                              "prompts": PROMPTS, "decode_after": DECODE_PROMPT, "steps": STEPS,
                              "repeats": options.repeats, "threads": {}}  # fmt: skip
    for threads in map(int, options.threads.split(",")):
        race = Race(runtimes, options, model, threads)
        race.run(options.repeats)
        result["threads"][str(threads)] = race.result()
        (options.out / "x86_llm.json").write_text(json.dumps(result, indent=2) + "\n")
        (options.out / "x86_llm.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
