"""Accuracy of compressed ResNets on labelled images: fp32, the compressed graph in PyTorch, and the bundle's kernels.

    python benchmarks/resnet.py WEIGHTS IMAGES [--schemes W8A8,W4A16_C] [--methods rtn,gptq] [--samples 256] [--json]

WEIGHTS is a safetensors file of a CIFAR ResNet (He et al. 2015, section 4.2, shortcuts of option A: every second
pixel, zeros for the new channels); its depth is read from the names.  IMAGES is an .npz with `images` and `labels`.
All images are evaluated on.  GPTQ calibrates on some of them, without their labels: the accuracy on the others is given
as well.  Mean and deviation are those that the model was trained with; the defaults are ImageNet's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad, relu

from compressor.capture import capture
from compressor.codegen.lower import compile_graph
from compressor.evaluate import Classes, graph_classes
from compressor.evaluate_model import BundleProcess
from compressor.graph import twin, weight_bytes
from compressor.images import load_image_samples, load_images
from compressor.pipeline import Context, Pipeline, pass_class
from compressor.recipe import Recipe
from compressor.run_assemble import assemble
from compressor.runtime import read_manifest

BATCH = 50
TARGETS = ("Conv2d", "Linear")


class Block(nn.Module):
    """Two convolutions beside a shortcut of option A."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride, self.added = outputs // inputs, (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]."""
        y = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        if self.added:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added, self.added))
        return relu(y + x)


class ResNet(nn.Module):
    """6 n + 2 layers: a convolution, three stages of n blocks with 16, 32 and 64 channels, a linear."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32), *(Block(32, 32) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64), *(Block(64, 64) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, 10]."""
        x = self.layer3(self.layer2(self.layer1(relu(self.bn1(self.conv1(x))))))
        result: Tensor = self.linear(avg_pool2d(x, x.shape[3]).flatten(1))
        return result


def load_resnet(weights: Path) -> ResNet:
    """The ResNet whose weights these are, for inference."""
    state = load_file(weights)
    module = ResNet(len({name.split(".")[1] for name in state if name.startswith("layer1.")}))
    module.load_state_dict(state)
    return module.eval().requires_grad_(False)


def main() -> None:
    """Measure and print one line a scheme and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("images")
    parser.add_argument("--schemes", default="W8A8,W4A16_C,W4A16_G32,W4A8_C")
    parser.add_argument("--methods", default="rtn,gptq")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--mean", default="0.485,0.456,0.406")
    parser.add_argument("--std", default="0.229,0.224,0.225")
    parser.add_argument("--threads", type=int, help="of the bundle's kernels [default: the physical cores]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mean, std = ([float(number) for number in text.split(",")] for text in (options.mean, options.std))
    source = {"images": options.images, "mean": mean, "std": std}
    data = Recipe.from_dict(
        {"calibration": {**source, "samples": options.samples}, "evaluation": source, "passes": [], "tune": "off"}
    )
    assert data.calibration is not None
    images, samples = load_images(data.evaluation), load_image_samples(data.calibration)
    calibrated = {pixels.numpy().tobytes() for pixels in samples.ids}
    unseen = torch.tensor([pixels.numpy().tobytes() not in calibrated for pixels in images.inputs()])

    def accuracy(classify: Classes) -> tuple[float, float]:
        """On all images, and on those that are not calibrated on."""
        batches = [classify(images.inputs(slice(i, i + BATCH)).numpy()) for i in range(0, len(unseen), BATCH)]
        right = torch.cat([torch.as_tensor(batch) for batch in batches]).argmax(1) == images.labels
        return float(right.double().mean()), float(right[unseen].double().mean())

    module = load_resnet(options.weights)
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    dense = capture(module, (images.inputs(slice(2)),), dynamic_shapes=shapes)
    fp32, fp32_unseen = accuracy(lambda x: module(torch.as_tensor(x)))
    rows: list[dict[str, Any]] = []
    if not options.json:
        print(f"fp32 accuracy {fp32:.2%} on {len(unseen)} images, {weight_bytes(dense):,} bytes")
        print("| scheme | method | weight bytes | graph | bundle | points lost | on unseen images | seconds |")
        print("|---|---|---|---|---|---|---|---|")
    for scheme in options.schemes.split(","):
        for method in options.methods.split(","):
            step = pass_class(method)(scheme=scheme, targets=TARGETS)
            begin = time.perf_counter()
            context = Context(samples=samples)
            graph = Pipeline([step]).run(twin(dense), context)
            seconds = time.perf_counter() - begin
            recipe = data.model_copy(update={"passes": (step,)})
            target = recipe.target.build()
            in_graph, _ = accuracy(graph_classes(graph))
            with tempfile.TemporaryDirectory() as folder:
                library = compile_graph(graph, target, tune="off")
                assemble(Path(folder), graph, [library], target, recipe, context, weight_bytes(dense))
                with BundleProcess(Path(folder), options.threads) as process:
                    ours, ours_unseen = accuracy(process.classes)
                stored = read_manifest(Path(folder))["weight_bytes"]
            lost, lost_unseen = fp32 - ours, fp32_unseen - ours_unseen
            row = {
                "scheme": scheme, "method": method, "weight_bytes": stored, "fp32_accuracy": fp32,
                "graph_accuracy": in_graph, "accuracy": ours, "accuracy_drop": lost,
                "unseen_accuracy_drop": lost_unseen, "pass_s": seconds,
            }  # fmt: skip
            rows.append(row)
            if not options.json:
                print(
                    f"| {scheme} | {method} | {stored:,} | {in_graph:.2%} | {ours:.2%} | {100 * lost:+.2f} | "
                    f"{100 * lost_unseen:+.2f} | {seconds:.1f} |",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
