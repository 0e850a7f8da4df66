"""Start a server: the command line, the socket, and uvicorn."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compressor_runtime.batching.worker import why_turns
from compressor_runtime.bundle import load
from compressor_runtime.errors import BundleError, RequestError
from compressor_runtime.server.embeddings import POOLINGS
from compressor_runtime.server.service import Service, Settings

KEY_VARIABLE = "COMPRESS_API_KEY"
_PACKAGES = ("starlette", "uvicorn", "h11", "jinja2")
_BACKLOG, _MOST_CONNECTIONS = 128, 512
_MORE_SECONDS = 5  # than its requests have a server has to end
_log = logging.getLogger("compressor.server")


def serve(bundle: Path, settings: Settings, threads: int | None, announce: Callable[[str], None]) -> None:
    """Serve a bundle until SIGINT, SIGTERM or SIGHUP.

    Args:
        bundle: its folder.
        threads: worker threads of the kernels; None takes the physical cores.
        announce: called with the API's address when requests are served.
    Raises:
        RequestError: a package is missing, or the port cannot be had.
        BundleError: the bundle cannot be loaded or served.
    """
    check_packages()
    if settings.api_key == "":
        raise RequestError("api-key: an empty one keeps nobody out; give another, or none")
    listener = listen(settings.host, settings.port)  # before the bundle is read, which may take long
    with listener:
        loaded = load(bundle, threads=threads)
        service = Service(loaded, settings)
        if service.worker is not None and (why := why_turns(loaded)):
            _log.warning("requests share no batch, but take turns: %s", why)
        if settings.api_key is None and settings.host not in ("127.0.0.1", "localhost", "::1"):
            _log.warning("anyone who reaches %s may use the model: give --api-key", settings.host)
        server = make_server(service)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        announce(f"http://{host}:{listener.getsockname()[1]}/v1")
        server.run([listener])


def make_server(service: Service) -> Any:
    """Return a uvicorn server, whose ``run`` takes a socket and serves until a signal or ``should_exit``."""
    import uvicorn

    from compressor_runtime.server.app import make_app
    from compressor_runtime.server.protocol import Server, timed_protocol

    settings = service.settings
    config = uvicorn.Config(
        make_app(service),
        http=timed_protocol(settings.head_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=round(settings.grace_s + _MORE_SECONDS),
    )
    return Server(config, service.drain)


def check_packages() -> None:
    """Raise a RequestError unless the packages that serve are here."""
    import importlib.util

    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"serving takes {', '.join(missing)}: pip install 'compressor[serve]', or pip install {' '.join(_PACKAGES)}"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        RequestError: the address is not of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            "127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
    except (OSError, OverflowError, TypeError, ValueError) as error:
        words = f"host {host!r:.100}, port {port}: {error}; give an IP address of this machine, and a port up to 65535"
        raise RequestError(words) from error
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise RequestError(
            f"port {port} of {host}: {error.strerror or error}; give another with --port, or 0 for any"
        ) from error
    return found


def log_to_stderr() -> None:
    """Write the server's log to stderr, a line a request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("compressor.server", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers[:] = [handler]
        logger.propagate = False


def key_of_environment() -> str | None:
    """Return the key that the environment has; an empty one is none."""
    return os.environ.get(KEY_VARIABLE) or None


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a bundle; return the process's exit code."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m compressor_runtime.server", description="Serve a Compressor bundle by OpenAI's API."
    )
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("bundle", nargs="?", type=Path, default=here, help="the bundle's folder (default: %(default)s)")
    for name, kind, meaning in (
        ("host", str, "address to listen on"),
        ("port", int, "0 takes any free one"),
        ("batch", int, "requests at once"),
        ("queue", int, "requests that wait; more get 429"),
        ("context", int, "most tokens of a prompt with its continuation (default: the model's positions)"),
        ("name", str, "of the model (default: the manifest's)"),
        ("max-body", int, "bytes of a request"),
        ("grace-s", int, "seconds that requests have to end at SIGTERM"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=meaning + " (default: %(default)s)" * (default is not None)
        )
    parser.add_argument("--pooling", choices=POOLINGS, help="of an encoder's hidden states (default: the manifest's)")
    parser.add_argument("--api-key", default=key_of_environment(), help=f"that clients give (default: ${KEY_VARIABLE})")
    parser.add_argument("--threads", type=int, help="worker threads (default: the physical cores available)")
    options = vars(parser.parse_args(arguments))
    bundle, threads = options.pop("bundle"), options.pop("threads")
    log_to_stderr()
    try:
        serve(bundle, dataclasses.replace(defaults, **options), threads, lambda url: print(url, flush=True))
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
