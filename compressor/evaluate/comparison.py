"""The bundle against the dense model: both timed in turns until the gates are decided, and what is worse, in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.errors import CompressorError
from compressor.evaluate.gates import decided, timing_of
from compressor.evaluate.speed import Worker, summary
from compressor.evaluate.timing import CONFIDENCE, Timing, collect, record
from compressor.graph.model import ModelInfo
from compressor.recipe.gates import Gate

LOOKS = (7, 14, 28)
"""Repeats after which one looks whether the gates are decided.  Seven are the fewest that give an interval."""

_LEAST = 3  # repeats, however long one takes
_PATIENCE_S = 120.0  # no further repeat is begun after that
_PAUSE_S = 0.25  # TVM's worker threads look for more to do for 0.16 s after a call, which would slow the other down
_UNSTEADY = 0.3  # (max - min) / median
_SLOWER = (  # what is compared, its unit, and whether more of it is better
    ("prefill", "prefill_tokens_per_s", "tokens/s", True),
    ("decode", "decode_tokens_per_s", "tokens/s", True),
    ("a forward call", "latency_ms", "ms", False),
)
_LARGER = (  # what is compared, its figure, the dense model's
    ("the bundle's weights take", "weight_bytes", "dense_weight_bytes", "the dense model's"),
    ("all files of the bundle take", "bundle_bytes", "dense_weight_bytes", "the dense model's weights"),
    ("running the bundle takes", "peak_rss_bytes", "dense_peak_rss_bytes", "the dense model in PyTorch"),
)


@dataclass(frozen=True)
class Speed:
    """How fast a bundle and its dense model are, and how much memory that takes.

    Attributes:
        metrics: figures by their JSON names; the dense model's begin with ``dense_``; ``timings`` has the repeats.
        timings: the repeats behind the figures that differ from one to the next; both models' come in pairs.
        notes: what could not be measured, and why.
    """

    metrics: Mapping[str, Any]
    timings: Mapping[str, Timing]
    notes: Sequence[str] = ()


def measure_speed(
    bundle: Path,
    info: ModelInfo,
    gates: Sequence[Gate] = (),
    threads: int | None = None,
    dense: bool = True,
    launcher: Sequence[str] = (),
) -> Speed:
    """Time a bundle, and with ``dense`` the dense model in PyTorch eager float32 where it comes from a folder.

    The two take turns, and each is first every other time: what disturbs the machine for longer than a repeat meets
    both, and cancels out of their ratios.  Repeats go on, up to the last of :data:`LOOKS` or for two minutes, until
    every gate on a timing is decided.

    Args:
        launcher: what stands before the command of the bundle's process; the dense model runs without it.
    Raises:
        CompressorError: the bundle does not run.
    """
    if info.kind == "module":
        return Speed({}, {}, ["speed was not measured: only this run knows the inputs of a plain module"])
    positions = info.max_positions
    prompt = min(128, positions or 128) if info.kind == "encoder" else max(1, min(128, (positions or 256) // 2))

    def worker(path: Path) -> Worker:
        before = launcher if path == bundle else ()
        return Worker(path, threads=threads, prompt_tokens=prompt, new_tokens=min(64, prompt), launcher=before)

    if info.source is None or not dense:
        return _measure(worker, bundle, None, gates)
    try:
        return _measure(worker, bundle, info.source, gates)
    except CompressorError as error:  # out of memory, say: no reason to lose the bundle, if that runs alone
        return replace(
            _measure(worker, bundle, None, gates), notes=[f"the dense model's speed was not measured: {error}"]
        )


def _measure(worker: Callable[[Path], Worker], bundle: Path, dense: Path | None, gates: Sequence[Gate]) -> Speed:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(path)) for path in (bundle, dense) if path is not None]
        repeats: list[list[dict[str, float]]] = [[] for _ in workers]

        def take() -> None:
            turns = list(zip(workers, repeats, strict=True))
            for each, taken in turns if len(repeats[0]) % 2 == 0 else reversed(turns):
                time.sleep(_PAUSE_S)
                taken.append(each.repeat())

        def timings() -> dict[str, Timing]:
            return {
                f"{prefix}{name}": timing
                for prefix, taken in zip(("", "dense_"), repeats, strict=False)
                for name, timing in collect(taken, len(LOOKS)).items()
            }

        for each in workers:
            each.repeat()  # the first does not count
        found = _until_decided(take, timings, gates)
        metrics: dict[str, Any] = {}
        for prefix, each, taken in zip(("", "dense_"), workers, repeats, strict=False):
            figures = summary(collect(taken), {**each.loaded, **each.finish()})
            metrics.update({f"{prefix}{name}": figure for name, figure in figures.items()})
    metrics.pop("dense_threads", None)  # the same
    if any(gate.metric == "load_s" for gate in gates):
        found |= _repeat_loading(lambda: worker(bundle), metrics["load_s"], gates)
        metrics["load_s"] = found["load_s"].median
    return Speed({**metrics, "timings": record(found)}, found)


def _repeat_loading(worker: Callable[[], Worker], first: float, gates: Sequence[Gate]) -> dict[str, Timing]:
    """Each in a new process, as users load a bundle."""
    seconds: list[float] = []

    def take() -> None:
        if not seconds:
            seconds.append(first)
            return
        with worker() as loaded:
            seconds.append(loaded.loaded["load_s"])

    return _until_decided(take, lambda: {"load_s": Timing(tuple(seconds), len(LOOKS))}, gates)


def _until_decided(
    take: Callable[[], None], timings: Callable[[], dict[str, Timing]], gates: Sequence[Gate]
) -> dict[str, Timing]:
    """Take repeats up to the first of the looks at which all gates on these timings are decided."""
    begin, taken = time.monotonic(), 0
    for look in LOOKS:
        while taken < look and (taken < _LEAST or time.monotonic() - begin < _PATIENCE_S):
            take()
            taken += 1
        found = timings()
        held = [
            timing for gate in gates if (timing := timing_of(gate, found)) is not None and not decided(gate, timing)
        ]
        if not held or taken < look:
            break
    return found


def comparisons(metrics: Mapping[str, Any], timings: Mapping[str, Timing]) -> list[str]:
    """What is larger or slower than dense, in words, with both figures; and whether the timings can be relied on."""
    notes = []
    for what, key, dense_key, dense_name in _LARGER:
        ours, dense = metrics.get(key), metrics.get(dense_key)
        if ours is not None and dense is not None and ours >= dense:
            notes.append(f"{what} {ours:,} bytes, no less than {dense_name}: {dense:,}")
    spread = max((value for key, value in metrics.items() if key.endswith("_spread")), default=0.0)
    if spread > _UNSTEADY:
        notes.append(f"timings varied by {spread:.0%} between repeats: the machine is busy, and speeds are uncertain")
    for what, key, unit, more_is_better in _SLOWER:
        if key == "latency_ms" and "decode_tokens_per_s" in metrics:
            continue  # a decoder's is that of decoding
        ours, dense = metrics.get(key), metrics.get(f"dense_{key}")
        if ours is not None and dense is not None and (ours < dense if more_is_better else ours > dense):
            notes.append(
                f"{what} is slower than the dense model in PyTorch: {ours:.4g} against {dense:.4g} {unit}"
                + _certainty(timings.get(key), timings.get(f"dense_{key}"))
            )
    return notes


def _certainty(ours: Timing | None, dense: Timing | None) -> str:
    ends = ours.over(dense).interval if ours is not None and dense is not None else None
    if ends is None:
        return ""
    doubt = ", which may be chance" if ends[0] <= 1 <= ends[1] else ""
    return f" ({ends[0]:.3g}x to {ends[1]:.3g}x dense at {CONFIDENCE:.0%} confidence{doubt})"
