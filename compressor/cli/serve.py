"""Serve a bundle: by OpenAI's API, or as static files on this machine alone if it was made for browsers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from compressor.errors import UsageError

HOST = "127.0.0.1"
_WEB_FORMAT = "compressor web bundle"


class _Files(SimpleHTTPRequestHandler):
    """Files of one folder, with what a browser wants to be told of them."""

    extensions_map = {  # noqa: RUF012 (as the class above has it)
        **SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
        ".bin": "application/octet-stream",
    }
    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        """Add what makes a page isolated, and so its clocks and memory precise."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def list_directory(self, path: object) -> None:
        """Folders are not listed."""
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Report nothing of a request."""


def make_server(bundle: Path, port: int) -> ThreadingHTTPServer:
    """Make a server of a bundle's folder; ``serve_forever`` runs it, and ``server_port`` is its port.

    Args:
        port: 0 takes any that is free.
    Raises:
        UsageError: the folder holds no bundle for browsers, or the port is taken.
    """
    check_web_bundle(bundle)
    try:
        return ThreadingHTTPServer((HOST, port), partial(_Files, directory=str(bundle.resolve())))
    except OSError as error:
        raise UsageError(f"port {port}: {error.strerror or error}; give another with --port, or 0 for any") from error


def check_web_bundle(bundle: Path) -> None:
    """Raise a UsageError unless a folder holds a bundle for browsers."""
    if not is_web(bundle):
        raise UsageError(f"{bundle}: no bundle for browsers; make one with `target: webgpu` in the recipe")
    if not (bundle / "index.html").is_file():
        raise UsageError(f"{bundle}: a bundle without a page; import its runner.js, see its README.md")


def is_web(bundle: Path) -> bool:
    """Tell whether a bundle was made for browsers.

    Raises:
        UsageError: its manifest cannot be read.
    """
    try:
        manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{bundle}: manifest.json cannot be read: {error}; give a bundle's folder") from error
    return isinstance(manifest, dict) and manifest.get("format") == _WEB_FORMAT


def serve_files(bundle: Path, port: int, options: Mapping[str, Any], announce: Callable[[str], None]) -> None:
    """Serve a bundle for browsers until interrupted.

    Args:
        options: given on the command line, none of which it takes.
        announce: called with its address.
    Raises:
        UsageError: the folder holds no such bundle, the port is taken, or there are options.
    """
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise UsageError(f"{bundle}: a bundle for browsers runs there, and takes no {names}; leave it out")
    with make_server(bundle, port) as server:
        announce(f"http://{HOST}:{server.server_port}/")
        with contextlib.suppress(KeyboardInterrupt):  # how serving ends
            server.serve_forever()


def serve_api(
    bundle: Path, port: int, options: Mapping[str, Any], threads: int | None, announce: Callable[[str], None]
) -> None:
    """Serve a bundle by OpenAI's API until SIGINT, SIGTERM or SIGHUP.

    Args:
        options: fields of :class:`compressor_runtime.server.service.Settings`.
        threads: of the kernels; None takes the physical cores.
        announce: called with its address.
    Raises:
        BundleError: a package is missing, the port is taken, or the bundle cannot be served.
    """
    from compressor_runtime.server.command import key_of_environment, log_to_stderr, serve
    from compressor_runtime.server.service import Settings

    log_to_stderr()
    given = {"api_key": key_of_environment(), **options}
    serve(bundle, Settings(port=port, **given), threads, announce)
