"""Plain modules on labelled images: what is read, drawn, measured, refused; and from images to a finished bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import compressor
from compressor.calibration.calibrate import CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.capture.capture import capture
from compressor.data.images import Images, load_evaluation_images, load_image_samples, load_images
from compressor.data.load import load_data
from compressor.data.pictures import StoredArrays
from compressor.data.preprocessing import Scaled
from compressor.data.text import Samples, load_samples
from compressor.errors import CompressorError, RecipeError, UsageError
from compressor.evaluate.quality import measure_accuracy
from compressor.graph.model import ModelInfo
from compressor.graph.sites import linear_sites
from compressor.host.resources import resource
from compressor.passes.mixed_precision import MixedPrecision
from compressor.pipeline.context import Context
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe

COUNT, CLASSES = 40, 4
TARGETS = ("Conv2d", "Linear")
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (COUNT, 8, 6, 3), dtype=np.uint8)
LABELS = RNG.integers(0, CLASSES, COUNT).astype(np.uint8)
MODULE = ModelInfo(kind="module", name="Net", architecture="Net")


def write(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "set.npz", **{"images": PIXELS, "labels": LABELS, **arrays})
    return folder / "set.npz"


def recipe(file: Path, **keys: Any) -> Recipe:
    data = {"calibration": {"images": str(file), "samples": 30}, "passes": [{"rtn": {"scheme": "W8A8"}}], **keys}
    return Recipe.from_dict(data)


def test_a_model_reads_scaled_pixels_with_channels_first(tmp_path: Path) -> None:
    file = write(tmp_path)
    mean, std = [0.5, 0.25, 0.1], [0.5, 1, 2]
    spec = recipe(file, evaluation={"images": [str(file), str(file)], "mean": mean, "std": std}).evaluation
    images = load_images(spec)
    expected = ((PIXELS / 255.0 - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(images.inputs().numpy(), np.concatenate([expected, expected]), atol=1e-6)
    assert images.inputs(slice(3, 5)).shape == (2, 3, 8, 6) and images.inputs().is_contiguous()
    assert images.labels is not None and images.labels.tolist() == [*LABELS.tolist()] * 2
    assert recipe(file, evaluation={"images": str(file), "mean": 0.5}).evaluation.mean == (0.5,)


def test_what_is_drawn_is_not_evaluated_on(tmp_path: Path) -> None:
    loaded = recipe(write(tmp_path))
    samples, rest = load_data(loaded, MODULE)
    assert samples is not None and isinstance(rest, Images) and rest.labels is not None
    drawn, left = ({tuple(row) for row in x.flatten(1).tolist()} for x in (samples.ids, rest.inputs()))
    assert (len(drawn), len(left), drawn & left) == (30, 10, set())
    assert samples.facts() == {"source": str(tmp_path / "set.npz"), "samples": 30, "sha256": samples.sha256}
    again = recipe(tmp_path / "set.npz", calibration={"images": str(tmp_path / "set.npz"), "samples": 30, "seed": 1})
    assert again.calibration is not None and load_image_samples(again.calibration).sha256 != samples.sha256
    assert Recipe.from_dict(loaded.resolved()).resolved() == loaded.resolved()


def test_images_without_labels_serve_calibration_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", images=PIXELS)
    loaded = recipe(tmp_path / "set.npz")
    assert load_data(loaded, MODULE)[1] is None
    with pytest.raises(UsageError, match="accuracy: there are no labelled images"):
        load_data(recipe(tmp_path / "set.npz", gates={"accuracy": ">= 90%"}), MODULE)
    evaluation = recipe(tmp_path / "set.npz", evaluation={"images": str(tmp_path / "set.npz")}).evaluation
    with pytest.raises(UsageError, match="no `labels`"):
        load_evaluation_images(evaluation, None)


@pytest.mark.parametrize(("arrays", "keys", "words"), [
    ({"images": PIXELS.astype(np.float32)}, {}, r"`images` is float32 \[40, 8, 6, 3\]; wanted: uint8"),
    ({"images": PIXELS[0]}, {}, "wanted: uint8"),
    ({"images": np.array([None])}, {}, "not a numpy .npz"),
    ({"labels": LABELS[:5]}, {}, "an integer for each image"),
    ({"labels": LABELS.astype(np.float32)}, {}, "an integer for each image"),
    ({"images": PIXELS[:0], "labels": LABELS[:0]}, {}, "there is no image"),
    ({}, {"mean": [0.5, 0.5]}, "mean has 2 numbers, and the images 3 channels"),
    ({}, {"samples": 41}, "has 40 images, and 41 samples are wanted"),
    ({}, {"std": 0}, "greater than 0"),
    ({}, {"mean": ".nan"}, "mean"),
    ({}, {"sequence_length": 8}, "`sequence_length` has no meaning without text or json"),
    ({}, {"text": "a.txt"}, "exactly one of"),
])  # fmt: skip
def test_what_does_not_fit_is_said(tmp_path: Path, arrays: Any, keys: Any, words: str) -> None:
    file = write(tmp_path, **arrays)
    with pytest.raises((UsageError, RecipeError), match=words):
        load_data(recipe(file, calibration={"images": str(file), "samples": 8, **keys}), MODULE)


def test_a_file_that_is_no_archive_and_data_of_the_wrong_kind(tmp_path: Path) -> None:
    (tmp_path / "set.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(UsageError, match=r"not a numpy \.npz"):
        load_data(recipe(tmp_path / "set.npz"), MODULE)
    with pytest.raises(
        UsageError, match="calibration: `images` does not fit: Llama is calibrated and evaluated on text"
    ):
        load_data(recipe(tmp_path / "set.npz"), ModelInfo("decoder", "Llama", "Llama"))
    text = {"calibration": {"text": "a.txt"}, "passes": [{"rtn": {"scheme": "W8A8"}}]}
    with pytest.raises(UsageError, match="evaluated on images, as a plain module"):
        load_data(Recipe.from_dict(text), MODULE)
    spec = recipe(tmp_path / "set.npz").calibration
    with pytest.raises(UsageError, match="images are for plain modules"):
        load_samples(spec, resource("models") / "reference")
    with pytest.raises(RecipeError, match="`mean` has no meaning without images"):
        Recipe.from_dict({**text, "calibration": {"text": "a.txt", "mean": 0.5}})


def test_accuracy_is_the_plain_definition_over_ragged_batches() -> None:
    labels, scaled = torch.from_numpy(LABELS.astype(np.int64)), Scaled(*torch.tensor([[0.5], [2.0]]))
    images = Images(StoredArrays(PIXELS, ""), torch.arange(COUNT), labels, scaled, "")
    rng = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(3 * 8 * 6, CLASSES, generator=rng) for _ in range(2))
    act: list[int] = []

    def classify(x: NDArray[np.float32]) -> Tensor:
        act.append(len(x))
        return torch.as_tensor(x).flatten(1) @ ours

    result = measure_accuracy(classify, images, batch=16, dense=lambda x: torch.as_tensor(x).flatten(1) @ theirs)
    p, q = (torch.log_softmax((images.inputs().flatten(1) @ w).double(), 1) for w in (theirs, ours))
    assert act == [16, 16, 16] and result.images == COUNT
    assert result.accuracy == pytest.approx(float((q.argmax(1) == images.labels).double().mean()))
    assert result.dense_accuracy == pytest.approx(float((p.argmax(1) == images.labels).double().mean()))
    assert result.accuracy_drop == pytest.approx(result.dense_accuracy - result.accuracy)
    assert result.top1_agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert result.kl_divergence == pytest.approx(float(functional.kl_div(q, p, reduction="batchmean", log_target=True)))
    with pytest.raises(UsageError, match=r"wanted: \[16, classes\]"):
        measure_accuracy(lambda x: x, images, batch=16)


class Net(nn.Module):
    """A batch norm with nothing in front, two convolutions with a shortcut, a grouped one, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.first = nn.BatchNorm2d(3), nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.second, self.grouped = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 8, 3, 2, groups=2)
        self.linear = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(self.alone(x))))
        x = torch.relu(self.grouped(x + self.second(x)))
        result: Tensor = self.linear(x.mean((2, 3)))
        return result


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net()
        for norm in (module.alone, module.norm):  # as after training
            norm.running_mean.uniform_(-0.5, 0.5)
            norm.running_var.uniform_(0.5, 2)
        return module.eval().requires_grad_(False)


def test_a_fixed_batch_takes_whole_batches_only(net: nn.Module) -> None:
    graph = capture(net, (torch.zeros(4, 3, 8, 6),))
    sites = [site for site in linear_sites(graph) if site.name == "second"]
    x = torch.randn(8, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    ((_, statistic),) = CalibrationRun(graph, x, sites, Hessian).groups()
    hidden = torch.relu(net.norm(net.first(net.alone(x))))
    rows = functional.unfold(hidden, 3, padding=1).unflatten(1, (16, 9)).permute(0, 3, 2, 1).reshape(-1, 144).double()
    torch.testing.assert_close(statistic.value.double(), 2 / len(rows) * rows.t() @ rows, rtol=1e-4, atol=1e-5)
    for samples, words in ((x[:6], "captured with a batch of 4, and 6 samples"), (x[:, :2], "the samples are"),
                           (x.long(), "reads no tokens")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            next(CalibrationRun(graph, samples, sites, Hessian).groups())


def test_mixed_precision_serves_convolutions(net: nn.Module) -> None:
    x = torch.randn(16, 3, 8, 6, generator=torch.Generator().manual_seed(0))
    graph = capture(net, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    context = Context(samples=Samples(x, torch.empty(0), "", "by chance"))
    graph = MixedPrecision(bits=8, targets=TARGETS).run(graph, context)
    assert [record.site for record in context.records] == ["first", "second", "linear"]
    assert linear_sites(graph) == []
    with torch.no_grad():
        assert float((graph(x) - net(x)).norm() / net(x).norm()) < 0.1


def check_parts(bundle: compressor.Bundle, x: NDArray[np.float32]) -> None:
    """Batches are divided by the largest value that an image makes, and the result is the same to the bit."""
    repeated = 4 * 16  # the pixels of a group of eight channels, for each of its four outputs
    assert bundle.model["entry_bytes"] == repeated * x.shape[2] * x.shape[3] * 4
    whole, call = bundle.run(x), bundle.call
    sizes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor_runtime.bundle._PART_BYTES", 3 * bundle.model["entry_bytes"])
        patch.setattr(bundle, "threads", 1)
        patch.setattr(bundle, "call", lambda part: sizes.append(int(part.shape[0])) or call(part))
        parts = bundle.run(x[:8])
    assert sizes == [2, 3, 3] and np.array_equal(parts, whole[:8])


def test_from_images_to_a_bundle(net: nn.Module, tmp_path: Path, require_tool: Callable[[str], Path]) -> None:
    require_tool("g++")
    scaled = {"mean": [0.5, 0.4, 0.3], "std": 0.25}
    unlabelled = load_images(
        recipe(write(tmp_path), evaluation={"images": str(tmp_path / "set.npz"), **scaled}).evaluation
    )
    file = write(tmp_path, labels=net(unlabelled.inputs()).argmax(1).numpy())
    plan = {
        "calibration": {"images": str(file), "samples": 12, **scaled},
        "evaluation": {"images": str(file), **scaled},
        "passes": [
            {"smoothquant": {"targets": ["second"]}},
            {"gptq": {"scheme": "W8A8", "targets": ["Conv2d", "Linear"]}},
        ],
        "gates": {"accuracy": ">= 0.95x dense", "accuracy_drop": "<= 5%", "batch_independent": True},
        "tune": "off",
    }
    example, shapes = (unlabelled.inputs(slice(2)),), ({0: torch.export.Dim("batch", min=1)},)
    outcome = run_recipe(Recipe.from_dict(plan), tmp_path / "bundle", model=net, example=example, dynamic_shapes=shapes)
    bundle = compressor.load(outcome.bundle)
    for count in (1, 5):
        x = unlabelled.inputs(slice(count))
        expected = net(x).numpy()
        assert np.linalg.norm(bundle.run(x.numpy()) - expected) < 0.03 * np.linalg.norm(expected)
    check_parts(bundle, unlabelled.inputs().numpy())
    manifest, measured = (
        json.loads((tmp_path / "bundle" / f"{n}.json").read_text()) for n in ("manifest", "measurements")
    )
    assert manifest["formats"] == ["W8A8"] and manifest["calibration"]["samples"] == 12
    assert [site["site"] for site in manifest["sites"]] == ["first", "second", "grouped", "linear"]
    assert {"convolution", "depthwise", "packed_linear"} <= {kernel["family"] for kernel in manifest["kernels"]}
    assert measured["dense_accuracy"] == 1 and measured["images"] == COUNT and measured["accuracy"] >= 0.95
    dense = {"alone.scale", "alone.shift", "grouped.bias", "first.bias", "second.bias", "linear.bias"}
    assert {name for name in manifest["parameters"] if not name.endswith((".codes", ".scales"))} == dense
    with pytest.raises(CompressorError, match="does not fit"):
        text = {**plan, "evaluation": None, "calibration": "python_docs", "gates": None}
        compressor.compress(net, text, tmp_path / "none", example=example, dynamic_shapes=shapes)
