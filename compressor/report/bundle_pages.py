"""Put a report and a model card into a finished bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.export.manifest import CARD, REPORT, finite
from compressor.host.machine import cpu_name
from compressor.report.content import outcome_content, write_file
from compressor.report.model_card import model_card
from compressor.report.outcome import Outcome
from compressor.report.page.document import report_page

if TYPE_CHECKING:
    from compressor.plan.roofline import Roofline

_PEAKS = ("peak_flop", "peak_int8_op", "peak_read_byte", "cached_read_byte")
"""Prices that are the roofs of a roofline (:data:`compressor.plan.prices.UNITS`)."""


def write_bundle_pages(
    bundle: Path, outcome: Outcome, rooflines: Sequence[Roofline], prices: Mapping[str, float], source: Path | None
) -> None:
    """Write ``report.html``, and put what was measured in front of the ``README.md`` that says how to run the bundle.

    Both stand outside the manifest's hashes, as measurements do: what they say differs from run to run.

    Args:
        rooflines: of the plan.
        prices: seconds of a unit of work on this machine.
        source: folder of the dense model, whose card may name a licence; None where there is none.
    Raises:
        CompressorError: a file cannot be written.
    """
    manifest_text = (bundle / "manifest.json").read_bytes()
    manifest = json.loads(manifest_text)
    content = {
        "outcome": outcome_content(outcome),
        "manifest": manifest,
        "manifest_sha256": hashlib.sha256(manifest_text).hexdigest(),
        "rooflines": [dataclasses.asdict(one) for one in rooflines],
        "machine": {"cpu": cpu_name(), "peaks": {key: prices[key] for key in _PEAKS if key in prices}},
    }
    write_file(bundle / REPORT, report_page(finite(content)).encode())
    readme = bundle / CARD  # of the backend; other people's may write none
    how_to_run = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    write_file(readme, model_card(manifest, outcome.metrics, source, how_to_run).encode())
