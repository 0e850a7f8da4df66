"""Export a module as a graph, or name the line of the model that prevents it."""

from __future__ import annotations

import inspect
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram, _trace
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule
from torch.fx.experimental import _config
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from compressor.capture.arithmetic.sizes import reads_numbers, sizes_stay_numbers
from compressor.capture.attention.interface import ATTENTION_NAME
from compressor.errors import CaptureError, first_line
from compressor.graph.caches import empty_past
from compressor.graph.kinds.example_sources import source_call
from compressor.graph.model import ModelInfo
from compressor.host.resources import PACKAGE

_SHAPES: Any = _config  # of torch.fx, whose types leave `patch` out
_OWN = PACKAGE
_TORCH = Path(torch.__file__).parent
_STANDARD = Path(traceback.__file__).parent


def export_program(
    module: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any, name: str, root: nn.Module | None = None
) -> ExportedProgram:
    """Export without strict tracing; in-place operators become functional ones.

    Args:
        module, args, dynamic_shapes: as for torch.export.export.
        name: of the model, for messages.
        root: the model inside, when the module is a wrapper of ours.
    Raises:
        CaptureError: names the module and the line that stopped it.
    """
    with torch.no_grad(), error_context(root or module, name, is_plain=root is None):
        program = _export(module, args, dynamic_shapes)
        if reads_numbers(program.graph):
            with (
                sizes_stay_numbers(module),
                suppress(Exception),
            ):  # where it cannot run so, the numbers are refused later
                program = _export(module, args, dynamic_shapes)
        if any(_writes(node) for node in program.graph.nodes):
            program = program.run_decompositions({})
    changed = [s.target for s in program.graph_signature.output_specs if s.kind is not OutputKind.USER_OUTPUT]
    if changed:
        raise CaptureError(
            f"{name} changes {', '.join(map(str, changed))} as it runs; only pure functions are captured"
        )
    return program


def _export(module: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> ExportedProgram:
    """Export, and once more where PyTorch's own operators asked whether a size is 1, which the model's code does not.

    They ask to leave out what tensors of one entry do not need; the second time they take no size for 1.  What the
    model's code asks for is refused both times.
    """
    given: dict[str, Any] = {"dynamic_shapes": dynamic_shapes, "strict": False}
    try:
        return torch.export.export(module, args, **given)
    except UserError as error:
        if "!= 1" not in str(error):
            raise
        with _SHAPES.patch(backed_size_oblivious=True):
            return torch.export.export(module, args, **given)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def reexport(graph: GraphModule) -> ExportedProgram:
    """Export a captured (and perhaps rewritten) graph again, with the same symbolic sizes, for lowering."""
    info: ModelInfo = graph.meta["model"]
    args, shapes = graph.meta["inputs"] if info.kind == "module" else example_call(info)
    return export_program(graph, args, shapes, info.name)


def example_call(info: ModelInfo, limited: bool = False) -> tuple[tuple[Any, ...], Any]:
    """Return example arguments of a text model's graph, and their ``dynamic_shapes``.

    Args:
        limited: steps of a decoder are shorter than the model's positions (a mask may be a table of them).
    """
    batch, longest = Dim("batch", min=1), info.max_positions or None
    ids = torch.zeros(2, 5, dtype=torch.int64)
    if info.kind == "encoder":
        sequence = Dim("sequence", min=1, max=longest)
        return (ids, torch.ones(2, 5, dtype=torch.float32)), ({0: batch, 1: sequence}, {0: batch, 1: sequence})
    # Those of speech may look positions up in a table that they would make longer.
    most = longest - 1 if limited and longest else longest if info.hears else None
    sequence = Dim("sequence", min=1, max=most)
    rows, capacity = Dim("rows", min=1), Dim("capacity", min=1)
    cache_shape = [{0: batch, 2: capacity}] * info.layers
    states = [[{0: batch}] * len(info.states)] if info.states else []
    args = (ids, torch.arange(5), torch.zeros(3, dtype=torch.int64), *empty_past(info, 2, 7))
    source, source_shapes = source_call(info.encoder_source, batch)
    return (*args, *source), (
        {0: batch, 1: sequence},
        {0: sequence},
        {0: rows},
        cache_shape,
        cache_shape,
        *states,
        *source_shapes,
    )


def shapes_of_arguments(module: nn.Module, args: tuple[Any, ...], shapes: Any) -> tuple[Any, ...] | None:
    """Return ``dynamic_shapes`` with one entry for each argument, those behind ``*args`` too; None where none vary."""
    if shapes is None:
        return None
    parameters = inspect.signature(module.forward).parameters.values()
    given = [shapes.get(p.name) for p in parameters] if isinstance(shapes, dict) else list(shapes)
    rest = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL), None)
    if rest is not None and rest < len(given):
        given[rest:] = given[rest] or ()
    return (*given, *[None] * len(args))[: len(args)]


def unlift(program: ExportedProgram, rename: Mapping[str, str], names: list[str]) -> tuple[fx.Graph, dict[str, Tensor]]:
    """Return a graph that reads parameters with ``get_attr`` and takes the original arguments.

    Args:
        program: an exported program.
        rename: name of each parameter and buffer in the program -> name in the graph; tied ones share one.
        names: argument names of the graph's forward.
    Returns:
        The graph, with fake values and module names in ``meta``, and the constants that the export lifted.
    """
    graph, constants = fx.Graph(), dict[str, Tensor]()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    env: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, fx.Node] = {}
    for node in program.graph.nodes:
        spec = specs.get(node.name) if node.op == "placeholder" else None
        if spec is None or spec.kind is InputKind.USER_INPUT:
            env[node] = graph.node_copy(node, env.__getitem__)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            target = rename.get(spec.target, spec.target)
            if spec.kind is InputKind.CONSTANT_TENSOR:
                constants[target] = program.constants[spec.target]
            if target not in attributes:
                attributes[target] = graph.create_node("get_attr", target)
                attributes[target].meta = dict(node.meta)
            env[node] = attributes[target]
        else:
            raise CaptureError(f"the model uses {spec.target}, an object ({spec.kind.name}) that a graph cannot hold")
        env[node].meta = _renamed(env[node].meta, rename)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, program.call_spec.in_spec, program.call_spec.out_spec)))
    return graph, constants


def flatten_outputs(graph: fx.Graph, structure: pytree.TreeSpec, names: list[str], module: str) -> list[str] | None:
    """Make a graph return one tensor or a tuple of tensors, whatever its module returns.

    Args:
        structure: of what the module returns.
        names: of the graph's arguments.
        module: its name, for messages.
    Returns:
        Dotted names of the tensors, where the module returns them in dictionaries or other classes.
    Raises:
        CaptureError: it returns something that is not a tensor.
    """
    leaves = graph.output_node().args[0]
    assert isinstance(leaves, tuple | list)
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(len(leaves))), structure))[0]
    found = [".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in paths]
    for leaf, name in zip(leaves, found, strict=True):
        if not isinstance(leaf, fx.Node):
            where = f" as {name!r}" if name else ""
            raise CaptureError(f"{module} returns {leaf!r:.80}{where}; a bundle returns tensors: leave it out")
    if not leaves:
        raise CaptureError(f"{module} returns no tensor")
    named = any(not hasattr(key, "idx") for path, _ in paths for key in path)
    flat = pytree.tree_structure(0 if len(leaves) == 1 and (named or not paths[0][0]) else tuple(range(len(leaves))))
    info = cast("_PyTreeCodeGen", graph._codegen).pytree_info
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, info.in_spec, flat)))
    return found if named else None


def _renamed(meta: dict[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Remove the wrapper around the model (its name is ``rename['']``) from the module names of the provenance."""
    wrapper = rename.get("")
    stack = meta.get("nn_module_stack")
    if wrapper is None or stack is None:
        return meta
    inner = {
        key: (path.removeprefix(wrapper).removeprefix("."), cls)
        for key, (path, cls) in stack.items()
        if path.startswith(wrapper)
    }
    return {**meta, "nn_module_stack": inner}


@contextmanager
def error_context(root: nn.Module | None, name: str, is_plain: bool = False) -> Iterator[None]:
    """Turn every error inside into a CaptureError that names the module, file and line."""
    try:
        with quiet_fake_tensors():
            yield
    except CaptureError as error:
        raise CaptureError(f"{name}: {error}") from error
    except Exception as error:
        where = _where(error, root) or (type(root).__name__ if root is not None else name)
        reason = _fixed_sizes(error) or _branch(error)
        reason = reason or f"{type(error).__name__}: {first_line(error, 'no reason given')}"
        raise CaptureError(f"{name}: cannot be captured: {where}: {reason}; {_advice(error, is_plain)}") from error


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Silence what torch logs and prints where it cannot follow an operator or a branch; our errors say it better."""
    logs = [
        logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
    ]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        # torch.export prints the graph so far when it gives up; stderr is also that of the run's progress.
        with patch.object(_trace, "print", lambda *_, **__: None, create=True):
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


_FIXED_SIZE = ("specialized", "Constraints violated", "Cannot create Dim")
"""In what PyTorch says of sizes that the code fixes, or rounds to whole blocks."""


def _fixed_sizes(error: Exception) -> str:
    """Return which sizes the code fixes, in our words; empty if the error is another."""
    if not any(word in str(error) for word in _FIXED_SIZE):
        return ""
    named = re.search(r"\((\w+(?:, \w+)*)\)!", str(error))
    sizes = named[1] if named else "a size that varies"
    return f"the code does not hold for all sizes of {sizes}: it fixes them, or rounds them to whole blocks"


def _branch(error: Exception) -> str:
    """Return that a line branches on a value, in our words; empty if the error is another."""
    is_branch = "DataDependent" in type(error).__name__ or "data-dependent" in str(error)
    return "the line branches on a tensor's value" if is_branch else ""


def _advice(error: Exception, is_plain: bool) -> str:
    if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
        return (
            "the model picks its attention from a table of its own, not through transformers' attention interface; "
            "capture it as a module with example inputs"
        )
    if _branch(error):
        return "make it depend on shapes only, or capture the module around it"
    if "Constraint" in type(error).__name__ or any(word in str(error) for word in _FIXED_SIZE):
        if is_plain:
            return "a size that was to stay symbolic is fixed by the code: fix it in dynamic_shapes too"
        return "capture the part you need as a module with an example of its inputs, of the sizes that you need"
    if is_plain:
        return "check that the module runs on the example; rewrite the line, or capture a part of the module"
    return (
        "decoders must take position_ids and a cache and use transformers' attention interface; for anything else, "
        "rewrite the line, or capture the part you need as a module with an example of its inputs"
    )


def _where(error: BaseException, root: nn.Module | None) -> str:
    """Return ``module (Class) at file:line`` of the model's own deepest frame, or an empty string."""
    names = {} if root is None else {id(module): path for path, module in root.named_modules()}
    module_text = line_text = ""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    for link in reversed(chain):  # the outermost exception with a frame of the model wins
        for frame, line in traceback.walk_tb(link.__traceback__):
            owner = frame.f_locals.get("self")
            if id(owner) in names and _is_model_code(frame):
                module_text = f"{names[id(owner)] or 'model'} ({type(owner).__name__})"
            if _is_model_code(frame):
                line_text = f"{frame.f_code.co_filename}:{line}"
    return " at ".join(text for text in (module_text, line_text) if text)


def _is_model_code(frame: FrameType) -> bool:
    """Return whether a frame is transformers' or the user's code, not ours, torch's or Python's."""
    path = Path(frame.f_code.co_filename)
    packages = _STANDARD in path.parents and not any(p.name in ("site-packages", "dist-packages") for p in path.parents)
    return path.is_file() and not packages and not any(own in path.parents for own in (_OWN, _TORCH))
