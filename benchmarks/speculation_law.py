"""Texts with drafts are those of plain decoding, token for token: many prompts, every kind, every family of formats.

    python benchmarks/speculation_law.py [--model reference] [--formats W8A8,NF4_G64] [--kinds exit,self]
                                         [--prompts 200] [--tokens 24] [--runner FILE] [--oracle] [--markdown FILE]

Prompts are passages of text that a model of quality.yaml was not calibrated on, each continued greedily, and every
fifth one also at temperature 0.7 in a nucleus of 0.9 with a seed.  A family has up to four bundles, since a library is
cut into parts in one way: kinds without parts, heads and upper planes among them; the model's first layers; the model
without some of its parts, two fixed choices; and, of formats that can skip them, drafts without inputs below a fixed
threshold.  Heads are trained for a few steps, once, unless ``--kinds`` leaves them out.  Every draft is verified,
whether it pays or not, so that as many verifications as possible are compared; chains that a model drafts have up to
four tokens.  Batches of four have prompts of one length, each read alone, and texts of several.  ``--runner``
is the runner in C++ (export/native), which drafts where that pays, on a quarter of the prompts, greedily and longer,
alone and in fours.
``--oracle`` compares with prompt lookup decoding of transformers (``prompt_lookup_num_tokens``) and its drafts by the
model's first layers (``assistant_early_exit``), in float32: its greedy texts, and those of a bundle without
quantisation, drafts off and on.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import yaml
from bundles import lower
from compressor_runtime import Bundle, load
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.pace import Always
from compressor_runtime.speculation.text import Text
from compressor_runtime.speculation.tree import Wish
from quality_row import load_texts
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.data.text import Samples
from compressor.graph.kinds.sparse_drafts import limit_drafts, may_draft_sparse
from compressor.graph.model import clone_graph
from compressor.passes.draft_heads import DraftHeads
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.recipe.recipe import Recipe

Bundles: TypeAlias = Iterator[tuple[Path, list[str]]]
"""Folders of bundles, each with kinds to compare, of which it may not serve all."""

Options: TypeAlias = tuple[float, int, float]
"""Temperature, top_k and top_p."""
Item: TypeAlias = tuple[list[int], Options]
"""A prompt, and how its text is chosen."""

PROMPT, BATCH, RUNNER_TOKENS, RUNNER_SHARE, SAMPLED_SHARE, LONGEST = 32, 4, 64, 4, 5, 4
GREEDY, SAMPLED = (0.0, 0, 1.0), (0.7, 0, 0.9)
PLAIN = "none"  # no pass: float32 as it is
EMBEDDING = {"embedding": {"scheme": "W8A16"}}
GROUPS = {"stories260K": "_G64"}  # in the place of _G128: its linears have 64 and 172 inputs
HEADS = DraftHeads(width=64, steps=60)
WHOLE = ("lookup", "recycle", "heads", "planes", "auto")  # kinds of the bundle that is not cut
THRESHOLD = 0.5  # of inputs, below which drafts skip them: about half of those behind a norm


def rtn(scheme: str) -> list[dict[str, Any]]:
    """Return the passes of a dense format."""
    return [{"rtn": {"scheme": scheme, "targets": "Linear", "ignore": ["lm_head"]}}, EMBEDDING]


DENSE = ("W8A8", "W4A8_G128", "W8A16", "W4A16_G128", "NF4_G64", "FP8_E4M3", "MXFP4", "W3A16_G128", "W8A8_G128_P4")
FAMILIES: dict[str, list[dict[str, Any]]] = {PLAIN: [], **{scheme: rtn(scheme) for scheme in DENSE}}
FAMILIES |= {
    scheme: [{"magnitude": {"scheme": scheme, "ignore": ["lm_head"]}}, EMBEDDING]
    for scheme in ("W8A16_B16x1@30", "W8A16_2:4")
}
FAMILIES |= {
    f"{scheme} and caches INT8": [*rtn(scheme), {"kv_cache": {"scheme": "INT8"}}] for scheme in ("W4A16_G128", "W8A8")
}


def family(name: str, model: str) -> list[dict[str, Any]]:
    """Return the passes of a family, with groups that fit the model."""
    written: list[dict[str, Any]] = yaml.safe_load(
        yaml.safe_dump(FAMILIES[name]).replace("_G128", GROUPS.get(model, "_G128"))
    )
    return written


def items_of(ids: Sequence[int], count: int) -> list[Item]:
    """Return passages spread over a text, each to be continued greedily, and some of them sampled as well."""
    starts = [(len(ids) - PROMPT) * number // count for number in range(count)]
    passages = [list(ids[start : start + PROMPT]) for start in starts]
    return [(passage, GREEDY) for passage in passages] + [(passage, SAMPLED) for passage in passages[::SAMPLED_SHARE]]


def bundles(
    dense: GraphModule,
    headed: GraphModule,
    passes: list[dict[str, Any]],
    samples: Samples,
    work: Path,
    kinds: Sequence[str],
) -> Bundles:
    """Make the bundles of a family that these kinds need, one after another; yield each with what it may serve."""
    layers = dense.meta["model"].layers
    names = [f"{half}_{layer}" for layer in range(layers) for half in ("attention", "ffn")]
    skips = [{"without": names[first::3], "agreement": 0.5, "cost": 0.5} for first in (1, 2)]
    for kind, graph in (("auto", headed), ("exit", dense), ("self", dense), ("sparse", dense)):
        own = [name for name in kinds if name in (WHOLE if kind == "auto" else (kind,))]
        if not own:
            continue
        recipe = Recipe.from_dict(
            {
                "model": str(dense.meta["model"].source),
                "calibration": "python_docs",
                "speculate": kind,
                "passes": passes,
                "target": "x86",
            }
        )
        context, folder = Context(samples=samples), work / kind
        compressed = Pipeline(recipe.passes).run(clone_graph(graph), context)
        if kind == "sparse":
            sites = may_draft_sparse(compressed)
            if not sites:
                continue
            limit_drafts(compressed, {site.name: torch.full((site.in_features,), THRESHOLD) for site in sites})
        folder.mkdir()
        lower(dense, compressed, recipe, context, folder, 1, facts={"skips": skips} if kind == "self" else None)
        yield folder, own


class Short(Always):
    """Verify every drafted token, of chains of up to four: longer ones take their time and are wrong."""

    def going(self, name: str, sequences: int, room: int, wishes: Mapping[int, Wish]) -> dict[int, Wish]:
        """Return the drafts that are shorter."""
        return {place: wish for place, wish in wishes.items() if wish.ahead < LONGEST}


def drafts_of(bundle: Bundle) -> Drafts:
    """Return drafts that have learnt nothing."""
    return Drafts(bundle.model["vocab_size"], Short(), bundle.entries, bundle.model)


def alone(bundle: Bundle, kind: str | None, items: list[Item], count: int) -> tuple[list[list[int]], Speculation]:
    """Return the texts behind prompts, one after another, and the counts of drafts; a kind None drafts nothing."""
    bundle._drafts = drafts_of(bundle)
    found, total = [], Speculation(kind or "off")
    for number, (prompt, options) in enumerate(items):
        counts = Speculation(kind) if kind else None
        found.append(list(bundle.continued(prompt, count, checked_sampler(*options, number), [], counts)))
        total = total + counts if counts else total
    return found, total


def together(bundle: Bundle, kind: str, items: list[Item], count: int) -> tuple[list[list[int]], Speculation]:
    """Return the texts behind prompts, four at a time, the later ones of four a token shorter each."""
    total, found = Speculation(kind), list[list[int]]()
    drafts = drafts_of(bundle)
    for start in range(0, len(items), BATCH):
        own = items[start : start + BATCH]
        session, counts = bundle.session(len(own), PROMPT + count), Speculation(kind)
        ends = dict.fromkeys(bundle.model["eos_ids"], "eos_token")
        texts = []
        for slot, (prompt, options) in enumerate(own):
            sampler = checked_sampler(*options, start + slot)
            texts.append(Text(slot, [*prompt], drafts.start(kind, session, slot), sampler, ends, count - slot))
        # Alone, as a server reads them: more rows have other bits.
        for text, (prompt, _) in zip(texts, own, strict=True):
            read = bundle.session(1, PROMPT)
            text.choose(read.step([prompt])[0, -1])
            session.take(text.slot, read)
        for _ in Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts):
            pass
        found += [text.tokens[PROMPT:] for text in texts]
        total += counts
    return found, total


def native(runner: Path, folder: Path, drafting: str, prompts: list[list[int]], batch: int) -> str:
    """Return how many texts of the runner with drafts are those without, of how many, and what was verified.

    Args:
        batch: so many texts are drafted together; those without drafts are alone.
    """

    def run(own: list[list[int]], kind: str) -> tuple[list[str], str]:
        ids = [word for prompt in own for word in ("--ids", ",".join(map(str, prompt)))]
        words = [str(runner), str(folder), *ids, "--max-tokens", str(RUNNER_TOKENS), "--threads", "1"]
        done = subprocess.run([*words, "--speculate", kind], capture_output=True, text=True, check=True)
        return done.stdout.splitlines(), done.stderr

    equal, verifications, accepted = 0, 0, 0
    for start in range(0, len(prompts), batch):
        own = prompts[start : start + batch]
        drafted, said = run(own, drafting)
        equal += sum(run([prompt], "off")[0] == [line] for prompt, line in zip(own, drafted, strict=True))
        if counted := re.search(r"(\d+) verifications, \d+ tokens drafted, (\d+) accepted", said):
            verifications, accepted = verifications + int(counted[1]), accepted + int(counted[2])
    return f"{equal} of {len(prompts)}; {verifications}, {accepted}"


def rows(name: str, made: Bundles, items: list[Item], count: int, runner: Path | None) -> Iterator[str]:
    """Yield a family's line of the table for each kind, and how many texts differed."""
    greedy = [prompt for prompt, options in items if options is GREEDY]
    for folder, only in made:
        bundle = load(folder, threads=1)
        plain, _ = alone(bundle, None, items, count)
        shorter = [text[: count - number % BATCH] for number, text in enumerate(plain)]
        for kind in (one for one in only if one in bundle.speculations):
            one, counts = alone(bundle, kind, items, count)
            four, batched = together(bundle, kind, items, count)
            cells = [f"`{name}`", f"`{kind}`", equals(one, plain, len(greedy)), told(counts)]
            cells += [equals(four, shorter, len(greedy)), told(batched)]
            for batch in (1, BATCH):
                cells += [native(runner, folder, kind, greedy[::RUNNER_SHARE], batch) if runner is not None else ""]
            yield "| " + " | ".join(cells) + " |"


def told(counts: Speculation) -> str:
    """Return what was verified, and what of it accepted."""
    return f"{counts.verifications}, {counts.accepted}"


def equals(found: list[list[int]], wanted: list[list[int]], greedy: int) -> str:
    """Say how many texts are the wanted ones, the first, greedy ones apart, and name those that are not."""
    same = [a == b for a, b in zip(found, wanted, strict=True)]
    odd = [number for number, equal in enumerate(same) if not equal]
    said = f"{sum(same[:greedy])} of {greedy} and {sum(same[greedy:])} of {len(same) - greedy}"
    return said + (f", **not {', '.join(map(str, odd[:5]))}**" if odd else "")


def oracle(work: Path, model: Path, prompts: list[list[int]], count: int) -> Iterator[str]:
    """Compare greedy texts in float32 with those of transformers, by prompt lookup and by early exits."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.set_num_threads(1)
    half = net.config.num_hidden_layers // 2
    for name, kind, extra in (
        ("auto", "lookup", {"prompt_lookup_num_tokens": 8}),
        ("exit", "exit", {"assistant_early_exit": half}),
    ):
        if not (work / name).is_dir():
            continue
        bundle, ours, equal, equal_plain = load(work / name, threads=1), 0, 0, 0
        for prompt in prompts:
            ids = torch.tensor([prompt])
            given = {"do_sample": False, "max_new_tokens": count, "attention_mask": torch.ones_like(ids)}
            texts = []
            for options in (extra, {}):
                tokens = net.generate(ids, pad_token_id=0, **given, **options)[0, len(prompt) :].tolist()
                texts.append([token for token in tokens if token not in bundle.model["eos_ids"]])
            bundle._drafts = drafts_of(bundle)
            found = [list(bundle.generate_ids(prompt, max_tokens=count, speculate=each)) for each in (kind, "off")]
            ours += found[0] == found[1]
            equal += found[0] == texts[0]
            equal_plain += texts[0] == texts[1]
        yield (
            f"Greedy texts of {count} tokens behind {len(prompts)} prompts, float32: drafts of the kind `{kind}` here "
            f"gave those of plain steps {ours} times and those of transformers with {extra} {equal} times; "
            f"transformers' own two agreed {equal_plain} times."
        )


def with_heads(dense: GraphModule, samples: Samples) -> GraphModule:
    """Return the graph with heads that draft."""
    graph = clone_graph(dense)
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    return Pipeline([HEADS]).run(graph, Context(samples=samples))


def main() -> None:
    """Make bundles of each family, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    entries = yaml.safe_load(Path(__file__).with_name("quality.yaml").read_text(encoding="utf-8"))
    parser.add_argument("--model", choices=entries, default="reference")
    parser.add_argument("--formats", default=",".join(FAMILIES))
    parser.add_argument("--kinds", default="lookup,recycle,heads,planes,auto,exit,self,sparse")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--runner", type=Path)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    entry = entries[given.model]
    dense = capture(entry["model"])
    samples, tokens = load_texts(entry, dense)
    items = items_of(tokens.flatten().tolist(), given.prompts)
    kinds = given.kinds.split(",")
    headed = with_heads(dense, samples) if "heads" in kinds else dense
    lines = ["| format | kind | batch 1: equal texts | verifications, accepted | batch 4: equal texts | "]
    lines[-1] += "verifications, accepted | runner in C++: equal texts; verifications, accepted | runner, batch 4 |"
    lines += ["|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines))
    for name in given.formats.split(","):
        with tempfile.TemporaryDirectory() as work:
            made = bundles(dense, headed, family(name, given.model), samples, Path(work), kinds)
            for line in rows(name, made, items, given.tokens, given.runner):
                lines.append(line)
                print(line, flush=True)
            if name == PLAIN and given.oracle:
                greedy = [prompt for prompt, options in items if options is GREEDY]
                for said in oracle(Path(work), Path(entry["model"]), greedy, given.tokens):
                    lines[:0] = [said, ""]
                    print(said, flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
