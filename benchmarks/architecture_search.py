"""Architectures of the reference model at equal measured time: searched, uniform, without layers, in fewer bits.

    python benchmarks/architecture_search.py --store build/search search --steps 0    # choose; again with --steps 200
    python benchmarks/architecture_search.py --store build/search row "puzzle 0.667 steps 200" --distill 120
    python benchmarks/architecture_search.py --store build/search fits "puzzle 0.667 steps 200" --steps 200
    python benchmarks/architecture_search.py --store build/search texts               # for a peer, whose model is then
    python benchmarks/architecture_search.py --store build/search row "folder PATH"   # (benchmarks/peers/README.md)
    python benchmarks/architecture_search.py --store build/search formats             # architecture, formats, both
    python benchmarks/architecture_search.py --store build/search table               # Markdown of what is there

Pieces add up in the folder: choices, rows, and the cache of trained candidates, so that each piece takes minutes.
Everything is timed in W8A16 on this machine's kernels, a row in turns with the whole model.  Perplexities are of the
graph that is packed, on text that nothing was fitted to.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples, load_evaluation, load_samples
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.graph.model import clone_graph, weight_bytes
from compressor.host.resources import resource
from compressor.passes.distill import Distill
from compressor.passes.gptq import Gptq
from compressor.passes.puzzle import Puzzle
from compressor.passes.rtn import Rtn
from compressor.passes.skip_layers import SkipLayers
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.pipeline.structured.architecture import build, find_parts
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe
from compressor.run.steps import Steps
from compressor.search.space import Start, alternatives
from compressor.training.candidates import CandidateOptions, train_candidates
from compressor.training.settings import split

RECIPE = {"model": "reference", "calibration": "python_docs_training", "evaluation": "python_docs_heldout"}
SHARES = (0.667, 0.5)
SPACE: dict[str, tuple[str, ...]] = {
    "attention": ("heads:0.5", "kv_heads:2", "none"),
    "ffn": ("width:0.75", "width:0.5", "width:0.25", "none"),
}
HELD_OUT = 0.1
FORMATS = ("W6A16_G128", "W4A16_G128", "W3A16_G128")
BYTES = "2.4 MB"


@dataclass(frozen=True)
class Architecture(Pass):
    """Build an architecture by the labels of its alternatives, trained as the search trained them.

    Without ``refits``, what reads the channels that stay keeps its weights.
    """

    labels: tuple[str, ...]
    steps: int
    refits: bool = True

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Sort, train or take the weights out of the cache, and build."""
        parts = find_parts(graph, "puzzle", 1, 1)
        space = alternatives(parts.layers, SPACE, 32)
        ids = ctx.calibration("puzzle").ids
        assert isinstance(ids, torch.Tensor)
        _, fitted = split(ids, HELD_OUT, ctx.seed)
        starts = sort_parts(graph, ctx, parts, space, fitted, "obs")
        if not self.refits:
            starts = [{label: Start(start.kept) for label, start in row.items()} for row in starts]
        if self.steps:
            settings = CandidateOptions(steps=self.steps).settings
            starts = train_candidates(
                graph, ctx, "puzzle", parts, space, starts, fitted, settings, "architecture_search"
            )
        picks = [next(one for one in row if one.label == label) for row, label in zip(space, self.labels, strict=True)]
        build(graph, ctx, "puzzle", parts, picks, starts)
        return graph


class Bench:
    """The model, its texts and what pieces have found so far."""

    def __init__(self, store: Path, samples: int, tokens: int) -> None:
        self._store, recipe, folder = (
            store,
            Recipe.from_dict({**RECIPE, "passes": []}),
            resource("models") / "reference",
        )
        assert recipe.calibration is not None
        store.mkdir(parents=True, exist_ok=True)
        self.dense = capture(folder)
        given = recipe.calibration.model_copy(update={"samples": samples})
        self.samples: Samples = load_samples(given, folder)
        self.tokens, _ = load_evaluation(recipe.evaluation.model_copy(update={"tokens": tokens}), None, folder)
        self.clock = Steps(Recipe.from_dict({**RECIPE, "passes": [], "target": "x86", "tune": "off"}), 1, Silent())

    def context(self, state: str = "reference") -> Context:
        """Return a context with this machine's clock and the folder's cache.

        Args:
            state: names the model, whose results are apart in the cache.
        """
        cache = SegmentCache(self._store / "cache")
        return Context(samples=self.samples, results=cache, state=state, step_seconds=self.clock)

    def keep(self, kind: str, name: str, value: dict[str, Any]) -> None:
        """Write a result, whole or not at all."""
        found = self.known()
        found.setdefault(kind, {})[name] = value
        new = self._store / "results.json.new"
        new.write_text(json.dumps(found, indent=1))
        new.replace(self._store / "results.json")
        print(json.dumps({name: value}), flush=True)

    def known(self) -> dict[str, dict[str, Any]]:
        """Return the results so far."""
        path = self._store / "results.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def row(self, name: str, steps: Sequence[Pass], distill: int, pack: Pass, source: Path | None = None) -> None:
        """Run passes, distil, pack; keep quality and the share of the whole model's step, timed in turns.

        Args:
            source: of another model in the place of the whole one.
        """
        begin, training = time.process_time(), list[Pass]()
        if distill:
            training = [Distill(steps=distill, batch=4, learning_rate=5e-4, ignore=("lm_head",))]
        begun, context = clone_graph(self.dense), self.context()
        if source is not None:
            begun, context = capture(source), self.context(str(source))
        graph = Pipeline([*steps, *training, pack]).run(begun, context)
        seconds = time.process_time() - begin
        whole = Pipeline([Rtn("W8A16", ignore=("lm_head",))]).run(clone_graph(self.dense), Context())
        (first, ours), _ = self.clock([whole, graph])
        found = measure_quality(GraphLogits(graph), self.tokens, window=256, stride=128, dense=GraphLogits(self.dense))
        figures = {"perplexity": found.perplexity, "divergence": found.kl_divergence, "share": ours / first}
        self.keep("rows", f"{name}, distilled {distill}", {**figures, "bytes": weight_bytes(graph), "cpu_s": seconds})


def search(bench: Bench, steps: int, share: float) -> None:
    """Choose under a share of the step; keep the labels of the choice and of the best uniform architecture."""
    ctx, begin = bench.context(), time.process_time()
    options: dict[str, Any] = {**SPACE, "steps": steps, "held_out": HELD_OUT, "scheme": "W8A16", "depth": "none"}
    Pipeline([Puzzle(latency=share, budgets=(min(0.99, share + 0.1),), **options)]).run(clone_graph(bench.dense), ctx)
    (front,) = ctx.fronts
    (chosen,) = [one for one in front.points if one.chosen]
    uniform = [one for one in front.points if one.uniform and one.cost <= share * front.whole]
    found = [("puzzle", chosen), *(("uniform", one) for one in sorted(uniform, key=lambda one: one.score)[:1])]
    for name, one in found:
        facts = {"labels": one.choice, "score": one.score, "error": one.error, "foreseen": one.cost / front.whole}
        taken = time.process_time() - begin
        bench.keep("choices", f"{name} {share:g} steps {steps}", {**facts, "steps": steps, "cpu_s": taken})


def row(bench: Bench, name: str, distill: int) -> None:
    """Measure one row of the table: a choice by its name, ``blocks N`` fewer, a format, or another model's folder."""
    pack = Rtn("W8A16", ignore=("lm_head",))
    kind, _, argument = name.partition(" ")
    if kind == "blocks":
        return bench.row(name, [SkipLayers(float(argument), ranking="perplexity")], distill, pack)
    if kind == "folder":
        return bench.row(name, [], 0, pack, Path(argument))
    if kind == "format":
        return bench.row(name, [], 0, Gptq(argument, ignore=("lm_head",)))
    found = bench.known()["choices"][name]
    return bench.row(name, [Architecture(tuple(found["labels"]), found["steps"])], distill, pack)


def fits(bench: Bench, name: str, steps: int) -> None:
    """Compare a choice whose weights are cut, refitted by least squares, and trained block by block behind that."""
    labels = tuple(bench.known()["choices"][name]["labels"])
    stages = {"cut": Architecture(labels, 0, False), "refitted": Architecture(labels, 0)}
    for stage, build_it in (stages | {f"trained {steps} steps": Architecture(labels, steps)}).items():
        graph = Pipeline([build_it]).run(clone_graph(bench.dense), bench.context())
        found = measure_quality(
            GraphLogits(graph), bench.tokens, window=256, stride=128, dense=GraphLogits(bench.dense)
        )
        bench.keep("fits", f"{name}, {stage}", {"perplexity": found.perplexity, "divergence": found.kl_divergence})


def texts(bench: Bench, folder: Path) -> None:
    """Write the samples that a search fits and those that it scores, for a peer."""
    ids = bench.samples.ids
    assert isinstance(ids, torch.Tensor)
    for name, one in zip(("held", "fitted"), split(ids, HELD_OUT, 0), strict=True):
        np.save(folder / f"{name}.npy", one.numpy())


def formats(bench: Bench) -> None:
    """Compare architecture, formats and both at equal stored bytes, by their scores on held-out samples."""
    narrow = {name: tuple(one for one in SPACE[name] if one != "none") for name in SPACE}
    spaces: dict[str, dict[str, Any]] = {
        "both": {**narrow, "schemes": FORMATS},
        "formats": {"attention": (), "ffn": (), "schemes": FORMATS},
        "architecture": {**SPACE, "keep_first": 0, "keep_last": 0},
    }
    for name, options in spaces.items():
        ctx, begin = replace(bench.context(), results=None), time.process_time()
        step = Puzzle(weight_bytes=BYTES, scheme="W8A16", held_out=HELD_OUT, depth="none", **options)
        Pipeline([step]).run(clone_graph(bench.dense), ctx)
        told = [note for note in ctx.notes if "KL(" in note or "weight_bytes" in note or "uniform" in note]
        bench.keep("formats", name, {"told": told, "notes": ctx.notes, "cpu_s": time.process_time() - begin})


def table(bench: Bench) -> None:
    """Print what is there."""
    known = bench.known()
    print("| choice | score, held out | step, foreseen |\n|---|---|---|")
    for name, one in known.get("choices", {}).items():
        print(f"| {name} | {one['score']:.4f} ± {one['error']:.2g} | {one['foreseen']:.3f} |")
    print("\n| row | step, measured | perplexity | KL, nats a token | weight bytes |\n|---|---|---|---|---|")
    for name, one in known.get("rows", {}).items():
        figures = f"{one['share']:.3f} | {one['perplexity']:.3f} | {one['divergence']:.4f} | {one['bytes']:,}"
        print(f"| {name} | {figures} |")
    print("\n| block by block | perplexity | KL, nats a token |\n|---|---|---|")
    for name, one in known.get("fits", {}).items():
        print(f"| {name} | {one['perplexity']:.3f} | {one['divergence']:.4f} |")
    for name, one in known.get("formats", {}).items():
        print(f"\n{name}: {'; '.join(one['told'])}")


def main() -> None:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("piece", choices=("search", "row", "fits", "texts", "formats", "table"))
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--share", type=float, default=SHARES[0])
    parser.add_argument("--distill", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(given.store, given.samples, given.tokens)
    if given.piece == "search":
        search(bench, given.steps, given.share)
    elif given.piece == "row":
        row(bench, given.name, given.distill)
    elif given.piece == "fits":
        fits(bench, given.name, given.steps)
    elif given.piece == "texts":
        texts(bench, given.store)
    elif given.piece == "formats":
        formats(bench)
    else:
        table(bench)


if __name__ == "__main__":
    main()
