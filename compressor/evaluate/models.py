"""Measure the quality of a bundle by its own kernels, in its own process, and of models in PyTorch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.capture.capture import capture
from compressor.data.embedding_texts import Texts, load_embedding_texts
from compressor.data.images import Images, load_evaluation_images
from compressor.data.load import EvaluationData, check_continuations, check_kind
from compressor.data.pairs import ZeroShot, no_classes, with_classes, zero_shot
from compressor.data.sounds import Sounds, load_evaluation_sounds
from compressor.data.text import Samples, load_evaluation, source_label
from compressor.errors import UsageError
from compressor.evaluate.embeddings import measure_embeddings
from compressor.evaluate.fidelity.result import EvalResult
from compressor.evaluate.generation.continuations import Continue, graph_continued
from compressor.evaluate.generation.decoders import even_rows, measure_decoder, seen_windows
from compressor.evaluate.quality import (
    Classes,
    GraphLogits,
    Hidden,
    Logits,
    graph_classes,
    graph_hidden,
    image_batch,
    measure_accuracy,
)
from compressor.evaluate.speech.listeners import Listener, listener_of, most_tokens
from compressor.evaluate.speech.transcripts import measure_speech
from compressor.evaluate.zero_shot import classify_by_texts, graph_by_texts
from compressor.graph.kinds.encoder_decoder import Batch
from compressor.graph.model import PREPROCESSOR, ModelInfo, PairInfo, SourceInfo, weight_bytes
from compressor.host.child import Child
from compressor.progress import Reporter, Silent
from compressor.recipe.recipe import EvaluationSpec, Recipe
from compressor.runtime import check_files, read_manifest

SIZES = ("weight_bytes", "dense_weight_bytes", "bundle_bytes")
"""Sizes in bytes that a manifest states."""
_IMAGES = 64  # images per batch


class BundleProcess(Child):
    """A bundle's own kernels, in a process without torch.

    Args:
        threads: number of threads; None takes the physical cores.
        launcher: words put before the process's command, such as an emulator.
    Raises:
        CompressorError: the bundle does not run, now or later.
    """

    def __init__(self, bundle: Path, threads: int | None = None, launcher: Sequence[str] = ()) -> None:
        arguments = [str(bundle.absolute()), str(threads or 0)]
        super().__init__(f"{bundle}: evaluation", "compressor.evaluate.quality_worker", arguments, launcher)

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return a decoder's logits float32 [B, S, V] for ids [B, S], from an empty cache."""
        return self._outputs(ids, None)

    def hidden(self, ids: NDArray[np.int64], mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return an encoder's last hidden state float32 [B, S, H] for ids and mask [B, S]."""
        return self._outputs(ids, mask)

    def told(self, pair: Batch) -> Tensor:
        """Return a model of speech's logits float32 [S, V] of the next token after each of a pair's, or of frames."""
        if isinstance(pair, Tensor):
            return torch.from_numpy(self.classes(pair.numpy()))[0]
        source, ids = pair.source.numpy(), pair.ids.numpy()
        header = json.dumps({"source": source.shape, "ids": ids.shape})
        return torch.from_numpy(self._received(self.ask(header, source.tobytes() + ids.tobytes()))[0])

    def said(self, samples: NDArray[np.float32], most: int) -> list[int]:
        """Return the likeliest tokens that a model of speech says to samples float32 [N], at most ``most``."""
        tokens: list[int] = self.ask(json.dumps({"samples": len(samples), "most": most}), samples.tobytes())
        return tokens

    def continued(self, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the likeliest next tokens of a decoder's prompts [B, S], step by step, [B, count]."""
        header = json.dumps({"prompts": prompts.shape, "count": count})
        return np.array(self.ask(header, prompts.astype(np.int64).tobytes()), np.int64)

    def classes(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a plain module's output for its one input, or embeddings of pictures."""
        return self._received(self.ask(json.dumps(x.shape), x.astype(np.float32).tobytes()))

    def texts(self, ids: NDArray[np.int64], mask: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return embeddings of texts, float32 [B, D], for ids and mask [B, S]."""
        return self._outputs(ids, mask)

    def _outputs(self, ids: NDArray[np.int64], mask: NDArray[np.float32] | None) -> NDArray[np.float32]:
        payload = ids.astype(np.int64).tobytes() + (b"" if mask is None else mask.astype(np.float32).tobytes())
        return self._received(self.ask(json.dumps(ids.shape), payload))

    def _received(self, shape: list[int]) -> NDArray[np.float32]:
        return np.frombuffer(bytearray(self.receive(int(np.prod(shape)) * 4)), np.float32).reshape(shape)


def bundle_quality(
    start: Callable[[], Any],
    dense: GraphLogits,
    data: EvaluationData | None,
    recipe: Recipe,
    samples: Samples | None,
    reporter: Reporter,
) -> EvalResult:
    """Measure a finished bundle against the dense model: on text, texts to embed, images, or sound.

    Args:
        start: returns a context manager that gives the bundle as :class:`BundleProcess` does.
        data: int64 [tokens], or what its kind reads; None if there is no data, and then nothing is measured.
        samples: of the calibration, for ``in_domain``.
    """
    info: ModelInfo = dense.graph.meta["model"]
    if data is None:
        return EvalResult()
    with start() as process:
        if isinstance(data, ZeroShot):
            ours, theirs = classify_by_texts(process.classes, process.texts, data), graph_by_texts(dense.graph, data)
            return measure_accuracy(ours, data.images, batch=_IMAGES, dense=theirs, reporter=reporter)
        if isinstance(data, Images):
            batch = image_batch(dense.graph, _IMAGES)
            classify = graph_classes(dense.graph)
            return measure_accuracy(process.classes, data, batch=batch, dense=classify, reporter=reporter)
        if isinstance(data, Sounds):
            listener, most = listener_of(dense.graph), most_tokens(dataclasses.asdict(info))
            return measure_speech(process, data, most=most, dense=listener, reporter=reporter)
        if isinstance(data, Texts):
            return measure_embeddings(process.hidden, graph_hidden(dense.graph), data, reporter)
        spec, seen = recipe.evaluation, None
        if spec.in_domain is not None and samples is not None:
            seen = even_rows(samples.ids, spec.in_domain)
        score, write, most = process.logits, process.continued, info.max_positions
        return measure_decoder(score, write, data, spec, most, dense=dense, in_domain=seen, reporter=reporter)


def evaluate_path(
    path: Path,
    spec: EvaluationSpec,
    *,
    dense: str | None = None,
    in_domain: EvaluationSpec | None = None,
    threads: int | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Measure the quality of a bundle, by its own kernels, or of a Hugging Face folder's captured graph.

    Decoders are measured by perplexity, encoders by how close their embeddings are to another encoder's, models of
    speech by the words that they get wrong.

    Args:
        dense: folder or id of a reference model, for ``dense_perplexity``, ``kl_divergence`` and ``top1_agreement``;
            encoders need it for ``embedding_cosine`` and ``embedding_cosine_min``.
        in_domain: text that a decoder was calibrated on, for ``overfit_gap``.
    Raises:
        CompressorError: the path is neither a bundle nor a model, or the text does not suit it.
    """
    reporter = reporter or Silent()
    if not (path / "manifest.json").is_file():
        graph = capture(path)
        info: ModelInfo = graph.meta["model"]
        _check_in_domain(path, in_domain, info.kind, info.hears)
        if info.kind == "module" and not info.hears:
            batch = image_batch(graph, _IMAGES)

            def own(data: ZeroShot | None) -> Classes:
                return graph_classes(graph) if data is None else graph_by_texts(graph, data)

            measured = _evaluate_images(own, batch, info, spec, dense, reporter)
        elif info.hears:
            measured = _evaluate_sounds(listener_of(graph), info, spec, dense, reporter)
        else:
            text = {"kind": info.kind, "vocab_size": info.vocab_size, "max_positions": info.max_positions}
            computed = (whole := GraphLogits(graph)), graph_hidden(graph), graph_continued(whole)
            measured = _evaluate(path, *computed, text, spec, dense, reporter, in_domain)
        return measured | {"weight_bytes": weight_bytes(graph)}
    manifest = read_manifest(path)
    check_files(path, manifest)
    facts: dict[str, Any] = {**manifest["model"], "kind": manifest["kind"]}
    hears = (facts.get("encoder_source") or {}).get("reads") == "audio"
    _check_in_domain(path, in_domain, facts["kind"], hears)
    with BundleProcess(path, threads) as process:
        if hears:
            measured = _evaluate_sounds(process, _speech_facts(path, facts), spec, dense, reporter)
        elif facts["kind"] == "module":
            known = _image_facts(path, facts)
            batch = fixed if isinstance(fixed := facts["inputs"][0]["shape"][0], int) else _IMAGES

            def served(data: ZeroShot | None) -> Classes:
                return process.classes if data is None else classify_by_texts(process.classes, process.texts, data)

            measured = _evaluate_images(served, batch, known, spec, dense, reporter)
        else:
            ours = process.logits, process.hidden, process.continued
            measured = _evaluate(path, *ours, facts, spec, dense, reporter, in_domain)
        return measured | {key: manifest[key] for key in SIZES}


def _check_in_domain(path: Path, in_domain: EvaluationSpec | None, kind: str, hears: bool) -> None:
    if in_domain is not None and (hears or kind in ("encoder", "module")):
        raise UsageError(f"{path}: is not a decoder, which alone is measured on --in-domain; leave it out")


def _evaluate(
    path: Path,
    logits: Logits,
    hidden: Hidden,
    continued: Continue,
    facts: dict[str, Any],
    spec: EvaluationSpec,
    dense: str | None,
    reporter: Reporter,
    in_domain: EvaluationSpec | None,
) -> dict[str, Any]:
    kind, vocab_size, positions = facts["kind"], facts["vocab_size"], facts["max_positions"]
    check_kind("evaluation", spec, ModelInfo(kind, str(path), ""))
    graph = None if dense is None else capture(dense)
    if graph is not None:
        known: ModelInfo = graph.meta["model"]
        if (known.kind, known.vocab_size) != (kind, vocab_size):
            raise UsageError(
                f"{dense}: {known.kind} with {known.vocab_size} tokens; {path}: {kind} with {vocab_size}; not its model"
            )
    if kind == "encoder":
        if graph is None:
            raise UsageError(
                f"{path}: is an encoder, which has no perplexity; name the model to compare its embeddings with: "
                "--dense"
            )
        folder = graph.meta["model"].source  # its files state the pooling
        texts = load_embedding_texts(spec, None, folder, vocab_size, positions)
        found = measure_embeddings(hidden, graph_hidden(graph), texts, reporter).metrics()
        return {"text": source_label(spec), **found}
    tokens, source = load_evaluation(spec, None, path, vocab_size)
    if len(tokens) < spec.tokens:
        reporter.note(f"evaluation: {source} has {len(tokens)} tokens, of the {spec.tokens} asked for")
    reference = None if graph is None else GraphLogits(graph)
    check_continuations(spec, len(tokens))
    seen = seen_windows(spec, in_domain, path, vocab_size, positions)
    compared: dict[str, Any] = {"dense": reference, "in_domain": seen}
    result = measure_decoder(logits, continued, tokens, spec, positions, reporter=reporter, **compared)
    return {"text": source, **result.metrics()}


def _speech_facts(path: Path, facts: dict[str, Any]) -> ModelInfo:
    """Return what a bundle's manifest says of the sound that it reads and the text that it writes."""
    return ModelInfo(
        kind=facts["kind"],
        name=facts["name"],
        architecture=facts["architecture"],
        vocab_size=facts["vocab_size"],
        max_positions=facts["max_positions"],
        eos_ids=tuple(facts["eos_ids"]),
        source=path,
        encoder_source=SourceInfo.of_facts(facts["encoder_source"]),
    )


def _evaluate_sounds(
    listener: Listener, info: ModelInfo, spec: EvaluationSpec, dense: str | None, reporter: Reporter
) -> dict[str, Any]:
    """Measure a model of speech on sounds and their texts, and against another that writes the same tokens."""
    check_kind("evaluation", spec, info)
    sounds = load_evaluation_sounds(spec, None, info)
    if sounds is None:
        raise UsageError(f"{info.name}: name a folder of sounds with their texts to evaluate on, with --data")
    reference = None
    if dense is not None:
        graph = capture(dense)
        known: ModelInfo = graph.meta["model"]
        if known.encoder_source != info.encoder_source or known.vocab_size != info.vocab_size:
            raise UsageError(f"{dense}: reads other sound or writes other tokens than {info.name}; not its model")
        reference = listener_of(graph)
    most = most_tokens(dataclasses.asdict(info))
    found = measure_speech(listener, sounds, most=most, dense=reference, reporter=reporter).metrics()
    return {"data": sounds.source, **found}


def _image_facts(path: Path, facts: dict[str, Any]) -> ModelInfo:
    """Return what a bundle's manifest says of the images that it reads.

    Raises:
        UsageError: it is a module of another kind, or was made before bundles said so.
    """
    shape, classes, pair = facts.get("image_shape"), facts.get("classes"), facts.get("pair")
    if not shape or not (classes or pair):
        raise UsageError(
            f"{path}: its manifest names no classes of images; what can be evaluated are decoders, encoders, and "
            "modules of images float32 [n, channels, height, width] that give [n, classes]"
        )
    return ModelInfo(
        kind="module",
        name=facts["name"],
        architecture=facts["architecture"],
        source=path if (path / PREPROCESSOR).is_file() else None,
        image_shape=tuple(shape),
        classes=classes or 0,
        class_names=tuple(facts.get("class_names", ())),
        vocab_size=facts["vocab_size"],
        max_positions=facts["max_positions"],
        pair=None if pair is None else PairInfo(**pair),
    )


def _evaluate_images(
    classifier: Callable[[ZeroShot | None], Classes],
    batch: int,
    info: ModelInfo,
    spec: EvaluationSpec,
    dense: str | None,
    reporter: Reporter,
) -> dict[str, Any]:
    """Measure a classifier on labelled images, and against another of the same images and classes.

    Args:
        classifier: gives the classifier; told of the classes' texts where the model embeds both.
    """
    check_kind("evaluation", spec, info)
    if spec.kind is None:
        raise UsageError(f"{info.name}: name labelled images to evaluate on, with --data")
    if info.pair is not None and spec.classes is None:
        raise no_classes("evaluation", info)
    images = load_evaluation_images(spec, None, with_classes(info, spec) if info.pair is not None else info)
    assert images is not None
    data = None if info.pair is None else zero_shot(images, spec, info)
    reference = None
    if dense is not None:
        graph = capture(dense)
        known: ModelInfo = graph.meta["model"]
        if (known.image_shape, known.classes) != (info.image_shape, info.classes):
            raise UsageError(
                f"{dense}: reads {list(known.image_shape)} and has {known.classes} classes; {info.name}: "
                f"{list(info.image_shape)} and {info.classes}; not its model"
            )
        reference = graph_classes(graph) if data is None else graph_by_texts(graph, data)
    found = measure_accuracy(classifier(data), images, batch=batch, dense=reference, reporter=reporter).metrics()
    return {"data": images.source, **found}
