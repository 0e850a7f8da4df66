"""Gather what became of linears: the last record of each, totals of formats, bits of a weight."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a site's name that is a number, such as its layer's."""
_WIDTHS, _NEAR = (8.0, 16.0, 32.0, 64.0), 0.05


def last_records(sites: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a record for each site as it is in the end, with the bytes before the first pass that changed it."""
    dense = {site["site"]: site["bytes_before"] for site in reversed(sites)}
    last = {site["site"]: site for site in sites}
    return [{**site, "bytes_before": dense[name]} for name, site in last.items()]


def totals(sites: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the linears of each format take together, as they are in the end."""
    found: dict[str, dict[str, Any]] = {}
    for site in last_records(sites):
        name = site["format"] or "dense"
        row = found.setdefault(name, {"format": name, "linears": 0, "bytes_before": 0, "bytes_after": 0})
        row["linears"] += 1
        row["bytes_before"] += site["bytes_before"]
        row["bytes_after"] += site["bytes_after"]
    return list(found.values())


def dense_bits(manifest: Mapping[str, Any]) -> float | None:
    """Return the bits that a linear's weight took in the dense model; None where a bundle does not say.

    All bytes by all parameters are near the width of most weights; a few, such as norms, may be wider.
    """
    mean = _bits(manifest.get("dense_weight_bytes"), manifest)
    return next((width for width in _WIDTHS if mean is not None and abs(mean / width - 1) < _NEAR), mean)


def bits_a_weight(manifest: Mapping[str, Any]) -> float | None:
    """Return all stored bytes of weights, scales and tables included, in bits for each parameter of the dense model."""
    return _bits(manifest.get("weight_bytes"), manifest)


def _bits(size_bytes: int | None, manifest: Mapping[str, Any]) -> float | None:
    parameters = manifest.get("model", {}).get("parameters")
    return 8 * size_bytes / parameters if size_bytes and parameters else None
