"""Compile decoders that verify what another entry of theirs drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from compressor_runtime.device.host import Host
from compressor_runtime.session import Session
from kernel_cases import Program
from torch.fx import GraphModule

from compressor.codegen.lowering.compile import compile_graph
from compressor.codegen.targets.x86 import X86
from compressor.export.facts import model_facts

LIMIT = 64


def compile_drafting(graph: GraphModule, entry: str) -> tuple[Callable[..., Session], dict[str, list[str]]]:
    """Compile a decoder with `verify` and an entry that drafts.

    Returns:
        A function that opens a session, and the parameters' names by entry.
    """
    graph.meta["model"] = dataclasses.replace(graph.meta["model"], speculates=True)
    library = compile_graph(graph, X86(), tune="off", threads=1)
    program, facts = Program(graph, library), model_facts(graph)
    parameters = {name: [program.parameters[i] for i in used] for name, used in library.entries.items()}

    def call(name: str, *tensors: Any) -> Any:
        return program.vm[name](*tensors, parameters[name]).numpy()

    def open_session(batch: int = 1) -> Session:
        drafted = {name: partial(call, name) for name in ("verify", entry)}
        return Session(facts, LIMIT, partial(call, "main"), batch, 4, (), Host(), None, drafted)

    return open_session, {name: [library.parameters[i] for i in used] for name, used in library.entries.items()}
