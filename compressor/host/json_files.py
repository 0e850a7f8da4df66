"""Read JSON files with limits on their size, before anything is built or opened by what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressor.errors import CaptureError

_LARGEST_BYTES = 64 << 20  # the index of a model of 100,000 tensors takes a tenth of it


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CaptureError: it is not a regular file, too large, or something else than a JSON object.
    """
    try:
        if not file.is_file():
            raise CaptureError(f"{file}: missing, or no regular file; fetch it again")
        with file.open("rb") as stream:
            data = stream.read(_LARGEST_BYTES + 1)
        if len(data) > _LARGEST_BYTES:
            raise CaptureError(f"{file}: cannot be used (larger than {_LARGEST_BYTES >> 20} MiB); fetch it again")
        content = json.loads(data.decode())
    except (OSError, RecursionError, ValueError) as error:
        raise CaptureError(f"{file}: cannot be used ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CaptureError(f"{file}: cannot be used (not a JSON object); fetch it again")
    return content
