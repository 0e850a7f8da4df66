"""Drafts of a model: the text's own random numbers choose them, and they go on only where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.chain import Chain, Mean, chain_prior, drafted_together
from compressor_runtime.speculation.cost import forecast, is_worth_drafting
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.pace import Always, Pace
from compressor_runtime.speculation.text import Text
from compressor_runtime.speculation.tree import Room
from toy_target import ToyTarget, plain

VOCAB = 12
TABLE = np.random.default_rng(2).normal(scale=2, size=(VOCAB * VOCAB, VOCAB)).astype(np.float32)
FLAT: Callable[[int], float] = lambda rows: 1 + 0.02 * rows  # noqa: E731


class Noisy:
    """Draft with the target's table, changed; a call takes ``seconds``, and a tenth more for each further text."""

    def __init__(self, target: ToyTarget, noise: float, seconds: float) -> None:
        change = np.random.default_rng(9).normal(scale=1, size=TABLE.shape).astype(np.float32)
        self.target, self.seconds, self.table, self.steps = target, seconds, TABLE + noise * change, 0
        self.texts: dict[int, list[int]] = {}
        self.calls: list[tuple[int, ...]] = []

    def step(self, tokens: Sequence[int], ahead: Sequence[int], slots: Sequence[int]) -> np.ndarray:
        found = []
        for token, place, slot in zip(tokens, ahead, slots, strict=True):
            if place == 0:
                self.texts[slot] = list(self.target.texts[slot][-2:])
            text = self.texts[slot]
            assert len(text) == place + min(2, len(self.target.texts[slot]))
            text.append(token)
            found.append(self.table[(text[-2] * VOCAB + token) % len(self.table)])
        self.target.now += self.seconds * (0.9 + 0.1 * len(slots))
        self.steps += len(slots)
        self.calls.append(tuple(slots))
        return np.stack(found)[:, None]


def generate(
    noise: float, seconds: float, temperature: float, measure: bool = False, count: int = 400, price: float = 1e-4
) -> tuple[list[int], Speculation, ToyTarget, Noisy]:
    target = ToyTarget(TABLE, seconds=FLAT)
    stepper, counts = Noisy(target, noise, seconds), Speculation("noisy")

    def clock() -> float:
        target.now += price
        return target.now

    pace, acceptance = (Always if measure else Pace)(clock), Acceptance(chain_prior)
    draft = Chain("noisy", stepper, 0, acceptance, Mean())
    text = Text(0, [1, 2], [draft], Sampler(np.random.default_rng(5), temperature, 0, 1.0), {}, count)
    text.choose(target.step([[1, 2]])[0, -1])
    assert list(Engine(target, pace, acceptance, counts).rounds([text]))
    return text.tokens[2:], counts, target, stepper


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.5, 100.0])
def test_texts_are_those_of_plain_decoding(noise: float, temperature: float) -> None:
    tokens, counts, _, stepper = generate(noise, 0.1, temperature, measure=True)
    wanted = plain(ToyTarget(TABLE), [1, 2], Sampler(np.random.default_rng(5), temperature, 0, 1.0), {}, 400)[0]
    assert tokens == wanted and stepper.steps == counts.drafted
    if noise == 0:  # the same model with the same random numbers: no guess is wrong
        assert counts.acceptance == 1 and counts.accepted == counts.drafted
    else:
        assert 0.55 < counts.acceptance < 0.95 if noise == 0.5 else counts.acceptance < 0.2


def test_a_draft_goes_on_as_far_as_its_steps_pay() -> None:
    """Cheap and right: faster, near the forecast; too dear or wrong: next to no time is lost, whatever the prior."""
    for noise, seconds in ((0.0, 0.25), (0.3, 0.1)):
        tokens, counts, target, _ = generate(noise, seconds, 0.0, count=600)
        found = len(tokens) * FLAT(1) / target.now
        best = forecast(counts.acceptance, seconds / FLAT(1), [FLAT(1 + k) / FLAT(1) for k in range(1, 16)])
        assert found > 1.5 and found > 0.85 * best.speedup, (found, str(best))
    for noise, seconds in ((0.0, 1.2), (100.0, 0.1), (100.0, 0.9)):
        tokens, _, target, stepper = generate(noise, seconds, 0.0, count=1500)
        assert len(tokens) * FLAT(1) / target.now > 0.98 and stepper.steps > 1


def test_a_further_token_is_drafted_at_the_price_of_time() -> None:
    """Against a search over lengths: a chain goes on where a longer one has the better rate, and never where none."""
    steep: Callable[[int], float] = lambda rows: 0.5 + 0.5 * rows  # noqa: E731
    assert not is_worth_drafting([], 0.5, 15, 1, FLAT, 0.6) and is_worth_drafting([], 0.9, 15, 1, FLAT, 0.3)
    assert not is_worth_drafting([], 0.9, 15, 1, steep, 0.6)
    for acceptance in (0.6, 0.8, 0.95):
        for draft_s in (0.05, 0.2, 0.4):
            best = forecast(acceptance, draft_s, [FLAT(1 + k) for k in range(1, 16)])
            chances = [acceptance ** (k + 1) for k in range(15)]
            length = 0
            while length < 15 and is_worth_drafting(chances[:length], acceptance, 15, 1, FLAT, draft_s):
                length += 1
            pays = best.speedup > 1 / FLAT(1)
            assert length == (best.length if pays else 0), (acceptance, draft_s)
            assert not is_worth_drafting([*chances[:1], 0.01], acceptance, 15, 1, FLAT, 0.4)


def several(
    noise: float,
    seconds: float,
    temperature: float,
    counts: Sequence[int],
    ends: dict[int, str],
    pace_of: type[Pace] = Always,
) -> tuple[list[Text], Speculation, ToyTarget, Noisy]:
    """Generate texts at once."""
    target = ToyTarget(TABLE, len(counts), seconds=FLAT)
    stepper, counted, acceptance = Noisy(target, noise, seconds), Speculation("noisy"), Acceptance(chain_prior)
    pace, mean = pace_of(lambda: target.now), Mean()
    prompts = [[1 + slot, 2] for slot in range(len(counts))]
    texts = [
        Text(
            slot, [*prompt], [Chain("noisy", stepper, slot, acceptance, mean)], sampler(slot, temperature), ends, count
        )
        for slot, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    for text, logits in zip(texts, target.step(prompts), strict=True):
        text.choose(logits[-1])
    assert list(Engine(target, pace, acceptance, counted).rounds(texts))
    return texts, counted, target, stepper


def sampler(slot: int, temperature: float) -> Sampler:
    return Sampler(np.random.default_rng(slot), temperature, 0, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_several_texts_are_those_of_plain_decoding(batch: int, temperature: float) -> None:
    """They end at different times, one of them at its length, the others at a token."""
    counts, ends = [60, 60, 6, 60][:batch], {5: "eos_token"}
    texts, counted, _, stepper = several(0.3, 0.1, temperature, counts, ends)
    for text, count in zip(texts, counts, strict=True):
        chooser = sampler(text.slot, temperature)
        wanted, reason = plain(ToyTarget(TABLE), [1 + text.slot, 2], chooser, ends, count)
        assert (text.tokens[2:], text.finish_reason) == (wanted, reason)
    assert len({len(text.tokens) for text in texts}) == batch
    assert counted.accepted > 3 and len(stepper.calls[0]) == batch
    assert all(len(set(slots)) == len(slots) for slots in stepper.calls)


def test_drafts_in_lockstep_are_those_of_each_text_alone() -> None:
    target = ToyTarget(TABLE, 4)
    target.step([[slot, 2] for slot in range(4)])

    def proposed(slots: Sequence[int]) -> tuple[list[tuple[list[int], list[float]]], Noisy]:
        stepper, acceptance, drafts = Noisy(target, 0.5, 0.1), Acceptance(chain_prior), {}
        for slot in slots:
            chain = Chain("noisy", stepper, slot, acceptance, Mean())
            chain.extend([slot, 2, 5])
            drafts[slot] = chain.propose(Room(4 + slot, 15, 0.02, sampler(slot, 0.8), {3}))
        trees = drafted_together("noisy", drafts, Always(), 4, 28)
        return [(trees[slot].tokens, trees[slot].chances) for slot in slots], stepper

    together, stepper = proposed(range(4))
    assert together == [proposed([slot])[0][0] for slot in range(4)]
    lengths = [len(tokens) for tokens, _ in together]
    assert len(set(lengths)) > 1 and max(lengths) > 3, "chains end at different times"
    assert stepper.calls == [tuple(slot for slot in range(4) if lengths[slot] > n) for n in range(max(lengths))]


def test_models_that_differ_are_asked_apart() -> None:
    target, acceptance = ToyTarget(TABLE, 3), Acceptance(chain_prior)
    target.step([[slot, 2] for slot in range(3)])
    models = [Noisy(target, noise, 0.1) for noise in (0.1, 0.2)]
    chains = {slot: Chain("noisy", models[slot % 2], slot, acceptance, Mean()) for slot in range(3)}
    room = Room(3, 15, 0.02, sampler(0, 0.0))
    trees = drafted_together("noisy", {slot: one.propose(room) for slot, one in chains.items()}, Always(), 3, 29)
    assert [len(trees[slot]) for slot in range(3)] == [3, 3, 3]
    assert [model.calls for model in models] == [[(0, 2)] * 3, [(1,)] * 3]


def test_several_texts_draft_as_far_as_the_calls_that_they_share_pay() -> None:
    """A token costs more than it gains where each text has a call of its own, and pays where four share it."""
    counts = [400] * 4
    texts, _, target, stepper = several(0.0, 0.5, 0.0, counts, {}, Pace)
    tokens = sum(len(text.tokens) - 2 for text in texts)
    found = tokens * FLAT(4) / 4 / target.now
    best = max((1 + n) * FLAT(4) / (FLAT(4 + 4 * n) + n * 0.5 * 1.3) for n in range(1, 7))
    assert found > 1.1 and found > 0.85 * best, (found, best)
    assert sum(len(slots) for slots in stepper.calls) > 3.5 * len(stepper.calls)
    for noise, seconds in ((0.0, 3.0), (100.0, 0.5)):
        texts, _, target, stepper = several(noise, seconds, 0.0, [1500] * 4, {}, Pace)
        tokens = sum(len(text.tokens) - 2 for text in texts)
        assert tokens * FLAT(4) / 4 / target.now > 0.97 and stepper.steps > 1


def test_times_of_models_that_draft_are_known_by_the_texts_of_a_call() -> None:
    pace = Pace(lambda: 0.0)
    assert pace.draft_s("planes") is None
    for _ in range(2):
        pace.note_draft("planes", 3.0, 4)
    assert [pace.draft_s("planes", texts) for texts in (1, 4)] == [3.0, 3.0]
    for _ in range(2):
        pace.note_draft("planes", 1.5, 1)
    assert [pace.draft_s("planes", texts) for texts in (1, 2, 3, 4, 6)] == [1.5, 2.0, 2.5, 3.0, 4.0]
    assert pace.draft_s("exit", 2) is None
