"""Compare the bundle with the dense model: time both in turns until the gates are decided, and say where the bundle is
worse.
"""

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
from compressor.host.machine import cpu_name
from compressor.recipe.gates import Gate

LOOKS = (7, 14, 28)
"""Numbers of repeats after which to check whether the gates are decided.  Seven is the smallest that gives an
interval.
"""

_LEAST = 3  # repeats, regardless of their duration
_PATIENCE_S = 120.0  # no repeat begins after that
_PAUSE_S = 0.25  # TVM's worker threads spin for 0.16 s after a call, which would slow the other process down
_UNSTEADY = 0.3  # (max - min) / median
_SLOWER = (  # name, metric, unit, whether more is better
    ("prefill", "prefill_tokens_per_s", "tokens/s", True),
    ("decode", "decode_tokens_per_s", "tokens/s", True),
    ("a forward call", "latency_ms", "ms", False),
)
_LARGER = (  # text, the bundle's metric, the dense model's metric and text
    ("the bundle's weights take", "weight_bytes", "dense_weight_bytes", "the dense model's"),
    ("all files of the bundle take", "bundle_bytes", "dense_weight_bytes", "the dense model's weights"),
    ("running the bundle takes", "peak_rss_bytes", "dense_peak_rss_bytes", "the dense model in PyTorch"),
)


@dataclass(frozen=True)
class Speed:
    """Speed and memory of a bundle and of its dense model.

    Attributes:
        metrics: figures by their JSON names; the dense model's begin with ``dense_``; ``timings`` has the repeats.
        timings: the repeats behind each figure that varies between repeats; both models' come in pairs.
        notes: figures that could not be measured, and why.
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
    """Time a bundle, and with ``dense`` also the dense model in PyTorch eager float32 if it comes from a folder.

    The two take turns, and each is first every other time: a disturbance of the machine that outlasts a repeat slows
    both, and cancels out of their ratios.  Repeats go on until every gate on a timing is decided, up to the last of
    :data:`LOOKS` or for two minutes.

    Args:
        launcher: words put before the command of the bundle's process; the dense model runs without them.
    Raises:
        CompressorError: the bundle does not run.
    """
    if info.hears:
        return Speed({}, {}, ["speed was not measured: text is timed, and this model reads sound"])
    if info.kind == "module":
        return Speed({}, {}, ["speed was not measured: only this run knows the inputs of a plain module"])
    positions = info.max_positions
    prompt = min(128, positions or 128) if info.kind == "encoder" else max(1, min(128, (positions or 256) // 2))

    def worker(path: Path) -> Worker:
        before = launcher if path == bundle else ()
        return Worker(path, threads=threads, prompt_tokens=prompt, new_tokens=min(64, prompt), launcher=before)

    if info.unpacked_bytes:
        note = (
            "the dense model's speed was not measured: PyTorch does not load its checkpoint, which is quantised, alone"
        )
        return replace(_measure(worker, bundle, None, gates), notes=[note])
    if info.source is None or not dense:
        return _measure(worker, bundle, None, gates)
    try:
        return _measure(worker, bundle, info.source, gates)
    except CompressorError as error:  # such as out of memory: the bundle may still run alone
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
            each.repeat()  # a warm-up, which does not count
        found = _until_decided(take, timings, gates)
        metrics: dict[str, Any] = {}
        for prefix, each, taken in zip(("", "dense_"), workers, repeats, strict=False):
            figures = summary(collect(taken), {**each.loaded, **each.finish()})
            metrics.update({f"{prefix}{name}": figure for name, figure in figures.items()})
    metrics.pop("dense_threads", None)  # equals the bundle's
    if any(gate.metric == "load_s" for gate in gates):
        found |= _repeat_loading(lambda: worker(bundle), metrics["load_s"], gates)
        metrics["load_s"] = found["load_s"].median
    return Speed({**metrics, "cpu": cpu_name(), "timings": record(found)}, found)


def _repeat_loading(worker: Callable[[], Worker], first: float, gates: Sequence[Gate]) -> dict[str, Timing]:
    """Time loading in a new process for each repeat, as users load a bundle."""
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
    """Take repeats up to the first of the looks at which all gates on these timings are decided, and return the
    timings.
    """
    begin = time.monotonic()
    taken = 0
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
    """Name each figure in which the bundle is larger or slower than the dense model, with both figures, and say if the
    timings are unreliable.
    """
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
            continue  # a decoder's latency is that of its decode steps, compared as tokens/s
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
