"""Hold a plan: what a run will do and cost on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.host.machine import Memory
from compressor.pipeline.pipeline import TrainingNeeds
from compressor.pipeline.site_plan import SitePlan
from compressor.plan.durations import Estimate
from compressor.plan.memory import StageMemory
from compressor.plan.roofline import Roofline


@dataclass(frozen=True)
class PassPlan:
    """Prediction of what one pass will do.

    Attributes:
        index: from 1, as in the run.
        name: recipe name of the pass.
        sites: a plan for each linear that was dense before it; empty where the pass says nothing of itself.
        weight_bytes: of the model after it.
        cost_known: False for a pass without ``plan``: its time, memory and effect are not in the figures.
        runs_samples: it takes the calibration samples through the whole graph, beside what the sites' plans say.
        notes: what it has to say beside the sites.
        training: runs of the graph that it takes, if it trains.
        forward_samples: how many of them, each time counted, where it does.
        timed_graphs: graphs that it makes kernels of, to time them.
        is_exact: the samples decide nothing that bytes depend on.
    """

    index: int
    name: str
    sites: tuple[SitePlan, ...]
    weight_bytes: int
    cost_known: bool
    runs_samples: bool = False
    notes: tuple[str, ...] = ()
    training: TrainingNeeds | None = None
    forward_samples: float = 0.0
    timed_graphs: int = 0
    is_exact: bool = True


@dataclass(frozen=True)
class Plan:
    """Prediction of what a run will do and cost on this machine.

    Attributes:
        model, architecture: of the model.
        target: that kernels are made for.
        passes: in order.
        dense_weight_bytes, weight_bytes: before and after.
        bundle_bytes: all files of the bundle.
        memory: the most that each stage takes.
        peak_rss_bytes: resident memory of the run's process and those it starts, at its worst.
        needed_bytes: the part of it that has to be there; the rest are pages of files.
        available: memory that there is now.
        spill: hidden states go to disk, since memory is short.
        dense_speed: the dense model is timed for comparison; False where it would not fit.
        disk: by folder, bytes that the run writes and that are free; folders on one disk share both.
        stages: seconds by stage.
        seconds: of all of them, from the command to its end.
        rooflines: bounds on the bundle's speed on this machine.
        device, device_rooflines: the device that was asked for, and bounds on the bundle's speed there, modelled on
            published figures; empty without one.
        notes: what the user should know.
        advice: settings that would make a run fit that does not.
    """

    model: str
    architecture: str
    target: str
    passes: tuple[PassPlan, ...]
    dense_weight_bytes: int
    weight_bytes: int
    bundle_bytes: int
    memory: tuple[StageMemory, ...]
    peak_rss_bytes: int
    needed_bytes: int
    available: Memory
    spill: bool
    dense_speed: bool
    disk: Mapping[str, tuple[int, int]]
    stages: Mapping[str, Estimate]
    seconds: Estimate
    rooflines: tuple[Roofline, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...] = ()
    device: str = ""
    device_rooflines: tuple[Roofline, ...] = ()

    @property
    def disk_bytes(self) -> int:
        """Bytes that the run writes, on all disks."""
        return sum(written for written, _ in self.disk.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**dataclasses.asdict(self), "disk_bytes": self.disk_bytes}
