"""Losses on text that was calibrated on and on other, and divergences at temperatures, against their definitions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from tiny_models import save_model

from compressor.cli.commands import main
from compressor.data.load import check_kind
from compressor.errors import RecipeError, UsageError
from compressor.evaluate.gates import check_gates
from compressor.evaluate.generation.decoders import cut, even_rows, measure_overfit
from compressor.evaluate.models import evaluate_path
from compressor.evaluate.quality import Ids, measure_quality
from compressor.graph.model import ModelInfo
from compressor.progress import Silent
from compressor.recipe.data_spec import EvaluationSpec
from compressor.recipe.recipe import Recipe

RANDOM = torch.Generator().manual_seed(0)
DENSE = torch.randn(20, 20, generator=RANDOM)
SEEN = torch.randint(0, 20, (40, 12), generator=RANDOM)
OTHER = torch.randint(0, 20, (600,), generator=RANDOM)
STEPS = [{"rtn": {"scheme": "W8A16"}}]
BERT = transformers.BertConfig(
    vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)
GATES = {"overfit_gap": "<= 0.05", "swept_kl_divergence": "<= 0.2"}


def of(table: torch.Tensor, ids: Ids) -> torch.Tensor:
    return table[torch.as_tensor(ids)]


def fitted(steps: int) -> torch.Tensor:
    """Lower the dense table's loss on what is seen, and with it the loss on nothing else."""
    table = DENSE.clone().requires_grad_()
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(table[SEEN[:, :-1]].flatten(0, 1), SEEN[:, 1:].flatten())
        (grad,) = torch.autograd.grad(loss, table)
        table = (table - 2 * grad).detach().requires_grad_()
    return table.detach()


def loss(table: torch.Tensor, begin: torch.Tensor, then: torch.Tensor) -> float:
    total = 0.0
    for token, target in zip(begin.tolist(), then.tolist(), strict=True):
        total -= table[token].double().log_softmax(0)[target].item()
    return total / len(begin)


@pytest.mark.parametrize("steps", [0, 8])
def test_the_gap_is_the_loss_that_calibration_hides(steps: int) -> None:
    table = fitted(steps)
    result = measure_quality(lambda ids: of(table, ids), OTHER, window=64, stride=32, dense=lambda ids: of(DENSE, ids))
    found = measure_overfit(result, lambda ids: of(table, ids), SEEN, lambda ids: of(DENSE, ids), Silent())
    seen = SEEN[:, :-1].flatten(), SEEN[:, 1:].flatten()
    other = OTHER[:-1], OTHER[1:]
    expected = loss(table, *other) - loss(DENSE, *other) - (loss(table, *seen) - loss(DENSE, *seen))
    assert found.overfit_gap == pytest.approx(expected, abs=1e-6)
    low, high = found.intervals["overfit_gap"]
    assert low <= expected <= high and (low > 0) == (steps > 0) and found.perplexity == result.perplexity
    with pytest.raises(UsageError, match="--dense"):
        measure_overfit(result, lambda ids: of(table, ids), SEEN, None, Silent())


def test_the_sweep_keeps_the_temperature_that_differs_most() -> None:
    table = DENSE + 0.5 * torch.randn(20, 20, generator=RANDOM)
    heat = (0.25, 0.5, 1.0, 3.0)
    found = measure_quality(lambda ids: of(table, ids), OTHER, dense=lambda ids: of(DENSE, ids), temperatures=heat)
    expected = {}
    for temperature in heat:
        p, q = ((x[OTHER[:-1]].double() / temperature).softmax(-1) for x in (DENSE, table))
        expected[temperature] = float((p * (p / q).log()).sum(-1).mean())
    worst = max(expected, key=lambda temperature: expected[temperature])
    assert found.swept_temperature == worst != 1.0
    assert found.swept_kl_divergence == pytest.approx(expected[worst], rel=1e-6)
    assert found.kl_divergence == pytest.approx(expected[1.0], rel=1e-6)
    low, high = found.intervals["swept_kl_divergence"]
    assert low < expected[worst] < high
    assert "swept_kl_divergence" not in measure_quality(lambda ids: of(table, ids), OTHER).metrics()


def test_samples_are_taken_at_even_distances_and_texts_cut() -> None:
    assert even_rows(SEEN, 10).tolist() == SEEN[::4].tolist() and len(even_rows(SEEN, 100)) == 40
    assert cut(OTHER, 256).tolist() == OTHER[:512].view(2, 256).tolist() and cut(OTHER, 1000).shape == (1, 600)


def test_gates_need_what_they_are_measured_by() -> None:
    evaluation = {"text": "x.txt", "in_domain": 8, "temperatures": [0.5, 2]}
    whole = {"passes": STEPS, "gates": GATES, "evaluation": evaluation, "calibration": {"text": "y.txt"}}
    recipe = Recipe.from_dict(whole)
    assert recipe.evaluation.temperatures == (0.5, 2.0)
    figures = {"overfit_gap": 0.06, "swept_kl_divergence": 0.1}
    assert [gate.passed for gate in check_gates(recipe.gates, figures)] == [False, True]
    for key, message in (("in_domain", "add `in_domain: 32`"), ("temperatures", r"add `temperatures: \[0.5, 1.5\]`")):
        with pytest.raises(RecipeError, match=message):
            Recipe.from_dict({**whole, "evaluation": {k: v for k, v in evaluation.items() if k != key}})
    with pytest.raises(RecipeError, match="counts windows of `calibration`"):
        Recipe.from_dict({key: value for key, value in whole.items() if key != "calibration"})
    with pytest.raises(RecipeError, match="temperatures"):
        Recipe.from_dict({**whole, "evaluation": {**evaluation, "temperatures": [0]}})
    with pytest.raises(UsageError, match="`temperatures` has no meaning: m is not a decoder"):
        check_kind("evaluation", EvaluationSpec(text=("x",), temperatures=(0.5,)), ModelInfo("encoder", "m", "M"))


def test_eval_measures_both_of_a_model(tmp_path: Path) -> None:
    text = Path(pytest.__file__).read_text(encoding="utf-8")
    model = save_model(tmp_path / "model", text)
    for name, part in (("seen.txt", text[:4000]), ("other.txt", text[4000:])):
        (tmp_path / name).write_text(part, encoding="utf-8")
    spec = EvaluationSpec(text=(str(tmp_path / "other.txt"),), tokens=200, window=32, temperatures=(0.5,))
    seen = EvaluationSpec(text=(str(tmp_path / "seen.txt"),), tokens=200, window=32)
    found = evaluate_path(model, spec, dense=str(model), in_domain=seen)
    assert found["overfit_gap"] == 0 and math.isclose(found["swept_kl_divergence"], 0, abs_tol=1e-12)
    with pytest.raises(UsageError, match="temperatures: predictions are compared"):
        evaluate_path(model, spec)
    done = CliRunner().invoke(main, ["eval", str(model), "--data", str(tmp_path / "other.txt"), "--tokens", "100",
                                     "--in-domain", str(tmp_path / "seen.txt")])  # fmt: skip
    assert done.exit_code == 2 and "--dense" in done.output, done.output


def test_text_that_an_encoder_was_calibrated_on_is_refused_before_it_is_read(tmp_path: Path) -> None:
    transformers.BertModel(BERT).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="not a decoder, which alone is measured on --in-domain; leave it out"):
        evaluate_path(tmp_path, EvaluationSpec(text=("absent.txt",)), in_domain=EvaluationSpec(text=("absent.txt",)))
