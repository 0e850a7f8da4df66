"""Exports of small models, loaded by their client: how far outputs are apart, equal greedy tokens, true bits a weight.

    python benchmarks/exports.py models/reference [MiniLM=FOLDER ...] [--only gptq] > benchmarks/results/exports.md
    python benchmarks/exports.py --resnet WEIGHTS IMAGES --experts --ort-web peers/node_modules/onnxruntime-web/dist

Weights are rounded to nearest, which calibrates nothing but stored scales of activations: what is measured is the
export, not the quality of the codes.  Each row is an export as `compress export` makes it: refused, or read again
number by number, then loaded by its client.  ``--experts`` is a Qwen 3 of experts, random weights.  With ``--ort-web``
a decoder's ONNX file also runs in ONNX Runtime Web, by WebAssembly in Chromium (`npm install --prefix peers
onnxruntime-web`); its greedy tokens are compared as the client's are, and so are those of GGUF files with
``--llama`` in llama.cpp itself.  ``--rows`` prints the rows alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from resnet import captured, data_recipe
from resnet_model import load_resnet
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.images import load_image_samples, load_images
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.evaluate.quality import GraphLogits
from compressor.export.exchange.job import Exported, export_graph
from compressor.graph.model import clone_graph
from compressor.graph.sites import EXPERT, ROUTER, linear_sites
from compressor.passes.embedding import Embedding
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.recipe.exports import make_export

MIXED = "W8A16 + W4A16_G128"
DECODERS = (
    ("compressed-tensors", (), ("W4A16_G128", "W8A8", "FP8_E4M3", "NVFP4", MIXED, "LUT4_G128")),
    ("gptq", (), ("W4A16_G128", "W8A8")),
    ("gptq", ("version=2",), ("W3A16_ASYM_G128",)),
    ("awq", (), ("W4A16_ASYM_G128",)),
    ("gguf", (), ("W4A16_G128", "W4A16_ASYM_G128", MIXED, "W4A8_G128")),
    ("gguf", ("dense=down_proj",), ("W4A16_G32",)),
    ("gguf", ("dense=down_proj", "pre=none"), ("W4A16_G32",)),
    ("onnx", (), ("W4A16_G128", "W4A16_C", "W3A16_ASYM_G128", "W8A8", MIXED, "FP8_E4M3", "LUT4_G128")),
    ("onnx", ("operators=standard",), ("W4A16_G128",)),
    ("onnx", ("external=true",), ("W4A16_G128",)),
    ("safetensors", (), ("LUT4_G128",)),
)
ENCODERS = (
    ("compressed-tensors", (), ("W4A16_G128", "W8A8")),
    ("onnx", (), ("W4A16_G128", "W8A8", "FP8_E4M3")),
    ("gguf", (), ("W4A16_G128",)),
    ("safetensors", (), ("NF4_G64",)),
)
MODULES = (
    ("onnx", (), ("W8A8_STATIC", "W8A16", "W4A16_C", "FP8_E4M3")),
    ("onnx", ("external=true",), ("W8A8_STATIC",)),
    ("compressed-tensors", (), ("W8A16",)),
)
PAGES = ("W4A16_G128", "W4A16_C")  # formats whose ONNX files Chromium loads as well
PROMPT, NEW = 16, 64
HEADINGS = ("model", "export", "format", "bits a weight", "folder, kB", "outputs differ by", "greedy tokens equal")


@dataclass(frozen=True)
class Subject:
    """A model, and what stored scales of its activations are calibrated on."""

    name: str
    dense: GraphModule
    samples: Samples | None = None

    @property
    def cases(self) -> Any:
        """Return exports, options and formats for its kind."""
        return {"decoder": DECODERS, "encoder": ENCODERS, "module": MODULES}[self.dense.meta["model"].kind]


def compressed(subject: Subject, scheme: str, table: bool) -> GraphModule:
    """Round all linears but the head; of MIXED, those of feed-forward networks to the first format."""
    graph, (first, _, second) = clone_graph(subject.dense), scheme.partition(" + ")
    kind = subject.dense.meta["model"].kind
    if kind != "decoder":
        return Rtn(first, targets=("Conv2d", "Linear") if kind == "module" else "Linear").run(
            graph, Context(samples=subject.samples)
        )
    experts = any(site.module_class == EXPERT for site in linear_sites(graph))
    steps = [Rtn(first, targets=("Linear", EXPERT) if experts else "Linear", ignore=("lm_head",))]
    if second:
        routers = (ROUTER,) if experts else ()
        steps = [Rtn(first, targets=("re:.*mlp.*",), ignore=routers), Rtn(second, targets=("re:.*self_attn.*",))]
    for step in (*steps, *([Embedding()] if table else [])):
        graph = step.run(graph, Context())
    return graph


def exported(
    subject: Subject, name: str, options: tuple[str, ...], scheme: str, asked: argparse.Namespace
) -> tuple[Exported | str | None, str]:
    """Export, or say why not; and where a page or llama.cpp is asked for, the greedy tokens that are equal there.

    A format whose groups divide none of the model's widths gives None.
    """
    export = make_export(name, options)
    try:
        graph = compressed(subject, scheme, name in ("onnx", "safetensors"))
    except UsageError:
        return None, ""
    try:
        form = export.plan(graph)
    except UsageError as error:
        line = str(error).split(";")[0].splitlines()[0].replace(str(graph.meta["model"].source), subject.name)
        site = line.split(": ", 2)  # name, format, reason
        return site[2] if len(site) == 3 and site[1] in scheme else line, ""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        found = export_graph(graph, form, folder, folder)
        if name == "gguf" and asked.llama is not None:
            return found, in_llama_cpp(graph, folder, asked.llama)
        paged = name == "onnx" and not options and scheme in PAGES
        return found, in_browser(graph, folder, asked.ort_web) if paged and asked.ort_web is not None else ""


def equal_tokens(graph: GraphModule, prompt: list[int], tokens: list[int]) -> str:
    """Count the tokens up to the first that the graph would not choose."""
    chosen = GraphLogits(graph)(np.array([prompt + tokens]))[0, PROMPT - 1 : -1].argmax(-1).numpy()
    unequal = np.flatnonzero(chosen != np.array(tokens))
    return f"{int(unequal[0]) if len(unequal) else NEW} of {NEW}"


def in_llama_cpp(graph: GraphModule, folder: Path, program: Path) -> str:
    """Continue a prompt in llama.cpp (benchmarks/peers/llama_tokens.cpp), which rounds activations to 8 bits."""
    prompt = np.random.default_rng(0).integers(3, graph.meta["model"].vocab_size, PROMPT).tolist()
    given = [str(program), str(folder / "model.gguf"), ",".join(map(str, prompt)), str(NEW)]
    said = subprocess.run(given, check=True, capture_output=True, text=True).stdout
    return equal_tokens(graph, prompt, [int(token) for token in said.replace(",", " ").split()])


def in_browser(graph: GraphModule, folder: Path, dist: Path) -> str:
    """Continue a prompt in ONNX Runtime Web."""
    from playwright.sync_api import sync_playwright
    from web_race import FLAGS, serving

    info = graph.meta["model"]
    prompt = np.random.default_rng(0).integers(3, info.vocab_size, PROMPT).tolist()
    shape = f"&layers={info.layers}&heads={info.kv_heads}&width={info.head_dim}"
    folders = {"work": folder, "ort": dist, "peers": Path(__file__).parent / "peers"}
    with serving(folders) as server, sync_playwright() as started:
        page = started.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS)).new_page()
        page.set_default_timeout(300_000)
        query = f"model=/work&kind=decoder&provider=wasm&threads=1{shape}"
        page.goto(f"http://127.0.0.1:{server.server_port}/peers/web_onnxruntime.html?{query}")
        page.wait_for_function("window.ready")
        tokens = page.evaluate("([ids, count]) => generate(ids, count)", [prompt, NEW])["ids"]
    return equal_tokens(graph, prompt, tokens)


def rows(subject: Subject, asked: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row whose export, options and format have one of the parts that are asked for."""
    for name, options, schemes in subject.cases:
        for scheme in schemes:
            start = subject.name, " ".join((name, *options)), scheme
            if not any(part in " ".join(start[1:]) for part in asked.only.split(",")):
                continue
            found, page = exported(subject, name, options, scheme, asked)
            if found is None:
                continue
            if isinstance(found, str):
                yield (*start, "refused", "", found, "")
                continue
            size = f"{found.written.bits:.3f}", f"{found.folder_bytes / 1e3:,.0f}"
            if (checked := found.checked) is None:
                yield (*start, *size, found.unchecked, "")
                continue
            apart = f"{checked.difference:.2g} of {checked.largest:.3g} ({checked.dtype})"
            tokens = f"{checked.equal_tokens} of {checked.tokens}" if checked.tokens else ""
            yield (*start, *size, apart, tokens)
            if page:
                where = "llama.cpp" if name == "gguf" else "ONNX Runtime Web, WebAssembly in Chromium"
                yield (*start, *size, where, page)


def subjects(asked: argparse.Namespace, scratch: Path) -> Iterator[Subject]:
    """Capture the models that are asked for."""
    for model in asked.models:
        name, _, folder = model.rpartition("=")
        yield Subject(name or Path(folder).name, capture(folder))
    if asked.resnet:
        weights, images = asked.resnet
        data = data_recipe(images, 64)
        assert data.calibration is not None
        samples = load_image_samples(data.calibration)
        yield Subject(Path(weights).parent.name, captured(load_resnet(Path(weights)), load_images(data.evaluation)),
                      samples)  # fmt: skip
    if asked.experts:
        yield Subject("experts", capture(random_experts(scratch / "experts")))


def random_experts(folder: Path) -> Path:
    """Write a Qwen 3 of two layers, whose tokens take two of eight experts."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, max_position_embeddings=512, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
        bos_token_id=0, eos_token_id=0, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).half().save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="[NAME=]FOLDER")
    parser.add_argument("--only", default="", help="parts of an export's name, options and format, joined by commas")
    parser.add_argument("--resnet", nargs=2, metavar=("WEIGHTS", "IMAGES"), help="see benchmarks/resnet.py")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--ort-web", type=Path, metavar="DIST", help="folder of ONNX Runtime Web's files")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="of benchmarks/peers/llama_tokens.cpp")
    parser.add_argument("--rows", action="store_true", help="print rows alone, for a table that is there")
    asked = parser.parse_args()
    if not asked.rows:
        print_head(asked.ort_web)
    with tempfile.TemporaryDirectory() as scratch:
        for subject in subjects(asked, Path(scratch)):
            for row in rows(subject, asked):
                print(f"| {' | '.join(row)} |", flush=True)


def print_head(dist: Path | None) -> None:
    """Print the title, the clients' versions and the table's headings."""
    clients = ["transformers", "compressed-tensors", "gguf", "onnxruntime"]
    programs = [f"{name} {version(name)}" for name in clients]
    if dist is not None:
        package = json.loads((dist.parent / "package.json").read_text(encoding="utf-8"))
        programs.append(f"onnxruntime-web {package['version']}")
    print(f"# Exports\n\nMade by `benchmarks/exports.py`, on x86-64. Client: {', '.join(programs)}.\n")
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}")


if __name__ == "__main__":
    main()
