"""Models larger than memory: ``compress run`` of random-weight Llamas within a control group's memory limit.

    python benchmarks/larger_than_memory.py WORK_FOLDER [--layers 18 36 72] [--limit-mb 1600] [--methods rtn gptq]

Makes float32 checkpoints with equal blocks (hidden 1024, FFN 2816, 16 heads, 4 KV heads, vocabulary 2,048), layer by
layer, in WORK_FOLDER.  Each is compressed in a control group of its own (version 1 or 2; needs root) that kills what
needs more memory; pages of files count there too, and can be reclaimed.  Prints for each the bytes of the weights,
their ratio to the limit, the wall time and the process's peak resident memory (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 1024, 2816, 16, 4, 2048
TEXT = " ".join(f"<{(i * i * 7 + i // 3) % VOCABULARY}>" for i in range(20000))
PASSES = {
    "rtn": "rtn: {scheme: W4A16_G128}",
    "gptq": "gptq: {scheme: W4A16_G128, match_dense: true}",
}


def make_model(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig

    folder.mkdir(parents=True)
    head = HIDDEN // HEADS
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * head, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * head, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    owner, total_bytes = {}, 0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.02

    for layer in range(-1, layers):
        if layer < 0:
            tensors = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
            tensors["lm_head.weight"] = random(VOCABULARY, HIDDEN)
        else:
            prefix = f"model.layers.{layer}"
            tensors = {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN)
        file = f"model-{layer + 1:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        owner.update(dict.fromkeys(tensors, file))
        total_bytes += sum(t.numel() * 4 for t in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": owner}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


class ControlGroup:
    """A memory limit for one child process and its children."""

    def __init__(self, limit_bytes: int) -> None:
        unified = Path("/sys/fs/cgroup")
        self.version = 2 if (unified / "cgroup.controllers").is_file() else 1
        self.folder = (unified if self.version == 2 else unified / "memory") / f"compress-{os.getpid()}"
        if self.version == 2:
            (unified / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(limit_bytes))
        if self.version == 2:
            (self.folder / "memory.swap.max").write_text("0")

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        for _ in range(50):
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)


def peak_rss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def compress(model: Path, work: Path, method: str, limit_bytes: int) -> dict[str, Any]:
    (work / "text.txt").write_text(TEXT)
    recipe = work / f"{method}.yaml"
    calibration = "calibration: {text: text.txt, samples: 16, sequence_length: 128}\n" if method == "gptq" else ""
    evaluation = "evaluation: {text: text.txt, tokens: 256, window: 128}\n"
    recipe.write_text(f"model: {model}\n{calibration}{evaluation}passes:\n  - {PASSES[method]}\ntune: 'off'\n")
    output, cache = work / f"{method}_{model.name}", work / "cache"
    for folder in (output, cache):
        shutil.rmtree(folder, ignore_errors=True)
    command = [str(Path(sys.executable).with_name("compress")), "run", str(recipe), "-o", str(output), "--json"]
    group = ControlGroup(limit_bytes)
    log, result = (work / f"{method}_{model.name}.{ending}" for ending in ("log", "json"))
    begin, peak = time.perf_counter(), 0
    with log.open("w") as stream, result.open("w") as out:
        child = subprocess.Popen(
            command, stdout=out, stderr=stream, preexec_fn=group.enter,
            env={**os.environ, "COMPRESS_CACHE_DIR": str(cache)},
        )  # fmt: skip
        while child.poll() is None:
            peak = max(peak, peak_rss_bytes(child.pid))
            time.sleep(0.05)
    group.close()
    weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    row = {
        "method": method,
        "model": model.name,
        "weights_bytes": weights_bytes,
        "limit_bytes": limit_bytes,
        "weights_to_limit": round(weights_bytes / limit_bytes, 2),
        "exit_code": child.returncode,
        "wall_s": round(time.perf_counter() - begin, 1),
        "peak_rss_bytes": peak,
    }
    if child.returncode:
        row["message"] = log.read_text().strip().splitlines()[-1:]
    else:
        content = json.loads(result.read_text())
        row |= {key: content[key] for key in ("weight_bytes", "dense_weight_bytes", "kernel_error", "notes")}
        row["passes"] = [(stage["name"], round(stage["seconds"], 1)) for stage in content["passes"]]
    shutil.rmtree(output, ignore_errors=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[18, 36, 72])
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"])
    parser.add_argument("--limit-mb", type=int, default=1600, help="in units of 10**6 bytes")
    options = parser.parse_args()
    work = options.work.absolute()
    for layers in options.layers:
        model = work / f"llama_{layers}_layers"
        if not model.is_dir():
            make_model(model, layers)
    for method in options.methods:
        peaks = []
        for layers in options.layers:
            row = compress(work / f"llama_{layers}_layers", work, method, options.limit_mb * 10**6)
            print(json.dumps(row), flush=True)
            peaks.append(row["peak_rss_bytes"])
        print(json.dumps({"method": method, "peak_rss_spread": round(max(peaks) / min(peaks) - 1, 3)}), flush=True)


if __name__ == "__main__":
    main()
