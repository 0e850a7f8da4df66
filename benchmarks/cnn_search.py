"""Architectures of a ResNet within a time and a memory: searched, and scaled uniformly in width, at equal cost.

    python benchmarks/cnn_search.py WEIGHTS IMAGES --store build/cnn row puzzle --distill 120
    python benchmarks/cnn_search.py WEIGHTS IMAGES --store build/cnn row "blocks 0.5" --distill 120
    python benchmarks/cnn_search.py WEIGHTS IMAGES --store build/cnn row "all 0.3" --distill 120
    python benchmarks/cnn_search.py WEIGHTS IMAGES --store build/cnn table               # Markdown of what is there

WEIGHTS and IMAGES are those of benchmarks/resnet.py.  `blocks SHARE` keeps that share of the channels inside each
block, `all SHARE` removes that share of all channels, those between blocks too (`channel_prune`), each refitted on the
same images.  The first half of the images fits, scores and trains, without labels; accuracy is that on the other half.
Times are those of one image on this machine's kernels in W8A8, a row in turns with the whole network; memory is that of
activations as the program is planned.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pruned_resnet import outputs
from resnet import captured, data_recipe
from resnet_model import load_resnet
from torch.fx import GraphModule

from compressor.data.images import load_images
from compressor.data.text import Samples
from compressor.graph.model import clone_graph, weight_bytes
from compressor.passes.channel_prune import ChannelPrune
from compressor.passes.distill import Distill
from compressor.passes.puzzle import Puzzle
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass, Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.pipeline.structured.architecture import build, find_parts
from compressor.pipeline.structured.architecture_starts import sort_parts
from compressor.progress import Silent
from compressor.recipe.recipe import Recipe
from compressor.run.steps import Peaks, Steps
from compressor.search.space import alternatives

MULTIPLE, HELD_OUT = 4, 0.2
SPACE = ("width:0.75", "width:0.5", "none")
TRAINING: dict[str, Any] = {"batch": 32, "temperature": 2.0, "learning_rate": 2e-4, "targets": "re:.*"}


@dataclass(frozen=True)
class Blocks(Pass):
    """Keep the same share of the channels inside each block, the most important ones, and refit what reads them."""

    share: float

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Sort and build as the search does."""
        parts = find_parts(graph, "puzzle", 0, 0)
        wanted = {"attention": (), "ffn": (), "convolution": (f"width:{self.share:g}",)}
        space = alternatives(parts.layers, wanted, MULTIPLE)
        ids = ctx.calibration("blocks").ids
        assert isinstance(ids, torch.Tensor)
        starts = sort_parts(graph, ctx, parts, space, ids, "obs")
        build(graph, ctx, "puzzle", parts, [row[-1] for row in space], starts)
        return graph


class Bench:
    """The network, its images and what pieces have found so far."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._store, self.given = given.store, given
        given.store.mkdir(parents=True, exist_ok=True)
        images = load_images(data_recipe(given.images, 1).evaluation)
        self.half = len(images.labels) // 2
        self.inputs, self.labels = images.inputs(), images.labels
        self.dense = captured(load_resnet(given.weights), images)
        recipe = Recipe.from_dict({"model": "reference", "passes": [], "target": "x86", "tune": "off"})
        self.clock, self.memory = Steps(recipe, 1, Silent()), Peaks(recipe)

    def context(self, count: int) -> Context:
        """Return a context with the first images, this machine's clock and the folder's cache."""
        samples = Samples(self.inputs[: min(count, self.half)], torch.zeros(0), f"first {count}", "the first images")
        cache = SegmentCache(self._store / "cache")
        known = {"results": cache, "state": "resnet", "step_seconds": self.clock, "peak_bytes": self.memory}
        return Context(samples=samples, **known)

    def puzzle(self) -> Puzzle:
        """Return the search."""
        given = self.given
        limits: dict[str, Any] = {"latency": given.latency, "peak_memory": given.memory}
        trained: dict[str, Any] = {"steps": given.steps, "batch": 8, "held_out": HELD_OUT, "depth": given.depth}
        return Puzzle(**limits, scheme="W8A8", convolution=SPACE, multiple=MULTIPLE, **trained)

    def keep(self, name: str, value: dict[str, Any]) -> None:
        """Write a row, whole or not at all."""
        found = {**self.known(), name: value}
        new = self._store / "results.json.new"
        new.write_text(json.dumps(found, indent=1))
        new.replace(self._store / "results.json")
        print(json.dumps({name: value}), flush=True)

    def known(self) -> dict[str, Any]:
        """Return the rows so far."""
        path = self._store / "results.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def accuracy(self, graph: GraphModule) -> float:
        """Return the share of the other half that is classified right."""
        found = outputs(graph, self.inputs[self.half :]).argmax(1)
        return float((found == self.labels[self.half :]).double().mean())

    def row(self, name: str, step: Pass | None, distill: int) -> None:
        """Build an architecture, measure it, train it, and measure its accuracy again."""
        begin, ctx, graph = time.process_time(), self.context(self.given.samples), clone_graph(self.dense)
        if step is not None:
            graph = Pipeline([step]).run(graph, ctx)
        searched_s, at_once = time.process_time() - begin, self.accuracy(graph)
        pack = Rtn("W8A8", targets=("Conv2d", "Linear"))
        whole, ours = (Pipeline([pack]).run(clone_graph(one), Context()) for one in (self.dense, graph))
        (first, seconds), _ = self.clock([whole, ours])
        figures = {"share": seconds / first, "ms": 1e3 * seconds, "memory": self.memory(ours, False)}
        figures |= {"bytes": weight_bytes(ours), "at_once": at_once, "searched_s": searched_s}
        if distill:
            trained = Context(samples=self.context(self.half).samples, dense=self.dense)
            graph = Distill(steps=distill, evaluate_every=distill // 2, held_out=0.03, **TRAINING).run(graph, trained)
            figures["distilled"] = self.accuracy(graph)
        packed = Pipeline([pack]).run(clone_graph(graph), Context())
        self.keep(name, {**figures, "packed": self.accuracy(packed), "steps": distill, "notes": ctx.notes})


def chosen(bench: Bench, name: str) -> Pass | None:
    """Return the pass that makes a row's architecture; None leaves the network whole."""
    kind, _, argument = name.partition(" ")
    if kind == "blocks":
        return Blocks(float(argument))
    if kind == "all":
        return ChannelPrune(float(argument), allocate="uniform", multiple=MULTIPLE)
    return bench.puzzle() if kind == "puzzle" else None


def table(bench: Bench) -> None:
    """Print what is there."""
    print("| architecture | time | ms | activations | weights, W8A8 | at once | distilled | and packed |")
    print("|---|---|---|---|---|---|---|---|")
    for name, one in bench.known().items():
        distilled = f"{one['distilled']:.1%}" if one["steps"] else ""
        print(
            f"| {name} | {one['share']:.3f} | {one['ms']:.3f} | {one['memory']:,} | {one['bytes']:,} | "
            f"{one['at_once']:.1%} | {distilled} | {one['packed']:.1%} |"
        )
    for name, one in bench.known().items():
        print("\n".join(("", f"{name}:", *one["notes"])) if one["notes"] else "", end="\n")


def main() -> None:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("images")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=256, help="images that fit and score [default: %(default)s]")
    parser.add_argument("--latency", type=float, default=0.6, help="share of the time [default: %(default)s]")
    parser.add_argument("--memory", default="180 kB", help="of activations at once [default: %(default)s]")
    parser.add_argument("--depth", default="none", help="how blocks that go are ranked [default: %(default)s]")
    parser.add_argument("--steps", type=int, default=0, help="that train candidates [default: %(default)s]")
    parser.add_argument("--distill", type=int, default=0, help="steps on all of the first half [default: none]")
    parser.add_argument("piece", choices=("row", "table"))
    parser.add_argument("name", nargs="?", default="", help="dense, puzzle, blocks SHARE or all SHARE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(given)
    if given.piece == "row":
        bench.row(given.name, chosen(bench, given.name), given.distill)
    else:
        table(bench)


if __name__ == "__main__":
    main()
