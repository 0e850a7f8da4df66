"""Texts with drafts are those of plain decoding, token for token: many prompts, every kind, every family of formats.

    python benchmarks/speculation_law.py [--formats W8A8,NF4_G64] [--prompts 200] [--tokens 24] [--runner FILE]
                                         [--oracle] [--markdown FILE]

Prompts are passages of the held-out text on the reference model; every other one is continued greedily, the others at
temperature 0.7 in a nucleus of 0.9, with seeds.  Every draft is verified, whether it pays or not, so that as many
verifications as possible are compared.  Batches of four have prompts of one length and texts of several.  ``--runner``
is the runner in C++ (export/native), which drafts by lookup where it pays, on a tenth of the prompts, greedily and
longer.  ``--oracle`` compares with prompt lookup decoding of transformers (``prompt_lookup_num_tokens``) in float32:
its greedy texts, and those of a bundle without quantisation, drafts off and on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from bundles import write_bundle
from compressor_runtime import Bundle, load
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine, Text
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.speculation.pace import Always

from compressor.capture.capture import capture
from compressor.data.text import load_samples
from compressor.host.resources import resource
from compressor.recipe.recipe import Recipe

PROMPT, BATCH, RUNNER_TOKENS = 32, 4, 64
SAMPLED = (0.7, 0, 0.9)
PLAIN = "none"  # no pass: float32 as it is
EMBEDDING = {"embedding": {"scheme": "W8A16"}}


def rtn(scheme: str) -> list[dict[str, Any]]:
    """Return the passes of a dense format."""
    return [{"rtn": {"scheme": scheme, "targets": "Linear", "ignore": ["lm_head"]}}, EMBEDDING]


DENSE = ("W8A8", "W4A8_G128", "W8A16", "W4A16_G128", "NF4_G64", "FP8_E4M3", "MXFP4", "W3A16_G128")
FAMILIES: dict[str, list[dict[str, Any]]] = {PLAIN: [], **{scheme: rtn(scheme) for scheme in DENSE}}
FAMILIES |= {
    scheme: [{"magnitude": {"scheme": scheme, "ignore": ["lm_head"]}}, EMBEDDING]
    for scheme in ("W8A16_B16x1@30", "W8A16_2:4")
}
FAMILIES["W4A16_G128 and caches INT8"] = [*rtn("W4A16_G128"), {"kv_cache": {"scheme": "INT8"}}]


def prompts_of(ids: Sequence[int], count: int) -> list[list[int]]:
    """Return passages spread over a text."""
    starts = [(len(ids) - PROMPT) * number // count for number in range(count)]
    return [list(ids[start : start + PROMPT]) for start in starts]


def options_of(number: int) -> tuple[float, int, float]:
    """Return temperature, top_k and top_p of a prompt."""
    return SAMPLED if number % 2 else (0.0, 0, 1.0)


def alone(bundle: Bundle, kind: str | None, prompts: list[list[int]], count: int) -> tuple[list[list[int]], Any]:
    """Return the texts behind prompts, one after another, and the counts of drafts; a kind None drafts nothing."""
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries)
    found, total = [], Speculation(kind or "off")
    for number, prompt in enumerate(prompts):
        counts = Speculation(kind) if kind else None
        sampler = checked_sampler(*options_of(number), number)
        found.append(list(bundle.continued(prompt, count, sampler, [], counts)))
        total = total + counts if counts else total
    return found, total


def together(bundle: Bundle, kind: str, prompts: list[list[int]], count: int) -> tuple[list[list[int]], Speculation]:
    """Return the texts behind prompts, four at a time, the later ones of four a token shorter each."""
    total, found = Speculation(kind), list[list[int]]()
    drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries)
    for start in range(0, len(prompts), BATCH):
        own = prompts[start : start + BATCH]
        session, counts = bundle.session(len(own), PROMPT + count), Speculation(kind)
        ends = dict.fromkeys(bundle.model["eos_ids"], "eos_token")
        texts = [
            Text(slot, [*prompt], drafts.start(kind, session, slot), sampler_of(start + slot), ends, count - slot)
            for slot, prompt in enumerate(own)
        ]
        for text, logits in zip(texts, session.step(own), strict=True):
            text.choose(logits[-1])
        for _ in Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts):
            pass
        found += [text.tokens[PROMPT:] for text in texts]
        total += counts
    return found, total


def sampler_of(number: int) -> Any:
    """Return the sampler of a prompt."""
    return checked_sampler(*options_of(number), number)


def native(runner: Path, folder: Path, prompts: list[list[int]]) -> tuple[int, int]:
    """Return how many texts of the runner with drafts are those without, and of how many."""
    equal = 0
    for prompt in prompts:
        words = [str(runner), str(folder), "--ids", ",".join(map(str, prompt)), "--max-tokens", str(RUNNER_TOKENS)]
        texts = [
            subprocess.run([*words, "--threads", "1", "--speculate", kind], capture_output=True, text=True, check=True)
            for kind in ("lookup", "off")
        ]
        equal += texts[0].stdout == texts[1].stdout
    return equal, len(prompts)


def row(name: str, folder: Path, prompts: list[list[int]], count: int, runner: Path | None) -> list[str]:
    """Return a family's line of the table for each kind, and how many texts differed."""
    bundle, lines = load(folder, threads=1), []
    plain, _ = alone(bundle, None, prompts, count)
    for kind in served(bundle.entries):
        one, counts = alone(bundle, kind, prompts, count)
        four, batched = together(bundle, kind, prompts, count)
        shorter = [text[: count - number % BATCH] for number, text in enumerate(plain)]
        equal = sum(a == b for a, b in zip(one, plain, strict=True))
        equal_four = sum(a == b for a, b in zip(four, shorter, strict=True))
        cells = [f"`{name}`", f"`{kind}`", f"{equal} of {len(plain)}", f"{counts.verifications}, {counts.accepted}"]
        cells += [f"{equal_four} of {len(plain)}", f"{batched.verifications}, {batched.accepted}"]
        if kind == "lookup" and runner is not None:
            equal_runner, asked = native(runner, folder, prompts[::10])
            cells += [f"{equal_runner} of {asked}"]
        else:
            cells += [""]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


def oracle(folder: Path, model: Path, prompts: list[list[int]], count: int) -> str:
    """Compare greedy texts of a bundle in float32 with those of transformers, plain and by prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    bundle, net = load(folder, threads=1), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.set_num_threads(1)
    equal, equal_plain, ours = 0, 0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        given = {"do_sample": False, "max_new_tokens": count, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        texts = []
        for extra in ({"prompt_lookup_num_tokens": 8}, {}):
            tokens = net.generate(ids, **given, **extra)[0, len(prompt) :].tolist()
            texts.append([token for token in tokens if token not in bundle.model["eos_ids"]])
        bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries)
        found = [list(bundle.generate_ids(prompt, max_tokens=count, speculate=kind)) for kind in ("lookup", "off")]
        ours += found[0] == found[1]
        equal += found[0] == texts[0]
        equal_plain += texts[0] == texts[1]
    return (
        f"Greedy texts of {count} tokens behind {len(prompts)} prompts, float32: drafts by lookup here gave those of "
        f"plain steps {ours} times and those of transformers' prompt lookup decoding {equal} times; transformers' own "
        f"two agreed {equal_plain} times."
    )


def main() -> None:
    """Make a bundle of each family, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", default=",".join(FAMILIES))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--runner", type=Path)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    model = resource("models") / "reference"
    dense, prompts = capture(model), None
    lines = ["| format | kind | batch 1: equal texts | verifications, accepted | batch 4: equal texts | "]
    lines[-1] += "verifications, accepted | runner in C++: equal texts |"
    lines += ["|---|---|---|---|---|---|---|"]
    for name in given.formats.split(","):
        with tempfile.TemporaryDirectory() as work:
            keys = {"model": "reference", "calibration": "python_docs", "speculate": "auto", "target": "x86"}
            recipe = Recipe.from_dict({**keys, "passes": FAMILIES[name]})
            spec = recipe.calibration
            assert spec is not None
            samples = load_samples(spec.model_copy(update={"samples": 8}), model)
            folder = Path(work) / "bundle"
            write_bundle(dense, recipe, samples, folder, 1)
            if prompts is None:
                text = (resource("calibration") / "python_docs_heldout.txt").read_text(encoding="utf-8")
                prompts = prompts_of(load(folder, threads=1).tokenizer.encode(text).ids, given.prompts)
            lines += row(name, folder, prompts, given.tokens, given.runner)
            if name == PLAIN and given.oracle:
                lines[:0] = [oracle(folder, model, prompts, given.tokens), ""]
                print(lines[0], flush=True)
    print("\n".join(lines))
    if given.markdown:
        given.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
