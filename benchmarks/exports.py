"""Exports of small models, loaded by their client: how far outputs are apart, equal greedy tokens, true bits a weight.

    python benchmarks/exports.py models/reference [MORE FOLDERS] [--only gptq] > benchmarks/results/exports.md

Weights are rounded to nearest, which calibrates nothing: what is measured is the export, not the quality of the codes.
Each row is an export as `compress export` makes it: refused, or read again number by number, then loaded by its client.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.export.exchange.job import Exported, export_graph
from compressor.graph.model import clone_graph
from compressor.passes.embedding import Embedding
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export

MIXED = "W8A16 + W4A16_G128"
CASES = (
    ("compressed-tensors", (), ("W4A16_G128", "W8A8", "FP8_E4M3", "NVFP4", MIXED, "LUT4_G128")),
    ("gptq", (), ("W4A16_G128", "W8A8")),
    ("gptq", ("version=2",), ("W3A16_ASYM_G128",)),
    ("awq", (), ("W4A16_ASYM_G128",)),
    ("gguf", (), ("W4A16_G128", "W4A16_ASYM_G128", MIXED, "W4A8_G128")),
    ("onnx", (), ("W4A16_G128", "W3A16_ASYM_G128", "W8A8", MIXED, "LUT4_G128")),
    ("onnx", ("operators=standard",), ("W4A16_G128",)),
    ("safetensors", (), ("LUT4_G128",)),
)
HEADINGS = ("model", "export", "format", "bits a weight", "folder, kB", "outputs differ by", "greedy tokens equal")


def compressed(dense: GraphModule, scheme: str, table: bool) -> GraphModule:
    """Round all linears but the head; of MIXED, those of feed-forward networks to the first format."""
    graph, (first, _, second) = clone_graph(dense), scheme.partition(" + ")
    steps = [Rtn(first, ignore=("lm_head",))]
    if second:
        steps = [Rtn(first, targets=("re:.*mlp.*",)), Rtn(second, targets=("re:.*self_attn.*",))]
    for step in (*steps, *([Embedding()] if table else [])):
        graph = step.run(graph, Context())
    return graph


def exported(dense: GraphModule, name: str, options: tuple[str, ...], scheme: str) -> Exported | str:
    """Export, or say why not."""
    export = make_export(name, options)
    graph = compressed(dense, scheme, name in ("onnx", "safetensors"))
    try:
        form = export.plan(graph)
    except UsageError as error:
        return str(error).split(";")[0].splitlines()[0].split(": ", 2)[-1]
    with tempfile.TemporaryDirectory() as folder:
        return export_graph(graph, form, Path(folder), Path(folder))


def rows(model: Path, only: str) -> Iterator[tuple[str, ...]]:
    dense = capture(model)
    for name, options, schemes in CASES:
        for scheme in schemes:
            if only not in f"{' '.join((name, *options))} {scheme}":
                continue
            found = exported(dense, name, options, scheme)
            start = model.name, " ".join((name, *options)), scheme
            if isinstance(found, str):
                yield (*start, "refused", "", found, "")
                continue
            size = f"{found.written.bits:.3f}", f"{found.folder_bytes / 1e3:,.0f}"
            if (checked := found.checked) is None:
                yield (*start, *size, found.unchecked, "")
                continue
            apart = f"{checked.difference:.2g} of {checked.largest:.3g} ({checked.dtype})"
            yield (*start, *size, apart, f"{checked.equal_tokens} of {checked.tokens}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="part of the export's name, its options and the format")
    asked = parser.parse_args()
    programs = ", ".join(
        f"{name} {version(name)}" for name in ("transformers", "compressed-tensors", "gguf", "onnxruntime")
    )
    print(f"# Exports\n\nMade by `benchmarks/exports.py`, on x86-64. Client: {programs}.\n")
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
    for model in asked.models:
        for row in rows(model, asked.only):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
