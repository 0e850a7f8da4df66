"""lm-eval's tasks on a bundle, against the model's own arithmetic and against `compress eval`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from missing import skip_or_fail
from tiny_bundle import POSITIONS, TEXT, TinyLanguageModel, edit_manifest, greedy, write_tiny_bundle

from compressor.cli.commands import main
from compressor.errors import UsageError
from compressor.evaluate.harness import session_scores
from compressor.evaluate.models import evaluate_path
from compressor.recipe.data_spec import EvaluationSpec

try:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from compressor.evaluate.harness.bundle_model import BundleModel
except ImportError as error:
    MISSING: str | None = f"{error}: pip install 'compressor[eval]'"
else:
    MISSING = None

MODEL = TinyLanguageModel()
STORY = (TEXT * 3).strip()
QUESTIONS = [
    {"question": "the rain in", "choices": [" Spain", " the plain", " it"], "answer": 0},
    {"question": "ça coûte très cher; 한국어", "choices": [" 🙂", " and so on"], "answer": 1},
    {"question": "and so on", "choices": [" and on", ". "], "answer": 0},
]
TASKS = {
    "story": {
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": "story.txt"}, "sample_by": "document", "keep_linebreaks": True},
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "choice": {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], Path]) -> Path:
    if MISSING:
        skip_or_fail(MISSING)
    require_tool("g++")
    folder = tmp_path_factory.mktemp("harness")
    write_tiny_bundle(folder, MODEL)
    (folder / "story.txt").write_text(STORY, encoding="utf-8")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, task in TASKS.items():
        files = {split: str(folder / file) for split, file in task["dataset_kwargs"]["data_files"].items()}  # type: ignore[index]
        places = {"data_files": files, "cache_dir": str(folder / "cache")}
        content = {"task": name, "test_split": "test", **task, "dataset_kwargs": {**task["dataset_kwargs"], **places}}  # type: ignore[dict-item]
        (folder / f"{name}.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return BundleModel(str(folder / "bundle"), threads=1)


def reference(ids: list[int], scored: int) -> tuple[float, bool]:
    total, is_greedy = 0.0, True
    for place in range(len(ids) - scored, len(ids)):
        x = MODEL.logits(ids[:place]).astype(np.float64)
        total += x[ids[place]] - np.log(np.exp(x).sum())
        is_greedy &= int(x.argmax()) == ids[place]
    return total, is_greedy


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.mark.parametrize("rows", [4, 256])
def test_scores_are_the_models(model: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Texts share a begin or not, in both orders, and end with what the model finds likeliest, or not."""
    monkeypatch.setattr(session_scores, "_ROWS", rows)
    scores = session_scores.SessionScores(model.bundle)
    for begin in ([5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [5, 6, 9, 9, 9], [5, 6, 9, 9, 9, 8, 7, 6, 5, 4]):
        likeliest = begin + greedy(MODEL, begin, 3)
        for ids, scored in ((likeliest, 3), ([*likeliest, 4], 4), (likeliest, len(likeliest) - 1), (begin, 1)):
            found, expected = scores.score(ids, scored), reference(ids, scored)
            assert found[1] == expected[1] and math.isclose(found[0], expected[0], rel_tol=1e-5)
    assert scores.score(likeliest, 3)[1] is True


def test_a_text_has_the_perplexity_of_compress_eval(model: Any, folder: Path) -> None:
    bundle = folder / "bundle"
    ours = BundleModel(str(bundle), threads=1, max_length=24, stride=10)
    spec = EvaluationSpec(text=(str(folder / "story.txt"),), tokens=1000, window=24, stride=10)
    measured = evaluate_path(bundle, spec, threads=1)
    (rolled,) = ours.loglikelihood_rolling(requests((STORY,)), disable_tqdm=True)
    count = len(ours.tok_encode(STORY)) - 1  # without the token of the begin, which nothing predicts
    assert measured["tokens"] == count and math.isclose(math.exp(-rolled / count), measured["perplexity"], rel_tol=1e-6)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(ours, tasks=["story", "choice"], task_manager=manager, bootstrap_iters=0)["results"]
    total = math.log(measured["perplexity"]) * count
    for unit, size in (("word", len(STORY.split(" "))), ("byte", len(STORY.encode()))):
        assert math.isclose(math.log(found["story"][f"{unit}_perplexity,none"]), total / size, rel_tol=1e-6), unit
    right = 0
    for asked in QUESTIONS:
        begin = ours.tok_encode(asked["question"])
        whole = [ours.tok_encode(str(asked["question"]) + choice) for choice in asked["choices"]]  # type: ignore[attr-defined]
        right += int(np.argmax([reference(ids, len(ids) - len(begin))[0] for ids in whole])) == asked["answer"]
    assert found["choice"]["acc,none"] == right / len(QUESTIONS)


def test_texts_go_on_as_the_bundle_writes_them(model: Any) -> None:
    prompt, options = "the rain", {"until": ["\n\n"], "max_gen_toks": 9}
    whole = "".join(model.bundle.generate(prompt, max_tokens=9))
    stop = whole[4:6]
    asked = [(prompt, options), (prompt, {**options, "until": stop}), (prompt * 20, options)]
    sampled = {**options, "do_sample": True, "temperature": 2.0}
    found = model.generate_until(requests(*asked, (prompt, sampled), (prompt, sampled)), disable_tqdm=True)
    assert found[:2] == [whole, whole[: whole.index(stop)]] and found[3] != found[4]
    cut = model.tok_encode(prompt * 20)[9 - POSITIONS :]
    assert found[2] == "".join(model.bundle.generate(cut, max_tokens=9))


def test_an_empty_context_is_the_token_of_the_begin(model: Any) -> None:
    ids = model.tok_encode("the rain")
    assert ids[0] == model.prefix_token_id == 0 and model.tok_encode("<s>the rain") == ids
    ((found, _),) = model.loglikelihood(requests(("", "the rain")), disable_tqdm=True)
    assert math.isclose(found, reference(ids, len(ids) - 1)[0], rel_tol=1e-5)


def test_what_cannot_be_is_refused(model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = str(folder / "bundle")
    for options, message in (
        ({"max_length": POSITIONS + 1}, "40, the model's positions"),
        ({"max_length": 8, "stride": 9}, "stride 9"),
        ({"batch_size": 4}, "read one by one"),
    ):
        with pytest.raises(UsageError, match=message):
            BundleModel(bundle, threads=1, **options)  # type: ignore[arg-type]
    for asked, message in (({"max_gen_toks": POSITIONS}, "no room"), ({"num_beams": 4}, "num_beams: not an option")):
        with pytest.raises(UsageError, match=message):
            model.generate_until(requests(("a", asked)), disable_tqdm=True)
    with pytest.raises(UsageError, match="a window has 1 to 40"):
        model.loglikelihood(requests(("a", STORY)), disable_tqdm=True)
    with pytest.raises(UsageError, match="begin the answer"):
        model.apply_chat_template([], add_generation_prompt=False)
    (tmp_path / "manifest.json").write_bytes((folder / "bundle" / "manifest.json").read_bytes())
    edit_manifest(tmp_path, lambda manifest: manifest.update(schema_version=10**6))
    for place, code, words in ((tmp_path, 1, "schema version 1000000"), (folder, 2, "not a bundle")):
        done = CliRunner().invoke(main, ["lm-eval", str(place), "--tasks", "story"])
        assert done.exit_code == code and words in done.output, done.output
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # 14,000 files
    for task, code, words in (("no_such_task", 2, "no_such_task"), ("choice", 0, "|acc")):
        arguments = ["--tasks", task, "--include_path", str(folder)]
        done = CliRunner().invoke(main, ["lm-eval", "--threads", "1", bundle, *arguments])
        assert done.exit_code == code and words in done.output, done.output
