"""State the version of this package, and the versions of packages that determine a bundle's content."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

__version__ = "0.1.0"
_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy", "tokenizers", "torch", "transformers")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, the machine's architecture, and the packages that determine a bundle's content."""
    own = {"compressor": __version__, "machine": platform.machine(), "python": platform.python_version()}
    return own | {name: importlib.metadata.version(name) for name in _PACKAGES}
