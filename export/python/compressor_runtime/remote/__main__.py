"""``python -m compressor_runtime.remote``: serve this device, with what a bundle has."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from compressor_runtime.remote.server import Address, ServeError, serve


def main() -> int:
    """Parse arguments and serve until a signal ends it; return the exit code."""
    parser = argparse.ArgumentParser(description="Serve this device to `compress run --device rpc://HOST:PORT/KEY`.")
    parser.add_argument("--host", default="127.0.0.1", help="Address to listen at [127.0.0.1]; whoever reaches it may "
                        "run programs here: prefer `ssh -R` or `ssh -L` to opening it.")  # fmt: skip
    parser.add_argument("--port", type=int, default=9090, help="Port to listen at [9090]; 0 takes any free one.")
    parser.add_argument("--key", default="device", help="Name of this device, as the address or the tracker has it.")
    parser.add_argument("--tracker", metavar="HOST:PORT", help="TVM's tracker to report to.")
    parser.add_argument("--folder", type=Path, help="Where files go [the temporary folder].")
    parser.add_argument("--runtime", type=Path, help="TVM's run-time library [the one beside this package].")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its files go
    try:
        tracker = None if given.tracker is None else Address.parse(given.tracker)
        serve(Address(given.host, given.port), given.key, tracker, given.folder, given.runtime)
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
