"""Store the tensors of an ONNX model: in the model's file, or beside it where that would grow too large.

``model.onnx`` is one message of protobuf, which ends at 2 GB; external data have no such limit, and can be mapped.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compressor.errors import UsageError

if TYPE_CHECKING:
    from onnx import TensorProto

FILE_NAME, DATA_NAME = "model.onnx", "model.onnx.data"
_ALIGNED = 4096  # bytes: a tensor can be mapped
_SMALL = 1024  # bytes that stay in the model's file: shapes and numbers


def onnx_package() -> Any:
    """Import the package onnx.

    Raises:
        UsageError: it is missing.
    """
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise UsageError("writing ONNX takes the package onnx; install it: pip install 'compressor[onnx]'") from error


class TensorStore:
    """Make the initializers of a model.

    Args:
        folder: where the model is to lie.
        external: larger tensors are written beside the model, one behind another.
    """

    def __init__(self, folder: Path, external: bool) -> None:
        self._onnx = onnx_package()
        self._file = (folder / DATA_NAME).open("wb") if external else None

    def tensor(self, name: str, kind: int, shape: tuple[int, ...], value: NDArray[Any]) -> TensorProto:
        """Store an array's bytes.

        Args:
            kind: type of its elements, a member of ``TensorProto.DataType``.
        """
        proto: TensorProto = self._onnx.TensorProto(name=name, data_type=kind, dims=shape)
        data = np.ascontiguousarray(value)
        if self._file is None or data.nbytes < _SMALL:
            proto.raw_data = data.tobytes()
            return proto
        place = -(-self._file.tell() // _ALIGNED) * _ALIGNED
        self._file.seek(place)
        self._file.write(data.reshape(-1).view(np.uint8).data)
        proto.data_location = self._onnx.TensorProto.EXTERNAL
        for key, text in (("location", DATA_NAME), ("offset", str(place)), ("length", str(data.nbytes))):
            proto.external_data.add(key=key, value=text)
        return proto

    def close(self) -> None:
        """Finish the file of external data."""
        if self._file is not None:
            self._file.close()
