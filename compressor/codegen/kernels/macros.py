"""Let TVMScript expand macros without a look at the sources of the whole call stack.

A macro (``T.inline``) that is called inside a kernel asks which parser calls it.  TVM 0.27 looks for the parser with
``inspect.getouterframes``, which reads file and line of every caller and, for each, goes through all imported modules:
three quarters of the time that it takes to write a kernel.  The parser lies in the globals of one of those frames, so
the frames alone are enough.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from tvm.script.parser.core.parser import ScriptMacro


def find_parsers_by_frame() -> None:
    """Replace TVM's search for the parser that expands a macro by one with the same result."""
    ScriptMacro._find_parser_def = _find_parser


def _find_parser(_macro: Any) -> Any:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        parser = frame.f_globals.get(ScriptMacro.parser_object_name)
        if parser is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("a macro of TVMScript was called outside a kernel; call it in a function under T.prim_func")
