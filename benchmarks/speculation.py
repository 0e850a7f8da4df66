"""Gain of each kind of drafts on text that repeats and on text that does not, measured and predicted.

    python benchmarks/speculation.py --work DIR [--models reference,widened] [--kinds lookup,planes] [--texts 12]
                                     [--tokens 96] [--override KEY=VALUE] [--source DIR] [--always] [--text FILE]
                                     [--json FILE] [--markdown FILE]

For the reference model, which fits into the caches, and for its widened twin (benchmarks/widened.py), which does not.
One thread, timed by its CPU time, which other processes add little to.  The run-time decides by the same clock, or
where a step takes less than 2 ms by one that leaves out gaps in which other processes ran: to ask for CPU time takes
1 us and more.  Plain steps, each kind, and plain steps again as a control take turns text by text, in an order that is
turned.  A text's shortest time of ``--repeats`` counts.  All texts of a kind share what it has learnt, as in a bundle
that goes on running; repeats do not, as what a draft has learnt from a text must not serve for the same text again.

- ``edits``: a function of the text, and the first lines of its copy with another name.  Greedy.
- ``greedy``: passages of the text, continued greedily: the model's own domain.
- ``sampled``: the same at temperature 1: text that does not repeat.

``--source`` names a Hugging Face folder in the place of the reference model, for example the checkpoint of one that was
trained for drafts of its first layers; it needs a ``--work`` of its own.  With ``--always`` each draft is verified,
chains of up to four tokens, which says how often drafts are right.

Times of verifications by their rows are measured before; of drafts by the first layers, whose work is reused, behind
such drafts.  The prediction takes these, how many verifications had how
many rows, what drafts cost, and what it costs to choose a token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from bundles import write_bundle
from compressor_runtime import Bundle, load
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import MOST_ROWS
from compressor_runtime.speculation.pace import Pace
from speculation_law import Short
from widened import write_widened

from compressor.capture.capture import capture
from compressor.data.text import load_samples
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe

LOOKUP = "speculate_lookup_x86"
KINDS = {kind: LOOKUP for kind in ("lookup", "recycle", "auto")}
KINDS |= {"planes": "speculate_planes_x86", "heads": "draft_heads_x86", "exit": "speculate_exit_x86"}
"""Kind of drafts -> recipe of a bundle that serves it."""
STEPS, TURNS, CHOICES = 8, 25, 200
SHOWN = (*range(1, 17), 20, 24, 28, 32)
"""Rows whose times the table has."""
PROMPT, COPIED_LINES = 128, 3
FUNCTION_TOKENS = (48, 200)
PLAIN, CONTROL = "plain", "off"
LEAST_TOKENS, QUANTILE, SHORT_STEP_S = 8, 0.25, 2e-3


@dataclass(frozen=True)
class Task:
    """Prompts, and how they are continued."""

    name: str
    prompts: list[list[int]]
    temperature: float


def functions(text: str) -> Iterator[str]:
    """Yield the functions and methods of a text, dedented."""
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if not (found := re.match(r"( *)def \w+\(", line)):
            continue
        end = start + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(found[1] + " ")):
            end += 1
        yield textwrap.dedent("\n".join(lines[start:end])).rstrip()


class Undisturbed:
    """A clock that stands still while this thread waits: gaps longer than ``most_s`` are left out."""

    def __init__(self, most_s: float) -> None:
        self._most_s, self._before, self._left_out = most_s, time.perf_counter(), 0.0

    def __call__(self) -> float:
        now = time.perf_counter()
        if now - self._before > self._most_s:
            self._left_out += now - self._before
        self._before = now
        return now - self._left_out


def tasks(bundle: Bundle, text: str, texts: int) -> list[Task]:
    """Return what is continued."""

    def encode(words: str) -> list[int]:
        found: list[int] = bundle.tokenizer.encode(words).ids
        return found

    edits = []
    for source in functions(text):
        name = source[4 : source.index("(")]
        copy = "\n".join(source.replace(name, f"{name}_again").splitlines()[:COPIED_LINES]) + "\n"
        if FUNCTION_TOKENS[0] <= len(encode(source)) <= FUNCTION_TOKENS[1] and len(source.splitlines()) > COPIED_LINES:
            edits.append(encode(f"{source}\n\n\n{copy}"))
    ids = encode(text)
    starts = [(len(ids) - PROMPT) * number // texts for number in range(texts)]
    passages = [ids[start : start + PROMPT] for start in starts]
    spread = [edits[len(edits) * number // texts] for number in range(min(texts, len(edits)))]
    return [Task("edits", spread, 0.0), Task("greedy", passages, 0.0), Task("sampled", passages, 1.0)]


def verification_times(bundle: Bundle, prompt: Sequence[int], turns: int, is_begun: bool = False) -> dict[int, float]:
    """Return the seconds of a verification by its rows, and under 0 those of a step: the lower quartile.

    Each comes behind others of its sort, the verifications in shuffled order.

    Args:
        is_begun: the first layers have read all tokens but the last, as in their drafts, which is not timed here.
    """
    session, shuffled = bundle.session(1, len(prompt) + MOST_ROWS), random.Random(0)
    session.step([list(prompt)])
    order, steps = list(range(1, MOST_ROWS + 1)), [0] * STEPS
    times: dict[int, list[float]] = {rows: [] for rows in (0, *order)}
    for _ in range(turns):
        shuffled.shuffle(order)
        for place, rows in enumerate(steps + order):
            session.position = len(prompt)
            for ahead in range(rows - 1 if is_begun else 0):
                session.begin([prompt[-1]], [ahead])
            begin = time.thread_time()
            if rows:
                session.verify([prompt[-1]] * rows, list(range(-1, rows - 1)))
                session.accept({0: [0]})
            else:
                session.step([[prompt[-1]]])
            if place:
                times[rows].append(time.thread_time() - begin)
    return {rows: float(np.quantile(found, QUANTILE)) for rows, found in sorted(times.items())}


def continued(
    bundle: Bundle, kind: str, drafts: Drafts | None, prompt: list[int], temperature: float, seed: int, count: int
) -> tuple[list[int], float, Speculation | None]:
    """Return the tokens behind a prompt, the seconds of those behind the first, and the counts of drafts."""
    counts = None
    if drafts is not None:
        bundle._drafts = drafts  # what this kind has learnt from other texts
        counts = Speculation(kind)
    tokens = bundle.continued(prompt, count, checked_sampler(temperature, 0, 1.0, seed), [], counts)
    found = [next(tokens, -1)]
    begin = time.thread_time()
    found += tokens
    return found, time.thread_time() - begin, counts


def measured(
    bundle: Bundle, drafting: Sequence[str], task: Task, given: argparse.Namespace, times: dict[int, float]
) -> dict[str, Any]:
    """Return figures of each kind on one task."""
    count, repeats, pace = given.tokens, given.repeats, Short if given.always else Pace
    kinds = [PLAIN, *drafting, CONTROL]
    clock = time.thread_time if times[0] > SHORT_STEP_S else Undisturbed(2 * times[MOST_ROWS])
    drafts = {kind: Drafts(bundle.model["vocab_size"], pace(clock), bundle.entries) for kind in drafting}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    total: dict[str, Speculation] = {}
    for seed, prompt in enumerate(task.prompts):
        found: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for repeat in range(repeats):
            first = (seed * repeats + repeat) % len(kinds)
            for kind in kinds[first:] + kinds[:first]:
                known = deepcopy(drafts.get(kind))
                found[kind].append((*continued(bundle, kind, known, prompt, task.temperature, seed, count), known))
        plain = found[PLAIN][0][0]
        for kind, each in found.items():
            if any(tokens != plain for tokens, *_ in each):
                raise SystemExit(f"{kind}, {task.name}, text {seed}: other tokens than those of plain steps")
            _, least, counts, learnt = min(each, key=lambda one: one[1])
            if counts is not None:
                drafts[kind] = learnt  # what it has learnt from this text once, for the next one
            if len(plain) >= LEAST_TOKENS:  # else the text ended at once, and says nothing of time
                seconds[kind].append(least)
                if counts is not None:
                    total[kind] = total[kind] + counts if kind in total else counts
    plain_s, choice_s = sum(seconds[PLAIN]), choosing_time(bundle, task.temperature)
    result = {}
    for kind in kinds[1:]:
        ratios = [plain / other for plain, other in zip(seconds[PLAIN], seconds[kind], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        figures: dict[str, Any] = {"texts": len(ratios), "speedup": plain_s / sum(seconds[kind])}
        figures |= {"median": median(ratios), "quartiles": [low, high], "seconds": sum(seconds[kind])}
        if kind in total:
            figures |= total[kind].facts() | {"rows": dict(sorted(total[kind].rows.items()))}
            figures |= {"predicted": predicted(total[kind], choice_s, times)}
        result[kind] = figures
    return result


def choosing_time(bundle: Bundle, temperature: float) -> float:
    """Return the seconds in which a token is chosen from logits: the lower quartile."""
    logits, sampler, times = bundle.session().step([[1]])[0, -1], checked_sampler(temperature, 0, 1.0, 0), []
    for _ in range(CHOICES):
        begin = time.thread_time()
        sampler.pick(logits)
        times.append(time.thread_time() - begin)
    return float(np.quantile(times, QUANTILE))


def predicted(counts: Speculation, choice_s: float, times: dict[int, float]) -> float:
    """Return the gain to expect from times of verifications, what drafts cost, and how many rows were verified.

    Args:
        choice_s: in which a token is chosen from logits.
    """
    steps_s, choosing_s = counts.tokens * times[0], counts.tokens * choice_s
    spent_s = sum(count * times[rows if rows > 1 else 0] for rows, count in counts.rows.items())
    return (steps_s + choosing_s) / (spent_s + choosing_s + counts.draft_s)


def made(given: argparse.Namespace, model: str, name: str) -> Bundle:
    """Return the bundle of a recipe with overrides; it is written into the folder ``work`` unless it is there."""
    work, source, overrides = given.work, given.source, given.override
    folder, path = source, work / re.sub(r"\W+", "_", "_".join([model, name, *overrides]))
    if model == "widened":
        folder = work / "widened"
        if not (folder / "model.safetensors").is_file():
            write_widened(source, folder, *map(int, given.widths.split(",")))
    if not (path / "manifest.json").is_file():
        recipe = load_recipe(name, [f"model={folder}", *overrides])
        samples = load_samples(recipe.calibration, folder) if recipe.calibration else None
        write_bundle(capture(folder), recipe, samples, path, 1)
    return load(path, threads=1)


def table(results: dict[str, Any]) -> list[str]:
    """Return the results as Markdown."""
    lines = []
    for model, result in results.items():
        step, *_ = times = list(result["verification"].values())
        spent = [times[rows] / step for rows in SHOWN]
        lines += [f"## {model}", "", f"A step takes {step * 1e3:.2f} ms.  Verifying k rows, in steps:", ""]
        lines += ["| k | " + " | ".join(map(str, SHOWN)) + " |", "|---" * (len(SHOWN) + 1) + "|"]
        lines += ["| v(k) | " + " | ".join(f"{each:.2f}" for each in spent) + " |", ""]
        lines += ["| text | kind | acceptance | tokens a verification | verifications, plain steps | predicted | "]
        lines[-1] += "measured | of texts: median, quartiles |"
        lines += ["|---|---|---|---|---|---|---|---|"]
        for task, kinds in result["tasks"].items():
            for kind, found in kinds.items():
                low, high = found["quartiles"]
                spread = f"{found['median']:.3f}, {low:.3f} to {high:.3f} |"
                if kind == CONTROL:
                    lines += [f"| {task} | plain steps again | | | | | {found['speedup']:.3f} | {spread}"]
                    continue
                rates = f"{found['acceptance']:.2f} | {found['tokens_per_verification']:.2f}"
                calls = f"{found['verifications']}, {found['steps']}"
                gains = f"{found['predicted']:.3f} | {found['speedup']:.3f}"
                lines += [f"| {task} | `{kind}` | {rates} | {calls} | {gains} | {spread}"]
        lines += [""]
    return lines


def main() -> None:
    """Make what is missing, measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="reference,widened")
    parser.add_argument("--kinds", default="lookup,recycle,auto")
    parser.add_argument("--override", action="append", default=[], help="of the recipe: key=value")
    parser.add_argument("--source", type=Path, default=resource("models") / "reference")
    parser.add_argument("--widths", default="8,2,16", help="copies of residual, heads and inner units when widening")
    parser.add_argument("--always", action="store_true", help="verify each draft, of up to four tokens")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tasks", default="edits,greedy,sampled")
    parser.add_argument("--text", type=Path, default=resource("calibration") / "python_docs_heldout.txt")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    text, results = given.text.read_text(encoding="utf-8"), dict[str, Any]()
    asked = given.kinds.split(",")
    for model, name in itertools.product(given.models.split(","), dict.fromkeys(KINDS[kind] for kind in asked)):
        bundle = made(given, model, name)
        kinds = [kind for kind in asked if KINDS[kind] == name]
        wanted = [task for task in tasks(bundle, text, given.texts) if task.name in given.tasks.split(",")]
        times = verification_times(bundle, wanted[0].prompts[0][:PROMPT], given.turns, "exit" in kinds)
        result = results[f"{model}, `{name}`"] = {"verification": times, "tasks": {}}
        for task in wanted:
            result["tasks"][task.name] = measured(bundle, kinds, task, given, times)
            print(json.dumps({model: {task.name: result["tasks"][task.name]}}), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(table(results)))
    if given.markdown:
        given.markdown.write_text("\n".join(table(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
