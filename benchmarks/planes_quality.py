"""How often upper planes draft the model's own next token, and what choosing codes for both costs the model.

    python benchmarks/planes_quality.py [--schemes W8A8_P4,W8A8_G128_P4] [--samples 32] [--tokens 4096]

Runs in PyTorch on the reference model and held-out text, with the right tokens so far: the share of positions where the
upper planes' likeliest token is that of both planes, and the divergence of both planes from the dense model.
"""

from __future__ import annotations

import argparse

from compressor.capture.capture import capture
from compressor.data.text import load_evaluation, load_samples
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.graph.kinds.upper_planes import upper_graph
from compressor.graph.model import clone_graph
from compressor.host.resources import resource
from compressor.passes.gptq import Gptq
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import Recipe

RECIPE = {"model": "reference", "calibration": "python_docs", "evaluation": "python_docs_heldout", "passes": []}
COLUMNS = (
    "scheme",
    "pass",
    "KL of both planes",
    "their top-1 agreement",
    "upper plane's with both",
    "KL of it from both",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="W8A8_P4,W8A8_G128_P4,W8A8_G32_P4")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    given = parser.parse_args()
    recipe, folder = Recipe.from_dict(RECIPE), resource("models") / "reference"
    dense, calibration = capture(folder), recipe.calibration
    assert calibration is not None
    samples = load_samples(calibration.model_copy(update={"samples": given.samples}), folder)
    tokens, _ = load_evaluation(recipe.evaluation.model_copy(update={"tokens": given.tokens}), None, folder)
    print(f"| {' | '.join(COLUMNS)} |", flush=True)
    for scheme in given.schemes.split(","):
        for name, step in (("rtn", Rtn(scheme, ignore=("lm_head",))), ("gptq", Gptq(scheme, ignore=("lm_head",)))):
            graph = Pipeline((step,)).run(clone_graph(dense), Context(samples=samples))
            both, upper = GraphLogits(graph), GraphLogits(upper_graph(graph))
            whole = measure_quality(both, tokens, window=256, stride=128, dense=GraphLogits(dense))
            draft = measure_quality(upper, tokens, window=256, stride=128, dense=both)
            cells = (whole.kl_divergence, whole.top1_agreement, draft.top1_agreement, draft.kl_divergence)
            print(f"| {scheme} | {name} | {' | '.join(f'{cell:.4f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
