"""Tasks of benchmarks/x86_models.py: folders of inputs for all runtimes, and our bundles."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import minilm
import numpy as np
import resnet
import torch
from bundles import write_bundle
from numpy.typing import NDArray
from resnet_model import load_resnet
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from x86_race import cosines

from compressor.capture.capture import capture
from compressor.data.images import load_image_samples, load_images
from compressor.data.text import Samples, load_samples
from compressor.evaluate.embeddings import pool

LENGTH = 128  # tokens
IMAGES = 256  # for calibration


class Task(ABC):
    """A model with its data; ``folder`` is given to the drivers.

    It contains task.json, `calibration.npz`, a `case-BATCH.npz` to time, and `check-NUMBER.npz` to judge by.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    runs: ClassVar[dict[int, int]]
    """Batches that are timed -> calls in a turn."""
    ours: ClassVar[dict[str, str]]
    """Schemes of our bundles -> the pass or method that gives the codes."""
    judged: ClassVar[str]
    """The figure of quality that the table shows."""

    def __init__(self, work: Path, source: Path, data: list[str]) -> None:
        self.folder, self.source, self.data = work / self.name, source.absolute(), data
        if not (self.folder / "task.json").exists():
            print(f"{self.name}: making inputs", file=sys.stderr, flush=True)
            self.folder.mkdir(exist_ok=True)
            facts = {"kind": self.kind, "source": str(self.source), "operations": self._make()}
            (self.folder / "task.json").write_text(json.dumps(facts, indent=1) + "\n")
        self.operations: dict[str, int] = json.loads((self.folder / "task.json").read_text())["operations"]

    @abstractmethod
    def _make(self) -> dict[str, int]:
        """Write the arrays and return the operations, by batch."""

    @abstractmethod
    def compress(self, scheme: str, out: Path) -> None:
        """Write a bundle of ours."""

    @abstractmethod
    def outputs(self, raw: NDArray[np.float32], inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return the part of a model's output that is judged."""

    @abstractmethod
    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the quality of outputs for all of `check-NUMBER.npz`, given those of float32."""

    def case(self, batch: int) -> Path:
        """Return the inputs to time."""
        return self.folder / f"case-{batch}.npz"

    def checks(self) -> list[Path]:
        """Return the inputs to judge by, in order."""
        return sorted(self.folder.glob("check-*.npz"))

    def _write(self, name: str, *arrays: Any) -> None:
        named: dict[str, Any] = dict(zip(self._inputs(), map(np.asarray, arrays), strict=True))
        np.savez(self.folder / f"{name}.npz", **named)

    def _inputs(self) -> tuple[str, ...]:
        return ("input_ids", "attention_mask") if self.kind == "encoder" else ("x",)

    @torch.no_grad()
    def _operations(self, network: Any) -> dict[str, int]:
        """Count two operations for each product of linears, convolutions and attention; other operators count none."""
        with np.load(self.case(1)) as arrays, FlopCounterMode(display=False) as counter:
            network(*(torch.from_numpy(arrays[name]) for name in arrays.files))
        return {str(batch): batch * counter.get_total_flops() for batch in self.runs}


class MiniLM(Task):
    """Sentence embeddings of benchmarks/minilm.py's texts; ``data`` are text files."""

    kind, name, title = "encoder", "minilm", f"MiniLM, sequences of {LENGTH} tokens"
    runs, judged = {1: 20, 32: 3}, "cosine"
    ours: ClassVar[dict[str, str]] = {"W8A8": "smoothquant", "W8A8_STATIC": "smoothquant", "W4A8_G32": "gptq"}

    def _make(self) -> dict[str, int]:
        texts, others = minilm.load_texts(self.source, [Path(file) for file in self.data])
        (self.folder / "pooling.txt").write_text(texts.pooling)
        (self.folder / "others.txt").write_text("\n".join(others), encoding="utf-8")
        for number, (ids, mask) in enumerate(texts.batches()):
            self._write(f"check-{number:03}", ids, mask.astype(np.int64))
        everything = torch.cat(texts.ids)
        for batch in self.runs:
            windows = everything[: batch * LENGTH].reshape(batch, LENGTH)
            self._write(f"case-{batch}", windows, torch.ones_like(windows))
        samples = self._samples("W8A8").ids
        self._write("calibration", samples, torch.ones_like(samples))
        bert = minilm.load_bert(self.source)
        bert.set_attn_implementation("eager")  # whose products are counted
        return self._operations(bert)

    def _samples(self, scheme: str) -> Samples:
        spec = minilm.recipe_of(scheme, self.ours[scheme], str(self.folder / "others.txt")).calibration
        vocabulary = json.loads((self.source / "config.json").read_text())["vocab_size"]
        assert spec is not None
        return load_samples(spec, self.source, vocabulary)

    def compress(self, scheme: str, out: Path) -> None:
        """Compress as benchmarks/minilm.py does, calibrated on sentences that are not among the texts."""
        recipe = minilm.recipe_of(scheme, self.ours[scheme], str(self.folder / "others.txt"))
        write_bundle(capture(self.source), recipe, self._samples(scheme), out)

    def outputs(self, raw: NDArray[np.float32], inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return embeddings."""
        mask = torch.as_tensor(inputs["attention_mask"])
        pooled: Tensor = pool(torch.as_tensor(raw), mask, (self.folder / "pooling.txt").read_text())  # type: ignore[arg-type]
        return pooled.numpy()

    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the mean and the smallest cosine with the embeddings of float32."""
        if reference is None:
            return {}
        found = cosines(outputs, reference)
        return {"cosine": float(found.mean()), "cosine_least": float(found.min())}


class ResNet56(Task):
    """Images of CIFAR-10; ``data`` is one .npz."""

    kind, name, title = "module", "resnet56", "ResNet-56, images of 32 x 32"
    runs, judged = {1: 30, 64: 3}, "accuracy"
    ours: ClassVar[dict[str, str]] = {"W8A8": "rtn", "W8A8_STATIC": "rtn", "W4A8_G32": "rtn"}

    def _make(self) -> dict[str, int]:
        recipe = resnet.data_recipe(self.data[0], IMAGES)
        images = load_images(recipe.evaluation)
        inputs = images.inputs()
        np.save(self.folder / "labels.npy", np.asarray(images.labels))
        for first in range(0, len(inputs), resnet.BATCH):
            self._write(f"check-{first // resnet.BATCH:03}", inputs[first : first + resnet.BATCH])
        for batch in self.runs:
            self._write(f"case-{batch}", inputs[:batch])
        assert recipe.calibration is not None
        self._write("calibration", load_image_samples(recipe.calibration).ids)
        return self._operations(load_resnet(self.source))

    def compress(self, scheme: str, out: Path) -> None:
        """Compress as benchmarks/resnet.py does; static activations calibrate on images without their labels."""
        recipe = resnet.data_recipe(self.data[0], IMAGES)
        assert recipe.calibration is not None
        dense = resnet.captured(load_resnet(self.source), load_images(recipe.evaluation))
        samples = load_image_samples(recipe.calibration)
        write_bundle(dense, resnet.with_pass(recipe, scheme, self.ours[scheme]), samples, out)

    def outputs(self, raw: NDArray[np.float32], inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return logits."""
        return raw.astype(np.float64)

    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the fraction of the images that are classified correctly."""
        return {"accuracy": float((outputs.argmax(1) == np.load(self.folder / "labels.npy")).mean())}
