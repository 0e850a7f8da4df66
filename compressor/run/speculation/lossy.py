"""State in a bundle that its drafts are lossy, and what they lose, measured by its own kernels.

bundle with a tolerance -> greedy texts with lossy drafts, and without -> agreement, perplexities -> manifest
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.codegen.backend import Written
from compressor.evaluate.generation.continuations import NEW_TOKENS, prompts_of
from compressor.evaluate.models import BundleProcess
from compressor.export.bundle import write_bundle
from compressor.export.facts import BundleFacts
from compressor.recipe.data_spec import PROMPT_TOKENS
from compressor.recipe.drafts import SparseSpec
from compressor.run.prepare import Prepared
from compressor.run.speculation.skips import write_with_skips

_TEXTS = 16
"""Prompts of the evaluation's text that are continued."""


def write_with_drafts(given: Prepared, folder: Path, written: Written, facts: BundleFacts) -> dict[str, Any]:
    """Write a bundle as :func:`write_bundle` does, with what its drafts leave out or lose."""
    asked = given.recipe.speculate
    tolerance = asked.tolerance if isinstance(asked, SparseSpec) else 0.0
    if not tolerance:
        return write_with_skips(given, folder, written, facts)

    def write(lossy: dict[str, Any]) -> dict[str, Any]:
        return write_bundle(folder, dataclasses.replace(written, model={**written.model, "lossy": lossy}), facts)

    manifest = write({"tolerance": tolerance})
    if not given.backend.runs_here:
        given.context.notes.append(f"speculate: sparse is lossy, tolerance {tolerance:g}; not measured on this machine")
        return manifest
    lossy = {"tolerance": tolerance, **_measured(given, folder)}
    given.context.notes.append(
        f"speculate: sparse is lossy, tolerance {tolerance:g}: {lossy['lossless_agreement']:.0%} of a greedy text as "
        f"without tolerance, perplexity {lossy['lossy_perplexity']:.3g} in place of {lossy['lossless_perplexity']:.3g}"
    )
    (folder / "manifest.json").unlink()  # it is not a file that a manifest lists
    return write(lossy)


def _measured(given: Prepared, folder: Path) -> dict[str, Any]:
    """Return what :func:`compressor_runtime.speculation.measure.fidelity` finds, with the number of prompts."""
    text = given.data
    assert isinstance(text, Tensor)  # drafts of few inputs need samples, and what is left of their text is evaluated on
    prompts = prompts_of(text, max(1, min(_TEXTS, len(text) // PROMPT_TOKENS)))
    with given.clock.stage("drafts", shown=False), given.backend.open(folder) as process:
        assert isinstance(process, BundleProcess)
        asked = json.dumps({"lossy": prompts.shape, "count": NEW_TOKENS})
        found: dict[str, float] = process.ask(asked, prompts.tobytes())
    return {name: round(figure, 4) for name, figure in found.items()} | {"lossy_texts": len(prompts)}
