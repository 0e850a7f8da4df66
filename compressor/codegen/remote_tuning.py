"""Choosing schedules by timing them on a device that is reached over TVM's RPC (``--device rpc://HOST:PORT/KEY``).

A candidate is compiled and linked here, and called there in a process of its own.  The database's entries name the
device; what was timed before it was lost is kept, so that the next run goes on from there.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray

from compressor.codegen.isa import Isa
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.tuning import S, Tuner, fields_of
from compressor.errors import CompressorError
from compressor.host.remote.address import DeviceAddress
from compressor.host.remote.client import Device, LostDeviceError

_LIMIT_S = 20.0
"""Seconds that all calls of one candidate may take."""
_BACK_S, _AGAIN_S = 30.0, 2.0
_LOSSES = 2
"""Times that a device may be lost over one candidate, which then counts as failed."""


class RemoteSession:
    """A device for the time of a compilation: connected when it is first asked, and again when it was lost.

    Args:
        facts: of the device, as it tells them.
        limit_s: seconds that a candidate may take there.
        back_s: seconds that a lost device has to come back.
    """

    def __init__(
        self, address: DeviceAddress, facts: Mapping[str, Any], limit_s: float = _LIMIT_S, back_s: float = _BACK_S
    ) -> None:
        self.address, self.limit_s, self._back_s = address, limit_s, back_s
        self.name, self.cores = str(facts["name"]), int(facts["cores"])
        self.is_emulated = bool(facts["emulator"])
        self._device: Device | None = None

    def device(self) -> Device:
        """Return the connected device.

        Raises:
            LostDeviceError: it does not come back in time.
        """
        end = time.monotonic() + self._back_s
        while self._device is None:
            try:
                self._device = Device(self.address)
            except LostDeviceError:
                if time.monotonic() > end:
                    raise
                time.sleep(_AGAIN_S)
        return self._device

    def close(self) -> None:
        """Let the device take other clients."""
        if self._device is not None:
            self._device.close()
        self._device = None


@dataclass
class RemoteTuner(Tuner):
    """Choose schedules by what a device takes; where it is emulated, the first one that runs.

    Attributes:
        session: with the device.
        link: links objects into a shared library for it.
    """

    session: RemoteSession | None = None
    link: Callable[[str, Sequence[str]], None] | None = None
    _timed: list[str] = field(default_factory=list)

    @classmethod
    def make(
        cls,
        mode: str,
        target: tvm.target.Target | None,
        isa: Isa,
        threads: int | None,
        suffix: str,
        pinned: Mapping[str, Mapping[str, Any]] | None,
        session: RemoteSession,
        link: Callable[[str, Sequence[str]], None],
    ) -> RemoteTuner:
        """Make one for a level; ``target`` is None where the device does not have it.

        Args:
            threads: None takes the device's cores.
        """
        count = threads or session.cores
        machine = f"{isa.name}|{session.name}|{count} threads"
        return cls(mode, count, target, machine, suffix=suffix, pinned=pinned, session=session, link=link)

    def seconds(self, kernel: str, candidates: Sequence[S], build: Any, operands: Any) -> list[float | None]:
        """Return the seconds of a call of each candidate on the device; None of one that did not run there.

        Raises:
            LostDeviceError: the device was lost, and did not come back.
            ResourceError: it has too little disk or memory.
            CompressorError: no candidate runs there.
        """
        arrays = [np.ascontiguousarray(array) for array in operands()]
        times: list[float | None] = []
        failures: list[str] = []
        for number, schedule in enumerate(candidates):
            seconds, reason = self._one(kernel, self._library(build(schedule)), arrays, is_first=number == 0)
            times.append(seconds)
            if seconds is None:
                failures.append(f"{fields_of(schedule)} {reason}")
        assert self.session is not None
        name = self.session.name
        if all(seconds is None for seconds in times):
            raise CompressorError(
                f"device {self.session.address} ({name}): none of the {len(times)} candidates of {kernel} runs there: "
                f"{failures[0]}; name a level that it has (`target: {{arm: {{isa: neon}}}}`)"
            )
        self.notes += [f"{kernel}: on {name}, {failure}; it was not chosen" for failure in failures]
        self._timed.append(kernel)
        return times

    def fastest(self, kernel: str, space: Sequence[S], build: Any, operands: Any, estimate: Any) -> S:
        """Return the fastest of ``space``, as far as the mode has them timed; under an emulator, nothing is."""
        schedule = super().fastest(kernel, space, build, operands, estimate)
        assert self.session is not None
        if self.session.is_emulated and self._timed:
            self.tried = []
            name = self.session.name
            note = f"schedules: candidates ran on {name}, whose times say nothing: the first that runs is taken"
            self.notes += [] if note in self.notes else [note]
        return schedule

    def best(self, times: Sequence[float | None]) -> int:
        """Return the index of the fastest; under an emulator, whose times say nothing, of the first that ran."""
        assert self.session is not None
        is_first = self.session.is_emulated
        return next(i for i, t in enumerate(times) if t is not None) if is_first else super().best(times)

    def told(self, times: Sequence[float | None]) -> Sequence[float | None]:
        """Return the times; none of an emulator's."""
        assert self.session is not None
        return [None] * len(times) if self.session.is_emulated else times

    def _one(
        self, kernel: str, library: bytes, arrays: Sequence[NDArray[Any]], is_first: bool
    ) -> tuple[float | None, str]:
        """Return a candidate's seconds, or why there are none."""
        assert self.session is not None
        for _ in range(_LOSSES):
            is_new = is_first or self.session._device is None
            try:
                device = self.session.device()
                if is_new:
                    _send(device, arrays)
                limit_s = self.session.limit_s
                request = json.dumps({"threads": self.threads, "limit_s": limit_s})
                answer = device.ask("time", request, library, limit_s=2 * limit_s + 30)
            except LostDeviceError as error:
                self.session.close()
                try:
                    self.session.device()
                except LostDeviceError as gone:
                    raise LostDeviceError(
                        f"{error}, while {kernel} was timed, and it did not come back; {len(self._timed)} kernels that "
                        f"were timed in this run are kept in {self.database.path}: the same command goes on from there"
                    ) from gone
                note = f"{self.session.name} was lost while {kernel} was timed, and came back"
                self.notes += [] if note in self.notes else [note]
                is_first = True
                continue
            if "seconds" in answer:
                return float(answer["seconds"]), ""
            if "signal" in answer:
                number = int(answer["signal"])
                return None, f"was ended by signal {number} ({signal.strsignal(number)})"
            return None, str(answer.get("failed", "gave no answer"))
        return None, f"lost the device {_LOSSES} times"

    def _library(self, func: tvm.tirx.PrimFunc) -> bytes:
        """Compile and link one candidate."""
        assert self.link is not None
        module = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
        compiled = tvm.compile(module, target=self.target, tir_pipeline=PIPELINE).mod
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "kernel.o"
            compiled.write_to_file(str(made), "o")
            self.link(str(made.with_suffix(".so")), [str(made)])
            return made.with_suffix(".so").read_bytes()


def _send(device: Device, arrays: Sequence[NDArray[Any]]) -> None:
    for index, array in enumerate(arrays):
        header = {"index": index, "dtype": str(array.dtype), "shape": array.shape}
        device.ask("operand", json.dumps(header), array.tobytes(), limit_s=120)
