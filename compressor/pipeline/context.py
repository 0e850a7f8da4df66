"""State that passes share in a run: its inputs, and the records that passes leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from compressor.errors import UsageError
from compressor.executor.jobs import Executor, InProcess
from compressor.progress import Reporter, Silent

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compressor.data.text import Samples
    from compressor.host.tensor_files import Spill
    from compressor.pipeline.segment_cache import SegmentCache
    from compressor.search.front import Front


@dataclass(frozen=True)
class SiteRecord:
    """Record of what a pass did to one linear.

    Attributes:
        site: module name of the linear.
        pass_name: recipe name of the pass.
        format: name of the format that it is stored in now; empty if the weight is still dense (masked, pruned,
            re-shaped) or gone (merged into another).
        bytes_before, bytes_after: bytes of its weight, counted on the tensors (without the bias).
        error: relative squared error, of the site's outputs over the calibration samples if ``error_of`` is "output",
            of the weight if it is "weight".
        rtn_error: the relative squared error of round to nearest; None if the pass does not measure it.
        note: anything unusual that the user should know; usually empty.
        tokens: of the calibration samples that were routed to it, of an expert whose pass looks at samples; else None.
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
    tokens: int | None = None


@dataclass(frozen=True)
class StageRecord:
    """Cost of one stage: stage 0 is the captured graph, then one for each pass.

    Attributes:
        blocks: segments of the graph that the pass worked on.
        reused: number of those segments that an earlier run had finished.
    """

    index: int
    name: str
    seconds: float
    weight_bytes: int
    blocks: int = 0
    reused: int = 0


StepSeconds: TypeAlias = "Callable[[Sequence[GraphModule]], tuple[list[float], str]]"
"""Decoders or networks of images -> seconds of a step, or an image, of each as the target's kernels compute it, and in
words how they were found."""
PeakBytes: TypeAlias = "Callable[[GraphModule, bool], int]"
"""A graph, and whether its inputs count -> the most bytes of activations that its program holds at once."""


@dataclass
class Context:
    """Inputs of a run that passes share, and the records that they leave.

    Attributes:
        samples: calibration samples, or None when the recipe has none.
        seed: of every random choice.
        target: name of the target that the graph will be lowered to.
        reporter: receiver of progress and notes.
        records: one entry for each site and pass, in order.
        stages: one entry for the captured graph and each pass, in order.
        results: cache of finished segments, of earlier runs and of this one; None keeps all in memory.
        state: digest of everything that determines the graph as it is; only with ``results``.
        spill: store for calibration's hidden states that do not fit into memory; None keeps them in memory.
        notes: remarks of passes beside their records, a line each.
        prices: cost of work on this machine, in seconds by unit (:data:`compressor.plan.prices.UNITS`); None if it was
            not measured.
        step_seconds: times steps of decoders (:class:`compressor.run.steps.Steps`); None where no run provides it.
        peak_bytes: counts memory of activations (:class:`compressor.run.steps.Peaks`); None where no run provides it.
        fronts: of searches, for the report.
        executor: runs independent jobs of a pass, such as the scores of candidates.
        dense: the graph before the first linear was packed, for passes with ``needs_dense``; else None.
        blocks, reused: number of segments that the passes worked on so far, and of those that came from ``results``.
    """

    samples: Samples | None = None
    seed: int = 0
    target: str = "x86"
    reporter: Reporter = field(default_factory=Silent)
    records: list[SiteRecord] = field(default_factory=list)
    stages: list[StageRecord] = field(default_factory=list)
    results: SegmentCache | None = None
    state: str = ""
    spill: Spill | None = None
    notes: list[str] = field(default_factory=list)
    prices: Mapping[str, float] | None = None
    step_seconds: StepSeconds | None = None
    peak_bytes: PeakBytes | None = None
    fronts: list[Front] = field(default_factory=list)
    executor: Executor = field(default_factory=InProcess)
    dense: GraphModule | None = None
    blocks: int = 0
    reused: int = 0

    def calibration(self, pass_name: str, purpose: str = "") -> Samples:
        """Return the calibration samples.

        Args:
            purpose: use of the samples, for the error message.
        Raises:
            UsageError: the recipe has no calibration samples.
        """
        if self.samples is None:
            what = f"calibration samples{purpose and ' for the '}{purpose}"
            raise UsageError(f"{pass_name}: needs {what} and the recipe has none; add `calibration:`")
        return self.samples
