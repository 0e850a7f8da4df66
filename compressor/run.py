"""The main job: a recipe turns a model into a bundle, and says what became of quality, size and speed."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import GraphModule

from compressor.bench import bench
from compressor.calibration import load_evaluation, load_samples
from compressor.capture import capture
from compressor.codegen.lower import Library, compile_graph
from compressor.codegen.targets import Target
from compressor.errors import CompressorError, GateError, UsageError
from compressor.evaluate import (
    EvalResult,
    GateResult,
    check_gates,
    graph_hidden,
    graph_logits,
    measure_cosine,
    measure_quality,
)
from compressor.export import BundleParts, check_destination, fill_bundle, publishing, write_measurements
from compressor.graph import ModelInfo, twin, weight_bytes
from compressor.pipeline import Context, Dump, Observer, Pipeline, Reporter, Silent
from compressor.recipe import EvaluationSpec, Recipe
from compressor.runtime import Bundle, load, read_manifest
from compressor.verify import bundle_logits, check_kernels, verify_stage

if TYPE_CHECKING:
    from torch import nn

_UNSTEADY = 0.3  # (max - min) / median
_SIZES = ("weight_bytes", "dense_weight_bytes", "bundle_bytes")


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        bundle: folder of the bundle.
        metrics: measured figures by their JSON names; dense figures begin with ``dense_``.
        gates: how each gate went.
        sites: what each pass did to each linear.
        stages: time and weight bytes of each pass.
        kernel_error: relative error of the bundle's outputs against the graph in PyTorch; None if they cannot run here.
        notes: what the user should know.
    """

    bundle: Path
    metrics: Mapping[str, float | int]
    gates: Sequence[GateResult]
    sites: Sequence[Mapping[str, Any]]
    stages: Sequence[Mapping[str, Any]]
    kernel_error: float | None
    notes: Sequence[str]


def compress(
    model: str | Path | nn.Module | None,
    recipe: Recipe | Mapping[str, Any],
    output: str | Path | None = None,
    *,
    example: tuple[Any, ...] | None = None,
    reporter: Reporter | None = None,
) -> Bundle:
    """Compress a model by a recipe and load the bundle.

    Args:
        model: Hugging Face folder or id, or a module; None takes the recipe's.
        recipe: a recipe, or plain data with the keys of its YAML form.
        output: the bundle's folder; None takes the recipe's.
        example: example inputs, for a module that is no Hugging Face model.
    Raises:
        CompressorError: see ``compressor.errors``; nothing is left behind.
    """
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.from_dict(recipe)
    return load(run_recipe(recipe, output, model=model, example=example, reporter=reporter).bundle)


def run_recipe(
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    model: str | Path | nn.Module | None = None,
    example: tuple[Any, ...] | None = None,
    reporter: Reporter | None = None,
    dump: Path | None = None,
    threads: int | None = None,
) -> Outcome:
    """Run a recipe; the bundle appears whole, or not at all.

    A bundle that fails a gate is kept as ``<output>.rejected``.

    Args:
        dump: folder for the graph after each pass and the program after each lowering phase.
        threads: for tuning and for timing; None takes the physical cores.
    Raises:
        GateError: a gate failed; each is named with what was expected and measured.
        VerificationError: the kernels do not compute what the graph does.
    """
    reporter = reporter or Silent()
    destination = Path(output or recipe.output or _missing_output())
    rejected = destination.with_name(destination.name + ".rejected")
    for folder in (destination, rejected) if recipe.gates else (destination,):
        check_destination(folder)
    if dump is not None:
        _make_dump_folder(dump)
    if isinstance(model, str):
        recipe, model = recipe.model_copy(update={"model": model}), None
    source = recipe.model_source() if model is None else model
    recipe.check_texts()
    target: Target = recipe.target.build()
    target.check_toolchain()  # fails now rather than after calibration
    runs_here = target.executes(target.resolve())
    with _step(reporter, "capture"):
        graph = capture(source, example, trust_remote_code=recipe.trust_remote_code)
        dense = twin(graph)  # for comparison
    info: ModelInfo = graph.meta["model"]
    samples = None
    if recipe.calibration is not None:
        samples = load_samples(recipe.calibration, info.source, info.vocab_size)
    text = None
    if info.kind == "decoder" and (recipe.evaluation.kind is not None or samples is not None):
        text, _ = load_evaluation(recipe.evaluation, samples, info.source, info.vocab_size)
    context = Context(samples=samples, seed=recipe.seed, target=recipe.target.name, reporter=reporter)
    observers: list[Observer] = [verify_stage] if dump is None else [verify_stage, Dump(dump)]
    graph = Pipeline(recipe.passes, observers).run(graph, context)
    with _step(reporter, "compile"):
        library = compile_graph(graph, target, tune=recipe.tune, threads=threads, dump=_dumper(dump))
    with publishing(destination) as partial:
        assemble(partial, graph, library, target, recipe, context, weight_bytes(dense))
        manifest = read_manifest(partial)
        metrics: dict[str, Any] = {key: manifest[key] for key in _SIZES}
        kernel_error: float | None = None
        notes: list[str] = []
        if runs_here:
            bundle = load(partial, threads=threads)
            kernel_error = check_kernels(bundle, graph)
            metrics.update(_quality(bundle, dense, text, recipe, reporter).metrics())
            del bundle, graph, dense
            gc.collect()  # graphs are cyclic, and two more processes are about to need memory
            with _step(reporter, "time"):
                speed, notes = _speed(partial, info, threads)
            metrics.update(speed)
        else:
            notes.append(f"kernels are compiled for {library.isa.name}, which this machine lacks: nothing was measured")
        notes += _comparisons(metrics)
        gates = check_gates(recipe.gates, metrics)
        outcome = Outcome(
            destination,
            metrics,
            gates,
            [dataclasses.asdict(record) for record in context.records],
            [dataclasses.asdict(record) for record in context.stages],
            kernel_error,
            notes,
        )
        write_measurements(partial, {**metrics, "kernel_error": kernel_error, "gates": [str(gate) for gate in gates]})
        if failed := [str(gate) for gate in gates if not gate.passed]:
            with publishing(rejected) as kept:
                kept.rmdir()
                partial.rename(kept)
            outcome = dataclasses.replace(outcome, bundle=rejected)
            raise GateError("\n".join([*failed, f"the bundle is kept as {rejected}"]), outcome)
    return outcome


def _missing_output() -> str:
    raise UsageError("no output folder: give one with -o, or `output:` in the recipe")


def _make_dump_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"dump: {folder} cannot be made a folder: {error}; choose another") from error


@contextmanager
def _step(reporter: Reporter, name: str) -> Iterator[None]:
    with reporter.task(name, 1) as task:
        yield
        task.advance()


def _dumper(folder: Path | None) -> Any:
    if folder is None:
        return None
    count = iter(range(1, 1000))

    def write(phase: str, text: str) -> None:
        (folder / f"lower_{next(count):02d}_{phase}.py").write_text(text, encoding="utf-8")

    return write


def assemble(
    folder: Path,
    graph: GraphModule,
    library: Library,
    target: Target,
    recipe: Recipe,
    context: Context,
    dense_weight_bytes: int,
) -> None:
    """Link the library and write all files of a bundle into the empty ``folder``."""
    info: ModelInfo = graph.meta["model"]
    with tempfile.TemporaryDirectory() as scratch:
        shared = Path(scratch) / "model.so"
        library.save(shared, target)
        parts = BundleParts(
            graph=graph,
            parameters=library.parameters,
            library=shared,
            model={**dataclasses.asdict(info), "weight_bytes_per_token": weight_bytes_per_token(graph)},
            recipe=recipe.resolved(),
            sites=[dataclasses.asdict(record) for record in context.records],
            kernels=library.kernels,
            cpu_features=library.isa.cpu_flags,
            dense_weight_bytes=dense_weight_bytes,
            calibration=None if context.samples is None else context.samples.facts(),
            tokenizer=info.source if info.kind != "module" else None,
        )
        fill_bundle(folder, parts)


def weight_bytes_per_token(graph: GraphModule) -> int:
    """Bytes of parameters that one token reads: all, but of a table that only an embedding uses one row."""
    total = 0
    users: dict[str, set[Any]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        users.setdefault(str(node.target), set()).update(user.target for user in node.users)
    for name, parameter in graph.named_parameters():
        size_bytes = parameter.numel() * parameter.element_size()
        only_embedding = users.get(name) == {torch.ops.aten.embedding.default}
        total += size_bytes // parameter.shape[0] if only_embedding else size_bytes
    return total


def _quality(bundle: Bundle, dense: GraphModule, text: Any, recipe: Recipe, reporter: Reporter) -> EvalResult:
    info: ModelInfo = dense.meta["model"]
    if info.kind == "encoder":
        rng = np.random.default_rng(recipe.seed)
        ids = rng.integers(0, info.vocab_size, (4, min(128, info.max_positions or 128)))
        return measure_cosine(bundle.encode, graph_hidden(dense), [(ids, np.ones(ids.shape, np.float32))])
    if text is None:
        return EvalResult()
    window, stride = _window(recipe.evaluation, info.max_positions, reporter)
    return measure_quality(
        bundle_logits(bundle), text, window=window, stride=stride, dense=graph_logits(dense), reporter=reporter
    )


def _speed(bundle: Path, info: ModelInfo, threads: int | None) -> tuple[dict[str, Any], list[str]]:
    """The bundle's figures, the dense model's in PyTorch eager float32 where it comes from a folder, and notes."""
    if info.kind != "decoder":
        return {}, []
    prompt = max(1, min(128, (info.max_positions or 256) // 2))
    count = max(1, min(64, prompt))
    measured = bench(bundle, threads=threads, prompt_tokens=prompt, new_tokens=count)
    if info.source is None:
        return measured, []
    try:
        dense = bench(info.source, threads=threads, prompt_tokens=prompt, new_tokens=count, repeats=3)
    except CompressorError as error:  # out of memory, say: no reason to lose the bundle
        return measured, [f"the dense model's speed was not measured: {error}"]
    return {**measured, **{f"dense_{name}": value for name, value in dense.items() if name != "threads"}}, []


def _comparisons(metrics: Mapping[str, Any]) -> list[str]:
    """What is worse than dense, in words."""
    notes = []
    if metrics["weight_bytes"] >= metrics["dense_weight_bytes"]:
        notes.append("the bundle's weights are not smaller than the dense model's")
    spread = max((metrics[key] for key in metrics if key.endswith("_spread")), default=0.0)
    if spread > _UNSTEADY:
        notes.append(f"timings varied by {spread:.0%} between repeats: the machine is busy, and speeds are uncertain")
    for name in ("prefill", "decode"):
        ours, dense = metrics.get(f"{name}_tokens_per_s"), metrics.get(f"dense_{name}_tokens_per_s")
        if ours is not None and dense is not None and ours < dense:
            notes.append(f"{name} is slower than the dense model in PyTorch: {ours:.1f} against {dense:.1f} tokens/s")
    return notes


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
    if (path / "manifest.json").is_file():
        bundle = load(path, threads=threads)
        if bundle.kind != "decoder":
            raise UsageError(f"{path}: holds a {bundle.kind}; perplexity is of decoders")
        logits, vocab_size, positions = bundle_logits(bundle), bundle.model["vocab_size"], bundle.model["max_positions"]
        sizes = {key: bundle.manifest[key] for key in _SIZES}
    else:
        graph = capture(path)
        info: ModelInfo = graph.meta["model"]
        if info.kind != "decoder":
            raise UsageError(f"{path}: is a {info.kind}; perplexity is of decoders")
        logits, vocab_size, positions = graph_logits(graph), info.vocab_size, info.max_positions
        sizes = {"weight_bytes": weight_bytes(graph)}
    tokens, _ = load_evaluation(spec, None, path, vocab_size)
    window, stride = _window(spec, positions, reporter)
    reference = None
    if dense is not None:
        graph = capture(dense)
        if graph.meta["model"].vocab_size != vocab_size:
            raise UsageError(
                f"{dense}: {graph.meta['model'].vocab_size} tokens, {path} has {vocab_size}; not its model"
            )
        reference = graph_logits(graph)
    result = measure_quality(logits, tokens, window=window, stride=stride, dense=reference, reporter=reporter)
    return {**result.metrics(), **sizes}


def _window(spec: EvaluationSpec, positions: int, reporter: Reporter) -> tuple[int, int]:
    """The window and stride to evaluate with: the specification's, or the model's positions if those are fewer."""
    if not positions or spec.window <= positions:
        return spec.window, spec.stride
    reporter.note(f"evaluation: windows of {positions} tokens, the model's positions, with stride {positions // 2}")
    return positions, max(1, positions // 2)
