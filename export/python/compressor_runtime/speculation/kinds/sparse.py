"""Draft with the model's own weights, of which those of small inputs are not read (after Sirius, arXiv:2409.03856).

The library has an entry `sparse`, which takes what `verify` does; its linears have thresholds below which inputs count
as zero.  What verifies has none, so that the text is the model's own.
"""

from __future__ import annotations

from functools import partial

from compressor_runtime.speculation.kinds.kind import kind_of_chains
from compressor_runtime.speculation.kinds.planes import UpperPlanes

FEW_INPUTS = "sparse"
"""Name of the kind and of the entry."""

SPARSE = kind_of_chains(FEW_INPUTS, partial(UpperPlanes, entry=FEW_INPUTS), (FEW_INPUTS,))
"""Drafts of the model itself, without small inputs."""
