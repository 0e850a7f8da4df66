"""Embeddings of texts: which texts, how they are pooled, and how close two models' are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressor.data.embedding_texts import Pooling, Texts, load_embedding_texts, read_pooling
from compressor.data.text import Samples
from compressor.errors import UsageError
from compressor.evaluate.embeddings import measure_embeddings, pool
from compressor.host.resources import resource
from compressor.recipe.data_spec import EvaluationSpec

REFERENCE = resource("models") / "reference"


def specification(folder: Path, text: str, **keys: int) -> EvaluationSpec:
    (folder / "text.txt").write_text(text)
    return EvaluationSpec(text=(str(folder / "text.txt"),), **keys)


def test_texts_are_paragraphs_rows_and_documents_cut_to_the_window(tmp_path: Path) -> None:
    spec = specification(tmp_path, "one\n\n\ntwo\nlines\n \nthree<|endoftext|>four " + 50 * "five ", window=8)
    texts = load_embedding_texts(spec, None, REFERENCE, 0, 0)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    whole = [tokenizer.encode(text).ids for text in ("one", "two\nlines", "three", "four " + " ".join(50 * ["five"]))]
    assert [ids.tolist() for ids in texts.ids] == [ids[:8] for ids in whole]
    assert load_embedding_texts(spec, None, REFERENCE, 0, 5).ids[-1].tolist() == whole[-1][:5]
    assert len(load_embedding_texts(spec.model_copy(update={"tokens": 2}), None, REFERENCE, 0, 0).ids) < 4

    row = tmp_path / "rows.jsonl"
    row.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two\nlines")))
    rows = load_embedding_texts(EvaluationSpec(json=(str(row),)), None, REFERENCE, 0, 0)  # type: ignore[call-arg]
    assert [ids.tolist() for ids in rows.ids] == whole[:2]


def test_text_that_cannot_be_embedded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"text\.txt: the text is empty"):
        load_embedding_texts(specification(tmp_path, " \n\n"), None, REFERENCE, 0, 0)
    with pytest.raises(UsageError, match="the tokenizer does not match the model"):
        load_embedding_texts(specification(tmp_path, "some text"), None, REFERENCE, 2, 0)
    samples = Samples(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), "", "")
    with pytest.raises(UsageError, match="no text left to embed; name one"):
        load_embedding_texts(EvaluationSpec(), samples, REFERENCE, 0, 0)


def test_without_a_text_of_its_own_it_embeds_what_calibration_left() -> None:
    samples = Samples(torch.zeros(1, 2, dtype=torch.int64), torch.arange(10), "", "")
    texts = load_embedding_texts(EvaluationSpec(tokens=9, window=4, stride=2), samples, REFERENCE, 0, 0)
    assert [ids.tolist() for ids in texts.ids] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 4}, "mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, None),
        ({}, None),
    ],
)
def test_pooling_is_read_from_the_folder(tmp_path: Path, config: dict[str, object], pooling: str | None) -> None:
    assert read_pooling(tmp_path) == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if pooling is not None:
        assert read_pooling(tmp_path) == pooling
        return
    with pytest.raises(UsageError, match=r"1_Pooling/config\.json: pools by .*leave `evaluation`"):
        read_pooling(tmp_path)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_pooling_is_that_of_each_text_alone(pooling: Pooling) -> None:
    hidden = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(0))
    lengths = (6, 1, 4)
    mask = torch.tensor([[1.0] * n + [0.0] * (6 - n) for n in lengths])
    hidden[mask == 0] = torch.inf  # padding, which must not count
    pooled = pool(hidden, mask, pooling)
    for row, states, n in zip(pooled, hidden.double(), lengths, strict=True):
        alone = {"mean": states[:n].mean(0), "cls": states[0], "max": states[:n].max(0).values}[pooling]
        torch.testing.assert_close(row, alone, rtol=1e-12, atol=0)


def test_cosines_are_over_texts_and_the_least_is_one_of_them() -> None:
    ids = tuple(torch.full((1 + i % 7,), i) for i in range(40))
    turned, angle = 33, 0.3

    def model(turn: int | None) -> object:
        def hidden(ids: NDArray[np.int64], mask: NDArray[np.float32]) -> Tensor:
            assert mask.sum(1).tolist() == [1 + i % 7 for i in ids[:, 0].tolist()]
            angles = torch.as_tensor(ids[:, :1] == turn) * angle + torch.zeros(ids.shape)
            states = torch.stack([angles.cos(), angles.sin()], -1) * (1 + torch.as_tensor(ids)[..., None])
            states[torch.as_tensor(mask) == 0] = torch.nan
            return states

        return hidden

    result = measure_embeddings(model(turned), model(None), Texts(ids, "mean"))  # type: ignore[arg-type]
    assert (result.texts, result.tokens) == (40, sum(map(len, ids)))
    assert result.embedding_cosine_min == pytest.approx(np.cos(angle), rel=1e-6)
    assert result.embedding_cosine == pytest.approx((39 + np.cos(angle)) / 40, rel=1e-6)

    def broken(ids: NDArray[np.int64], mask: NDArray[np.float32]) -> Tensor:
        return torch.full((*ids.shape, 2), torch.nan)

    nothing = measure_embeddings(broken, model(None), Texts(ids, "cls"))  # type: ignore[arg-type]
    assert np.isnan([nothing.embedding_cosine, nothing.embedding_cosine_min]).all()  # which no gate lets pass


def test_the_lock_knows_texts_by_their_tokens_and_pooling() -> None:
    texts = Texts((torch.tensor([1, 2]), torch.tensor([3])), "mean")
    assert texts.facts()["texts"] == 2
    for other in (Texts((torch.tensor([1]), torch.tensor([2, 3])), "mean"), Texts(texts.ids, "cls")):
        assert other.facts() != texts.facts()
