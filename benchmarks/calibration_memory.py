"""Peak memory of GPTQ calibration: how it grows with samples and layers.

Each setting runs in a process of its own, on a random Llama that is saved as float16 and memory-mapped.  Beside
the peak that the system counts (``ru_maxrss``, with pages of the mapped weights that were touched) the table gives
the peak of anonymous memory, which is what calibration allocates, and the part of it that has to be there: the
live hidden states (dense and compressed: two float32 [samples, sequence, hidden]) and the packed weights.

    python benchmarks/calibration_memory.py [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HIDDEN, VOCABULARY, SEQUENCE = 512, 1000, 256
SETTINGS = [(16, 4), (64, 4), (16, 8)]  # samples, layers; the first is the reference


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no RssAnon in /proc/self/status: this benchmark needs Linux")


class Watch(threading.Thread):
    """Sampler of the anonymous memory, every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def save(folder: Path, layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)


def measure(folder: Path, samples: int) -> dict[str, Any]:
    import torch

    from compressor.capture.capture import capture
    from compressor.data.text import Samples
    from compressor.passes.gptq import Gptq
    from compressor.pipeline.context import Context
    from compressor.pipeline.pipeline import Pipeline

    graph = capture(folder)
    ids = torch.randint(0, VOCABULARY, (samples, SEQUENCE), generator=torch.Generator().manual_seed(0))
    context = Context(samples=Samples(ids, ids[:0].flatten(), "", "random"))
    before_bytes = anonymous_bytes()
    watch = Watch()
    watch.start()
    Pipeline([Gptq("W4A16_G128", ignore="lm_head")]).run(graph, context)
    watch.done.set()
    watch.join()
    return {
        "before_bytes": before_bytes,
        "peak_anonymous_bytes": watch.peak_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "hidden_bytes": 2 * samples * SEQUENCE * 5 * HIDDEN * 4,  # in front of down_proj: its input and the residual
        "packed_bytes": sum(record.bytes_after for record in context.records),
    }


def in_a_process(*arguments: str) -> str:
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures on stdout as JSON")
    parser.add_argument("--save", nargs=2, metavar=("FOLDER", "LAYERS"), help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "SAMPLES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.save:
        save(Path(options.save[0]), int(options.save[1]))
        return
    if options.measure:
        print(json.dumps(measure(Path(options.measure[0]), int(options.measure[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for samples, layers in SETTINGS:
            folder = Path(scratch) / f"{layers}_layers"
            if not folder.exists():
                in_a_process("--save", str(folder), str(layers))
            figures = json.loads(in_a_process("--measure", str(folder), str(samples)).splitlines()[-1])
            rows.append({"samples": samples, "layers": layers, **figures})
    for row in rows:
        row["working_bytes"] = (
            row["peak_anonymous_bytes"] - row["before_bytes"] - row["hidden_bytes"] - row["packed_bytes"]
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    columns = ("before", "peak_anonymous", "peak_rss", "hidden", "packed", "working")
    print("samples layers " + " ".join(f"{name:>14}" for name in columns) + "   (MB)")
    for row in rows:
        print(
            f"{row['samples']:7} {row['layers']:6} "
            + " ".join(f"{row[f'{name}_bytes'] / 1e6:14.1f}" for name in columns)
        )


if __name__ == "__main__":
    main()
