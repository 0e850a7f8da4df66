"""Take the fields of a request's JSON one by one, checked; what is left over is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from compressor_runtime.server.errors import ApiError

_MISSING: Any = object()


def read_object(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object.

    Raises:
        ApiError: it is something else.
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is a JSON {type(found).__name__}; give an object")
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


class Fields:
    """The fields of an object, which are taken by name; null stands for one that is left out."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._left = {key: value for key, value in found.items() if value is not None}

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Return a field as it is.

        Raises:
            ApiError: it is missing, and there is no default.
        """
        value = self._left.pop(name, default)
        if value is _MISSING:
            raise ApiError(400, f"{name}: missing", name, "missing_required_parameter")
        return value

    def whole(self, name: str, default: Any, least: int, most: int) -> Any:
        """Return a whole number from ``least`` to ``most``."""
        value = self.take(name, default)
        if value is default:
            return default
        if type(value) is not int or not least <= value <= most:
            raise wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float, above: bool = False) -> float:
        """Return a number from ``least`` (if ``above``, above it) to ``most``."""
        value = self.take(name, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        if not fits or (above and value == least):
            raise wrong(name, value, f"a number {'above' if above else 'from'} {least:g} {'up ' * above}to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return true or false, which is the default."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return value

    def texts(self, name: str, most: int) -> list[str]:
        """Return texts: one, a list of at most so many, or none; empty ones are refused."""
        value = self.take(name, [])
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or len(found) > most or not all(isinstance(x, str) and x for x in found):
            raise wrong(name, value, f"a text that is not empty, or up to {most} of them")
        return found

    def end(self, neutral: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> None:
        """Refuse what was not taken.

        Args:
            neutral: fields that are known, but not served; each may have this value.
            ignored: fields that say something about a request, but change nothing.
        Raises:
            ApiError: a field is unknown, or has another value than may be.
        """
        for name, value in self._left.items():
            if name in ignored:
                continue
            if name not in neutral:
                raise ApiError(
                    400, f"{name!s:.80}: not a parameter of this server; leave it out", name[:80], "unknown_parameter"
                )
            if value != neutral[name] or isinstance(value, bool) is not isinstance(neutral[name], bool):
                raise ApiError(
                    400,
                    f"{name}: this server has none; leave it out, or give {json.dumps(neutral[name])}",
                    name,
                    "unsupported_parameter",
                )


def wrong(name: str, value: Any, wanted: str) -> ApiError:
    """Return the error of a field that has a wrong value."""
    if isinstance(value, float) and not math.isfinite(value):
        shown = "a number too large"
    else:
        shown = (
            json.dumps(value, ensure_ascii=True)[:60] if isinstance(value, bool | float | str) else _described(value)
        )
    return ApiError(400, f"{name}: {shown}; give {wanted}", name, "invalid_value")


def _described(value: Any) -> str:
    if isinstance(value, int):
        return str(value) if abs(value) < 1 << 64 else "a number of more than 64 bits"
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "nothing of the kind"
