"""Size, speed and memory of an 852 M-parameter Llama with random weights: ``compress run``, then ``compress bench``.

    python benchmarks/llama_852m.py WORK_FOLDER [--threads 2] [--scheme W4A8_G128] [--json]

Makes the checkpoint (fp16, 1.7 GB) in WORK_FOLDER if it is not there, compresses every linear with RTN, and prints
tokens/s of prefill and decode, bytes per token, the fraction of the measured read bandwidth, and peak memory of the
whole process tree while compressing and while generating.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

RECIPE = """\
model: {model}
passes:
  - rtn: {{scheme: {scheme}, targets: Linear}}
target: x86
tune: {tune}
"""


def make_model(folder: Path, hidden: int = 2048, layers: int = 16) -> None:
    """Make a Hugging Face folder: FFN 2.75 times as wide, heads of 64, a quarter of them for KV, vocabulary 32,000."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(32000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def tree_rss_bytes(pid: int) -> int:
    """Return resident bytes of a process and its descendants; shared pages count once for each process."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
    total, waiting = 0, [pid]
    while waiting:
        current = waiting.pop()
        waiting += children.get(current, [])
        try:
            lines = Path(f"/proc/{current}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return total


def watched(command: list[str]) -> tuple[dict[str, Any], float, int]:
    """Run a command that prints JSON; return its output, seconds, and the peak RSS of its process tree."""
    begin, peak, done = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, tree_rss_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(output), time.perf_counter() - begin, peak


def main() -> None:
    """Make, compress, time, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--scheme", default="W4A8_G128")
    parser.add_argument("--tune", default="quick")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model, bundle = options.folder / "llama-852m", options.folder / f"llama-852m-{options.scheme}"
    if not (model / "config.json").exists():
        make_model(model)
    recipe = options.folder / "llama-852m.yaml"
    recipe.write_text(RECIPE.format(model=model.absolute(), scheme=options.scheme, tune=options.tune))
    compress = [sys.executable, "-c", "from compressor.cli.commands import main; main()"]
    run, run_s, run_peak = watched(
        [*compress, "run", str(recipe), "-o", str(bundle), "--threads", options.threads, "--json"]
    )
    timed, _, bench_peak = watched([*compress, "bench", str(bundle), "--threads", options.threads, "--json"])
    keep = ("weight_bytes", "dense_weight_bytes", "bundle_bytes", "kernel_error", "dense_prefill_tokens_per_s",
            "dense_decode_tokens_per_s", "dense_peak_rss_bytes")  # fmt: skip
    result = {
        "scheme": options.scheme,
        "compress_s": run_s,
        "compress_peak_rss_bytes": run_peak,
        "pass_s": {stage["name"]: stage["seconds"] for stage in run["passes"]},
        **{name: run[name] for name in keep if name in run},
        **timed,
        "bench_tree_peak_rss_bytes": bench_peak,
    }
    print(json.dumps(result, indent=2) if options.json else "\n".join(f"{k:<32} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
