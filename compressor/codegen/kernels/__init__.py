"""One file per kernel family; each makes TIR functions for given shapes and one instruction set."""

from __future__ import annotations

import sys
from typing import Any

from tvm.script.parser.core.parser import ScriptMacro


def _calling_parser(_macro: Any) -> Any:
    """The parser that came upon a call of an inlined function.

    As TVM's own does, but without reading the source of every function on the stack, which takes longer than all else
    that a kernel's script does.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if (parser := frame.f_globals.get(ScriptMacro.parser_object_name)) is not None:
            return parser
        frame = frame.f_back
    raise RuntimeError("an inlined function is called outside of a kernel's script")


ScriptMacro._find_parser_def = _calling_parser
