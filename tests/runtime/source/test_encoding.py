"""What a manifest says of an encoder-decoder's source is checked, and so is what is given to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compressor_runtime import RequestError
from compressor_runtime.source.encoding import encode_source, source_of_prompt, without, wrong_source

TEXT: dict[str, Any] = {
    "reads": "tokens",
    "shape": [0],
    "max_positions": 8,
    "min_positions": 1,
    "start_ids": [2],
    "suppressed_ids": [1],
    "first_suppressed_ids": [3],
    "forced_eos_id": None,
    "features": {},
}
SPEECH = TEXT | {
    "reads": "audio",
    "min_positions": 4,
    "features": {"method": "samples", "sampling_rate": 16000, "normalize": False},
}


def test_entries_that_cannot_be_are_found() -> None:
    for facts in (TEXT, SPEECH):
        assert not wrong_source({"vocab_size": 9, "encoder_source": facts})
        for change in (
            {"reads": "smells"},
            {"start_ids": []},
            {"start_ids": [9]},
            {"suppressed_ids": [-1]},
            {"first_suppressed_ids": None},
            {"max_positions": "8"},
            {"forced_eos_id": 0.5},
            {"shape": [-1]},
        ):
            assert wrong_source({"vocab_size": 9, "encoder_source": facts | change}), change
    for features in ({}, None, {"method": "samples"}, {**SPEECH["features"], "sampling_rate": -1}, {"method": []}):
        assert wrong_source({"vocab_size": 9, "encoder_source": SPEECH | {"features": features}}), features
    assert wrong_source({"vocab_size": 9})


def test_tokens_that_are_never_said_have_no_chance() -> None:
    logits = np.arange(5, dtype=np.float32)
    assert without(logits, TEXT, first=False).tolist() == [0, -np.inf, 2, 3, 4]
    assert without(logits, TEXT, first=True).tolist() == [0, -np.inf, 2, -np.inf, 4]
    assert without(logits, None, first=True) is logits and logits[1] == 1


def test_sources_that_do_not_fit_are_refused() -> None:
    model = {"vocab_size": 9, "encoder_source": SPEECH}
    for source, mask in (
        (np.zeros((1, 3), np.float32), None),
        (np.zeros((1, 5), np.int64), None),
        (np.zeros(5, np.float32), None),
        (np.zeros((1, 5), np.float32), np.ones((1, 5))),
    ):
        with pytest.raises(RequestError, match=r"give float32 \['batch', '4 or more'\]"):
            encode_source(model, lambda *_: [], source, mask, 1)
    with pytest.raises(RequestError, match="2 sequences, for a session of 1"):
        encode_source(model, lambda *_: [], np.zeros((2, 5), np.float32), None, 1)
    with pytest.raises(RequestError, match="give a WAV file, or samples"):
        source_of_prompt(model, [1, 2, 3], lambda _: [])
    assert source_of_prompt(model, np.zeros(6, np.float32), lambda _: []).shape == (1, 6)
