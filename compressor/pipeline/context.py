"""Carry what passes share in a run: its inputs, and the records that passes leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compressor.errors import UsageError
from compressor.progress import Reporter, Silent

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compressor.data.text import Samples
    from compressor.host.tensor_files import Spill
    from compressor.pipeline.segment_cache import Results


@dataclass(frozen=True)
class SiteRecord:
    """What a pass did to one linear.

    Attributes:
        site: module name of the linear.
        pass_name: recipe name of the pass.
        format: name of the format it is stored in now; empty where the weight is dense still (masked, pruned,
            re-shaped) or is not there any more (merged into another).
        bytes_before, bytes_after: bytes of its weight, counted on the tensors (without the bias).
        error: relative squared error: of the site's outputs over the calibration samples where ``error_of``
            is "output", of the weight where it is "weight".
        rtn_error: the same error for round to nearest; None where the pass does not know it.
        note: whatever the user should know, empty when all is as asked for.
    """

    site: str
    pass_name: str
    format: str
    bytes_before: int
    bytes_after: int
    error: float
    error_of: str
    rtn_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class StageRecord:
    """Cost of one stage: 0 is the captured graph, then one for each pass.

    Attributes:
        blocks: stretches of the graph that the pass worked on.
        reused: those of them that an earlier run had finished.
    """

    index: int
    name: str
    seconds: float
    weight_bytes: int
    blocks: int = 0
    reused: int = 0


@dataclass
class Context:
    """What passes share: inputs of the run, and the records that they leave.

    Attributes:
        samples: calibration samples, or None when the recipe has none.
        seed: of every random choice.
        target: name of the target that the graph will be lowered to.
        reporter: progress and notes.
        records: one entry for each site and pass, in order.
        stages: one entry for the captured graph and each pass, in order.
        results: blocks that earlier runs finished, and where this one's are kept; None keeps all in memory.
        state: digest of everything that led to the graph as it is; with ``results`` only.
        spill: where calibration puts hidden states that memory is too short for; None keeps them in memory.
        notes: what passes have to say beside their records, a line each.
        prices: what work costs on this machine, seconds by unit (:data:`compressor.plan.prices.UNITS`); None where it
            was not measured.
        dense: the graph before the first linear was packed, for passes that say ``needs_dense``; else None.
        blocks, reused: blocks that the passes worked on so far, and those that came from ``results``.
    """

    samples: Samples | None = None
    seed: int = 0
    target: str = "x86"
    reporter: Reporter = field(default_factory=Silent)
    records: list[SiteRecord] = field(default_factory=list)
    stages: list[StageRecord] = field(default_factory=list)
    results: Results | None = None
    state: str = ""
    spill: Spill | None = None
    notes: list[str] = field(default_factory=list)
    prices: Mapping[str, float] | None = None
    dense: GraphModule | None = None
    blocks: int = 0
    reused: int = 0

    def calibration(self, pass_name: str, purpose: str = "") -> Samples:
        """The calibration samples.

        Raises:
            UsageError: there are none; says what for, if that is given.
        """
        if self.samples is None:
            what = f"calibration samples{purpose and ' for the '}{purpose}"
            raise UsageError(f"{pass_name}: needs {what} and the recipe has none; add `calibration:`")
        return self.samples
