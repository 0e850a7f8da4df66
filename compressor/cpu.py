"""What the processor is and can do."""

from __future__ import annotations
