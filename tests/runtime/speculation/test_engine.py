"""Texts with drafts are those without, whatever is drafted, and where they end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from compressor_runtime import RequestError
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.engine import Engine
from compressor_runtime.speculation.kinds.registry import served
from compressor_runtime.speculation.pace import Always, Pace
from compressor_runtime.speculation.text import Text
from compressor_runtime.speculation.tree import Draft, Room, Tree
from scipy import stats
from toy_target import ToyTarget, plain

VOCAB = 7
TABLE = np.random.default_rng(5).normal(scale=2, size=(VOCAB * VOCAB, VOCAB))
GREEDY, SAMPLED = (0.0, 0, 1.0), (0.7, 0, 0.9)


class RandomTrees:
    """Draft trees at random, with what will come somewhere in them."""

    name = "random"
    reads_logits = True

    def __init__(self, seed: int, known: Sequence[int] = ()) -> None:
        self._random, self._known, self.text = np.random.default_rng(seed), list(known), list[int]()

    def extend(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def observe(self, tokens: np.ndarray, logits: np.ndarray) -> None:
        assert len(tokens) == len(logits)

    def propose(self, room: Room) -> Tree:
        tree, source = Tree(), ("random", 0, 0)
        depth = [0]
        for _ in range(int(self._random.integers(room.nodes + 1))):
            parent = int(self._random.integers(-1, len(tree)))
            level = 1 if parent < 0 else depth[parent + 1] + 1
            at = len(self.text) + level - 1
            right = at < len(self._known) and self._random.random() < 0.8
            token = self._known[at] if right else int(self._random.integers(VOCAB))
            if level <= room.depth and tree.add(parent, token, float(self._random.random()), source) == len(depth) - 1:
                depth.append(level)
        return tree


def sampler(seed: int, options: tuple[float, int, float]) -> Sampler:
    return Sampler(np.random.default_rng(seed), *options)


def speculate(
    target: ToyTarget,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    options: tuple[float, int, float],
    ends: dict[int, str],
    counts: Sequence[int],
) -> tuple[list[tuple[list[int], str | None]], Speculation]:
    """Generate with drafts for several texts at once, seeds 0, 1, ...; all prompts are as long."""
    counted = Speculation("random")
    engine = Engine(target, Always(lambda: target.now), Acceptance(lambda _: 0.5), counted, 16)
    texts = [
        Text(slot, list(prompts[slot]), [draft], sampler(slot, options), ends, count)
        for slot, (draft, count) in enumerate(zip(drafts, counts, strict=True))
    ]
    found: list[list[int]] = [[] for _ in texts]
    logits = target.step(prompts)
    for text in texts:
        token = text.choose(logits[text.slot, -1])
        found[text.slot] += [] if token is None else [token]
    for gained in engine.rounds(texts):
        for text, tokens in gained:
            found[text.slot] += tokens
    return [(tokens, text.finish_reason) for tokens, text in zip(found, texts, strict=True)], counted


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
def test_texts_are_those_of_plain_decoding(options: tuple[float, int, float], batch: int) -> None:
    accepted = 0
    for trial in range(25):
        random = np.random.default_rng(trial)
        prompts = random.integers(VOCAB, size=(batch, 3)).tolist()
        ends = {} if trial % 2 else {int(random.integers(VOCAB)): "eos_token"}
        limit = 3 + int(random.integers(1, 40))
        counts = [min(int(random.integers(1, 40)), limit + 1 - 3) for _ in range(batch)]
        wanted = [
            plain(ToyTarget(TABLE, limit=limit), prompt, sampler(slot, options), ends, count)
            for slot, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        drafts = [RandomTrees(trial * 7 + slot, prompts[slot] + wanted[slot][0]) for slot in range(batch)]
        target = ToyTarget(TABLE, batch, limit, most_rows=16)
        found, counted = speculate(target, prompts, drafts, options, ends, counts)
        assert found == wanted
        accepted += counted.accepted
        for (tokens, reason), prompt, text in zip(found, prompts, target.texts, strict=True):
            whole = prompt + tokens
            assert text == whole[: len(text)] and len(whole) - len(text) <= 1 + (reason == "length")
        rounds = counted.verifications + counted.steps  # each gives a token and those accepted; an end is not a token
        ended = sum(reason != "length" for _, reason in found) if rounds else 0
        assert rounds + counted.accepted - ended <= counted.tokens <= rounds + counted.accepted
    assert accepted > 60


@pytest.mark.parametrize("kind", served({"verify"}))
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_kind_gives_the_tokens_of_plain_decoding(kind: str, options: tuple[float, int, float]) -> None:
    prompt = [1, 2, 3]
    wanted = plain(ToyTarget(TABLE), prompt, sampler(1, options), {}, 300)
    target = ToyTarget(TABLE)
    found, counted, _ = with_drafts(target, kind, prompt, sampler(1, options), {}, 300)
    assert found == wanted
    assert counted.accepted > (120 if options is GREEDY else 60)
    calls = target.steps + target.verifications
    assert calls == 1 + counted.steps + counted.verifications < (180 if options is GREEDY else 240)


def with_drafts(
    target: ToyTarget, kind: str, prompt: Sequence[int], chooser: Sampler, ends: dict[int, str], count: int
) -> tuple[tuple[list[int], str], Speculation, Drafts]:
    drafts, counted, tokens = Drafts(VOCAB, Pace(lambda: target.now)), Speculation(kind), list[int]()
    walk = drafts.tokens(target, np.array([prompt]), chooser, ends, count, counted)
    while True:
        try:
            tokens.append(next(walk))
        except StopIteration as end:
            return (tokens, end.value), counted, drafts


@pytest.mark.parametrize("kind", served({"verify"}))
def test_sampled_tokens_follow_the_model_s_distribution(kind: str) -> None:
    """A chain of Markov: transitions counted, against probabilities of temperature 0.7 and a nucleus of 0.9."""
    table = np.random.default_rng(0).normal(scale=1.0, size=(VOCAB, VOCAB))
    (tokens, _), counted, _ = with_drafts(ToyTarget(table, order=1), kind, [0], sampler(3, SAMPLED), {}, 20_000)
    assert counted.accepted > 5000
    seen = np.zeros((VOCAB, VOCAB))
    np.add.at(seen, ([0, *tokens[:-1]], tokens), 1)
    statistic, freedom = 0.0, 0
    for row, counts in zip(table.astype(np.float32).astype(np.float64), seen, strict=True):
        weights = np.exp(row / 0.7)
        order = np.argsort(-weights)
        kept = order[: int(np.searchsorted(np.cumsum(weights[order]), 0.9 * weights.sum())) + 1]
        assert set(np.flatnonzero(counts)) <= set(kept)
        expected = counts.sum() * weights[kept] / weights[kept].sum()
        statistic += ((counts[kept] - expected) ** 2 / expected).sum()
        freedom += len(kept) - 1
    assert 0.001 < stats.chi2.sf(statistic, freedom) < 0.999


def test_a_draw_can_be_looked_at_before_it_is_made() -> None:
    chooser = sampler(4, (1.0, 0, 1.0))
    ahead = chooser.ahead(5)
    logits = np.log(np.full(1000, 1 / 1000, np.float32))
    assert [chooser.pick(logits) for _ in range(5)] == [int(number * 1000) for number in ahead]


def test_what_a_session_refuses_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="17 sequences at once: with drafts, at most 16"):
        speculate(ToyTarget(TABLE, 17), [[1]] * 17, [RandomTrees(0)] * 17, GREEDY, {}, [3] * 17)
    with pytest.raises(RequestError, match=r"\d+ rows; at most 4"):
        speculate(ToyTarget(TABLE, most_rows=4), [[1]], [RandomTrees(0)], GREEDY, {}, [30])
    with pytest.raises(RequestError, match="the model ends at 5 positions"):
        speculate(ToyTarget(TABLE, limit=5), [[1]], [RandomTrees(0)], GREEDY, {}, [30])
