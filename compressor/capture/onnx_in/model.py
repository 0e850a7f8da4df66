"""Read an ONNX file; refuse operators that are not served by the name of the node, before any weight is read."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compressor.capture.onnx_in.operators.table import EXTRA_DOMAIN, REFUSED, load
from compressor.capture.onnx_in.stored import DTYPES, NARROW, Place, read_tensor, strip_weights
from compressor.errors import ModelFileError, UsageError, first_line
from compressor.recipe.sources import ONNX_SUFFIX

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

OLDEST_OPSET, NEWEST_OPSET = 13, 23
_STANDARD = ("", "ai.onnx")
_SHOWN = 3
_ATTRIBUTES = {"MatMulNBits": {"K", "N", "accuracy_level", "bits", "block_size", "weight_prequantized"}}


@dataclass(frozen=True)
class OnnxModel:
    """A checked model.

    Attributes:
        file: where it was read.
        graph: without the larger weights.
        opset: version of the standard's operators.
        places: of the weights that lie in this file or another, by initializer.
        files: all that the model consists of.
    """

    file: Path
    graph: GraphProto
    opset: int
    places: dict[str, Place]
    files: tuple[Path, ...]

    def tensor(self, proto: TensorProto) -> Tensor:
        """Return an initializer, mapped where it can be."""
        try:
            return read_tensor(proto, self.places.get(proto.name))
        except ModelFileError as error:
            raise ModelFileError(f"{self.file}: {error}") from error


def is_onnx(path: object) -> bool:
    """Return whether a path names an ONNX file, by its ending."""
    return isinstance(path, str | Path) and Path(path).suffix.lower() == ONNX_SUFFIX


def read_model(file: Path) -> OnnxModel:
    """Read an ONNX file without its weights, and check all that can be known without them.

    Raises:
        UsageError: the package ``onnx`` is missing.
        ModelFileError: the file is missing or not ONNX, its opset or an operator is not served, or its external data
            are missing or elsewhere.
    """
    onnx: Any = _package()
    if not file.is_file():
        raise ModelFileError(f"{file}: no such file; give an ONNX file" + (", not a folder" if file.is_dir() else ""))
    try:
        message, places = strip_weights(file)
        model = onnx.ModelProto.FromString(message)
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error.strerror}") from error
    except ModelFileError:
        raise
    except Exception as error:  # protobuf's own class depends on its version
        raise ModelFileError(f"{file}: not an ONNX file ({first_line(error)}); fetch it again") from error
    if not model.HasField("graph") or not model.opset_import:
        raise ModelFileError(f"{file}: not an ONNX file: it states no graph or no opset; fetch it again")
    if model.functions:
        try:
            model = importlib.import_module("onnx.inliner").inline_local_functions(model)
        except Exception as error:
            raise ModelFileError(f"{file}: its functions cannot be inlined ({first_line(error)})") from error
    opset = _opset(file, model)
    _check_nodes(file, model.graph, opset)
    _check_values(file, model.graph)
    external = {proto.name: _external_place(file, proto) for proto in _external(model.graph)}
    places = places | external
    files = tuple(dict.fromkeys([file, *(place.file for place in external.values())]))
    return OnnxModel(file, model.graph, opset, places, files)


def _package() -> Any:
    try:
        onnx = importlib.import_module("onnx")
        importlib.import_module("onnx.defs")
    except ImportError as error:
        raise UsageError(
            "reading ONNX files takes the package onnx; install it with: pip install 'compressor[onnx]'"
        ) from error
    return onnx


def _opset(file: Path, model: ModelProto) -> int:
    versions = {"" if entry.domain in _STANDARD else entry.domain: entry.version for entry in model.opset_import}
    opset = versions.get("")
    if opset is None:
        domains = ", ".join(sorted(versions))
        raise ModelFileError(f"{file}: states no opset of the ONNX standard, only of {domains}; that is not served")
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelFileError(
            f"{file}: opset {opset} is too {'old' if opset < OLDEST_OPSET else 'new'}: {OLDEST_OPSET} to "
            f"{NEWEST_OPSET} are read; export it again, or convert it with onnx.version_converter.convert_version"
        )
    return int(opset)


def _check_nodes(file: Path, graph: GraphProto, opset: int) -> None:
    """Refuse operators that are not served, and nodes that are not as their operator's schema says."""
    refused = [f"{node_name(node)}: {why}" for node in graph.node if (why := _why_not(node, opset))]
    if refused:
        more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
        raise ModelFileError(f"{file}: {'; '.join(refused[:_SHOWN])}{more}")
    known = {value.name for value in graph.input} | {proto.name for proto in graph.initializer} | {""}
    for node in graph.node:
        if absent := [name for name in node.input if name not in known]:
            raise ModelFileError(f"{file}: {node_name(node)} reads {absent[0]!r}, which no node in front of it makes")
        if twice := [name for name in node.output if name and name in known]:
            raise ModelFileError(f"{file}: {node_name(node)} makes {twice[0]!r}, which there is already")
        known.update(node.output)
    if absent := [value.name for value in graph.output if value.name not in known]:
        raise ModelFileError(f"{file}: no node makes its output {absent[0]!r}")


def _why_not(node: NodeProto, opset: int) -> str:
    from onnx import AttributeProto, defs

    if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
        return "control flow is not captured; unroll the loop, or fix the branch, where the model is exported"
    if node.domain not in _STANDARD and (node.domain != EXTRA_DOMAIN or node.op_type not in _ATTRIBUTES):
        return f"it is of the domain {node.domain!r}; operators of the ONNX standard are read"
    if node.op_type in REFUSED:
        return REFUSED[node.op_type]
    if node.op_type not in load():
        return "this operator is not read"
    if node.op_type in _ATTRIBUTES:
        allowed, least, most = _ATTRIBUTES[node.op_type], 3, 6
    else:
        try:
            schema = defs.get_schema(node.op_type, opset, "")
        except defs.SchemaError:
            return f"opset {opset} has no such operator"
        if schema.deprecated:
            return f"opset {opset} has it no longer"
        allowed, least, most = set(schema.attributes), schema.min_input, schema.max_input
        if lacking := [n for n, a in schema.attributes.items() if a.required and n not in _names(node.attribute)]:
            return f"its attribute {lacking[0]!r} is missing"
    if unknown := sorted(_names(node.attribute) - allowed):
        return f"opset {opset} gives it no attribute {unknown[0]!r}"
    if not least <= len(node.input) <= most:
        return f"it has {len(node.input)} inputs, and takes {least} to {most}"
    return ""


def _names(attributes: Iterable[Any]) -> set[str]:
    return {attribute.name for attribute in attributes}


def _check_values(file: Path, graph: GraphProto) -> None:
    """Refuse inputs and outputs that are not tensors of numbers, and weights of other kinds."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelFileError(f"{file}: {name!r} is a sparse initializer; store it as a dense one")
    for what, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            kind = value.type.WhichOneof("value")
            if kind not in ("tensor_type", None) or (kind is None and what == "input"):
                kind = (kind or "value without a type").removesuffix("_type").replace("_", " ")
                raise ModelFileError(f"{file}: its {what} {value.name!r} is a {kind}; tensors are read")
            held = value.type.tensor_type.elem_type
            if held not in DTYPES and kind is not None:
                raise ModelFileError(f"{file}: its {what} {value.name!r} holds {_type_name(held)}; numbers and "
                                     "booleans are read")  # fmt: skip
    for proto in graph.initializer:
        if proto.data_type not in DTYPES and proto.data_type not in NARROW:
            raise ModelFileError(f"{file}: {proto.name!r} holds {_type_name(proto.data_type)}; numbers and booleans "
                                 "are read")  # fmt: skip
        if any(size < 0 for size in proto.dims):
            raise ModelFileError(f"{file}: {proto.name!r} has the shape {list(proto.dims)}; fetch the file again")


def _type_name(kind: int) -> str:
    from onnx import TensorProto

    return TensorProto.DataType.Name(kind).lower() if kind in TensorProto.DataType.values() else f"type {kind}"


def node_name(node: NodeProto) -> str:
    """Return how messages name a node: its operator, and its own name or its first output's."""
    own = node.name or next((name for name in node.output if name), "")
    return f"{node.op_type} {own!r}"


def _external(graph: GraphProto) -> Iterator[TensorProto]:
    from onnx import TensorProto

    held = [*graph.initializer]
    held += [a.t for node in graph.node for a in node.attribute if a.HasField("t")]
    for proto in held:
        if proto.data_location == TensorProto.EXTERNAL:
            yield proto


def _external_place(file: Path, proto: TensorProto) -> Place:
    """Find external data: in a file below the model's folder, links included, that is long enough."""
    said = {entry.key: entry.value for entry in proto.external_data}
    location, what = said.get("location", ""), f"{file}: external data of {proto.name!r}"
    path = Path(location)
    if not location or not location.isprintable() or path.is_absolute() or ".." in path.parts or "\\" in location:
        raise ModelFileError(f"{what} lie at {location!r:.80}, not below the model's folder; do not trust this file")
    found = file.parent / path
    if not found.is_file():
        raise ModelFileError(f"{what}: {found} is missing; fetch it, and put it there")
    # The hub's cache consists of links into one folder of contents: they may lead where the model's own link leads.
    homes = (file.parent.resolve(), file.resolve().parent)
    if not any(found.resolve().is_relative_to(home) for home in homes):
        raise ModelFileError(f"{what}: {found} is a link out of the model's folder; do not trust this file")
    try:
        offset = int(said.get("offset", 0))
        size_bytes = int(said.get("length", found.stat().st_size - offset))
    except ValueError as error:
        raise ModelFileError(f"{what}: offset or length is not a number; fetch the model again") from error
    if offset < 0 or size_bytes < 0 or offset + size_bytes > found.stat().st_size:
        raise ModelFileError(f"{what}: bytes {offset} to {offset + size_bytes} of {found}, which has "
                             f"{found.stat().st_size}; fetch it again")  # fmt: skip
    return Place(found, offset, size_bytes)
