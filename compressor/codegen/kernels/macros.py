"""Let TVMScript read kernels and expand macros without a look at the sources of the whole call stack.

``T.prim_func`` asks for the stack it is called on, to find variables that are named in annotations only, and a macro
(``T.inline``) that is called inside a kernel asks which parser calls it.  TVM 0.27 does both with ``inspect``, which
reads file and line of every caller and, for each, goes through all imported modules: together most of the time that it
takes to write a kernel.  Variables and parsers lie in the frames, so the frames alone are enough.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from types import FrameType, SimpleNamespace
from typing import Any

from tvm.script.parser.core.parser import ScriptMacro
from tvm.tirx.script.parser import entry


def search_by_frame() -> None:
    """Replace TVM's search for a macro's parser, and its view of the stack, by ones that find the same."""
    ScriptMacro._find_parser_def = _find_parser
    entry.inspect = SimpleNamespace(**{**vars(inspect), "stack": _stack})


def _find_parser(_macro: Any) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        parser = frame.f_globals.get(ScriptMacro.parser_object_name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("a macro of TVMScript was called outside a kernel; call it in a function under T.prim_func")


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
