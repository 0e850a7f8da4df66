"""Drafts of a model: the text's own random numbers choose them, and they go on only where that pays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.chain import Chain, Mean, chain_prior
from compressor_runtime.speculation.cost import forecast, is_worth_drafting
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.engine import Engine, Text
from compressor_runtime.speculation.pace import Always, Pace
from toy_target import ToyTarget, plain

VOCAB = 12
TABLE = np.random.default_rng(2).normal(scale=2, size=(VOCAB * VOCAB, VOCAB)).astype(np.float32)
FLAT: Callable[[int], float] = lambda rows: 1 + 0.02 * rows  # noqa: E731


class Noisy:
    """Draft with the target's table, changed; a token takes ``seconds``."""

    def __init__(self, target: ToyTarget, noise: float, seconds: float) -> None:
        change = np.random.default_rng(9).normal(scale=1, size=TABLE.shape).astype(np.float32)
        self.target, self.seconds, self.table, self.steps = target, seconds, TABLE + noise * change, 0
        self.text: list[int] = []

    def step(self, token: int, ahead: int) -> np.ndarray:
        if ahead == 0:
            self.text = list(self.target.texts[0][-2:])
        assert len(self.text) == ahead + min(2, len(self.target.texts[0]))
        self.text.append(token)
        self.target.now += self.seconds
        self.steps += 1
        return self.table[(self.text[-2] * VOCAB + token) % len(self.table)]


def generate(
    noise: float, seconds: float, temperature: float, measure: bool = False, count: int = 400, price: float = 1e-4
) -> tuple[list[int], Speculation, ToyTarget, Noisy]:
    target = ToyTarget(TABLE, seconds=FLAT)
    stepper, counts = Noisy(target, noise, seconds), Speculation("noisy")

    def clock() -> float:
        target.now += price
        return target.now

    pace, acceptance = (Always if measure else Pace)(clock), Acceptance(chain_prior)
    draft = Chain("noisy", stepper, pace, acceptance, Mean())
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
