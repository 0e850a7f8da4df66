"""Torch-Pruning on a ResNet of CIFAR-10, recovered by distillation, for benchmarks/pruned_resnet.py.

    python benchmarks/peers/torchpruning.py WEIGHTS IMAGES.safetensors --speedup 2.1 --seconds 60

IMAGES has `inputs` and `labels`; the first half is trained on, without labels, and the other half judges.  Prints a
line of JSON.  Torch-Pruning 1.6.1 has no rule for padded shortcuts, and stops when channels of the streams go ("mat1
and mat2 shapes cannot be multiplied"); so the convolutions that write these are ignored, and inner channels go alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch_pruning as tp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

sys.path.insert(0, str(Path(__file__).parents[1]))
from resnet_model import ResNet, load_resnet

ROUNDS = 100  # that Torch-Pruning takes to a share of 0.9; it stops where the speed-up is reached


def prune(model: ResNet, speedup: float, is_global: bool) -> tuple[float, int]:
    """Remove channels, and return times fewer MACs and the parameters that are left."""
    example = torch.zeros(1, 3, 32, 32)
    streams = [block.conv2 for layer in (model.layer1, model.layer2, model.layer3) for block in layer]
    dense, _ = tp.utils.count_ops_and_params(model, example)
    pruner = tp.pruner.BasePruner(
        model, example, importance=tp.importance.GroupMagnitudeImportance(p=2), global_pruning=is_global,
        pruning_ratio=0.9, iterative_steps=ROUNDS, ignored_layers=[model.conv1, model.linear, *streams],
        max_pruning_ratio=0.9,
    )  # fmt: skip
    reached = 1.0
    while reached < speedup:
        pruner.step()
        reached = dense / tp.utils.count_ops_and_params(model, example)[0]
    return reached, sum(parameter.numel() for parameter in model.parameters())


def train(model: nn.Module, teacher: nn.Module, inputs: Tensor, steps: int, options: Any) -> None:
    """Take steps of AdamW towards the teacher's predictions, with batch norms in training mode."""
    order = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    rising = math.ceil(0.1 * steps)
    model.train()
    queue: list[int] = []
    for step in range(steps):
        done = (step - rising) / max(1, steps - rising)
        share = (step + 1) / (rising + 1) if step < rising else (1 + math.cos(math.pi * done)) / 2
        optimiser.param_groups[0]["lr"] = options.learning_rate * share
        if len(queue) < options.batch:
            queue = torch.randperm(len(inputs), generator=order).tolist()
        batch, queue = inputs[queue[: options.batch]], queue[options.batch :]
        with torch.no_grad():
            wanted = log_softmax(teacher(batch) / options.temperature, -1)
        found = log_softmax(model(batch) / options.temperature, -1)
        loss = options.temperature**2 * kl_div(found, wanted, reduction="batchmean", log_target=True)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of images whose class is predicted."""
    logits = torch.cat([model(part) for part in torch.split(inputs, 50)])
    return float((logits.argmax(1) == labels).double().mean())


def main() -> None:
    """Prune, recover for the rest of the time, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--speedup", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of processor time, pruning included")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--global", action="store_true", dest="is_global", help="all layers compete")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_file(options.images)
    inputs, labels = data["inputs"], data["labels"]
    half = len(labels) // 2
    teacher = load_resnet(options.weights)
    model = copy.deepcopy(teacher).requires_grad_(True)
    begin = time.process_time()
    reached, parameters = prune(model, options.speedup, options.is_global)
    pruned_s = time.process_time() - begin
    at_once = accuracy(model, inputs[half:], labels[half:])
    begin = time.process_time()
    train(copy.deepcopy(model), teacher, inputs[:half], 3, options)
    steps = max(1, int((options.seconds - pruned_s) / ((time.process_time() - begin) / 3)))
    begin = time.process_time()
    train(model, teacher, inputs[:half], steps, options)
    seconds = pruned_s + time.process_time() - begin
    recovered = accuracy(model, inputs[half:], labels[half:])
    row = {
        "speedup": reached, "parameters": parameters, "at_once": at_once, "recovered": recovered, "steps": steps,
        "seconds": seconds,
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main()
