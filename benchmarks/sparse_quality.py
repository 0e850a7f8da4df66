"""Quality of sparse networks that classify images or embed texts, beside formats without zeros of as many bits.

    python benchmarks/sparse_quality.py resnet WEIGHTS IMAGES [--rows REGEX]
    python benchmarks/sparse_quality.py minilm MODEL TEXT [TEXT ...] [--rows REGEX]
    python benchmarks/sparse_quality.py resnet|minilm   (only the table again)

WEIGHTS and IMAGES are those of benchmarks/resnet.py: 256 images of the first half calibrate, without their labels; the
accuracy is that on the second half.  MODEL and TEXTs are those of benchmarks/minilm.py: calibrated on 64 windows of 128
tokens of the files' other sentences; the mean cosine to transformers' float32 embeddings over 200 texts.  Figures are
those of the compressed graph in PyTorch, which kernels are held to by tests.  Each row goes to
benchmarks/results/sparse_quality_<network>.json once it is measured; the .md follows at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from minilm import embedded, load_bert, load_texts
from resnet import BATCH, captured, data_recipe
from resnet_model import load_resnet
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.images import load_images
from compressor.data.text import Samples, load_samples
from compressor.evaluate.quality import graph_hidden
from compressor.formats.format import Format
from compressor.graph.model import clone_graph
from compressor.graph.sites import packed_weight_sites
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import load_text_spec
from compressor.registry import PASSES

RESULTS = Path(__file__).resolve().parent / "results"
TARGETS = {"resnet": ("Conv2d", "Linear"), "minilm": ("Linear",)}
DENSE = ("W8A16", "W6A16_G32", "W4A16_G32", "W3A16_G32", "W2A16_G32")
SPARSE = ("W8A16_B1x1@50", "W8A16_2:4", "W8A16_B16x1@50", "W8A16_B1x1@70", "W8A16_B16x1@70")
RECOVERED = ("W8A16_B1x1@70", "W8A16_2:4", "W8A16_B16x1@50", "W8A16_B16x1@70")
TRAINING: dict[str, dict[str, Any]] = {
    "resnet": {"batch": 32, "temperature": 2.0, "learning_rate": 2e-4, "steps": 60, "evaluate_every": 20},
    "minilm": {"batch": 8, "learning_rate": 1e-4, "steps": 60, "evaluate_every": 20},
}
FIGURE = {"resnet": "accuracy", "minilm": "mean cosine"}
NO_GROUPS = {"resnet": "conv1"}  # rows of 27 weights, which no groups of four fill: stored in 8 bits


def rows(network: str) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Return method, format, and the passes of every row."""
    targets = {"targets": TARGETS[network]}
    for scheme in DENSE:
        yield "gptq", scheme, [{"gptq": {"scheme": scheme, **targets}}]
    sparse = {scheme: {"scheme": scheme, **targets} for scheme in SPARSE}
    whole = {scheme: list[dict[str, Any]]() for scheme in SPARSE}
    if network in NO_GROUPS:
        sparse["W8A16_2:4"]["ignore"] = NO_GROUPS[network]
        whole["W8A16_2:4"] = [{"rtn": {"scheme": "W8A16", "targets": NO_GROUPS[network]}}]
    for scheme, options in sparse.items():
        for method in ("magnitude", "wanda", "sparsegpt", "alps"):
            yield method, scheme, [{method: options}, *whole[scheme]]
    for scheme in RECOVERED:
        trained, last = {**TRAINING[network], "targets": "re:.*"}, {"magnitude": sparse[scheme]}
        steps = [{"alps": {**sparse[scheme], "pack": False}}, {"distill": trained}, last, *whole[scheme]]
        yield "alps+distill", scheme, steps


def compress(dense: GraphModule, passes: list[dict[str, Any]], samples: Samples) -> tuple[GraphModule, dict[str, Any]]:
    """Run passes; return the graph, the stored bits a weight of what is packed, and the seconds that it took."""
    steps = [PASSES.find(name)(**options) for step in passes for name, options in step.items()]
    context, begin = Context(samples=samples, dense=dense), time.process_time()
    graph = Pipeline(steps).run(clone_graph(dense), context)
    seconds = time.process_time() - begin
    formats = {record.site: Format.parse(record.format) for record in context.records if record.format}
    shapes = {site.name: (site.out_features, site.in_features) for site in packed_weight_sites(graph)}
    stored = sum(formats[name].packed_bytes(*shape) for name, shape in shapes.items())
    weights = sum(rows * columns for rows, columns in shapes.values())
    return graph, {"bits": 8 * stored / weights, "cpu_s": seconds}


Measure = Callable[[GraphModule], float]


def resnet(weights: Path, images_file: str) -> tuple[GraphModule, Samples, Measure]:
    """Load the network, images to calibrate on, and how to measure accuracy on the others."""
    images = load_images(data_recipe(images_file, 256).evaluation)
    inputs, labels = images.inputs(), images.labels
    half = len(labels) // 2
    samples = Samples(inputs[:256], torch.zeros(0), "first half", "the first images")

    @torch.no_grad()
    def accuracy(graph: GraphModule) -> float:
        logits = torch.cat([graph(inputs[i : i + BATCH]) for i in range(half, len(labels), BATCH)])
        return float((logits.argmax(1) == labels[half:]).double().mean())

    return captured(load_resnet(weights), images), samples, accuracy


def minilm(model: Path, files: list[Path], scratch: Path) -> tuple[GraphModule, Samples, Measure]:
    """Load the encoder, windows to calibrate on, and how to measure the mean cosine to the dense embeddings."""
    texts, others = load_texts(model, files)
    (scratch / "others.txt").write_text("\n".join(others), encoding="utf-8")
    bert, dense = load_bert(model), capture(model)
    spec = load_text_spec(str(scratch / "others.txt")).model_copy(update={"samples": 64, "sequence_length": 128})
    samples = load_samples(spec, model, dense.meta["model"].vocab_size)

    @torch.no_grad()
    def oracle(ids: Any, mask: Any) -> Any:
        return bert(input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask)).last_hidden_state

    expected, _ = embedded(oracle, texts)

    def cosine(graph: GraphModule) -> float:
        return float(torch.cosine_similarity(embedded(graph_hidden(graph), texts)[0], expected).mean())

    return dense, samples, cosine


def table(network: str, found: list[dict[str, Any]]) -> str:
    """Render rows by bits, each sparse one with the best of the dense formats that has no more bits."""
    dense = [row for row in found if row["method"] == "gptq"]
    show = (lambda value: f"{value:.1%}") if network == "resnet" else (lambda value: f"{value:.4f}")
    lines = [
        f"# Quality of sparse networks: {network}",
        "",
        f"Made by `python benchmarks/sparse_quality.py {network} ...`, whose docstring has the data. fp32: "
        f"{show(found[0]['fp32'])}. Bits are stored bits a weight of what is packed, masks and scales included.",
        "",
        f"| method | format | bits | {FIGURE[network]} | dense format of no more bits | CPU s |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(found, key=lambda row: (-row["bits"], -row["quality"])):
        fewer = [other for other in dense if other["bits"] <= row["bits"] and row["method"] != "gptq"]
        best = max(fewer, key=lambda other: other["quality"], default=None)
        beside = f"{best['format']}: {show(best['quality'])}" if best else ""
        figures = (f"{row['bits']:.3f}", show(row["quality"]), beside, f"{row['cpu_s']:.0f}")
        lines.append(f"| {' | '.join((row['method'], row['format'], *figures))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure rows, store them, and render what is stored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=sorted(TARGETS))
    parser.add_argument("source", nargs="*", type=Path, help="WEIGHTS IMAGES, or MODEL TEXT [TEXT ...]")
    parser.add_argument("--rows", default="", help="regular expression of the rows to measure: 'alps W8A16_2:4'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = RESULTS / f"sparse_quality_{options.network}.json"
    known = {(row["method"], row["format"]): row for row in json.loads(store.read_text())} if store.exists() else {}
    if options.source:
        first, *others = options.source
        with tempfile.TemporaryDirectory() as scratch:
            is_resnet = options.network == "resnet"
            loaded = resnet(first, str(others[0])) if is_resnet else minilm(first, others, Path(scratch))
        dense, samples, measure = loaded
        fp32 = measure(dense)
        for method, scheme, passes in rows(options.network):
            if not re.search(options.rows, f"{method} {scheme}"):
                continue
            graph, figures = compress(dense, passes, samples)
            row = {"method": method, "format": scheme, **figures, "quality": measure(graph), "fp32": fp32}
            known[method, scheme] = row
            print(json.dumps(row), flush=True)
            store.write_text(json.dumps(list(known.values()), indent=1) + "\n", encoding="utf-8")
    if not known:
        parser.error(f"{store} holds no row yet")
    text = table(options.network, list(known.values()))
    store.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
