"""Serve a bundle: ``python -m compressor_runtime.server BUNDLE``."""

from __future__ import annotations

import sys

from compressor_runtime.server.command import main

if __name__ == "__main__":
    sys.exit(main())
