"""The cache folder: where results, schedules and facts about this machine are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``COMPRESS_CACHE_DIR``, else ``compressor`` in the user's cache folder."""
    if named := os.environ.get("COMPRESS_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compressor"
