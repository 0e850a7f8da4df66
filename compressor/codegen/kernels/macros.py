"""Let TVMScript read kernels and expand macros without a look at the sources of the whole call stack.

``T.prim_func`` asks for the stack it is called on, to find variables that are named in annotations only, and a macro
(``T.inline``) that is called inside a kernel asks which parser calls it.  TVM 0.27 does both with ``inspect``, which
reads file and line of every caller and, for each, goes through all imported modules: together most of the time that it
takes to write a kernel.  Variables and parsers lie in the frames, so the frames alone are enough.  A macro's source is
parsed once, not at every call.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
from types import FrameType, SimpleNamespace
from typing import Any

from tvm.script.parser.core import doc
from tvm.script.parser.core.parser import ScriptMacro
from tvm.tirx.script.parser import entry


def search_by_frame() -> None:
    """Replace TVM's searches for a macro's parser and definition, and for the stack, by ones that find the same."""
    ScriptMacro._find_parser_def = _find_parser
    ScriptMacro.get_macro_def = _definition
    entry.inspect = SimpleNamespace(**{**vars(inspect), "stack": _stack})


def _find_parser(_macro: Any) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        parser = frame.f_globals.get(ScriptMacro.parser_object_name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("a macro of TVMScript was called outside a kernel; call it in a function under T.prim_func")


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
