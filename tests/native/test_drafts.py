"""Drafts of the C++ runner: Python's drafts and figures, and the texts of plain steps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from compressor_runtime import RequestError, load
from compressor_runtime.generation import checked_sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts, speculation
from compressor_runtime.speculation.kinds.lookup import Lookup
from compressor_runtime.speculation.pace import Always
from native_runner import KINDS, POSITIONS, PROMPT, SAMPLED, Runner, figures, ids_of, refused, stated


@pytest.mark.parametrize(("which", "kind"), KINDS)
def test_drafts_and_texts_are_those_of_python(
    request: pytest.FixtureRequest, runner: Runner, which: str, kind: str
) -> None:
    """Compare tokens and counts with Python's where every draft is verified; caches grow in a draft."""
    bundle = request.getfixturevalue(f"{which}_bundle")
    python = load(bundle, threads=1)
    expected = list(python.generate_ids(PROMPT, max_tokens=POSITIONS, speculate="off"))
    drafting = ("--max-tokens", POSITIONS, "--threads", 1, "--speculate", kind)
    run = runner(bundle, PROMPT, *drafting, "--draft-tokens", 15)
    assert ids_of(run) == expected
    python._drafts = Drafts(64, Always(), python.entries, python.model)
    counts = Speculation(kind)
    assert list(python.continued(PROMPT, POSITIONS, checked_sampler(0.0, 0, 1.0, 0), [], counts)) == expected
    assert figures(run, kind) == stated(counts) and counts.accepted > 0
    assert ids_of(runner(bundle, PROMPT, *drafting)) == expected  # as much as pays
    sampled = list(python.generate_ids(PROMPT, max_tokens=60, speculate="off", **SAMPLED))
    options = ("--max-tokens", 60, "--temperature", 0.8, "--top-p", 0.9, "--seed", 3, "--draft-tokens", 7)
    assert ids_of(runner(bundle, PROMPT, *drafting, *options)) == sampled != expected[:60]


def test_sampled_texts_are_those_of_a_seed(runner: Runner, packed_bundle: Path) -> None:
    python, seed = load(packed_bundle, threads=1), (1 << 40) + 5  # of two words
    for options in ({"temperature": 1.5}, {"temperature": 0.7, "top_k": 5, "top_p": 0.95}, {"temperature": 1e-6}):
        expected = list(python.generate_ids(PROMPT, max_tokens=40, seed=seed, **options))
        given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
        assert ids_of(runner(packed_bundle, PROMPT, "--max-tokens", 40, "--seed", seed, *given)) == expected
    few = [set[int](), set[int]()]  # tokens by all, and by the two likeliest
    for seed in range(4):
        for found, count in zip(few, (0, 2), strict=True):
            run = runner(packed_bundle, PROMPT, "--max-tokens", 1, "--temperature", 9, "--top-k", count, "--seed", seed)
            found.update(ids_of(run))
    assert len(few[1]) <= 2 < len(few[0])
    for option, value in (("--temperature", -1), ("--top-p", 0), ("--top-p", 1.5), ("--top-k", -1), ("--seed", -1)):
        refused(runner(packed_bundle, [1], option, value), 2, f"{option} {value}: must be")
    refused(runner(packed_bundle, [1], "--temperature", "nan"), 2, "--temperature: 'nan' is not a finite number")


def test_lossy_texts_are_those_of_python(runner: Runner, editable: Callable[..., Path]) -> None:
    measured = {"lossless_agreement": 0.125, "lossy_perplexity": 2.25, "lossless_perplexity": 2.0}
    folder = editable("drafting", speculate="sparse", lossy={"tolerance": 0.75, **measured})
    python = load(folder, threads=1)
    counts = speculation(python, None)
    assert counts is not None
    expected = list(python.continued(PROMPT, 60, checked_sampler(0.0, 0, 1.0, 0), [], counts))
    plain = list(python.generate_ids(PROMPT, max_tokens=60, speculate="off"))
    run, kind = runner(folder, PROMPT, "--max-tokens", 60), str(counts).partition(": acceptance")[0]
    assert ids_of(run) == expected != plain and counts.lenient > 0
    assert (
        run.stderr.startswith(f"{kind}: acceptance ") and f"{counts.lenient} of the tokens are not the model's" in kind
    )
    assert figures(run, "sparse.*") == stated(counts)
    assert ids_of(runner(folder, PROMPT, "--max-tokens", 20)) == expected[:20]
    for asked in ("off", "lookup", "auto"):
        assert ids_of(runner(folder, PROMPT, "--max-tokens", 60, "--speculate", asked)) == plain
    sampled = list(python.generate_ids(PROMPT, max_tokens=20, **SAMPLED))
    options = ("--temperature", 0.8, "--top-p", 0.9, "--seed", 3)
    run = runner(folder, PROMPT, "--max-tokens", 20, *options)
    assert ids_of(run) == sampled and "lossy" not in run.stderr
    refused(runner(folder, PROMPT, "--draft-tokens", 2), 2, "lossy texts depend on how many tokens are drafted")
    for wrong in ({"tolerance": 1.5}, {"tolerance": 0.0}, {}):
        refused(runner(editable("drafting", speculate="sparse", lossy=wrong), [1]), 4, "manifest.json")


def test_subsets_of_parts_take_turns(runner: Runner, editable: Callable[..., Path]) -> None:
    skips = [{"without": [name], "agreement": 0.9, "cost": 0.1} for name in ("ffn_0", "attention_1")]
    folder = editable("drafting", skips=skips)
    expected = list(load(folder, threads=1).generate_ids(PROMPT, max_tokens=100, speculate="off"))
    for options in ((), ("--draft-tokens", 3)):
        assert ids_of(runner(folder, PROMPT, "--max-tokens", 100, *options)) == expected
    for wrong in ([], [{**skips[0], "without": ["ffn_7"]}], [{**skips[0], "cost": -1.0}]):
        refused(runner(editable("drafting", skips=wrong), [1]), 4, "`skips` has a value that cannot be")


@dataclasses.dataclass(frozen=True)
class Run:
    """A prompt whose plain continuation agrees, behind three tokens, with what its lookup drafts.

    The first verification comes there whatever the times: after two steps, by the guess of what a row costs.
    """

    prompt: list[int]
    expected: list[int]
    accepted: int


@pytest.fixture(scope="module")
def repeating(packed_bundle: Path) -> Run:
    python = load(packed_bundle, threads=1)
    for turn in range(len(PROMPT)):
        start = PROMPT[turn:] + PROMPT[:turn]
        text = [*start, *python.generate_ids(start, max_tokens=POSITIONS)]
        for place in range(len(start) + 3, len(text) - 20):
            index = Lookup(Acceptance(lambda source: 1.0))
            index.extend(text[:place])
            if len(matches := index.matches()) != 1:
                continue
            agreeing = [a == b for a, b in zip(text[matches[0][1] : place], text[place:], strict=False)]
            count = agreeing.index(False) if False in agreeing else 0
            # As many as a first verification has at most, or one more; all differ.
            if count in (3, 4) and len(set(text[place - 3 : place + count])) == count + 3:
                return Run(text[: place - 3], text[place - 3 :], count)
    raise AssertionError("no prompt's continuation repeats itself")


def test_drafted_tokens_change_no_token(runner: Runner, packed_bundle: Path, repeating: Run) -> None:
    drafting, prompt, expected = ("--speculate", "lookup"), repeating.prompt, repeating.expected
    run = runner(packed_bundle, prompt, "--max-tokens", POSITIONS, *drafting)
    assert ids_of(run) == expected and len(prompt) + len(expected) == POSITIONS + 1
    _, each, verifications, drafted, accepted, steps = figures(run)
    assert verifications >= 1 and drafted >= accepted >= 3 and each == round(1 + accepted / verifications, 2)
    assert len(expected) == 1 + verifications + accepted + steps
    text = prompt + expected
    run = runner(packed_bundle, text[: len(PROMPT)], "--max-tokens", POSITIONS, *drafting)  # the caches grow
    assert ids_of(run) == text[len(PROMPT) :]
    for tokens in range(1, 8):  # ends before and in the first verification
        run = runner(packed_bundle, prompt, "--max-tokens", tokens, *drafting)
        assert ids_of(run) == expected[:tokens]
        if tokens > 4:  # as many drafted as may be needed, all of them right
            assert figures(run) == [1, tokens - 3, 1, tokens - 4, tokens - 4, 2]
    run = runner(packed_bundle, prompt, "--max-tokens", 20, "--speculate", "off")
    assert ids_of(run) == expected[:20] and not run.stderr


def test_a_text_ends_in_a_run_of_drafted_tokens(runner: Runner, editable: Callable[..., Path], repeating: Run) -> None:
    prompt, expected, place = repeating.prompt, repeating.expected, 5
    end = expected[place]  # the third drafted token
    assert end not in expected[:place]
    copy = editable("packed", eos_ids=[end], speculate="lookup")
    run = runner(copy, prompt, "--max-tokens", 50)
    assert ids_of(run) == expected[:place] == list(load(copy, threads=1).generate_ids(prompt, max_tokens=50))
    assert figures(run) == [1, 3, 1, 2, 2, 2]
    limit = len(prompt) + place - 1  # of positions: the last token needs none
    copy = editable("packed", max_positions=limit, speculate="auto")
    run = runner(copy, prompt, "--max-tokens", 50)
    assert ids_of(run) == expected[:place] == list(load(copy, threads=1).generate_ids(prompt, max_tokens=50))
    assert "auto: acceptance" in run.stderr
    refused(runner(editable("packed", speculate="off"), prompt), 4, "`speculate` has a value that cannot be")


def test_what_a_bundle_does_not_serve_is_refused_as_in_python(
    runner: Runner, bundle: Path, packed_bundle: Path, exit_bundle: Path
) -> None:
    for folder, kinds in (
        (bundle, ("lookup", "auto", "heads")),
        (packed_bundle, ("exit", "planes", "self", "sparse")),
        (exit_bundle, ("heads", "self")),
    ):
        python = load(folder, threads=1)
        for kind in kinds:
            with pytest.raises(RequestError) as error:
                python.generate_ids([1], speculate=kind)
            refused(runner(folder, [1], "--speculate", kind), error.value.exit_code, str(error.value))
    with pytest.raises(RequestError) as error:
        python.generate_ids([1], speculate="guess")
    words = str(error.value).partition(": ")[2]
    refused(runner(bundle, [1], "--speculate", "guess"), 2, f"--speculate 'guess': {words}")
    refused(runner(bundle, [1], "--speculate"), 2, "--speculate: no value")
    refused(runner(packed_bundle, [1], "--draft-tokens", 2), 2, "--draft-tokens: nothing drafts")
    for count in (0, 16):
        refused(runner(packed_bundle, [1], "--draft-tokens", count), 2, f"--draft-tokens {count}: must be from 1 to 15")


def test_parts_that_do_not_fit_are_refused(runner: Runner, editable: Callable[..., Path]) -> None:
    parts = json.loads((editable("exit") / "manifest.json").read_text())["model"]["parts"]
    for wrong, code, words in (
        ([{**parts[0], "axes": parts[0]["axes"][1:]}, *parts[1:]], 4, "`parts` has a value"),
        ([*parts[:-1], {**parts[-1], "gives": ["stream"]}], 4, "`parts` has a value"),
        ([{**parts[0], "axes": [7, *parts[0]["axes"][1:]]}, *parts[1:]], 1, "does not fit together"),
    ):
        done = runner(editable("exit", parts=wrong), PROMPT, "--draft-tokens", 2)
        assert done.returncode == code and words in done.stderr
