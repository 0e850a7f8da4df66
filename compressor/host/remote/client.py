"""Call the functions of a device, which :mod:`compressor_runtime.remote.session` registers there."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from compressor_runtime.remote.facts import PROTOCOL

from compressor.errors import NO_ROOM, CompressorError, ResourceError, UsageError
from compressor.host.remote.address import DeviceAddress

CONNECT_S = 15.0
"""Seconds that a device has to answer the first call."""
_SESSION_S = 3600
_SPARE_S = 30.0  # beyond the limit that a call states itself
_TRACKER_MAGIC, _REQUEST = 0x2F271, 4


class LostDeviceError(CompressorError):
    """A device that does not answer, or that has closed the connection."""


class Device:
    """A session with a device.

    Attributes:
        facts: as :func:`compressor_runtime.remote.facts.describe` gives them.

    Args:
        wait_s: seconds that the device has to answer at all.
        session_s: after which it ends the session.
    Raises:
        LostDeviceError: nothing answers there.
        UsageError: what answers is something else, or has another key.
    """

    def __init__(self, address: DeviceAddress, *, wait_s: float = CONNECT_S, session_s: int = _SESSION_S) -> None:
        self.address = address
        self._functions: dict[str, Any] = {}
        self._session: Any = _limited(lambda: _connect(address, wait_s, session_s), 2 * wait_s, address)
        try:
            self.facts: Mapping[str, Any] = self.ask("describe", limit_s=wait_s)
        except AttributeError as error:
            raise UsageError(
                f"{address}: a server of TVM's RPC, but not one that `compress device serve` of this version started"
            ) from error

    @property
    def name(self) -> str:
        """Return the device's name, as it gives it."""
        return str(self.facts["name"])

    def call(self, name: str, *arguments: Any, limit_s: float = _SPARE_S) -> Any:
        """Call a function there.

        Raises:
            LostDeviceError: there is no answer within the limit, or the connection is closed.
        """

        def run() -> Any:
            if name not in self._functions:
                self._functions[name] = self._session.get_function(f"compressor.remote.{name}")
            return self._functions[name](*arguments)

        return _limited(run, limit_s, self.address)

    def ask(self, name: str, *arguments: Any, limit_s: float = _SPARE_S) -> dict[str, Any]:
        """Call a function there that answers with an object.

        Raises:
            LostDeviceError: as for :meth:`call`.
            ResourceError: the device has too little disk or memory.
            CompressorError: it says that something else went wrong there.
        """
        answer: dict[str, Any] = json.loads(self.call(name, *arguments, limit_s=limit_s))
        if "error" in answer:
            free = f"; {self.facts['free_bytes'] / 1e6:.0f} MB were free" if hasattr(self, "facts") else ""
            if answer["errno"] in (errno.ENOMEM, *NO_ROOM):
                raise ResourceError(
                    f"device {self.address}: {answer['error']}{free}; free some there, or start its server with "
                    "another --folder; what was timed is kept, and the same command goes on from there"
                )
            raise CompressorError(f"device {self.address}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the session; the device takes the next client."""
        self._functions.clear()
        self._session = None


def ask_device(address: DeviceAddress) -> Mapping[str, Any]:
    """Ask a device what it is, in a session of its own; see :class:`Device` for errors.

    Raises:
        UsageError: its server is of another version.
    """
    device = Device(address)
    device.close()
    if device.facts.get("protocol") != PROTOCOL:
        raise UsageError(
            f"device {address}: its server speaks version {device.facts.get('protocol')!r:.20} of the protocol, and "
            f"this is {PROTOCOL}; start it there out of a bundle that this version made"
        )
    return device.facts


device_facts = functools.cache(ask_device)
"""Facts of a device, which this process asks for once."""


def _limited(run: Callable[[], Any], limit_s: float, address: DeviceAddress) -> Any:
    """Return what ``run`` returns, if it does so in time; TVM's own calls wait for ever."""
    result: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            result.append(run())
        except BaseException as error:  # raised again below
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    if result:
        return result[0]
    if not failed:
        raise LostDeviceError(
            f"device {address}: no answer within {limit_s:.0f} s; check that it is on, that `compress device serve` "
            "runs there, and that no other client uses it"
        )
    if isinstance(failed[0], CompressorError | AttributeError):
        raise failed[0]
    said = str(failed[0]).strip().splitlines()
    raise LostDeviceError(f"device {address}: {said[-1] if said else type(failed[0]).__name__:.200}") from failed[0]


def _connect(address: DeviceAddress, wait_s: float, session_s: int) -> Any:
    from compressor_runtime.remote.server import ServeError, load_runtime
    from compressor_runtime.vm import tvm_ffi

    try:
        load_runtime(None)
    except ServeError as error:
        raise CompressorError(str(error)) from error
    host, port, key = _resolved(address, wait_s)
    try:
        return tvm_ffi.get_global_func("rpc.Connect")(host, port, f"{key} -timeout={session_s}", False)
    except RuntimeError as error:
        if "key" in str(error):
            raise UsageError(f"device {address}: the server there has another key; see what it printed") from error
        raise


def _resolved(address: DeviceAddress, wait_s: float) -> tuple[str, int, str]:
    """Return host, port and key of the device itself: a tracker is asked for it."""
    try:
        with socket.create_connection((address.host, address.port), wait_s) as asked:
            asked.sendall(struct.pack("<i", _TRACKER_MAGIC))
            with contextlib.suppress(OSError, struct.error):
                if struct.unpack("<i", asked.recv(4, socket.MSG_WAITALL)) == (_TRACKER_MAGIC,):
                    return _from_tracker(asked, address)
    except OSError as error:
        raise LostDeviceError(
            f"device {address}: {error.strerror or error}; check the address, and that `compress device serve` runs "
            "there"
        ) from error
    return address.host, address.port, address.key


def _from_tracker(tracker: socket.socket, address: DeviceAddress) -> tuple[str, int, str]:
    text = json.dumps([_REQUEST, address.key, "", 1]).encode()
    tracker.sendall(struct.pack("<i", len(text)) + text)
    end = time.monotonic() + (tracker.gettimeout() or CONNECT_S)
    try:
        (size,) = struct.unpack("<i", tracker.recv(4, socket.MSG_WAITALL))
        data = b""
        while len(data) < size and time.monotonic() < end:
            data += tracker.recv(size - len(data))
        _, (host, port, key) = json.loads(data)
    except (OSError, ValueError, struct.error) as error:
        raise LostDeviceError(
            f"device {address}: the tracker there has no free device of that key; start `compress device serve "
            f"--tracker {address.host}:{address.port} --key {address.key}` on one, or wait"
        ) from error
    return str(host), int(port), str(key)
