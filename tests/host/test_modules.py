"""Modules load with the search for garbage paused, and their objects are left out of later ones."""

from __future__ import annotations

import gc

import pytest

from compressor.host.modules import loading


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_and_is_as_it_was_afterwards(enabled: bool) -> None:
    was, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), loading():
            kept = [[] for _ in range(1000)]
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() >= frozen + len(kept)
    finally:
        (gc.enable if was else gc.disable)()
