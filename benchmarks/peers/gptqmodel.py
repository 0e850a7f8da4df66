"""GPT-QModel: GPTQ and GPTAQ, saved in its own format and read back by its PyTorch kernel."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it takes half of the cores and refuses to start with one

from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.config import GPTAQConfig
from safetensors.torch import load_file

from benchmarks.peers.driver import job, linears, weight_count

OPTIONS = {
    "gptq": {"desc_act": True, "act_group_aware": False},
    "gptq+mse": {"desc_act": True, "act_group_aware": False, "mse": 2.4},
    "gptaq": {"desc_act": True, "act_group_aware": False, "gptaq": GPTAQConfig(alpha=0.25)},
}
SETTINGS = {
    "gptq": "desc_act=True, true_sequential",
    "gptq+mse": "desc_act=True, true_sequential, mse=2.4",
    "gptaq": "GPTAQConfig(alpha=0.25), desc_act=True, true_sequential",
}


def main() -> None:
    """Compress, save, read back."""
    task = job()
    plain = task.load(torch.float32)
    modules = linears(plain)
    rows = {name for name, module in modules.items() if not task.group_for(module.in_features)}
    per_row = {f"+:.*{leaf}$": {"group_size": -1} for leaf in sorted({name.rpartition(".")[2] for name in rows})}
    config = QuantizeConfig(
        bits=task.bits, group_size=task.group or -1, sym=task.symmetric, dynamic=per_row or None, device="cpu",
        offload_to_disk=False, **OPTIONS[task.method],
    )  # fmt: skip
    model = GPTQModel.load(str(task.model), config, dtype=task.dtype)
    samples = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in task.ids[:, None]]
    with task.timed():
        model.quantize(samples, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        saved = {
            name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        stored = [tensor for name, tensor in saved.items() if name.rpartition(".")[0] in modules]
        read = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
        packed = {name: module for name, module in read.model.named_modules() if name in modules}
        weights = {f"{name}.weight": module.dequantize_weight().t() for name, module in packed.items()}
        if packed.keys() != modules.keys():
            raise SystemExit(f"not compressed: {sorted(modules.keys() - packed.keys())}")
        task.finish("gptqmodel", SETTINGS[task.method], plain.state_dict() | weights, stored, weight_count(modules))


if __name__ == "__main__":
    main()
