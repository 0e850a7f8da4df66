"""Load modules without looking for garbage among the objects that they make."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Pause the search for garbage in cycles while modules are imported, and keep their objects out of later searches.

    PyTorch and TVM make a million objects that stay.  A run spent a sixth of its imports, and a second after them, on
    looking through these for garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
