"""Runs whose drafts skip inputs: asked for by name, and weighed by ``auto``."""

from __future__ import annotations

from pathlib import Path

import pytest
from compressor_runtime.speculation.cost import forecast
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.pace import Always

from compressor.errors import DriftError
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe
from compressor.run.job import run_recipe
from compressor.run.lock import read_lock
from compressor.runtime import load

RECIPE = resource("recipes") / "speculate_sparse_x86.yaml"
SMALL = ("tune=off", "calibration.samples=4", "calibration.sequence_length=128", "evaluation.tokens=64")


@pytest.mark.usefixtures("no_speed")
def test_the_bundle_drafts_with_few_inputs_and_gives_the_text_of_plain_steps(small_llama: Path, tmp_path: Path) -> None:
    asked = "speculate={kind: sparse, sparsity: 0.7}"
    outcome = run_recipe(load_recipe(RECIPE, [f"model={small_llama}", *SMALL, asked]), tmp_path / "bundle", threads=1)
    bundle = load(outcome.bundle, threads=1)
    assert bundle.model["speculate"] == "sparse" and bundle.speculations == ("lookup", "recycle", "sparse", "auto")
    notes = [site["note"] for site in bundle.manifest["sites"] if site["format"] == "W8A16_SKIP"]
    assert len(notes) == 7 and all("drafts skip " in note for note in notes)
    (said,) = (
        remark for remark in outcome.remarks if remark.startswith("speculate: sparse, 70% of the weights skipped")
    )
    assert "a draft step costs " in said and "acceptance " in said
    predicted = {name: (plan, actual) for name, plan, actual, _ in outcome.predictions}
    assert predicted["weight_bytes"][0] == predicted["weight_bytes"][1]
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries, bundle.model)
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}):
        wanted = "".join(bundle.generate("Return the ", max_tokens=24, speculate="off", **options))
        found = bundle.generate("Return the ", max_tokens=24, **options)
        assert "".join(found) == wanted and found.speculation.kind == "sparse" and found.speculation.verifications > 1


@pytest.mark.usefixtures("no_speed")
@pytest.mark.parametrize("verified", [7.0, 1.0])
def test_auto_takes_them_where_they_are_expected_to_pay_and_says_so(
    small_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: float
) -> None:
    expected = forecast(0.9, 0.5, [verified])
    monkeypatch.setattr("compressor.run.speculation.sparse._expected", lambda *_: expected)
    recipe = load_recipe(RECIPE, [f"model={small_llama}", *SMALL, "speculate=auto"])
    outcome = run_recipe(recipe, tmp_path / "bundle", threads=1)
    pays = verified == 1.0
    assert f"speculate: auto, {'with' if pays else 'without'} sparse: {expected}" in outcome.remarks
    assert ("pays with 1 tokens" in str(expected)) is pays and ("would not pay" in str(expected)) is not pays
    assert ("sparse" in load(outcome.bundle, threads=1).speculations) is pays
    locked = read_lock(outcome.bundle)
    assert locked["sparse_drafts"] is pays
    if not pays:
        del locked["sparse_drafts"]
        monkeypatch.setattr("compressor.run.prepare.capture", None)  # refused before the model is read
        with pytest.raises(DriftError, match="does not say whether drafts skip inputs"):
            run_recipe(recipe, tmp_path / "again", threads=1, locked=locked)
