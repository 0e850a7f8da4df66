"""Where the data folders that ship with Compressor are: in an installed wheel, or in a checkout."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from compressor.errors import CompressorError

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of this package: the one place that asks where the code lies."""
Kind = Literal["recipes", "calibration", "models", "export"]


def resource(kind: Kind) -> Path:
    """Return the folder that holds the shipped ``kind``.

    A wheel carries the folders as ``compressor/_data/<kind>``; in a checkout (an editable install, or the
    repository's root on the path) they are the siblings of the package.

    Raises:
        CompressorError: the installation is incomplete.
    """
    installed, checkout = PACKAGE / "_data" / kind, PACKAGE.parent / kind
    if installed.is_dir():
        return installed
    if (PACKAGE.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    raise CompressorError(f"{installed}: missing; the installation is incomplete; install compressor again")


def nearest_shipped_model(name: str) -> str | None:
    """Return the shipped model that somebody who wrote ``name`` may have meant; None if none is near."""
    shipped = sorted(path.name for path in resource("models").iterdir() if path.is_dir())
    return next(iter(get_close_matches(name[:80], shipped, n=1, cutoff=0.75)), None)


def runtime_files() -> dict[str, Path]:
    """Return the Python files that every bundle gets: name in the bundle -> source.

    ``compressor_runtime.py`` starts the package beside it: ``python compressor_runtime.py`` in a bundle's folder.

    Raises:
        CompressorError: the installation is incomplete.
    """
    python = resource("export") / "python"
    package = python / "compressor_runtime"
    modules = {path.relative_to(python).as_posix(): path for path in sorted(package.rglob("*.py"))}
    starts = {"compressor_runtime.py": package / "__main__.py"}
    return starts | modules | {"compressor_selfcheck.py": python / "compressor_selfcheck.py"}
