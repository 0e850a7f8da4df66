"""Keep the tensors of jobs in a folder that all workers see: jobs name them, and workers map them into memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import CompressorError, failed_write
from compressor.host.tensor_files import map_safetensors, write_safetensors

_KEY = "$tensor"
_mapped: dict[Path, dict[str, Tensor]] = {}
"""The files of one folder that this process has mapped."""


class Store:
    """A folder of tensors, each of which is written once however many jobs read it.

    Args:
        folder: seen under the same path by all workers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[tuple[object, ...], list[str]] = {}
        self._held: list[Tensor] = []  # an address is reused once its tensor is gone

    def put(self, arguments: Mapping[str, Any]) -> Any:
        """Return arguments as plain data, in which a reference stands for each tensor.

        Raises:
            CompressorError: the folder has no room, or an argument is neither plain data nor a tensor.
        """
        file, fresh = self._folder / f"{len(self._held)}.safetensors", dict[str, Tensor]()
        found = self._referring(arguments, file.name, fresh)
        if fresh:
            try:
                write_safetensors(file, fresh)
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            except OSError as error:
                what = f"{self._folder}: the tensors of a job cannot be written: {error}; free some space"
                raise failed_write(error, what) from error
            self._held += fresh.values()
        return found

    def _referring(self, value: Any, file: str, fresh: dict[str, Tensor]) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if key not in self._places or not value.numel():
                self._places[key] = [str(self._folder / file), str(len(fresh))]
                fresh[str(len(fresh))] = value.detach()
            return {_KEY: self._places[key]}
        if isinstance(value, Mapping):
            return {str(name): self._referring(one, file, fresh) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._referring(one, file, fresh) for one in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CompressorError(f"argument of a job: {value!r:.80} is neither plain data nor a tensor")


def fetched(value: Any) -> Any:
    """Return plain data with tensors in the place of references.

    Raises:
        CompressorError: a file is not seen from here.
    """
    if isinstance(value, dict):
        if _KEY in value:
            file, name = value[_KEY]
            return _tensors(Path(file))[name]
        return {name: fetched(one) for name, one in value.items()}
    return [fetched(one) for one in value] if isinstance(value, list) else value


def _tensors(file: Path) -> dict[str, Tensor]:
    if file not in _mapped:
        if any(other.parent != file.parent for other in _mapped):
            _mapped.clear()  # the folder of an earlier call, which is gone
        try:
            _mapped[file] = map_safetensors(file)
        except OSError as error:
            raise CompressorError(
                f"{socket.gethostname()}: {file} cannot be read: {error.strerror}; set COMPRESS_CACHE_DIR to a folder "
                "that all machines share, where compress runs"
            ) from error
    return _mapped[file]
