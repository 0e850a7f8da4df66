"""Recipes chosen for a budget: candidates, their figures, the recipe that is written, refusals that write nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_images import classifier, pictures, resnet, save
from tiny_models import save_model
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.cli.commands import main
from compressor.errors import UsageError
from compressor.executor.jobs import InProcess
from compressor.graph.model import weight_bytes
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.plan import prices
from compressor.plan.plan import make_plan
from compressor.plan.prices import UNITS, Prices
from compressor.progress import Silent
from compressor.recipe.recipe import load_recipe
from compressor.run.automatic import choice
from compressor.run.automatic.candidates import Budget, Formats, ImageFormats, named, read_budget
from compressor.run.automatic.choice import Tried
from compressor.run.automatic.job import choose_recipe

pytestmark = pytest.mark.usefixtures("captures_once")


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the measurement of this machine: no figure here depends on prices."""
    known = Prices("", 0, dict.fromkeys(UNITS, 1e-9), 0.1, 1 << 20, 2 << 20, 3 << 20)
    monkeypatch.setattr(prices, "probe", lambda: known)
    monkeypatch.setattr(prices, "merge_entries", lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("automatic")
    text = Path(pytest.__file__).read_text(encoding="utf-8") * 4
    (root / "text.txt").write_text(text, encoding="utf-8")
    save_model(root / "model", text)
    (root / "calibration.yaml").write_text("{text: text.txt, samples: 20, sequence_length: 32}\n")
    (root / "evaluation.yaml").write_text("{text: text.txt, tokens: 96}\n")
    return root


def chosen(folder: Path, budget: Budget, output: Path) -> tuple[Path, Sequence[Tried], Tried]:
    texts = str(folder / "calibration.yaml"), str(folder / "evaluation.yaml")
    place, tried = choose_recipe(str(folder / "model"), "x86", budget, output, texts, InProcess(), Silent())
    (best,) = [one for one in tried if one.chosen]
    return place, tried, best


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave two candidates of one format."""
    every, names = Formats.uniform, (named("W8A16"), named("W4A16_G64"))
    monkeypatch.setattr(Formats, "uniform", lambda self: (one for one in every(self) if one.name in names))


@pytest.fixture
def few_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train for a step, and leave samples enough to score on."""
    of_search = {**ImageFormats((), ()).of_search, "held_out": 0.4}
    monkeypatch.setattr(ImageFormats, "of_search", of_search)
    monkeypatch.setattr(ImageFormats, "of_training", {"steps": 1, "batch": 2, "held_out": 0.2})


@pytest.mark.usefixtures("few")
def test_the_recipe_is_the_best_within_the_bytes(folder: Path, tmp_path: Path) -> None:
    place, tried, best = chosen(folder, Budget("weight_bytes", 36_000.0), tmp_path / "bundle")
    measured = [one for one in tried if one.kl_divergence is not None]
    assert {one.candidate.kind for one in measured} >= {"uniform", "mixed"}
    assert all(one.note or one in measured for one in tried)
    for one in measured:
        if one.candidate.kind != "architecture":
            assert one.weight_bytes == pytest.approx(one.predicted_bytes, rel=0.1)
    within = [one for one in measured if one.weight_bytes is not None and one.weight_bytes <= 36_000]
    assert best in within and best.kl_divergence == min(one.kl_divergence or 0 for one in within)
    recipe = load_recipe(str(place))
    assert make_plan(recipe).weight_bytes <= 36_000 and place == tmp_path / "bundle.yaml"
    assert "chosen by compress auto for weight_bytes=36000" in place.read_text().casefold()
    with pytest.raises(UsageError, match="is there already"):
        chosen(folder, Budget("weight_bytes", 36_000.0), tmp_path / "bundle")


@pytest.mark.usefixtures("few")
def test_times_are_shares_of_the_dense_step(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
            return [float(weight_bytes(graph)) for graph in graphs], "counted"

    monkeypatch.setattr(choice, "Steps", Clock)
    monkeypatch.setattr(Formats, "searched", ())
    _, tried, best = chosen(folder, Budget("latency", 0.4), tmp_path / "bundle")
    dense = {round(one.weight_bytes / one.latency) for one in tried if one.weight_bytes and one.latency}
    assert len(tried) == 4 and len(dense) == 1 and best.latency is not None and best.latency <= 0.4
    with pytest.raises(
        UsageError, match=r"latency: 0.010 of .* cannot be met: the least is 0\.\d+ of .*, by formats by"
    ):
        chosen(folder, Budget("latency", 0.01), tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


@pytest.mark.usefixtures("few")
def test_searches_that_cannot_be_the_best_are_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format with the most bits alone is quick."""

    class Clock:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, graphs: Sequence[GraphModule]) -> tuple[list[float], str]:
            largest = max(map(weight_bytes, graphs[1:]))
            return [1.0, *(0.3 if weight_bytes(one) == largest else 0.9 for one in graphs[1:])], "told"

    monkeypatch.setattr(choice, "Steps", Clock)
    _, tried, best = chosen(folder, Budget("latency", 0.4), tmp_path / "bundle")
    (search,) = [one for one in tried if one.candidate.kind == "architecture"]
    assert best.candidate.name == named("W8A16") and search.kl_divergence is None
    assert search.candidate.passes[0]["puzzle"]["latency"] == round(0.95 * 0.4 / 0.9, 3)
    assert search.note == f"{named('W4A16_G64')} with all layers loses no less than {named('W8A16')}"


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("weight_bytes=0", "give more than 0 bytes"),
        ("weight_bytes=", "give weight_bytes=AMOUNT"),
        ("", "give weight_bytes=AMOUNT"),
        ("speed=2", "give weight_bytes=AMOUNT"),
        ("weight_bytes=many", "write a number and a unit"),
        ("latency=1.5", "a share of the dense model's step"),
    ],
)
def test_budgets_that_mean_nothing(budget: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_budget(budget)


def test_the_least_is_named_and_nothing_written(folder: Path, tmp_path: Path) -> None:
    options: list[Any] = ["--calibration", folder / "calibration.yaml", "--evaluation", folder / "evaluation.yaml"]
    arguments = ["auto", folder / "model", "--budget", "weight_bytes=5kB", "-o", tmp_path / "bundle", *options]
    found = CliRunner().invoke(main, [str(one) for one in arguments])
    assert found.exit_code == 2 and not list(tmp_path.iterdir())
    assert re.search(r"5,000 bytes cannot be met: the least is [\d,]+ bytes, by ", found.stderr)


@pytest.mark.usefixtures("few_of_images")
def test_networks_of_images_have_candidates_of_their_own(tmp_path: Path) -> None:
    """Four bits are too many: formats by layer or a narrower network, whichever predicts more like the whole."""
    folder = save(classifier(resnet(stages=1)), tmp_path / "resnet")
    data = pictures(tmp_path / "pictures")
    (tmp_path / "images.yaml").write_text(f"{{images: {data}, samples: 6}}\n")
    limit = 0.97 * weight_bytes(Rtn("W4A16_C", targets="re:.*").run(capture(folder), Context()))
    given = (str(tmp_path / "images.yaml"), None)
    place, tried = choose_recipe(
        str(folder), "x86", Budget("weight_bytes", limit), tmp_path / "bundle", given, InProcess(), Silent()
    )
    (best,) = [one for one in tried if one.chosen]
    measured = [one for one in tried if one.kl_divergence is not None]
    assert {one.candidate.kind for one in tried} == {"uniform", "mixed", "architecture"}
    assert best in measured and best.weight_bytes is not None and best.weight_bytes <= limit
    assert best.accuracy is not None and best.perplexity is None
    assert all(one.note for one in tried if one.candidate.name == "W4A16_C")
    recipe = load_recipe(str(place))
    assert recipe.evaluation.kind is None and "nats an image" in place.read_text()
    (tmp_path / "bundle.yaml").unlink()
    with pytest.raises(UsageError, match="plain module"):
        texts = "python_docs", None
        choose_recipe(str(folder), "x86", Budget("latency", 0.5), tmp_path / "bundle", texts, InProcess(), Silent())


def test_amounts() -> None:
    assert read_budget("weight_bytes=4MB") == Budget("weight_bytes", 4e6) == read_budget("weight_bytes=4000000")
    assert read_budget("latency=0.6") == Budget("latency", 0.6)
