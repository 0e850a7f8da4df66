"""Listen, shake hands as TVM's RPC servers do, and give each client a process of its own.

A client says how long its session may take; a session that takes longer, or whose kernels end its process, is cleared
away, and the server takes the next client.  One client is served at a time: a device times one thing at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor_runtime.remote.kernels import die_with_parent
from compressor_runtime.remote.session import register
from compressor_runtime.vm import tvm_ffi

MAGIC, MISMATCH, TRACKER_MAGIC = 0xFF271, 0xFF273, 0x2F271  # of TVM's protocol
_PUT, _UPDATE_INFO, _PENDING = 3, 5, 7  # its tracker's codes
_PATIENCE = 3  # times that the tracker is asked, until a client that asked it for this device is late
_HANDSHAKE_S, _ASK_TRACKER_S, _POLL_S = 10.0, 2.0, 0.02
_LONGEST_S = 3600.0  # of a session whose client states no limit


class ServeError(RuntimeError):
    """A server that cannot be started as it was asked for; the message says why."""


@dataclass(frozen=True)
class Address:
    """A machine and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``HOST:PORT``.

        Raises:
            ServeError: it is written otherwise.
        """
        if (found := re.fullmatch(r"\[?([^\[\]/]+?)\]?:(\d{1,5})", text)) is None or int(found[2]) > 65535:
            raise ServeError(f"{text!r:.80}: write it as HOST:PORT, such as 192.168.1.20:9190")
        return cls(found[1], int(found[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def serve(
    address: Address, key: str, tracker: Address | None = None, folder: Path | None = None, runtime: Path | None = None
) -> None:
    """Serve this device until the process is ended.

    Args:
        address: to listen at; port 0 takes any free one, which is printed.
        key: of the device; letters, digits, ``_``, ``-`` and ``.``.
        tracker: to report to; None serves clients that know the address.
        folder: for files; None takes the temporary folder.
        runtime: TVM's run-time library; None looks beside this package, and where `import tvm` would.
    Raises:
        ServeError: the key, the port, the folder or the library does not do.
    """
    if not re.fullmatch(r"[\w.-]{1,80}", key):
        raise ServeError(f"key {key!r:.90}: give letters, digits, `_`, `-` and `.`")
    load_runtime(runtime)
    place = Path(tempfile.gettempdir()) if folder is None else folder
    try:
        own = Path(tempfile.mkdtemp(prefix="compressor-device-", dir=place)).resolve()
    except OSError as error:
        raise ServeError(
            f"{place}: no files can be made there: {error.strerror}; name another with --folder"
        ) from error
    try:
        with _listening(address) as listening:
            port = listening.getsockname()[1]
            print(f"serving {key} at {Address(address.host, port)}", flush=True)
            _Server(listening, port, key, tracker, own).run()
    finally:
        shutil.rmtree(own, ignore_errors=True)


def load_runtime(path: Path | None) -> None:
    """Load TVM's run-time library, unless it is loaded; see :func:`serve`."""
    if tvm_ffi.get_global_func("rpc.ServerLoop", allow_missing=True) is not None:
        return
    name = Path("lib") / "libtvm_runtime.so"
    places = [Path(__file__).parents[2] / name]
    if (tvm := importlib.util.find_spec("tvm")) is not None and tvm.origin:
        places.append(Path(tvm.origin).parent / name)
    found = next((place for place in places if place.is_file()), None) if path is None else path
    if found is None:
        raise ServeError(f"{places[0]}: no run-time library of TVM; name one with --runtime")
    try:
        ctypes.CDLL(str(found), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ServeError(f"{found}: cannot be loaded: {error}") from error


def _listening(address: Address) -> socket.socket:
    try:
        family, kind, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(4)
    except OSError as error:
        raise ServeError(
            f"{address}: cannot listen there: {error.strerror}; choose another --host or --port"
        ) from error
    return listening


class _Server:
    def __init__(self, listening: socket.socket, port: int, key: str, tracker: Address | None, folder: Path) -> None:
        self._listening, self._port, self._key, self._folder = listening, port, key, folder
        self._tracker = None if tracker is None else _Tracker(tracker, key, port)

    def run(self) -> None:
        while True:
            match = self._key if self._tracker is None else self._tracker.offer()
            if not select.select([self._listening], [], [], None if self._tracker is None else _ASK_TRACKER_S)[0]:
                continue
            client, address = self._listening.accept()
            with client:
                try:
                    seconds = self._shake_hands(client, match)
                except (OSError, struct.error, ValueError):
                    continue  # not a client: a port scan, or one that went away
                if seconds is not None:
                    if self._tracker is not None:
                        self._tracker.taken()
                    print(f"client {address[0]}", flush=True)
                    self._session(client, seconds)

    def _shake_hands(self, client: socket.socket, match: str) -> float | None:
        """Return the seconds that the client's session may take; None if it asks for another device."""
        client.settimeout(_HANDSHAKE_S)
        if struct.unpack("<i", _receive(client, 4))[0] != MAGIC:
            raise ValueError("not a client of TVM's RPC")  # such as one that asks whether this is a tracker
        (size,) = struct.unpack("<i", _receive(client, 4))
        if not 0 < size < 4096:
            raise ValueError("a key of no sense")
        asked, *options = _receive(client, size).decode().split()
        if asked != f"client:{match}":
            client.sendall(struct.pack("<i", MISMATCH))
            return None
        own = f"server:{self._key}".encode()
        client.sendall(struct.pack("<ii", MAGIC, len(own)) + own)
        client.settimeout(None)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        limits = [float(option.removeprefix("-timeout=")) for option in options if option.startswith("-timeout=")]
        return min([limit for limit in limits if limit > 0], default=_LONGEST_S)

    def _session(self, client: socket.socket, seconds: float) -> None:
        """Serve one client in a process of its own, with a folder that is gone afterwards."""
        scratch = Path(tempfile.mkdtemp(prefix="session-", dir=self._folder))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.setsid()
                die_with_parent()
                self._listening.close()
                if self._tracker is not None:
                    self._tracker.forget()
                register(scratch, self._folder / "files")
                tvm_ffi.get_global_func("rpc.ServerLoop")(client.detach())
            os._exit(0)
        client.close()
        end = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                print(f"the session took more than {seconds:.0f} s, and was ended", flush=True)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it had started
        shutil.rmtree(scratch, ignore_errors=True)


class _Tracker:
    """The connection to TVM's tracker, made anew where it breaks."""

    def __init__(self, address: Address, key: str, port: int) -> None:
        self._address, self._key, self._port = address, key, port
        self._socket: socket.socket | None = None
        self._match, self._asked_for = "", 0

    def offer(self) -> str:
        """Say that the device is free, and return the key that its next client will have."""
        while True:
            try:
                if self._socket is None:
                    self._connect()
                if self._match:
                    is_pending = self._match in self._ask([_PENDING])
                    self._asked_for = 0 if is_pending else self._asked_for + 1
                if not self._match or self._asked_for > _PATIENCE:  # whoever asked for it has not come
                    self._match, self._asked_for = f"{self._key}:{secrets.token_hex(8)}", 0
                    self._ask([_PUT, self._key, [self._port, self._match], None])
                return self._match
            except (OSError, ValueError, struct.error) as error:
                print(f"tracker {self._address}: {error}; trying again", flush=True)
                self.forget()
                time.sleep(_ASK_TRACKER_S)

    def taken(self) -> None:
        """Have the next client get another key."""
        self._match = ""

    def forget(self) -> None:
        """Close the connection: the tracker strikes the device off."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._match = None, ""

    def _connect(self) -> None:
        self._socket = socket.create_connection((self._address.host, self._address.port), _HANDSHAKE_S)
        self._socket.sendall(struct.pack("<i", TRACKER_MAGIC))
        if struct.unpack("<i", _receive(self._socket, 4))[0] != TRACKER_MAGIC:
            raise ValueError("not a tracker of TVM's")
        self._ask([_UPDATE_INFO, {"key": f"server:{self._key}", "addr": [None, self._port]}])

    def _ask(self, question: list[Any]) -> Any:
        assert self._socket is not None
        text = json.dumps(question).encode()
        self._socket.sendall(struct.pack("<i", len(text)) + text)
        (size,) = struct.unpack("<i", _receive(self._socket, 4))
        if not 0 < size < 1 << 24:
            raise ValueError("an answer of no sense")
        return json.loads(_receive(self._socket, size))


def _receive(source: socket.socket, size: int) -> bytes:
    """Receive so many bytes.

    Raises:
        ConnectionError: there are fewer.
    """
    data = bytearray()
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)
