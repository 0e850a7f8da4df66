"""Let TVMScript read kernels without a look at the whole call stack, or Python's compiler, for each expression.

``T.prim_func`` asks for the stack it is called on, to find variables that are named in annotations only, and a macro
(``T.inline``) that is called inside a kernel asks which parser calls it.  TVM 0.27 does both with ``inspect``, which
reads file and line of every caller and, for each, goes through all imported modules: together most of the time that it
takes to write a kernel.  Variables lie in the frames, so the frames alone are enough, and a parser is kept while it
evaluates.  A macro's source is parsed once, not at every call.

Of an expression TVM evaluates each call, attribute and index alone: it writes a syntax tree of it, compiles that and
runs it.  Here names are looked up, attributes read and functions called as the compiled code would.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import linecache
import sys
from collections.abc import Mapping
from types import FrameType, SimpleNamespace
from typing import Any

from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.parser import ScriptMacro
from tvm.tirx.script.parser import entry

_parsers: list[Any] = []
"""Parsers that evaluate an expression, the innermost last."""
_tvm_evaluate, _tvm_assign, _tvm_visit = evaluator._eval_expr, evaluator._eval_assign, evaluator.ExprEvaluator.eval


def read_kernels_quickly() -> None:
    """Replace TVM's searches, and its evaluation of expressions, by ones that find the same."""
    ScriptMacro._find_parser_def = _find_parser
    ScriptMacro.get_macro_def = _definition
    entry.inspect = SimpleNamespace(**{**vars(inspect), "stack": _stack})
    evaluator.ExprEvaluator.eval = staticmethod(_visit)
    evaluator._eval_expr = _evaluate
    evaluator._eval_assign = _assign


def _visit(parser: Any, names: dict[str, Any], node: Any) -> Any:
    _parsers.append(parser)
    try:
        return _tvm_visit(parser, names, node)
    finally:
        _parsers.pop()


def _find_parser(_macro: Any) -> Any:
    if not _parsers:
        raise RuntimeError("a macro of TVMScript was called outside a kernel; call it in a function under T.prim_func")
    return _parsers[-1]


def _evaluate(node: Any, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression whose parts are names and constants; leave any other to TVM."""
    kind = type(node)
    if _is_leaf(node):
        return _leaf(node, names)
    if kind is doc.Attribute and _is_leaf(node.value):
        return getattr(_leaf(node.value, names), node.attr)
    if kind is doc.Subscript and _is_leaf(node.value) and _is_leaf(node.slice):
        return _leaf(node.value, names)[_leaf(node.slice, names)]
    if kind is doc.Tuple and all(map(_is_leaf, node.elts)):
        return tuple(_leaf(part, names) for part in node.elts)
    if kind is doc.Call and all(map(_is_leaf, (node.func, *node.args, *map(_word, node.keywords)))):
        words = {word.arg: _leaf(word.value, names) for word in node.keywords}
        return _leaf(node.func, names)(*[_leaf(part, names) for part in node.args], **words)
    return _tvm_evaluate(node, names)


def _is_leaf(node: Any) -> bool:
    return type(node) in (doc.Name, doc.Constant)


def _word(keyword: Any) -> Any:
    """Return a named argument's value, None for a dictionary of them."""
    return None if keyword.arg is None else keyword.value


def _leaf(node: Any, names: Mapping[str, Any]) -> Any:
    if type(node) is doc.Constant:
        return node.value
    return names[node.id] if node.id in names else getattr(builtins, node.id)


def _assign(target: Any, source: Any) -> Any:
    """Return what each name of a target is bound to; leave targets other than a name to TVM."""
    return {target.id: source} if type(target) is doc.Name else _tvm_assign(target, source)


def _definition(macro: Any) -> Any:
    for definition in _parsed(macro.source.source).body:
        if isinstance(definition, doc.FunctionDef) and definition.name == macro.func.__name__:
            return definition
    raise RuntimeError(f"{macro.func.__name__}: its source does not define it")


@functools.lru_cache(maxsize=256)
def _parsed(source: str) -> Any:
    """Parse a macro's source; nothing that reads the tree changes it."""
    return doc.parse(source)


def _stack() -> list[inspect.FrameInfo]:
    """Return what ``inspect.stack()`` does: the caller's frame first, each with its line where that is known."""
    found: list[inspect.FrameInfo] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        line = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals)
        context = ([line], 0) if line else (None, None)
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, *context))
        frame = frame.f_back
    return found
