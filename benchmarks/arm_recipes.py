"""Compare bundles for ARM, under emulation, with PyTorch on the same stored weights: perplexity and greedy tokens.

    python benchmarks/arm_recipes.py --runner BUILD/compressor_run BUNDLE... [--out FILE.md]

Each BUNDLE is what `compress run recipes/..._arm.yaml` wrote; BUILD is where the C++ runner was built for aarch64
(export/native/README.md).  Needs qemu-user-static.  FILE.md is benchmarks/results/arm_recipes.md where it is not given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from arm_instructions import FIRST, LAST, REFERENCE, agreeing, likeliest

from compressor.codegen.targets.arm import EMULATED
from compressor.data.text import load_evaluation
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.export.exchange.bundle_graph import bundle_graph
from compressor.recipe.recipe import Recipe

RESULTS = Path(__file__).parent / "results" / "arm_recipes.md"
PROMPT, TOKENS = 32, 32


def row(bundle: Path, runner: Path) -> str:
    """Return a line of the table for one bundle."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    measured = json.loads((bundle / "measurements.json").read_text())
    recipe = Recipe.from_dict({**manifest["recipe"], "passes": []})
    graph, spec = bundle_graph(bundle), recipe.evaluation
    tokens, _ = load_evaluation(spec, None, REFERENCE, graph.meta["model"].vocab_size)
    quality = measure_quality(GraphLogits(graph), tokens, window=spec.window, stride=spec.stride).metrics()
    expected, prompt = likeliest(graph, tokens[:PROMPT].tolist(), TOKENS), ",".join(map(str, tokens[:PROMPT].tolist()))
    levels = sorted({kernel["isa"] for kernel in manifest["kernels"] if "isa" in kernel})
    equal = []
    for level in levels or [recipe.target.build().resolve().name]:
        emulator = ["qemu-aarch64-static", "-cpu", EMULATED[level], "-L", "/usr/aarch64-linux-gnu", str(runner)]
        options = ["--ids", prompt, "--max-tokens", str(TOKENS), "--threads", "1", "--speculate", "off"]
        done = subprocess.run([*emulator, str(bundle), *options], capture_output=True, text=True, check=True)
        equal.append(f"{level} {agreeing([int(token) for token in done.stdout.split(',')], expected)} of {TOKENS}")
    change = measured["perplexity"] / quality["perplexity"] - 1
    figures = f"{len(tokens)} | {quality['perplexity']:.4f} | {measured['perplexity']:.4f} | {change:+.4%}"
    return f"| {bundle.name} | {figures} | {measured['kernel_error']:.1e} | {', '.join(equal)} |\n"


def main() -> None:
    """Write the table between the marks of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("bundles", nargs="+", type=Path)
    arguments = parser.parse_args()
    lines = []
    for bundle in arguments.bundles:
        lines.append(row(bundle.resolve(), arguments.runner.resolve()))
        print(lines[-1], end="", flush=True)
    head = "| recipe | tokens | perplexity, PyTorch | emulated | change | kernels' error | greedy tokens equal |\n"
    before, rest = arguments.out.read_text(encoding="utf-8").split(FIRST)
    table = head + "|---" * 7 + "|\n" + "".join(lines)
    arguments.out.write_text(before + FIRST + table + LAST + rest.split(LAST)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
