"""Put the data folders into the wheel; an editable install uses them where they are."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DataFolders(BuildHookInterface[Any]):
    """Build hook that maps the folders beside the package to where :mod:`compressor.host.resources` looks for them.

    The static ``force-include`` of pyproject.toml would copy the files into editable installs as well, where they would
    hide later changes.  A path that is missing here fails the build.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders to a standard wheel."""
        if version == "editable":
            return
        for folder in ("recipes", "calibration", "export", "models/reference"):
            build_data["force_include"][folder] = f"compressor/_data/{folder}"
        for module in ("compressor_runtime", "compressor_selfcheck.py"):
            build_data["force_include"][f"export/python/{module}"] = module
