"""llm-compressor: RTN, GPTQ (act-order, MSE observer) and AWQ, saved as compressed-tensors; SparseGPT and Wanda, saved
with their zeros."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from benchmarks.peers.driver import Job, job, linears, weight_count

SETTINGS = {
    "rtn": "QuantizationModifier, MSE observer",
    "gptq": "GPTQModifier, actorder=static, MSE observer, dampening_frac=0.01, sequential",
    "sparsegpt": "SparseGPTModifier, dampening_frac=0.01, sequential; zeros are stored",
    "wanda": "WandaPruningModifier, sequential; zeros are stored",
    "awq": "AWQModifier (duo_scaling), then QuantizationModifier with the MSE observer",
}


def scheme(task: Job, group: int, targets: list[str]) -> QuantizationScheme:
    """Return the arguments of linears that share a group size; 0 is one scale per row."""
    strategy = QuantizationStrategy.GROUP if group else QuantizationStrategy.CHANNEL
    weights = QuantizationArgs(
        num_bits=task.bits, type="int", symmetric=task.symmetric, strategy=strategy, group_size=group or None,
        observer="mse",
    )  # fmt: skip
    return QuantizationScheme(targets=targets, weights=weights)


def main() -> None:
    """Compress, save, read back."""
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None  # AWQ pins what it keeps, and a CPU alone cannot
    task = job()
    model = task.load()
    parameters = {name for name, _ in model.named_parameters()}
    modules = linears(model)
    count = weight_count(modules)
    by_group: dict[int, list[str]] = {}
    for name, module in modules.items():
        by_group.setdefault(task.group_for(module.in_features), []).append(name)
    groups = {f"group_{group}": scheme(task, group, names) for group, names in by_group.items()}
    options: dict[str, Any] = {"config_groups": groups, "ignore": ["lm_head"]}
    zeros = {"sparsity": task.sparsity, "mask_structure": task.pattern, "targets": list(modules)}
    recipe = {
        "rtn": lambda: [QuantizationModifier(**options)],
        "gptq": lambda: [GPTQModifier(**options, actorder="static")],
        "awq": lambda: [AWQModifier(duo_scaling=True), QuantizationModifier(**options)],
        "sparsegpt": lambda: [SparseGPTModifier(**zeros, dampening_frac=0.01)],
        "wanda": lambda: [WandaPruningModifier(**zeros)],
    }[task.method]()
    samples = Dataset.from_dict({"input_ids": task.ids.tolist(), "attention_mask": torch.ones_like(task.ids).tolist()})
    with task.timed():
        oneshot(
            model=model, dataset=samples, recipe=recipe, num_calibration_samples=len(task.ids),
            max_seq_length=task.ids.shape[1], shuffle_calibration_samples=False, batch_size=8,
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_compressed=True)
        saved = {
            name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        stored = [tensor for name, tensor in saved.items() if name.rpartition(".")[0] in modules]
        read = {} if task.sparsity else {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
        dense = AutoModelForCausalLM.from_pretrained(folder, dtype=task.dtype, **read)
        state = {name: tensor for name, tensor in dense.state_dict().items() if name in parameters}
        if missing := parameters - state.keys() - {"lm_head.weight"}:
            raise SystemExit(f"not dequantised: {sorted(missing)}")
        task.finish("llmcompressor", SETTINGS[task.method], state, stored, count)


if __name__ == "__main__":
    main()
