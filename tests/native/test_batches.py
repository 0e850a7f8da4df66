"""Several texts of the C++ runner at once: those that each has alone, and Python's drafts and figures in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compressor_runtime import Bundle, RequestError, load
from compressor_runtime.batching.worker import decoder_of
from compressor_runtime.generation import checked_sampler
from compressor_runtime.session import Session
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts, speculation
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.pace import Always
from compressor_runtime.speculation.text import Lenience, Text
from native_runner import KINDS, POSITIONS, PROMPT, SAMPLED, Runner, beside, figures, refused, stated, texts_of

COUNT = 40
PROMPTS = [PROMPT * 15, PROMPT, [7], [*PROMPT[::-1], 5]]  # the first comes to the last position before it has as many
GREEDY = (0.0, 0, 1.0)


def alone(bundle: Bundle, prompts: list[list[int]], temperature: float = 0.0, top_p: float = 1.0) -> list[list[int]]:
    """Return plain texts, one after another; the seed of each is one more than that before it."""
    options = {"temperature": temperature, "top_p": top_p, "speculate": "off", "max_tokens": COUNT}
    return [list(bundle.generate_ids(ids, seed=3 + slot, **options)) for slot, ids in enumerate(prompts)]


def read(bundle: Bundle, prompts: list[list[int]]) -> tuple[Session, list[np.ndarray]]:
    """Return a session that has read these prompts, and the logits [V] behind each."""
    session, logits = bundle.session(len(prompts), 4), []
    for slot, ids in enumerate(prompts):
        one = bundle.session(1, len(ids))
        logits.append(one.step([ids])[0, -1])
        session.take(slot, one)
    return session, logits


def together(bundle: Bundle, prompts: list[list[int]], counts: Speculation) -> list[list[int]]:
    """Return greedy texts of one session, in which every draft is verified."""
    session, logits = read(bundle, prompts)
    drafts, texts = Drafts(64, Always(), bundle.entries, bundle.model), []
    ends = dict.fromkeys(bundle.model["eos_ids"], "eos_token")
    for slot, (ids, first) in enumerate(zip(prompts, logits, strict=True)):
        room = POSITIONS + 1 - len(ids)
        sampler, left = checked_sampler(*GREEDY, 3 + slot), min(COUNT, room)
        text = Text(slot, [*ids], drafts.start(counts.kind, session, slot), sampler, ends, left)
        text.lenience = None if counts.lossy is None else Lenience(counts.lossy["tolerance"], room - left)
        text.choose(first)
        texts.append(text)
    for _ in Engine(session, drafts.pace, drafts.acceptance, counts).rounds(texts):
        pass
    return [text.tokens[len(ids) :] for text, ids in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(("which", "kind"), KINDS)
def test_texts_are_those_alone_and_figures_those_of_python(
    request: pytest.FixtureRequest, runner: Runner, which: str, kind: str
) -> None:
    """Compare texts of any lengths, which accept different lengths and end at different times; caches grow."""
    folder = request.getfixturevalue(f"{which}_bundle")
    python, counts = load(folder, threads=1), Speculation(kind)
    given = [*beside(PROMPTS[1:]), "--max-tokens", COUNT, "--threads", 1, "--speculate", kind, "--draft-tokens"]
    run = runner(folder, PROMPTS[0], *given, 15)
    expected = alone(python, PROMPTS)
    assert texts_of(run) == together(python, PROMPTS, counts) == expected
    assert [len(text) for text in expected] == [POSITIONS + 1 - len(PROMPTS[0]), COUNT, COUNT, COUNT]
    assert figures(run, kind) == stated(counts) and counts.accepted > 0
    sampled = [word for name, value in SAMPLED.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert texts_of(runner(folder, PROMPTS[0], *given, 7, *sampled)) == alone(python, PROMPTS, 0.8, 0.9) != expected


def test_plain_texts_and_drafts_that_pay_are_those_alone(runner: Runner, packed_bundle: Path, tmp_path: Path) -> None:
    python = load(packed_bundle, threads=1)
    expected, (_, logits) = alone(python, PROMPTS), read(python, PROMPTS)
    given = [*beside(PROMPTS[1:]), "--max-tokens", COUNT, "--logits", tmp_path / "logits"]
    run = runner(packed_bundle, PROMPTS[0], *given)
    assert texts_of(run) == expected and not run.stderr
    assert np.array_equal(np.fromfile(tmp_path / "logits", np.float32).reshape(4, -1), logits)
    run = runner(packed_bundle, PROMPTS[0], *given, "--speculate", "auto")
    assert texts_of(run) == expected and "auto: acceptance" in run.stderr
    assert runner(packed_bundle, [1], "--ids", "2", "--max-tokens", 0).stdout == "\n\n"


def test_texts_end_at_an_end_of_sequence_each_by_itself(runner: Runner, editable: Callable[..., Path]) -> None:
    plain = alone(load(editable("packed"), threads=1), PROMPTS)
    folder = editable("packed", eos_ids=[plain[0][0], plain[1][9], plain[2][21]])
    python, counts = load(folder, threads=1), Speculation("auto")
    expected = alone(python, PROMPTS)
    assert expected[0] == [] and len({len(text) for text in expected}) > 2
    given = [*beside(PROMPTS[1:]), "--max-tokens", COUNT, "--threads", 1]
    run = runner(folder, PROMPTS[0], *given, "--speculate", "auto", "--draft-tokens", 15)
    assert texts_of(run) == together(python, PROMPTS, counts) == expected
    assert figures(run, "auto") == stated(counts)
    assert texts_of(runner(folder, PROMPTS[0], *given)) == expected


def test_lossy_texts_are_those_alone(runner: Runner, editable: Callable[..., Path]) -> None:
    """Six texts are verified in two groups, since each always has seven drafted tokens."""
    folder, prompts = editable("drafting", speculate="sparse", lossy={"tolerance": 0.75}), [*PROMPTS, [1, 2], [3]]
    python = load(folder, threads=1)
    counts = speculation(python, None)
    assert counts is not None
    expected = [list(python.generate_ids(ids, max_tokens=COUNT)) for ids in prompts]
    run = runner(folder, prompts[0], *beside(prompts[1:]), "--max-tokens", COUNT)
    assert texts_of(run) == together(python, prompts, counts) == expected and counts.lenient > 0
    assert figures(run, "sparse, lossy.*") == stated(counts)


def test_texts_of_one_length_need_no_verification(runner: Runner, bundle: Path) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT]
    python, given = load(bundle, threads=1), ("--max-tokens", COUNT)
    assert texts_of(runner(bundle, prompts[0], *beside(prompts[1:]), *given)) == alone(python, prompts)
    session, _ = read(python, [PROMPT, [1]])
    with pytest.raises(RequestError) as error:
        session.step([[1], [2]])
    refused(runner(bundle, PROMPT, "--ids", 1), 2, str(error.value))


def test_batches_that_nothing_holds_are_refused_as_in_python(
    runner: Runner, packed_bundle: Path, editable: Callable[..., Path]
) -> None:
    python = load(packed_bundle, threads=1)
    many = beside([[1]] * 32)
    with pytest.raises(RequestError) as error:
        together(python, [[1]] * 33, Speculation("lookup"))
    refused(runner(packed_bundle, [1], *many, "--speculate", "lookup"), 2, str(error.value))
    with pytest.raises(RequestError) as error:
        decoder_of(python, 33)
    refused(runner(packed_bundle, [1], *many), 2, str(error.value))
    refused(runner(packed_bundle, [1], "--ids", ""), 2, "no token ids are given")
    refused(runner(packed_bundle, [1], "--ids", 64), 2, "token ids from 64 to 64: the model knows 0 to 63")
    refused(runner(packed_bundle, [1], *beside([[1] * (POSITIONS + 1)])), 2, "the model ends at 300 positions")
    facts = python.model
    huge = {name: facts[name] << 40 for name in ("cache_bytes_per_token", "head_dim")}
    folder = editable("packed", **huge)
    with pytest.raises(RequestError) as error:
        load(folder, threads=1).session(2, 65)
    refused(runner(folder, [1], "--ids", 2), 2, str(error.value))
