"""Run a server of a bundle on a thread, and call it by its socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from compressor_runtime.server.command import listen, make_server
from compressor_runtime.server.service import Service, Settings

JSON = {"content-type": "application/json"}


class Running:
    """A server that runs."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port, self.url = service, port, f"http://127.0.0.1:{port}/v1"

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body of an answer; what is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            sent = body if body is None or hasattr(body, "__next__") or isinstance(body, bytes) else json.dumps(body)
            given = {**JSON, **(headers or {})}
            connection.request(method, path, sent, given, encode_chunked="transfer-encoding" in given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()

    def metric(self, name: str) -> float:
        """Return a value of /metrics."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("GET", "/metrics")[2], re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def wait_for(self, name: str, value: float, seconds: float = 10) -> None:
        """Wait until a metric has a value."""
        limit = time.monotonic() + seconds
        while (found := self.metric(name)) != value:
            assert time.monotonic() < limit, f"{name} is {found}, not {value}"
            time.sleep(0.02)


@contextlib.contextmanager
def serving(bundle: Any, **settings: Any) -> Iterator[Running]:
    """Serve a loaded bundle."""
    service = Service(bundle, Settings(port=0, **settings))
    server, listener = make_server(service), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield Running(service, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
