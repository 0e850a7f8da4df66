"""How much memory a run takes, stage by stage.

Mapped are pages of files (weights, the cache's packed weights, the bundle): they count as resident memory, and the
kernel drops them when memory is short.  All else has to be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compressor.formats.packing import PIECE_ELEMENTS
from compressor.plan.prices import Prices
from compressor.plan.streaming import Streaming

MODEL_ERROR = 0.15
"""How far off the peak may be, as a fraction: see benchmarks/plan_accuracy.py."""

# Fitted to runs (benchmarks/plan_accuracy.py): what libraries take when they are first used.
_CAPTURE_BYTES = 112 << 20  # torch.export, the model's class, sympy
_NODE_BYTES = 40_000  # a node of the graph, with its fake tensors and provenance
_TEXT_BYTES = 120 << 20  # datasets, pyarrow, the tokenizer
_TOKEN_BYTES = 48  # a token while text is read: a Python number in a list, twice
_COMPILE_BYTES = 70 << 20  # LLVM, and TVM's modules
_LOWER_NODE_BYTES = 60_000
_TUNING_BYTES = 48 << 20  # copies of a kernel's operands
_NUMERICS_BYTES = 150 << 20  # what PyTorch's threads and numerical libraries hold once samples have run
_KEPT = 0.1  # of what passes freed, what the allocator does not give back
_KEPT_MOST_BYTES = 300 << 20  # large blocks are given back
_BUNDLE_BYTES = 25 << 20  # a session of the run-time, beside its weights
_DENSE_BYTES = 110 << 20  # the model's class and modules, and PyTorch's first forward call
_SCORING_BYTES = 8 * 5  # float64 of two models, and their differences, a logit


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage at its worst.

    Attributes:
        stage: its name.
        held_bytes: of this process, without mapped files.
        mapped_bytes: pages of mapped files, of this process and those it starts.
        least_mapped_bytes: those of them that are in use at once.
        child_bytes: of processes that it starts, without mapped files.
    """

    stage: str
    held_bytes: int
    mapped_bytes: int = 0
    least_mapped_bytes: int = 0
    child_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """With all pages that will be mapped when there is room."""
        return self.held_bytes + self.mapped_bytes + self.child_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that the stage cannot do without."""
        return self.held_bytes + self.least_mapped_bytes + self.child_bytes


@dataclass(frozen=True)
class Amounts:
    """Sizes that the memory of a run depends on.

    Attributes:
        nodes: of the captured graph.
        lowered_nodes: of all programs that are lowered.
        text_tokens: tokens that are read; 0 without text.
        passes: (name, streaming or None, arithmetic's bytes) of each pass.
        evaluation: of the dense model; None without text.
        logits: of one window, scored or not.
        largest: elements of the largest packed linear.
        largest_operand_bytes: what tuning copies at least once.
        weight_bytes, dense_weight_bytes: as stored.
        dense_float_bytes: the dense model's parameters in float32, ties counted once.
        child_activation_bytes: logits, keys and values of the timed prompt.
        spill: whether hidden states lie on disk.
        dense_speed: whether the dense model is timed.
    """

    nodes: int
    lowered_nodes: int
    text_tokens: int
    passes: Sequence[tuple[str, Streaming | None, int]]
    evaluation: Streaming | None
    logits: int
    largest: int
    largest_operand_bytes: int
    weight_bytes: int
    dense_weight_bytes: int
    dense_float_bytes: int
    child_activation_bytes: int
    spill: bool
    dense_speed: bool


def memory_stages(amounts: Amounts, prices: Prices) -> list[StageMemory]:
    """Return the memory of each stage of a run, in order."""
    a = amounts
    base = prices.all_bytes + _CAPTURE_BYTES + _NODE_BYTES * a.nodes
    stages = [StageMemory("capture", base)]
    if a.text_tokens:
        base += _TEXT_BYTES + 8 * a.text_tokens
        stages.append(StageMemory("text", base + _TOKEN_BYTES * a.text_tokens))
    kept = 0
    for name, streaming, arithmetic in a.passes:
        hidden = 0 if a.spill or streaming is None else streaming.live_bytes
        working = streaming.working_bytes + _NUMERICS_BYTES if streaming is not None else arithmetic
        mapped = streaming.weight_bytes if streaming is not None else 0
        stages.append(StageMemory(name, base + kept + hidden + working, mapped, mapped))
        kept = max(kept, min(_KEPT_MOST_BYTES, int(_KEPT * (hidden + working))))
    base += kept
    base += _COMPILE_BYTES + _LOWER_NODE_BYTES * a.lowered_nodes
    operands = max(_TUNING_BYTES, a.largest_operand_bytes)
    stages.append(StageMemory("compile", base + operands))
    stages.append(StageMemory("write", base + 8 * min(a.largest, PIECE_ELEMENTS), a.largest, a.largest))
    # The process that runs the bundle maps its weights; one linear's at a time are in use.
    bundle = prices.bundle_bytes + _BUNDLE_BYTES + a.child_activation_bytes
    weights, least = a.weight_bytes, min(a.weight_bytes, a.largest_operand_bytes)
    stages.append(StageMemory("check", base, weights, least, bundle))
    if a.evaluation is not None:
        hidden = 0 if a.spill else a.evaluation.live_bytes
        held = base + hidden + max(a.evaluation.working_bytes, _SCORING_BYTES * a.logits)
        mapped = a.evaluation.weight_bytes
        stages.append(StageMemory("evaluate", held, weights + mapped, least + mapped, bundle))
    children = bundle
    if a.dense_speed:
        weights += a.dense_weight_bytes  # the checkpoint's pages, beside what it is turned into
        children += prices.dense_bytes + _DENSE_BYTES + a.dense_float_bytes + a.child_activation_bytes
    stages.append(StageMemory("time", base, weights, least, children))
    return stages


def peak(stages: Iterable[StageMemory]) -> StageMemory:
    """Return the stage with the highest peak, in bytes."""
    return max(stages, key=lambda stage: stage.peak_bytes)


def needed(stages: Iterable[StageMemory]) -> StageMemory:
    """Return the stage that needs the most memory at the least."""
    return max(stages, key=lambda stage: stage.needed_bytes)
