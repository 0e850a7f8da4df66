"""Order where TVM leaves it to memory addresses: the same graph must give the same bytes."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx


@tvm.transform.module_pass(opt_level=0, name="OrderShapeStores")
class OrderShapeStores:
    """Sort the statements of the functions that compute symbolic sizes, made by ``VMShapeLower`` from a hash map.

    Each statement stores one size in a slot of its own, computed from slots that are filled before the function is
    called, so that any order is right.
    """

    def transform_module(self, mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        """Sort by slot; functions of any other form stay as they are."""
        for gvar, func in list(mod.functions.items()):
            if not isinstance(func, tirx.PrimFunc) or not gvar.name_hint.startswith("shape_func"):
                continue
            body = func.body
            if isinstance(body, tirx.SeqStmt) and all(isinstance(stmt, tirx.BufferStore) for stmt in body.seq):
                ordered = sorted(body.seq, key=lambda store: int(store.indices[0]))
                mod[gvar] = func.with_body(tirx.SeqStmt(ordered))
        return mod
