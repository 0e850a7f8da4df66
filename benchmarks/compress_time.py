"""Time and memory of GPTQ W4A16_G128 on a Llama: ours, and peers in their own environments.

    python benchmarks/compress_time.py WORK_FOLDER [--hidden 2048 --layers 16] [--peers FOLDER] [--repeats 1] [--json]

Makes a checkpoint of random weights in WORK_FOLDER (the default sizes are those of llama_852m.py) and calibrates on 64
samples of 256 random tokens.  Each run is a process of its own, and the competitors take turns, so that a disturbance
of the machine falls on all of them.  Measured from the loaded model to the compressed one; the least of the repeats.
Peers run in each of --dtypes, since what is quickest differs between processors.  Ours runs as it is by default, aiming
at the dense model's outputs, which doubles the forward passes; and without that, which is what the peers do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from llama_852m import make_model

SAMPLES, LENGTH, SCHEME = 64, 256, "W4A16_G128"
PEERS = {"llmcompressor": "gptq", "gptqmodel": "gptq"}
ROOT = Path(__file__).resolve().parents[1]


def compress_ours(model: str, ids_file: str, match_dense: str) -> None:
    """Run in its own process: compress by our GPTQ and print the figures as JSON."""
    from compressor.host.threads import wait_passively

    wait_passively()  # as the command does
    import torch
    from quality_row import compress

    from compressor.capture.capture import capture
    from compressor.data.text import Samples, tokens_sha256

    ids = torch.from_numpy(np.load(ids_file))
    samples = Samples(ids, torch.empty(0, dtype=torch.int64), tokens_sha256(ids), "random tokens")
    options = {"scheme": SCHEME, "ignore": ("lm_head",), "match_dense": match_dense == "true"}
    _, _, _, figures = compress(capture(model), [{"gptq": options}], samples)
    print(json.dumps(figures))


def competitors(model: Path, ids: Path, peers: Path | None, dtypes: list[str]) -> dict[str, list[str]]:
    """Return the competitors' names and commands; a peer's command ends with its output folder."""
    ours = [sys.executable, str(Path(__file__).resolve()), "--ours", str(model), str(ids)]
    found = {"ours": [*ours, "true"], "ours, match_dense: false": [*ours, "false"]}
    for name, method in PEERS.items() if peers else ():
        python = str(peers.absolute() / name / "bin" / "python")  # type: ignore[operator]
        for dtype in dtypes:
            command = [python, "-m", f"benchmarks.peers.{name}", str(model), str(ids), "OUT", method, SCHEME, dtype]
            found[f"{name}, {dtype}"] = command
    return found


def run(name: str, command: list[str], scratch: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Measure one command."""
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        command = [out if part == "OUT" else part for part in command]
        if not name.startswith("ours"):
            environment = {**environment, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=out, env=environment)
        if done.returncode:
            sys.exit(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(done.stdout if name.startswith("ours") else (Path(out) / "row.json").read_text())


def main() -> None:
    """Make the checkpoint, run the competitors in turns, print."""
    if sys.argv[1:2] == ["--ours"]:
        return compress_ours(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments")
    parser.add_argument("--dtypes", default="float16,bfloat16,float32")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    model, ids = folder / f"llama-{options.hidden}x{options.layers}", folder / "ids.npy"
    if not (model / "config.json").exists():
        make_model(model, options.hidden, options.layers)
    np.save(ids, np.random.default_rng(0).integers(0, 32000, (SAMPLES, LENGTH)))
    environment = {**os.environ, "OMP_NUM_THREADS": options.threads, "TOKENIZERS_PARALLELISM": "false"}
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(options.repeats):
        for name, command in competitors(model, ids, options.peers, options.dtypes.split(",")).items():
            figures = run(name, command, folder, environment)
            rows[name] = min(figures, rows.get(name, figures), key=lambda row: row["cpu_s"])
            print(f"{name}: {figures['seconds']:.1f} s, CPU {figures['cpu_s']:.1f} s", file=sys.stderr, flush=True)
    if options.json:
        print(
            json.dumps(
                {"hidden": options.hidden, "layers": options.layers, "threads": options.threads, **rows}, indent=2
            )
        )
        return
    print("| who | seconds | CPU seconds | peak RSS, MB |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['seconds']:.1f} | {row['cpu_s']:.1f} | {row['peak_rss_bytes'] / 1e6:.0f} |")


if __name__ == "__main__":
    main()
