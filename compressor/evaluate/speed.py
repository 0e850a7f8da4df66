"""Measure speed and memory, each model in its own process (:mod:`compressor.evaluate.speed_worker`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UsageError
from compressor.evaluate.timing import Timing, collect, record
from compressor.host.child import Child

_MOST_WARM_UPS, _SETTLED = 8, 0.9


class Worker(Child):
    """A process that has loaded one model and measures it on demand; ``loaded`` has ``load_s`` and ``threads``.

    Args:
        path: a bundle, or a Hugging Face folder, which runs in PyTorch eager float32.
        threads: number of threads; None takes the physical cores.
        prompt_tokens: length of a decoder's prompt, or of an encoder's text.
        new_tokens: single steps of a decoder after the prompt.
        launcher: words put before the process's command, such as an emulator.
        drafts: kind, and a text that is continued, for :meth:`drafts`.
    Raises:
        CompressorError: the child failed, now or later; its message and exit code are passed on.
    """

    def __init__(
        self,
        path: Path,
        *,
        threads: int | None,
        prompt_tokens: int,
        new_tokens: int,
        launcher: Sequence[str] = (),
        drafts: tuple[str, Path] | None = None,
    ) -> None:
        if prompt_tokens < 1 or new_tokens < 1:
            raise UsageError("bench: prompt tokens and new tokens must be at least 1")
        numbers = [str(n) for n in (prompt_tokens, new_tokens, threads or 0)]
        asked = [] if drafts is None else ["--speculate", drafts[0], "--text", str(drafts[1].absolute())]
        super().__init__(
            "bench", "compressor.evaluate.speed_worker", [str(path.absolute()), *numbers, *asked], launcher
        )

    def repeat(self) -> dict[str, float]:
        """Measure once and return the figures by their JSON names."""
        return self.ask("repeat")  # type: ignore[no-any-return]

    def drafts(self) -> dict[str, float]:
        """Time texts with drafts beside plain ones: the figures of
        :func:`compressor_runtime.speculation.measure.measure_drafts`.
        """
        return self.ask("drafts")  # type: ignore[no-any-return]

    def finish(self) -> dict[str, Any]:
        """Return the figures known after all repeats: peak memory, and for a bundle's decoder the bytes read per token
        and the memory bandwidth.
        """
        return self.ask("finish")  # type: ignore[no-any-return]


def bench(
    path: Path,
    *,
    threads: int | None = None,
    prompt_tokens: int = 128,
    new_tokens: int = 64,
    repeats: int = 7,
    drafts: tuple[str, Path] | None = None,
) -> dict[str, Any]:
    """Measure a bundle, or a Hugging Face folder in PyTorch eager float32, one sequence at a time.

    Args:
        drafts: kind, and a text whose passages are continued with drafts and without; None times no drafts.
    Returns:
        Medians over the repeats, after a warm-up: ``latency_ms`` (one decode step, or one call of an
        encoder); for decoders also ``prefill_tokens_per_s``, ``decode_tokens_per_s`` and ``first_token_ms``;
        ``*_spread`` is (max - min) / median, of two repeats and more.
        ``timings``: the samples, and confidence intervals of the medians.
        ``peak_rss_bytes``, ``load_s``, ``threads``; for a bundle's decoder also ``bytes_per_token`` (weights, keys and
        values that one decode step reads), ``read_bandwidth_bytes_per_s`` and ``bandwidth_fraction``; with drafts what
        :func:`compressor_runtime.speculation.measure.measure_drafts` finds.
    Raises:
        CompressorError: the child failed; its message and exit code are passed on.
    """
    if repeats < 1:
        raise UsageError("bench: repeats must be at least 1")
    if drafts is not None and not (path / "manifest.json").is_file():
        raise UsageError(f"{path}: holds no bundle, and only bundles draft tokens; leave --speculate out")
    with Worker(path, threads=threads, prompt_tokens=prompt_tokens, new_tokens=new_tokens, drafts=drafts) as worker:
        _warm_up(worker)
        timings = collect([worker.repeat() for _ in range(repeats)])
        drafted = {} if drafts is None else worker.drafts()
        facts = {
            **drafted,
            **worker.loaded,
            **worker.finish(),
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
        }
        return {**summary(timings, facts), "timings": record(timings)}


def _warm_up(worker: Worker) -> None:
    """Repeat until it gets hardly faster: PyTorch needs several turns."""
    before = worker.repeat()["latency_ms"]
    for _ in range(_MOST_WARM_UPS):
        now = worker.repeat()["latency_ms"]
        if now > _SETTLED * before:
            return
        before = now


def summary(timings: Mapping[str, Timing], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return medians, spreads and facts by their JSON names."""
    result: dict[str, Any] = {name: timing.median for name, timing in timings.items()}
    for name, timing in timings.items():
        if len(timing.samples) < 2:  # of one, nobody knows
            continue
        result[f"{name.removesuffix('_tokens_per_s').removesuffix('_ms')}_spread"] = timing.spread
    result.update(facts)
    if "bytes_per_token" in facts:
        bytes_per_s = facts["bytes_per_token"] * result["decode_tokens_per_s"]
        result["bandwidth_fraction"] = bytes_per_s / facts["read_bandwidth_bytes_per_s"]
    return result
