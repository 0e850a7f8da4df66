"""Perplexity by scheme and method: dense, the compressed graph in PyTorch, and the bundle's own kernels.

    python benchmarks/quality.py MODEL CALIBRATION EVALUATION [--schemes W4A16_G32,...] [--tokens 16384] [--json]
        [--methods rtn,rotation+gptq,...]

MODEL is a Hugging Face folder; CALIBRATION and EVALUATION are data specifications (a set's name, a .yaml or a text
file).  Calibrates on 64 samples of 256 tokens; evaluates on windows of 256 tokens with stride 128.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from compressor.calibration import load_evaluation, load_samples
from compressor.capture import capture
from compressor.codegen.lower import compile_graph
from compressor.evaluate import GraphLogits, measure_quality
from compressor.evaluate_model import BundleProcess
from compressor.graph import weight_bytes
from compressor.pipeline import Context, Pipeline, pass_class
from compressor.recipe import Recipe, load_text_spec
from compressor.run_assemble import assemble
from compressor.runtime import read_manifest

WINDOW, STRIDE = 256, 128


def main() -> None:
    """Measure and print one line a scheme and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration")
    parser.add_argument("evaluation")
    parser.add_argument("--schemes", default="W4A16_G32,W3A16_G32,W4A8_G32")
    parser.add_argument("--methods", default="rtn,gptq", help="passes; several in a row as rotation+rtn")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dense = capture(options.model)
    info = dense.meta["model"]
    spec = load_text_spec(options.calibration).model_copy(update={"samples": 64, "sequence_length": 256})
    samples = load_samples(spec, options.model, info.vocab_size)
    evaluation = load_text_spec(options.evaluation, evaluation=True).model_copy(update={"tokens": options.tokens})
    tokens, _ = load_evaluation(evaluation, None, options.model, info.vocab_size)
    base = measure_quality(GraphLogits(dense), tokens, window=WINDOW, stride=STRIDE).perplexity
    rows: list[dict[str, Any]] = []
    if not options.json:
        print(f"dense perplexity {base:.4f}, {weight_bytes(dense):,} bytes, {len(tokens)} tokens")
        print("| scheme | method | weight bytes | graph | bundle | bundle / graph | increase | KL | top-1 | seconds |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    for scheme in options.schemes.split(","):
        for method in options.methods.split(","):
            steps = [_step(name, scheme) for name in method.split("+")]
            begin = time.perf_counter()
            context = Context(samples=samples)
            graph = Pipeline(steps).run(capture(options.model), context)
            seconds = time.perf_counter() - begin
            in_graph = measure_quality(GraphLogits(graph), tokens, window=WINDOW, stride=STRIDE).perplexity
            recipe = Recipe.from_dict({"model": str(options.model), "passes": steps, "tune": "off"})
            target = recipe.target.build()
            with tempfile.TemporaryDirectory() as folder:
                library = compile_graph(graph, target, tune="off")
                assemble(Path(folder), graph, library, target, recipe, context, weight_bytes(dense))
                with BundleProcess(Path(folder)) as process:
                    result = measure_quality(
                        process.logits, tokens, window=WINDOW, stride=STRIDE, dense=GraphLogits(dense)
                    )
                stored = read_manifest(Path(folder))["weight_bytes"]
            row = {
                "scheme": scheme, "method": method, "weight_bytes": stored, "dense_perplexity": base,
                "graph_perplexity": in_graph, "perplexity": result.perplexity,
                "perplexity_increase": result.perplexity_increase, "kl_divergence": result.kl_divergence,
                "top1_agreement": result.top1_agreement, "pass_s": seconds,
            }  # fmt: skip
            rows.append(row)
            if not options.json:
                print(
                    f"| {scheme} | {method} | {stored:,} | {in_graph:.4f} | {result.perplexity:.4f} | "
                    f"{result.perplexity / in_graph - 1:+.3%} | {result.perplexity_increase:+.2%} | "
                    f"{result.kl_divergence:.4f} | {result.top1_agreement:.1%} | {seconds:.1f} |",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=2))


def _step(name: str, scheme: str) -> Any:
    """A pass with those of its options that matter here."""
    cls = pass_class(name)
    if getattr(cls, "needs_dense", False):  # it comes last, and sees packed linears only
        return cls(add=True)
    options = {"scheme": scheme, "ignore": ("lm_head",)}
    return cls(**{field.name: options[field.name] for field in dataclasses.fields(cls) if field.name in options})


if __name__ == "__main__":
    main()
