"""Tokens chosen from logits, and their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressor_runtime import Generation, choose
from tiny_bundle import POSITIONS, TEXT, VOCAB, TinyLanguageModel, edit_manifest, greedy
from tokenizers import Tokenizer

from compressor.runtime import Bundle, BundleError, RequestError, TextStream, load


def test_greedy_text_is_the_models(bundle: Bundle, model: TinyLanguageModel) -> None:
    ids = bundle.tokenizer.encode("the rain in Spain").ids
    assert len(ids) > 4 and ids[0] == 0
    expected = greedy(model, ids, 12)
    assert 1 not in expected
    assert list(bundle.generate_ids(ids, max_tokens=12)) == expected
    text = "".join(bundle.generate("the rain in Spain", max_tokens=12))
    assert text == "".join(bundle.generate(ids, max_tokens=12)) == bundle.tokenizer.decode(expected)


def test_a_seed_repeats_the_sampling_and_another_changes_it(bundle: Bundle) -> None:
    state = np.random.get_state()[1].tolist()  # type: ignore[index]

    def sample(seed: int) -> str:
        return "".join(bundle.generate("the", max_tokens=20, temperature=2.0, top_k=50, top_p=0.9, seed=seed))

    assert sample(1) == sample(1) != sample(2)
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]


def test_generation_ends_at_stops_end_of_sequence_and_the_last_position(bundle: Bundle) -> None:
    ids = list(bundle.generate_ids([0, 9], max_tokens=12))
    text = "".join(bundle.generate([0, 9], max_tokens=12))
    third = ids.index(ids[3])
    assert "".join(bundle.generate([0, 9], max_tokens=12, stop=ids[3])) == bundle.tokenizer.decode(ids[:third])
    stop = text[4:7]  # characters of several tokens
    assert "".join(bundle.generate([0, 9], max_tokens=12, stop=["not there", stop])) == text[: text.find(stop)]
    assert "".join(bundle.generate([0, 9], max_tokens=12, stop=text[-2:] + "zzz")) == text  # a beginning only
    assert list(bundle.generate([0, 9], max_tokens=0)) == []
    endless = list(bundle.generate_ids([0] * 35, max_tokens=1000, temperature=9.0, seed=0))
    assert len(endless) == POSITIONS - 35 + 1  # the last token needs no position of its own


def test_generation_ends_at_the_models_end_of_sequence(copy: Path, bundle: Bundle) -> None:
    ids = list(bundle.generate_ids([0, 9], max_tokens=12))
    edit_manifest(copy, lambda manifest: manifest["model"].update(eos_ids=[ids[2]]))
    assert list(load(copy).generate_ids([0, 9], max_tokens=12)) == ids[: ids.index(ids[2])]


def test_a_generation_tells_how_it_ended(copy: Path, bundle: Bundle) -> None:
    def told(found: Generation) -> tuple[int, int, str | None]:
        assert found.finish_reason is None
        list(found)
        return found.prompt_tokens, found.new_tokens, found.finish_reason

    ids = list(bundle.generate_ids([0, 9], max_tokens=12))
    text = "".join(bundle.generate([0, 9], max_tokens=12))
    assert told(bundle.generate([0, 9], max_tokens=12)) == (2, 12, "length")
    assert told(bundle.generate([], max_tokens=0)) == (1, 0, "length")
    assert told(bundle.generate([0] * POSITIONS, max_tokens=3)) == (POSITIONS, 1, "length")
    assert told(bundle.generate([0, 9], max_tokens=12, stop=ids[3])) == (2, ids.index(ids[3]), "stop_sequence")
    assert told(bundle.generate([0, 9], max_tokens=12, stop=text[4:7]))[2] == "stop_sequence"
    edit_manifest(copy, lambda manifest: manifest["model"].update(eos_ids=[ids[2]]))
    assert told(load(copy).generate([0, 9], max_tokens=12)) == (2, ids.index(ids[2]), "eos_token")


def test_what_generate_refuses_at_once(bundle: Bundle, copy: Path) -> None:
    numbers: list[Any] = [-1, float("nan"), float("inf"), None, "1", [1], 1j, object()]
    bad = [(name, value) for name in ("max_tokens", "temperature", "top_k", "top_p") for value in numbers]
    bad += [("max_tokens", 1.5), ("top_k", 0.0), ("top_p", 0), ("top_p", 1.1), ("seed", -1), ("seed", 0.5)]
    for name, value in bad:
        with pytest.raises(RequestError, match=rf"{name}=.*: give a (whole )?number (at least|above)"):
            bundle.generate("the", **{name: value})
    stops: list[Any] = [None, [None], [1.5], [True], 0.5]
    for stop in stops:
        with pytest.raises(RequestError, match=r"stop=.*: give token ids and strings"):
            bundle.generate("the", stop=stop)
    with pytest.raises(RequestError, match=r"speculate='lookups': give 'lookup', 'recycle', .*'auto' or 'off'"):
        bundle.generate("the", speculate="lookups")
    with pytest.raises(RequestError, match="no kernels that verify drafted tokens; make it with `speculate: auto` in"):
        bundle.generate_ids([1], speculate="auto")
    assert bundle.generate("the", speculate="off").speculation is None
    prompts: list[Any] = [None, 1, 0.5, [0.5], [[1]], [[1], [1, 2]], b"the", ["the"], {}, [1 << 70], object()]
    for prompt in prompts:
        with pytest.raises(RequestError, match="prompt"):
            bundle.generate(prompt)
    with pytest.raises(RequestError, match="cannot be written as UTF-8"):
        bundle.generate("the \udcff")
    with pytest.raises(RequestError, match="the model ends at 40 positions"):
        bundle.generate("xyz " * 50)
    with pytest.raises(RequestError, match="does the tokenizer belong"):
        bundle.generate([VOCAB])
    assert next(bundle.generate_ids([])) == next(bundle.generate_ids([0]))
    edit_manifest(copy, lambda manifest: manifest["model"].update(bos_id=None))
    with pytest.raises(RequestError, match="the prompt is empty"):
        load(copy).generate([])


@pytest.mark.parametrize("text", [TEXT, "🙂" * 5, "한국", "a\ufffdb", " spaced  out "])
def test_pieces_of_text_are_whole_characters_and_add_up(bundle: Bundle, text: str) -> None:
    ids = bundle.tokenizer.encode(text).ids[1:]
    stream = TextStream(bundle.tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.rest()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces) and "".join(pieces) == text
    assert stream.rest() == ""


def test_a_character_cut_off_by_the_last_token_is_shown_as_such(bundle: Bundle) -> None:
    ids = bundle.tokenizer.encode("é").ids[1:]
    partial = bundle.tokenizer.encode("漢").ids[1:-1]
    stream = TextStream(bundle.tokenizer, ids)
    assert "".join(stream.push(token) for token in partial) == ""
    assert set(stream.rest()) == {"\ufffd"}


def test_words_keep_their_spaces_after_a_prompt(shared_data: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_file(str(shared_data("models/stories260K") / "tokenizer.json"))
    text = "Once upon a time, there was a girl. 漢字 She was 3."
    ids = tokenizer.encode(text).ids
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        new = "".join([stream.push(token) for token in ids[cut:]] + [stream.rest()])
        assert text.endswith(new) and tokenizer.decode(ids[:cut]).rstrip("\ufffd") + new == text, cut


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ((1.0, 0, 1.0), 0b1111),
        ((1.0, 2, 1.0), 0b1010),
        ((1.0, 0, 0.6), 0b1010),
        ((1.0, 3, 0.5), 0b1000),
        ((0, 0, 1), 8),
    ],
)
def test_choices_follow_the_probabilities_of_what_is_allowed(arguments: tuple[float, int, float], allowed: int) -> None:
    probabilities = np.array([0.1, 0.2, 0.2, 0.5]) if allowed == 0b1111 else np.array([0.1, 0.29, 0.11, 0.5])
    generator = np.random.default_rng(0)
    counts = np.bincount([choose(np.log(probabilities), generator, *arguments) for _ in range(4000)], minlength=4)
    wanted = probabilities * [(allowed >> i) & 1 for i in range(4)]
    np.testing.assert_allclose(counts / 4000, wanted / wanted.sum(), atol=0.03)
    assert not counts[wanted == 0].any()


def test_temperature_flattens_and_extremes_are_finite() -> None:
    generator = np.random.default_rng(0)
    hot = [choose(np.array([0.0, 5.0]), generator, 50.0, 0, 1.0) for _ in range(2000)]
    assert 0.4 < np.mean(hot) < 0.6
    assert choose(np.array([-1e30, 1e30], np.float32), generator, 1e-3, 0, 1.0) == 1
    assert choose(np.array([-np.inf, 1.0]), generator, 1.0, 5, 0.5) == 1
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        for temperature in (5e-324, 1e-308, 1e-3):
            assert choose(np.array([1.0, 2.0, -3e38], np.float32), generator, temperature, 0, 1.0) == 1
        assert choose(np.array([1.0, 2.0, -3e38], np.float32), generator, 1e308, 0, 1.0) < 3
        assert choose(np.array([1.0, 2.0], np.float32), generator, 5e-324, 0, 0.9) == 1
    with pytest.raises(BundleError, match="NaN"):
        choose(np.array([0.0, np.nan]), generator, 1.0, 0, 1.0)
