"""Read the options of a ``quantization_config``: known values pass, all others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from compressor.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Options of one method; messages name the method, the option and the place."""

    method: str
    config: Mapping[str, Any]
    place: str

    def given(self, key: str) -> bool:
        """Return whether an option has a value other than none, false or empty."""
        return bool(self.config.get(key))

    def number(self, key: str, known: tuple[int, ...] = (), default: int | None = None) -> int:
        """Return a whole number: one of ``known``, or without these -1 or at least 1."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or (value not in known if known else value == 0 or value < -1):
            self.refuse(key, f"is {value!r:.40}; {'known are ' + _list(known) if known else 'a size or -1 is meant'}")
        return int(value)

    def word(self, key: str, known: tuple[str, ...], default: str) -> str:
        """Return a word, one of ``known``, in lower case."""
        value = self.config.get(key)
        word = str(default if value is None else value).removeprefix("torch.").lower()
        if word not in known:
            self.refuse(key, f"is {value!r:.40}; known are {_list(known)}")
        return word

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise a UsageError about one option."""
        raise UsageError(
            f"{self.place}/config.json: quantization_config of {self.method}: {key} {problem}; give the unquantised "
            "checkpoint, or one that its tool writes with other options"
        )


def _list(known: tuple[Any, ...]) -> str:
    return ", ".join(map(str, known))
