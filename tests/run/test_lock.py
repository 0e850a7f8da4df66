from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_caches import with_prices
from torch import nn

from compressor.codegen.targets.x86 import X86
from compressor.codegen.tuning import Database
from compressor.data.text import Samples, tokens_sha256
from compressor.errors import DriftError, UsageError
from compressor.recipe.recipe import Recipe
from compressor.run.job import run_recipe
from compressor.run.lock import LOCK_NAME, Lock, check_lock, check_place, read_lock, save_lock

pytestmark = pytest.mark.usefixtures("no_speed")

RECIPE = {"passes": [{"rtn": {"scheme": "W4A16_G128"}}], "seed": 3}
IDS = torch.arange(12).view(3, 4)


def gather(recipe: Any = RECIPE, model: nn.Module | None = None, ids: torch.Tensor = IDS) -> Lock:
    lock = Lock()
    lock.add_setting(Recipe.from_dict(recipe), X86())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lock.add_model(model or nn.Linear(3, 2))
    lock.add_data(Samples(ids, ids[0], tokens_sha256(ids), "story"), ids.flatten())
    lock.add_schedules({"packed:1": {"tiles": 4}, "packed:64": {"tiles": 4, "tokens": 8}})
    return lock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / LOCK_NAME
    path.write_text(gather().text())
    return path


def test_the_text_is_deterministic_and_reads_back(file: Path) -> None:
    assert gather().text() == file.read_text() and file.read_text().endswith("}\n")
    assert read_lock(file) == read_lock(file.parent) == gather().facts
    assert check_lock(read_lock(file), gather().facts) == []


def test_nothing_in_it_is_of_this_run_only(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gather().text() == file.read_text()
    for text in (str(tmp_path), str(Path(__file__).parents[2]), f'"{os.uname().nodename}"'):
        assert text not in file.read_text()


def test_a_lock_holds_what_a_bundle_follows_from(file: Path) -> None:
    content = json.loads(file.read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert content["recipe"]["seed"] == 3
    assert content["recipe"]["passes"][0]["rtn"]["targets"] == "Linear"  # a default
    assert content["cpu"]["isa"] == X86().resolve().name and "avx2" in content["cpu"]["features"]
    assert content["calibration"] == {
        "source": "story",
        "samples": 3,
        "sequence_length": 4,
        "sha256": tokens_sha256(IDS),
    }
    assert content["evaluation"] == {"tokens": 12, "sha256": tokens_sha256(IDS)}


def test_a_gpu_is_locked_where_a_pass_trains_on_one(tmp_path: Path) -> None:
    """Another card, none, and one that was not there before are drifts; a run without one has no such section."""
    before, lock = gather(), gather()
    assert "gpu" not in json.loads(before.text())
    lock.facts["gpu"] = {"name": "A", "torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "91900"}
    (tmp_path / LOCK_NAME).write_text(lock.text())
    locked = read_lock(tmp_path)
    assert locked == lock.facts and check_lock(locked, lock.facts) == []
    assert check_lock(locked, {**lock.facts, "gpu": {**lock.facts["gpu"], "name": "B"}}) == [
        'gpu.name: was "A", is "B"'
    ]
    assert any(line.startswith("gpu: was absent, is") for line in check_lock(before.facts, lock.facts))
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="finetune: device cuda needs a GPU, and PyTorch"):
            gather({"passes": [{"finetune": {"device": "cuda"}}]})


def test_a_models_folder_is_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("")
    lock = Lock()
    lock.add_model(tmp_path)
    assert list(lock.facts["model"]["files"]) == ["config.json"]
    lock.add_model(tmp_path, trust_remote_code=True)
    assert list(lock.facts["model"]["files"]) == ["config.json", "modeling.py"]


def test_drift_of_a_real_run_is_told_in_words(file: Path) -> None:
    recipe = {**RECIPE, "passes": [{"rtn": {"scheme": "W4A16_G128", "group_size": 64}}]}
    lock = gather(recipe, nn.Linear(3, 2, dtype=torch.float64), IDS + 1)
    lock.locked = read_lock(file)
    with pytest.raises(DriftError) as caught:
        lock.check()
    assert caught.value.exit_code == 2
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "recipe passes[0].rtn.group_size: was 0, is 64" in lines
    before, now = tokens_sha256(IDS)[:12], tokens_sha256(IDS + 1)[:12]
    assert f"calibration samples: sha256 was {before}, is {now}" in lines
    assert f"evaluation data: sha256 was {before}, is {now}" in lines
    assert any(line.startswith("the model's parameters and buffers: sha256 was ") for line in lines)
    assert len(lines) == 6 and "--locked" in lines[0] and "without --locked" in lines[-1]


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(facts: dict[str, Any]) -> None:
        *folders, last = path.split("/")
        for folder in folders:
            facts = facts[folder]
        if value is None:
            del facts[last]
        else:
            facts[last] = value

    return apply


SHA, OTHER = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change("versions/torch", "9.9"), f"torch: was {torch.__version__}, is 9.9"),
        (change("versions/new", "1"), "new: was absent, is 1"),
        (change("code", OTHER), f"the code of compressor: sha256 was aaaaaaaaaaaa, is {OTHER[:12]}"),
        (change("cpu/name", "other"), "cpu: was this, is other"),
        (change("cpu/isa", "avx2"), "instruction set: was avx512_vnni, is avx2"),
        (change("cpu/features", ["avx", "fma", "sse"]), "cpu: lacks avx2; also has sse"),
        (change("cpu/features", ["avx", "avx2", "fma", "f16c"]), "cpu: also has f16c"),
        (change("recipe/seed", 4), "recipe seed: was 3, is 4"),
        (change("recipe/tune", "off"), 'recipe tune: was "quick", is "off"'),
        (change("recipe/passes", []), 'recipe passes: was [{"rtn": '),
        (change("recipe/extra", {"a": 1}), 'recipe extra: was absent, is {"a": 1}'),
        (change("model", {"files": {"w": OTHER}}), "model file w: sha256 was aaaaaaaaaaaa, is bbbbbbbbbbbb"),
        (change("model", {"files": {"w": SHA, "x": OTHER}}), "model file x: sha256 was absent, is bbbbbbbbbbbb"),
        (change("model", {"files": {}}), "model file w: sha256 was aaaaaaaaaaaa, is absent"),
        (change("calibration/samples", 2), "calibration samples: samples was 3, is 2"),
        (change("schedules/packed:1", {"tiles": 2}), "schedule of packed:1: tiles was 4, is 2"),
        (change("schedules/packed:1", None), 'schedule of packed:1: was {"tiles": 4}, is absent'),
    ],
)
def test_each_kind_of_drift(edit: Callable[[dict[str, Any]], None], words: str) -> None:
    locked = gather().facts
    locked |= {"code": SHA, "model": {"files": {"w": SHA}}}
    locked["cpu"] = {"name": "this", "isa": "avx512_vnni", "features": ["avx", "avx2", "fma"]}
    current = copy.deepcopy(locked)
    edit(current)
    (line,) = check_lock(locked, current)
    assert line.startswith(words)


def test_true_is_not_one_and_texts_may_be_missing() -> None:
    locked = gather().facts
    current = copy.deepcopy(locked)
    current["recipe"]["seed"], locked["recipe"]["seed"] = True, 1
    current["calibration"] = None
    calibration, seed = check_lock(locked, current)
    assert seed == "recipe seed: was 1, is true"
    assert calibration.startswith("calibration samples: was {") and calibration.endswith("is null")


def test_what_is_not_known_yet_is_not_compared(file: Path) -> None:
    lock = Lock(read_lock(file))
    lock.check()
    lock.add_setting(Recipe.from_dict({**RECIPE, "tune": "off"}), X86())
    with pytest.raises(DriftError, match="recipe tune"):
        lock.check()
    assert lock.schedules == {"packed:1": {"tiles": 4}, "packed:64": {"tiles": 4, "tokens": 8}}
    assert Lock().schedules is None


def test_a_missing_lock_says_how_to_make_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="without --locked"):
            read_lock(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b" " * ((16 << 20) + 1),
        b"1" * 10_000,
    ],
    ids=range(10),
)
def test_a_damaged_lock_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(UsageError, match="not a lock of this version"):
        read_lock(tmp_path / "lock")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("format", "tarball", "format"),
        ("schema_version", 2, "schema_version"),
        ("recipe", [], "recipe"),
        ("recipe", {"seed": float("nan")}, "NaN"),
        ("recipe", {"a": json.loads("[" * 40 + "]" * 40)}, "nested"),
        ("schedules", {"k": {"tiles": "4"}}, "schedules.k.tiles"),
        ("schedules", {"k": {"tiles": {"a": "4"}}}, "schedules.k.tiles"),
        ("schedules", {"k": {"tiles": 4, "chosen": 3}}, "schedules.k.chosen"),
        ("schedules", None, "schedules"),
        ("model", {"files": {"w": 3}}, "model.files"),
        ("surprise", 1, "surprise"),
    ],
)
def test_a_lock_that_makes_no_sense_is_refused(key: str, value: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({**gather().facts, key: value}))
    with pytest.raises(UsageError, match=f"not a lock of this version .*{what}"):
        read_lock(tmp_path / "lock")


def test_what_a_terminal_would_obey_is_shown_escaped() -> None:
    locked = gather().facts
    locked["model"] = {"files": {"\x1b[2J": "\x1b[31m"}}
    locked["versions"]["a\nb"] = "\r"
    lines = check_lock(locked, {**gather().facts, "model": {"files": {}}})
    assert len(lines) == 2 and all(line.isprintable() for line in lines)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(gather().facts)), PLAIN)
def test_any_content_is_refused_or_compared(tmp_path_factory: pytest.TempPathFactory, key: str, value: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.lock"
    file.write_text(json.dumps({**gather().facts, key: value}))
    try:
        locked = read_lock(file)
    except UsageError as error:
        assert "not a lock of this version" in str(error)
        return
    for line in check_lock(locked, gather().facts):
        assert line.isprintable()


def test_a_lock_is_saved_in_one_step(file: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "new.lock", tmp_path / "new.lock"):
        check_place(place)
        save_lock(file.parent, place)
        assert place.read_bytes() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, "new.lock"]


def test_a_place_that_no_lock_can_be_written_to(file: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "lock"):
        with pytest.raises(UsageError, match="cannot be written"):
            check_place(place)
        with pytest.raises(UsageError, match="cannot be written"):
            save_lock(file.parent, place)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def module(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU()).eval().requires_grad_(False)


def test_a_locked_run_with_an_empty_cache_gives_the_same_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require_tool: Callable[[str], Path]
) -> None:
    require_tool("g++")
    recipe = Recipe.from_dict({"passes": [{"rtn": {"scheme": "W8A16_G32", "targets": "Linear"}}]})
    example = (torch.ones(2, 64),)
    first_cache, second_cache = (with_prices(tmp_path / name) for name in ("first cache", "second cache"))
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(first_cache))
    first = run_recipe(recipe, tmp_path / "first", model=module(), example=example).bundle
    assert Database().entries  # it was tuned
    locked = read_lock(first)
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(second_cache))
    options: dict[str, Any] = {"example": example, "locked": locked, "threads": 1}
    second = run_recipe(recipe, tmp_path / "second", model=module(), **options).bundle
    assert (second / "manifest.json").read_bytes() == (first / "manifest.json").read_bytes()
    assert LOCK_NAME in json.loads((first / "manifest.json").read_text())["files"]
    assert Database().entries == {}  # nothing was timed
    with pytest.raises(DriftError, match="parameters and buffers: sha256 was"):
        run_recipe(recipe, tmp_path / "third", model=module(1), **options)
    (kernel, fields), *_ = locked["schedules"].items()
    locked["schedules"][kernel] = {**fields, "unknown": 1}
    with pytest.raises(DriftError, match=f"for the kernel {kernel}"):
        run_recipe(recipe, tmp_path / "third", model=module(), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "first cache", "second", "second cache"]
