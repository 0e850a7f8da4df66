"""Quality of a bundle by its own kernels, in a process of its own, and of models in PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compressor.calibration import load_evaluation
from compressor.capture import capture
from compressor.child import Child
from compressor.errors import UsageError
from compressor.evaluate import (
    EvalResult,
    GraphLogits,
    Logits,
    graph_classes,
    graph_hidden,
    image_batch,
    measure_accuracy,
    measure_cosine,
    measure_quality,
)
from compressor.graph import ModelInfo, weight_bytes
from compressor.images import Images
from compressor.pipeline import Reporter, Silent
from compressor.recipe import EvaluationSpec, Recipe
from compressor.runtime import check_files, read_manifest

SIZES = ("weight_bytes", "dense_weight_bytes", "bundle_bytes")
"""Figures of a manifest."""
_IMAGES = 64  # that run at once


class BundleProcess(Child):
    """A bundle's own kernels, in a process without torch.

    Args:
        threads: None takes the physical cores.
    Raises:
        CompressorError: the bundle does not run, now or later.
    """

    def __init__(self, bundle: Path, threads: int | None = None) -> None:
        arguments = [str(bundle.absolute()), str(threads or 0)]
        super().__init__(f"{bundle}: evaluation", "compressor.evaluate_child", arguments)

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """A decoder's logits [B, S, V] for ids [B, S], from an empty cache."""
        return self._outputs(ids, None)

    def hidden(self, ids: NDArray[np.int64], mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """An encoder's last hidden state [B, S, H] for ids and mask [B, S]."""
        return self._outputs(ids, mask)

    def classes(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """A plain module's output for its one input."""
        return self._received(self.ask(json.dumps(x.shape), x.astype(np.float32).tobytes()))

    def _outputs(self, ids: NDArray[np.int64], mask: NDArray[np.float32] | None) -> NDArray[np.float32]:
        payload = ids.astype(np.int64).tobytes() + (b"" if mask is None else mask.astype(np.float32).tobytes())
        return self._received(self.ask(json.dumps(ids.shape), payload))

    def _received(self, shape: list[int]) -> NDArray[np.float32]:
        return np.frombuffer(bytearray(self.receive(int(np.prod(shape)) * 4)), np.float32).reshape(shape)


def bundle_quality(
    bundle: Path,
    dense: GraphLogits,
    data: Tensor | Images | None,
    recipe: Recipe,
    reporter: Reporter,
    threads: int | None,
) -> EvalResult:
    """A finished bundle against the dense model: decoders on text, encoders on random tokens, modules on images.

    Args:
        data: int64 [tokens], or images; None where a decoder or module has none, and then nothing is measured.
    """
    info: ModelInfo = dense.graph.meta["model"]
    if info.kind != "encoder" and data is None:
        return EvalResult()
    with BundleProcess(bundle, threads) as process:
        if isinstance(data, Images):
            batch, classify = image_batch(dense.graph, _IMAGES), graph_classes(dense.graph)
            return measure_accuracy(process.classes, data, batch=batch, dense=classify, reporter=reporter)
        if data is None:
            rng = np.random.default_rng(recipe.seed)
            ids = rng.integers(0, info.vocab_size, (4, min(128, info.max_positions or 128)))
            return measure_cosine(process.hidden, graph_hidden(dense.graph), [(ids, np.ones(ids.shape, np.float32))])
        window, stride = evaluation_window(recipe.evaluation, info.max_positions, reporter)
        return measure_quality(process.logits, data, window=window, stride=stride, dense=dense, reporter=reporter)


def evaluate_path(
    path: Path,
    spec: EvaluationSpec,
    *,
    dense: str | None = None,
    threads: int | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Perplexity of a bundle's own kernels, or of a Hugging Face folder's captured graph.

    Args:
        dense: folder or id of a model to measure fidelity against: ``dense_perplexity``, ``kl_divergence``,
            ``top1_agreement``.
    Raises:
        CompressorError: the path is neither, or the text does not suit it.
    """
    reporter = reporter or Silent()
    if not (path / "manifest.json").is_file():
        graph = capture(path)
        info: ModelInfo = graph.meta["model"]
        facts = {"kind": info.kind, "vocab_size": info.vocab_size, "max_positions": info.max_positions}
        return _evaluate(path, GraphLogits(graph), facts, spec, dense, reporter) | {"weight_bytes": weight_bytes(graph)}
    manifest = read_manifest(path)
    check_files(path, manifest)
    with BundleProcess(path, threads) as process:
        facts = {**manifest["model"], "kind": manifest["kind"]}
        return _evaluate(path, process.logits, facts, spec, dense, reporter) | {key: manifest[key] for key in SIZES}


def _evaluate(
    path: Path, logits: Logits, facts: dict[str, Any], spec: EvaluationSpec, dense: str | None, reporter: Reporter
) -> dict[str, Any]:
    if facts["kind"] != "decoder":
        raise UsageError(f"{path}: is a {facts['kind']}; perplexity is of decoders")
    tokens, _ = load_evaluation(spec, None, path, facts["vocab_size"])
    window, stride = evaluation_window(spec, facts["max_positions"], reporter)
    reference = None
    if dense is not None:
        graph = capture(dense)
        known = graph.meta["model"].vocab_size
        if known != facts["vocab_size"]:
            raise UsageError(f"{dense}: {known} tokens, {path} has {facts['vocab_size']}; not its model")
        reference = GraphLogits(graph)
    return measure_quality(logits, tokens, window=window, stride=stride, dense=reference, reporter=reporter).metrics()


def evaluation_window(spec: EvaluationSpec, positions: int, reporter: Reporter) -> tuple[int, int]:
    """The window and stride to evaluate with: the specification's, or the model's positions if those are fewer."""
    if not positions or spec.window <= positions:
        return spec.window, spec.stride
    reporter.note(f"evaluation: windows of {positions} tokens, the model's positions, with stride {positions // 2}")
    return positions, max(1, positions // 2)
