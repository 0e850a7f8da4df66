"""Order where TVM leaves it to memory addresses: the same graph must give the same bytes."""

from __future__ import annotations
