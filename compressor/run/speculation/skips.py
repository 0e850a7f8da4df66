"""Choose which parts of a model drafts leave out, by the bundle's own kernels, and state it in the bundle.

bundle without the choice -> times of parts, agreement on calibration text -> knapsack -> manifest, lock
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from compressor.codegen.backend import Written
from compressor.evaluate.models import BundleProcess
from compressor.export.bundle import write_bundle
from compressor.export.facts import BundleFacts
from compressor.run.prepare import Prepared
from compressor.search.skips import Skips, choose_skips

_TEXTS, _TOKENS = 6, 144
"""Calibration samples, and their first tokens, on which agreement is measured."""


def write_with_skips(given: Prepared, folder: Path, written: Written, facts: BundleFacts) -> dict[str, Any]:
    """Write a bundle as :func:`write_bundle` does; where it drafts with a part of itself, with what is left out.

    A locked run takes what its lock says; else it is chosen and locked.
    """
    manifest = write_bundle(folder, written, facts)
    if given.recipe.drafts != "self":
        return manifest
    locked = given.lock.locked
    chosen = _chosen(given, folder) if locked is None else locked["skips"]
    given.lock.facts["skips"] = chosen
    (folder / "manifest.json").unlink()  # it is not a file that a manifest lists
    told = dataclasses.replace(written, model={**written.model, "skips": chosen})
    return write_bundle(folder, told, dataclasses.replace(facts, lock=given.lock.text()))


def _chosen(given: Prepared, folder: Path) -> list[dict[str, Any]]:
    """Measure and choose; note what is expected of the best choice."""
    assert given.context.samples is not None and isinstance(given.context.samples.ids, Tensor)
    ids = given.context.samples.ids[:_TEXTS, :_TOKENS].numpy().astype(np.int64)
    with given.clock.stage("drafts", shown=False), given.backend.open(folder) as process:
        assert isinstance(process, BundleProcess)
        told: dict[str, Any] = process.ask(json.dumps({"parts": ids.shape}), ids.tobytes())
        names: list[str] = told["names"]

        def measure(choices: list[tuple[int, ...]]) -> list[float]:
            without = [[names[index] for index in one] for one in choices]
            found: list[float] = process.ask(json.dumps({"parts": ids.shape, "without": without}), ids.tobytes())
            return found

        first, *seconds, last = told["seconds"]
        found = choose_skips(seconds, first + last, told["step_s"], told["verification"], measure)
    given.context.notes.append(f"speculate: self, without {_listed(found[0], names)}: {found[0].expected}")
    return [
        {
            "without": [names[index] for index in one.without],
            "agreement": round(float(one.expected.acceptance), 4),
            "cost": round(float(one.expected.draft_cost), 4),
        }
        for one in found
    ]


def _listed(skips: Skips, names: list[str]) -> str:
    return ", ".join(names[index] for index in skips.without)
