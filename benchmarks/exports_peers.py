"""Our codes in GGUF and compressed-tensors against llama.cpp's own quantiser and llm-compressor's GPTQ, on one text.

    python benchmarks/exports_peers.py reference stories260K --peers FOLDER > benchmarks/results/exports_peers.md

FOLDER holds the environments of llamacpp (llama-cpp-python, which has llama.cpp's quantiser) and llmcompressor
(benchmarks/peers/README.md).  Models and texts are those of benchmarks/quality.yaml: all calibrate on the same 64
windows of 256 tokens, llama.cpp by way of the imatrix that an export writes of them, and are evaluated on the
same 16,384 others.  Each variant is a folder, ours written by an export; its dequantised weights run in our graph in
float32, where nothing rounds activations.  Bits are those of the compressed linears, counted in the files; embeddings
and head stay as they are.  GGUF files are also run by llama.cpp itself, which rounds activations to 8 bits: the greedy
tokens of one prompt up to the first that the float32 graph of the same file would not have chosen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from quality import measure_peer
from quality_evaluate import Remembered
from quality_row import LENGTH, SAMPLES, STRIDE, WINDOW, compress, load_texts, texts
from safetensors.torch import load_file
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.capture.checkpoints.gguf.gguf_file import PLAIN_TYPES, read_gguf
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits, measure_quality
from compressor.export.exchange.export import Export, Form
from compressor.export.exchange.job import export_graph
from compressor.graph.model import clone_graph
from compressor.graph.sites import linear_sites
from compressor.recipe.exports import make_export
from compressor.recipe.recipe import Recipe, load_text_spec

HERE = Path(__file__).resolve().parent
LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
OURS = (("gguf", "W4A16_G32"), ("compressed-tensors", "W4A16_G128"))
METHODS = ("rtn", "gptq")
FOREIGN = (("Q4_0", False), ("Q4_0", True), ("Q4_K_S", True))
HEADINGS = ("layout", "codes by", "format", "bits a weight", "perplexity", "increase", "KL, nats", "95% interval",
            "tokens equal in llama.cpp")  # fmt: skip
PROMPT, NEW = 64, 64


@dataclass(frozen=True)
class Setting:
    """A model, and what all variants are made of and measured on."""

    entry: Mapping[str, Any]
    dense: GraphModule
    samples: Samples
    tokens: Tensor
    logits: Remembered
    scratch: Path

    def figures(self, graph: GraphModule) -> dict[str, Any]:
        """Return the quality of a graph beside the dense model."""
        return measure_quality(
            GraphLogits(graph), self.tokens, window=WINDOW, stride=STRIDE, dense=self.logits
        ).metrics()

    def empty(self, name: str) -> Path:
        """Return a new folder."""
        folder = self.scratch / name
        folder.mkdir()
        return folder


def opened(name: str, root: Path, scratch: Path) -> Setting:
    """Capture a model of quality.yaml, whose paths are relative to ``root``, and read its texts."""
    entry = yaml.safe_load((HERE / "quality.yaml").read_text(encoding="utf-8"))[name]
    entry["model"] = str((root / entry["model"]).resolve())
    if "text" in entry:
        entry["text"] = str((root / entry["text"]).resolve())
    dense = capture(entry["model"])
    samples, tokens = load_texts(entry, dense)
    return Setting(entry, dense, samples, tokens, Remembered(GraphLogits(dense)), scratch)


def linears(setting: Setting) -> dict[str, int]:
    """Return the inputs of each linear that is compressed: all but the head."""
    return {site.name: site.in_features for site in linear_sites(setting.dense) if site.name != "lm_head"}


def held(setting: Setting, scheme: str) -> tuple[str, ...]:
    """Return the linears that a format's groups do not fit, which stay dense: llama.cpp leaves them in float16 too."""
    group = int(scheme.rpartition("_G")[2])
    return tuple(name for name, inputs in linears(setting).items() if inputs % group)


@dataclass(frozen=True)
class Variant:
    """A compressed model: the graph of its dequantised weights, bits of its linears, and the file, if it is GGUF."""

    graph: GraphModule
    bits: float
    file: Path | None = None


def gguf_form(graph: GraphModule) -> Form:
    """Plan an export to GGUF, without a tokenizer where the model's has no place there."""
    try:
        return make_export("gguf", ()).plan(graph)
    except UsageError:
        return make_export("gguf", ("pre=none",)).plan(graph)


def ours(setting: Setting, layout: str, scheme: str, method: str) -> Variant:
    """Compress, export, and read the folder again."""
    ignore = ("lm_head", *held(setting, scheme))
    graph, _, _, _ = compress(setting.dense, [{method: {"scheme": scheme, "ignore": ignore}}], setting.samples)
    folder = setting.empty(f"{layout}-{method}")
    form = gguf_form(graph) if layout == "gguf" else make_export(layout, ()).plan(graph)
    sizes = export_graph(graph, form, folder, folder, check=False).written.sizes
    bits = 8 * sum(sizes[name].bytes for name in form.packed) / sum(sizes[name].elements for name in form.packed)
    return Variant(capture(folder), bits, folder / "model.gguf" if layout == "gguf" else None)


def whole_gguf(setting: Setting) -> Path:
    """Return the dense model as GGUF, in the type in which it is stored."""
    folder, graph = setting.empty("whole"), clone_graph(setting.dense)
    export_graph(graph, gguf_form(graph), folder, folder, check=False)
    return folder / "model.gguf"


def imatrix(setting: Setting) -> Path:
    """Return the statistics of the calibration's windows, as an export writes them."""
    learn, _ = texts(dict(setting.entry), setting.scratch)
    spec = load_text_spec(learn).model_copy(update={"samples": SAMPLES, "sequence_length": LENGTH})
    recipe = Recipe.from_dict({"passes": []}).model_copy(update={"calibration": spec})
    export: Export = make_export("imatrix", ())
    form = export.plan_for(setting.dense, recipe)
    folder = setting.empty("imatrix")
    export_graph(setting.dense, form, folder, folder)
    return folder / "imatrix.gguf"


def in_llama(peers: Path, *arguments: object) -> dict[str, Any]:
    """Ask llama.cpp's driver."""
    command = [str(peers / "llamacpp/bin/python"), "-m", "benchmarks.peers.llamacpp", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def llama(setting: Setting, peers: Path, whole: Path, kind: str, matrix: Path | None) -> Variant:
    """Quantise by llama.cpp, and read the file again; bits are of the linears that it did not leave in floats."""
    out = setting.empty(f"llama-{kind}-{matrix is not None}")
    answer = in_llama(peers, "quantize", whole, out / "model.gguf", kind, *([matrix] if matrix else []))
    if matrix and answer["entries"] != len(linears(setting)):
        sys.exit(f"{answer['entries']} importances were read")
    (out / "tokenizer.json").write_bytes((Path(setting.entry["model"]) / "tokenizer.json").read_bytes())
    file = read_gguf(out / "model.gguf")
    packed = [
        tensor for name, tensor in file.tensors.items()
        if any(f".{part}.weight" in name for part in LINEARS) and tensor.type not in PLAIN_TYPES
    ]  # fmt: skip
    bits = 8 * sum(t.size_bytes for t in packed) / sum(t.shape[0] * t.shape[1] for t in packed)
    return Variant(capture(out), bits, out / "model.gguf")


def equal_tokens(setting: Setting, peers: Path, variant: Variant) -> str:
    """Continue the evaluation's first tokens in llama.cpp, and compare with the graph of the same file."""
    if variant.file is None or "tokenizer.ggml.model" not in read_gguf(variant.file).metadata:
        return ""
    prompt = setting.tokens[:PROMPT].tolist()
    found = in_llama(peers, "greedy", variant.file, NEW, *prompt)["tokens"]
    chosen = GraphLogits(variant.graph)(np.array([prompt + found]))[0, PROMPT - 1 : -1].argmax(-1).numpy()
    unequal = np.flatnonzero(chosen != np.array(found))
    return f"{int(unequal[0]) if len(unequal) else NEW} of {NEW}"


def llmcompressor(setting: Setting, python: Path, scheme: str) -> Variant:
    """Run GPTQ of llm-compressor by its driver; what transformers unpacks of its folder."""
    ids, out = setting.scratch / "ids.npy", setting.empty("llmcompressor")
    np.save(ids, setting.samples.ids.numpy())
    row = {"who": "llmcompressor", "method": "gptq", "format": scheme}
    figures = measure_peer(python, row, dict(setting.entry), ids, str(out), {**os.environ, "OMP_NUM_THREADS": "1"})
    graph, weights = clone_graph(setting.dense), load_file(out / "model.safetensors")
    for name, parameter in graph.named_parameters():
        parameter.data = weights[name].float()
    return Variant(graph, figures["bits"])


def variants(setting: Setting, options: argparse.Namespace) -> Iterator[tuple[tuple[str, ...], Variant]]:
    """Yield each variant under its layout, method and format; layouts whose groups fit no linear have none."""
    fitting = [(layout, scheme) for layout, scheme in OURS if len(held(setting, scheme)) < len(linears(setting))]
    for layout, scheme in fitting:
        for method in options.methods:
            yield (layout, f"ours, {method}", scheme), ours(setting, layout, scheme, method)
    if not options.peers:
        return
    whole, matrix = whole_gguf(setting), imatrix(setting)
    for kind, weighed in FOREIGN:
        who = "llama.cpp, imatrix" if weighed else "llama.cpp"
        yield ("gguf", who, kind), llama(setting, options.peers, whole, kind, matrix if weighed else None)
    if (layout := OURS[1]) in fitting:
        python = options.peers / "llmcompressor/bin/python"
        yield (layout[0], "llm-compressor, gptq", layout[1]), llmcompressor(setting, python, layout[1])


def compare(rows: Mapping[tuple[str, ...], dict[str, Any]]) -> Iterator[str]:
    """Yield our best codes beside each foreign variant of the layout, as ratios of KL divergences."""
    for key, row in rows.items():
        if key[1].startswith("ours"):
            continue
        mine = min((k for k in rows if k[0] == key[0] and k[1].startswith("ours")), key=lambda k: rows[k]["kl"])
        best = rows[mine]
        yield (
            f"- {key[0]}: KL of {mine[1]} {mine[2]} ({best['bits']:.3f} bits) is {best['kl'] / row['kl']:.2f} times "
            f"that of {key[1]} {key[2]} ({row['bits']:.3f} bits)"
        )


def report(name: str, options: argparse.Namespace) -> None:
    """Print one model's table."""
    with tempfile.TemporaryDirectory() as scratch:
        setting = opened(name, options.root, Path(scratch))
        base = setting.figures(setting.dense)
        print(f"\n## {name}\n\nDense perplexity {base['perplexity']:.4f}.\n")
        print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")
        rows: dict[tuple[str, ...], dict[str, Any]] = {}
        for key, variant in variants(setting, options):
            found, bits = setting.figures(variant.graph), variant.bits
            low, high = found["kl_divergence_interval"]
            rows[key] = {"bits": bits, "kl": found["kl_divergence"]}
            cells = (
                *key, f"{bits:.3f}", f"{found['perplexity']:.4f}",
                f"{100 * (found['perplexity'] / base['perplexity'] - 1):+.2f}%", f"{found['kl_divergence']:.5f}",
                f"{low:.5f} to {high:.5f}", equal_tokens(setting, options.peers, variant) if options.peers else "",
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
        print("", *compare(rows), sep="\n", flush=True)


def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peers", type=Path, help="folder of environments")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="that paths in quality.yaml are relative to")
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=METHODS)
    options = parser.parse_args()
    print(
        "# Our codes in foreign layouts, and the layouts' own quantisers\n\nMade by `benchmarks/exports_peers.py`. "
        "Calibrated on the same 64 windows of 256 tokens, evaluated on the same 16,384 tokens in windows of 256 with "
        "stride 128, all by dequantised weights in one float32 graph. Bits are of the compressed linears."
    )
    for name in options.models:
        report(name, options)


if __name__ == "__main__":
    main()
