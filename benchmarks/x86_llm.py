"""An 852 M-parameter Llama on this CPU in 4 bits: ours, and other runtimes, in turns on the same shapes.

    python benchmarks/x86_llm.py WORK_FOLDER --ours W4A8_G128=BUNDLE [--ours ...] --peers FOLDER [--threads 1,2]
    python benchmarks/x86_llm.py WORK_FOLDER --peers FOLDER --smoke

`python benchmarks/bundles.py WORK_FOLDER/llama-852m W4A8_G128 BUNDLE` makes a bundle.
Makes the checkpoint (benchmarks/llama_852m.py) in WORK_FOLDER if it is not there, has each peer convert and quantise it
there, once, and writes benchmarks/results/x86_llm.json and .md.  How they take turns is said in benchmarks/x86_race.py.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama_852m import RECIPE, make_model
from numpy.typing import NDArray
from x86_child import Child, Runtime
from x86_race import Race, Track, arguments, chosen, cosines, machine, parsed
from x86_table import table

PROMPTS, DECODE_PROMPT, STEPS = (128, 512), 128, 32
PEERS = (
    Runtime("OpenVINO int4, f32", "openvino", "x86_openvino", "f32", "openvino-int4"),
    Runtime("OpenVINO int4, default", "openvino", "x86_openvino", "default", "openvino-int4"),
    Runtime("ONNX Runtime GenAI int4", "ortgenai", "x86_ortgenai", "int4", "ortgenai-int4"),
    Runtime("llama.cpp Q4_0", "llamacpp", "x86_llamacpp", "Q4_0", "llamacpp-Q4_0"),
    Runtime("llama.cpp Q4_K_M", "llamacpp", "x86_llamacpp", "Q4_K_M", "llamacpp-Q4_K_M"),
    Runtime("torchao int4, compiled", "torchao", "x86_torchao", "int4", "torchao-int4"),
    Runtime("PyTorch bfloat16, eager", "torchao", "x86_torchao", "bfloat16", "torch-bfloat16"),
)


class DecoderRace(Race):
    """Race of prompts and greedy tokens; the logits behind a prompt show that all compute the same model."""

    reference = PEERS[-1].name

    def __init__(self, runtimes: list[Runtime], track: Track) -> None:
        super().__init__(runtimes, track)
        vocabulary = json.loads((track.model / "config.json").read_text())["vocab_size"]
        generator = random.Random(0)
        self.ids = [generator.randrange(3, vocabulary) for _ in range(max(PROMPTS))]

    def check(self, child: Child) -> NDArray[np.float64]:
        """Return the logits [V] behind the first prompt."""
        logits = self.track.work / "logits.npy"
        child.ask("check", ids=self.ids[: PROMPTS[0]], out=str(logits))
        return np.asarray(np.load(logits), np.float64).ravel()

    def measure(self, child: Child) -> dict[str, float]:
        """Time every prompt, and the median of the tokens."""
        found = {f"prefill_{n}_s": child.ask("prefill", ids=self.ids[:n])["seconds"] for n in PROMPTS}
        steps = child.ask("decode", ids=self.ids[:DECODE_PROMPT], steps=STEPS)["seconds"]
        return {**found, "decode_s": statistics.median(steps)}

    def quality(self, outputs: NDArray[np.float64], reference: NDArray[np.float64] | None) -> dict[str, float]:
        """Return the cosine of the logits with the reference's."""
        return {} if reference is None else {"cosine": float(cosines(outputs, reference))}


def linear_weights(model: Path) -> dict[str, int]:
    """Return the weights of the linears that every token of a prompt passes, and of the head, which only the last
    passes.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    attention = 2 * hidden * hidden * (1 + config["num_key_value_heads"] / heads)
    body = config["num_hidden_layers"] * int(attention + 3 * hidden * wide)
    return {"body": body, "head": hidden * config["vocab_size"]}


def smoke_bundle(model: Path, folder: Path) -> Runtime:
    """Make a bundle of the small model, rounded to nearest by us."""
    bundle, recipe = folder / "smoke-bundle", folder / "smoke.yaml"
    if not bundle.exists():
        recipe.write_text(RECIPE.format(model=model.absolute(), scheme="W4A8_G128", tune="off"))
        compress = [sys.executable, "-c", "from compressor.cli.commands import main; main()", "run", str(recipe)]
        subprocess.run([*compress, "-o", str(bundle)], check=True, stdout=sys.stderr)
    return Runtime("ours W4A8_G128", "", "x86_ours", "bundle", str(bundle))


def main() -> None:
    """Make, convert, take turns, write."""
    options = parsed(arguments(__doc__.splitlines()[0], "1,2", ",", "once, on a small model"))
    model = options.folder / ("llama-smoke" if options.smoke else "llama-852m")
    if not (model / "config.json").exists():
        make_model(model, **({"hidden": 512, "layers": 2} if options.smoke else {}))
    named = [text.partition("=") for text in options.ours]
    ours = [Runtime(f"ours {name}", "", "x86_ours", "bundle", bundle) for name, _, bundle in named]
    if options.smoke:
        ours = ours or [smoke_bundle(model, options.folder)]
    runtimes = chosen((*ours, *PEERS), options.only, ",")
    result: dict[str, Any] = {"model": model.name, "linear_weights": linear_weights(model), "machine": machine(),
                              "prompts": PROMPTS, "decode_after": DECODE_PROMPT, "steps": STEPS,
                              "repeats": options.repeats, "threads": {}}  # fmt: skip
    for threads in map(int, options.threads.split(",")):
        race = DecoderRace(runtimes, Track(model, options.folder, options.peers, threads))
        race.run(options.repeats)
        result["threads"][str(threads)] = race.result()
        (options.out / "x86_llm.json").write_text(json.dumps(result, indent=2) + "\n")
        (options.out / "x86_llm.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
