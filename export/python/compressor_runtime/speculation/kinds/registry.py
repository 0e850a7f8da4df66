"""List the kinds of drafts.  Recipes, manifests, command lines and the run-time read them here and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any

from compressor_runtime.speculation.kinds.heads import HEADS_KIND
from compressor_runtime.speculation.kinds.kind import Kind
from compressor_runtime.speculation.kinds.layers import EXIT
from compressor_runtime.speculation.kinds.lookup import LOOKUP
from compressor_runtime.speculation.kinds.planes import PLANES
from compressor_runtime.speculation.kinds.recycling import RECYCLE
from compressor_runtime.speculation.kinds.skips import SELF
from compressor_runtime.speculation.kinds.sparse import SPARSE

KINDS = {kind.name: kind for kind in (LOOKUP, RECYCLE, HEADS_KIND, EXIT, PLANES, SELF, SPARSE)}
"""Each kind by its name."""
AUTO = "auto"
"""All kinds that a bundle serves and that take part, merged into one tree; each goes on while it pays."""
SPECULATIONS = (*KINDS, AUTO)
"""Names that may be asked for."""


def served(entries: Collection[str], facts: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names that may be asked for; none where nothing verifies.

    Args:
        entries: of the library.
        facts: that the manifest states about the model.
    """
    found = [kind.name for kind in KINDS.values() if set(kind.needs) <= set(entries) and set(kind.facts) <= set(facts)]
    return (*found, AUTO) if found else ()


def members(name: str, entries: Collection[str], facts: Collection[str] = ()) -> list[Kind]:
    """Return the kinds that a name stands for; arguments as of :func:`served`."""
    if name != AUTO:
        return [KINDS[name]]
    return [KINDS[one] for one in served(entries, facts) if one != AUTO and KINDS[one].is_automatic]


def prior(source: Hashable) -> float:
    """Return how often a guess is right before any was seen; its source begins with the name of its kind."""
    entry: Any = source
    return KINDS[entry[0]].prior(source)
