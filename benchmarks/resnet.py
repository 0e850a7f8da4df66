"""Accuracy of compressed ResNets on labelled images: fp32, the compressed graph in PyTorch, and the bundle's kernels.

    python benchmarks/resnet.py WEIGHTS IMAGES [--schemes W8A8,W4A16_C] [--methods rtn,gptq] [--samples 256] [--json]

WEIGHTS is a safetensors file of a CIFAR ResNet (He et al. 2015, section 4.2, shortcuts of option A: every second
pixel, zeros for the new channels); its depth is read from the names.  IMAGES is an .npz with `images` and `labels`.
All images are evaluated on.  GPTQ calibrates on some of them, without their labels: the accuracy on the others is given
as well.  With `--export FILE.pt2` the network is written as an archive of torch.export, which recipes read, and that is
all.  Mean and deviation are those that the model was trained with; the defaults are ImageNet's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bundles import write_bundle
from resnet_model import load_resnet
from torch import nn

from compressor.capture.capture import capture
from compressor.data.images import Images, load_image_samples, load_images
from compressor.evaluate.models import BundleProcess
from compressor.evaluate.quality import Classes, graph_classes
from compressor.graph.model import weight_bytes
from compressor.recipe.recipe import Recipe
from compressor.registry import PASSES
from compressor.runtime import read_manifest

BATCH = 50
TARGETS = ("Conv2d", "Linear")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's


def data_recipe(images: str, samples: int, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Recipe:
    """Make a recipe without passes, of the images to evaluate on, some of which calibrate."""
    source = {"images": images, "mean": list(mean), "std": list(std)}
    calibration = {**source, "samples": samples}
    return Recipe.from_dict({"calibration": calibration, "evaluation": source, "passes": [], "tune": "off"})


def with_pass(data: Recipe, scheme: str, method: str) -> Recipe:
    """Return the recipe with one pass, over convolutions too."""
    return data.model_copy(update={"passes": (PASSES.find(method)(scheme=scheme, targets=TARGETS),)})


def captured(module: nn.Module, images: Images) -> Any:
    """Capture the module's graph for any number of images."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    return capture(module, (images.inputs(slice(2)),), dynamic_shapes=shapes)


def main() -> None:
    """Measure and print one line per scheme and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("images", nargs="?", default="")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the network as a .pt2 archive and end")
    parser.add_argument("--schemes", default="W8A8,W4A16_C,W4A16_G32,W4A8_C")
    parser.add_argument("--methods", default="rtn,gptq")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--mean", default=",".join(map(str, MEAN)))
    parser.add_argument("--std", default=",".join(map(str, STD)))
    parser.add_argument("--threads", type=int, help="of the bundle's kernels [default: the physical cores]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.export is not None:
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        example = (torch.zeros(2, 3, 32, 32),)
        torch.export.save(
            torch.export.export(load_resnet(options.weights), example, dynamic_shapes=shapes), options.export
        )
        return
    if not options.images:
        parser.error("the following arguments are required: images")
    mean, std = ([float(number) for number in text.split(",")] for text in (options.mean, options.std))
    data = data_recipe(options.images, options.samples, mean, std)
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
    dense = captured(module, images)
    fp32, fp32_unseen = accuracy(lambda x: module(torch.as_tensor(x)))
    rows: list[dict[str, Any]] = []
    if not options.json:
        print(f"fp32 accuracy {fp32:.2%} on {len(unseen)} images, {weight_bytes(dense):,} bytes")
        print("| scheme | method | weight bytes | graph | bundle | points lost | on unseen images | seconds |")
        print("|---|---|---|---|---|---|---|---|")
    for scheme in options.schemes.split(","):
        for method in options.methods.split(","):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "bundle"
                graph, seconds = write_bundle(dense, with_pass(data, scheme, method), samples, folder, options.threads)
                in_graph, _ = accuracy(graph_classes(graph))
                with BundleProcess(folder, options.threads) as process:
                    ours, ours_unseen = accuracy(process.classes)
                stored = read_manifest(folder)["weight_bytes"]
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
