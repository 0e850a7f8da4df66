"""A run that chooses what drafts of the model itself leave out, on the shipped model's first two blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressor_runtime import DamagedBundleError
from compressor_runtime.manifest import checked_model
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.pace import Always

from compressor.cli.contents import inspect_path
from compressor.cli.show_run import show_inspection
from compressor.errors import DriftError, RecipeError
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe
from compressor.run.job import run_recipe
from compressor.run.lock import read_lock
from compressor.runtime import load

RECIPE = resource("recipes") / "speculate_self_x86.yaml"


@pytest.mark.usefixtures("no_speed")
def test_the_bundle_says_what_its_drafts_leave_out_repeats_locked_and_gives_the_text_of_plain_steps(
    short_reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"model={short_reference}", "tune=off", "calibration.samples=4", "evaluation.tokens=64"]
    overrides.append("target={x86: {isa: avx2}}")  # the quickest to generate
    outcome = run_recipe(load_recipe(RECIPE, overrides), tmp_path / "bundle", threads=1)
    bundle = load(outcome.bundle, threads=1)
    skips, names = bundle.model["skips"], {"attention_0", "ffn_0", "attention_1", "ffn_1"}
    assert bundle.model["speculate"] == "self" and bundle.speculations == ("lookup", "recycle", "self", "auto")
    assert 1 <= len(skips) <= 4 and all(one["without"] and names.issuperset(one["without"]) for one in skips)
    assert read_lock(outcome.bundle)["skips"] == skips
    content = inspect_path(outcome.bundle)
    assert (content["speculate"], content["skips"]) == ("self", skips)
    show_inspection(content)
    shown = capsys.readouterr().out
    assert "speculate: self" in shown and ", ".join(skips[0]["without"]) in shown
    (note,) = (remark for remark in outcome.remarks if remark.startswith("speculate: self, without "))
    assert f"a draft step costs {skips[0]['cost']:.2g} of a step, acceptance {skips[0]['agreement']:.2g}, " in note
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries, bundle.model)
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}):
        wanted = "".join(bundle.generate("Return the ", max_tokens=40, speculate="off", **options))
        found = bundle.generate("Return the ", max_tokens=40, **options)
        assert "".join(found) == wanted and found.speculation.kind == "self" and found.speculation.verifications > 2

    locked = read_lock(outcome.bundle)
    again = run_recipe(load_recipe(RECIPE, overrides), tmp_path / "again", threads=1, locked=locked)
    assert not any("speculate: self" in remark for remark in again.remarks)  # nothing was measured
    assert (again.bundle / "manifest.json").read_bytes() == (outcome.bundle / "manifest.json").read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr("compressor.run.prepare.capture", None)  # refused before the model is read
        lacking = {key: value for key, value in locked.items() if key != "skips"}
        with pytest.raises(DriftError, match="--locked: the lock does not say what drafts leave out"):
            run_recipe(load_recipe(RECIPE, overrides), tmp_path / "never", threads=1, locked=lacking)

    one = skips[0]
    for wrong in ([], [{**one, "without": ["ffn_9"]}], [{**one, "cost": -1.0}], [{**one, "agreement": 1}], [{}]):
        with pytest.raises(DamagedBundleError, match=r"skips|without"):
            checked_model({**bundle.manifest, "model": {**bundle.model, "skips": wrong}})


def test_without_text_to_choose_on_it_is_refused(short_reference: Path, tmp_path: Path) -> None:
    for overrides in (["calibration=null"], ["calibration.sequence_length=32"]):
        recipe = load_recipe(RECIPE, [f"model={short_reference}", *overrides])
        with pytest.raises(
            RecipeError, match=r"speculate_self_x86.yaml:\d+: speculate: self: drafts leave parts of the"
        ):
            run_recipe(recipe, tmp_path / "bundle")
