"""Kernels are the same, whichever way TVM finds the stack they are written on and the parser that expands a macro."""

from __future__ import annotations

import inspect

import pytest
import tvm
from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.parser import ScriptMacro
from tvm.tirx.script.parser import entry

from compressor.codegen.kernels import macros
from compressor.codegen.kernels.linear.packed import Schedule, packed_linear
from compressor.codegen.targets.x86 import AVX2
from compressor.formats.format import Format


def test_kernels_are_those_of_tvms_own_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> tvm.tirx.PrimFunc:
        return packed_linear(40, 64, Format.parse("W4A8_G32"), True, AVX2, Schedule(1, 1, 2))

    def by_inspection(_macro: object) -> object:
        """TVM's search, as it is in 0.27."""
        for info in inspect.getouterframes(inspect.currentframe()):
            parser = info.frame.f_globals.get(ScriptMacro.parser_object_name)
            if parser is not None:
                return parser
        raise RuntimeError

    assert ScriptMacro._find_parser_def is macros._find_parser
    assert entry.inspect.stack is macros._stack
    assert ScriptMacro.get_macro_def is macros._definition
    assert evaluator._eval_expr is macros._evaluate and evaluator._eval_assign is macros._assign
    ours = written()
    tvm.ir.assert_structural_equal(ours, written())  # of trees that were read before
    monkeypatch.setattr(ScriptMacro, "_find_parser_def", by_inspection)
    monkeypatch.setattr(entry, "inspect", inspect)
    monkeypatch.setattr(macros, "_parsed", doc.parse)
    monkeypatch.setattr(evaluator, "_eval_expr", macros._tvm_evaluate)
    monkeypatch.setattr(evaluator, "_eval_assign", macros._tvm_assign)
    tvm.ir.assert_structural_equal(ours, written())


def test_the_stack_is_that_of_inspect() -> None:
    ours, theirs = macros._stack(), inspect.stack()
    assert [info[:2] + info[3:4] for info in ours] == [info[:2] + info[3:4] for info in theirs]
    assert [info.lineno for info in ours[1:]] == [info.lineno for info in theirs[1:]]
    known = [(mine.code_context, info.code_context) for mine, info in zip(ours, theirs, strict=True) if mine.index == 0]
    assert len(known) > 10
    assert all(mine == context for mine, context in known)


def test_a_macro_outside_a_kernel_says_so() -> None:
    with pytest.raises(RuntimeError, match="outside a kernel"):
        macros._find_parser(None)
