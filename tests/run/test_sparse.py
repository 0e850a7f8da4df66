"""Runs whose drafts skip inputs: asked for by name, and weighed by ``auto``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from compressor_runtime.errors import DamagedBundleError
from compressor_runtime.manifest import checked_model
from compressor_runtime.speculation.cost import forecast
from compressor_runtime.speculation.drafts import Drafts
from compressor_runtime.speculation.measure import measure_drafts
from compressor_runtime.speculation.pace import Always
from torch.nn.functional import cross_entropy

from compressor.errors import DriftError
from compressor.host.resources import resource
from compressor.recipe.recipe import load_recipe
from compressor.report.outcome import Outcome
from compressor.run.job import run_recipe
from compressor.run.lock import read_lock
from compressor.runtime import Bundle, load

pytestmark = pytest.mark.usefixtures("captures_once")

RECIPE = resource("recipes") / "speculate_sparse_x86.yaml"
HELD_OUT = resource("calibration") / "python_docs_heldout.txt"
SMALL = (
    "tune=off",
    "target={x86: {isa: avx2}}",
    "calibration.samples=4",
    "calibration.sequence_length=128",
    "evaluation.tokens=64",
)


@pytest.mark.usefixtures("no_speed")
def test_the_bundle_drafts_with_few_inputs_and_gives_the_text_of_plain_steps(small_llama: Path, tmp_path: Path) -> None:
    asked = "speculate={kind: sparse, sparsity: 0.7, tolerance: 0.9}"
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
    check_losses(bundle, outcome)
    lossy = bundle.model.pop("lossy")
    for wrong in ({**lossy, "tolerance": 0.0}, {**lossy, "tolerance": 2.0}, {**lossy, "lossy_perplexity": "low"}):
        with pytest.raises(DamagedBundleError, match=r"`lossy` has a value"):
            checked_model({**bundle.manifest, "model": {**bundle.model, "lossy": wrong}})
    with pytest.raises(DamagedBundleError, match="`lossy` has a value"):
        checked_model({**bundle.manifest, "model": {**bundle.model, "speculate": "lookup", "lossy": lossy}})
    bundle._drafts = Drafts(bundle.model["vocab_size"], Always(), bundle.entries, bundle.model)
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 3}):
        wanted = "".join(bundle.generate("Return the ", max_tokens=24, speculate="off", **options))
        found = bundle.generate("Return the ", max_tokens=24, **options)
        assert "".join(found) == wanted and found.speculation.kind == "sparse" and found.speculation.verifications > 1


def check_losses(bundle: Bundle, outcome: Outcome) -> None:
    """Compare what the manifest, the report and a generation say of lossy texts with texts measured by PyTorch."""
    lossy = bundle.model["lossy"]
    assert lossy["tolerance"] == 0.9 and {**outcome.metrics, **lossy} == outcome.metrics
    (said,) = (remark for remark in outcome.remarks if remark.startswith("speculate: sparse is lossy, tolerance 0.9: "))
    assert f"perplexity {lossy['lossy_perplexity']:.3g} in place of" in said
    ids, length = bundle.tokenizer.encode(HELD_OUT.read_text(encoding="utf-8")).ids[:64], 32
    prompts = [ids[begin : begin + length] for begin in range(0, 64, length)][: lossy["lossy_texts"]]
    shares, surprises = [], {"lossy": list[float](), "lossless": list[float]()}
    for prompt in prompts:
        ours, own = (list(bundle.generate_ids(prompt, max_tokens=64, speculate=kind)) for kind in (None, "off"))
        assert ours == list(bundle.generate_ids(prompt, max_tokens=64)) != own
        sampled, plain = (
            list(bundle.generate_ids(prompt, max_tokens=24, temperature=0.7, seed=1, speculate=kind))
            for kind in (None, "off")
        )
        assert sampled == plain, "sampled texts are the model's own"
        shares.append(next(place for place, pair in enumerate(zip(ours, own, strict=False)) if pair[0] != pair[1]) / 64)
        for name, text in (("lossy", ours), ("lossless", own)):
            logits = torch.from_numpy(bundle.session().step([prompt + text], keep=range(31, 31 + len(text)))[0])
            surprises[name] += cross_entropy(logits, torch.tensor(text), reduction="none").tolist()
    assert lossy["lossless_agreement"] == pytest.approx(np.mean(shares), abs=1e-4)
    for name, found in surprises.items():
        assert lossy[f"{name}_perplexity"] == pytest.approx(np.exp(np.mean(found)), rel=1e-4)
    pieces = bundle.generate("Return the ", max_tokens=24)
    assert "".join(pieces) and f"sparse, lossy (tolerance 0.9, {pieces.speculation.lenient} of" in str(
        pieces.speculation
    )
    assert pieces.speculation.facts()["lossy"] == lossy
    figures = measure_drafts(bundle, "sparse", ids, 32, 24, 2)
    assert figures["tolerance"] == 0.9 and figures["lossy_perplexity"] >= figures["lossless_perplexity"] > 1
    assert "tolerance" not in measure_drafts(bundle, "lookup", ids, 32, 4, 1)


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
