"""Kernels as object files of their own: the same results as from one object, the same bytes again, damage, room."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from kernel_cases import Program
from tiny_models import GROUPED, build, quantized, transformers
from torch.fx import GraphModule
from tvm import tirx

from compressor.capture.capture import capture
from compressor.codegen.lowering import kernel_set
from compressor.codegen.lowering.compile import Library, compile_graph
from compressor.codegen.machine_code import objects
from compressor.codegen.machine_code.objects import build_executable
from compressor.codegen.machine_code.store import ObjectStore
from compressor.codegen.machine_code.tir_pipeline import PIPELINE
from compressor.codegen.targets.x86 import X86


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that TVM's code generation makes from now on."""
    found, build = list[str](), tirx.build

    def counted(mod: tvm.IRModule, *given: Any, **options: Any) -> Any:
        (name,) = mod.get_global_vars()
        found.append(name.name_hint)
        return build(mod, *given, **options)

    monkeypatch.setattr(tirx, "build", counted)
    return found


@pytest.fixture(scope="module")
def graph() -> GraphModule:
    return quantized(capture(build(transformers.LlamaConfig(**GROUPED))), "W4A16_G32")


@pytest.fixture(scope="module")
def filled(graph: GraphModule, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Fill a store with the kernels of a model; return it and the library's bytes."""
    folder = tmp_path_factory.mktemp("filled")
    return folder / "kernels", linked(compiled(graph, ObjectStore(folder / "kernels")), folder)


def compiled(graph: GraphModule, store: ObjectStore) -> Library:
    """Compile a model with the objects of a store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_set, "build_executable", lambda mod, target: build_executable(mod, target, store))
        return compile_graph(graph, X86(), tune="off")


def linked(library: Library, folder: Path) -> bytes:
    library.save(folder / "model.so", X86())
    return (folder / "model.so").read_bytes()


def table() -> tvm.IRModule:
    """Return a module with one kernel that is quick to generate."""
    kernel = kernel_set.cpu_kernels(X86().resolve()).embedding(8, 16, "float16")
    return tvm.IRModule({"table": kernel.with_attr("global_symbol", "table")})


def test_a_second_library_takes_all_kernels_from_the_store_with_the_same_bytes(
    graph: GraphModule, filled: tuple[Path, bytes], generated: list[str], tmp_path: Path
) -> None:
    store = ObjectStore(filled[0])
    assert linked(compiled(graph, store), tmp_path) == filled[1] and not generated
    assert linked(compiled(graph, ObjectStore(tmp_path / "empty")), tmp_path) == filled[1]
    assert len({*generated}) == len(generated) == len(list(store.objects())) > 5


def test_results_are_those_of_one_object(
    graph: GraphModule, filled: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = compiled(graph, ObjectStore(filled[0]))

    def whole(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
        return tvm.compile(mod, target, relax_pipeline=None, tir_pipeline=PIPELINE)

    monkeypatch.setattr(kernel_set, "build_executable", whole)
    outputs = []
    for found in (apart, compile_graph(graph, X86(), tune="off")):
        program = Program(graph, found)
        outputs.append(program(np.arange(10).reshape(2, 5), np.arange(5), np.arange(5), *program.caches(2, 8)))
    assert np.array_equal(*outputs)


def test_damaged_objects_are_made_again(
    graph: GraphModule, filled: tuple[Path, bytes], generated: list[str], tmp_path: Path
) -> None:
    shutil.copytree(filled[0], tmp_path / "kernels")
    store = ObjectStore(tmp_path / "kernels")
    kept = sorted(one.path for one in store.objects())
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    kept[1].write_bytes(b"")
    assert linked(compiled(graph, store), tmp_path) == filled[1] and len(generated) == 2
    assert sorted(one.path for one in store.objects()) == kept


def test_the_key_holds_the_target_and_the_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generated: list[str]
) -> None:
    def made(cpu: str) -> int:
        """Count the kernels that are generated for a processor."""
        generated.clear()
        target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
        build_executable(table(), target, ObjectStore(tmp_path))
        return len(generated)

    assert [made("haswell"), made("haswell"), made("znver3"), made("znver3")] == [1, 0, 1, 0]
    monkeypatch.setattr(objects, "_versions", lambda: "TVM of tomorrow")
    assert [made("haswell"), made("haswell")] == [1, 0]


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path: Path, generated: list[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = ObjectStore(tmp_path / "file" / "kernels")
    for _ in range(2):
        build_executable(table(), X86().tvm_target(X86().resolve()), store).export_library(str(tmp_path / "table.so"))
    assert generated == ["table", "table"] and not list(store.objects())


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    store, now = ObjectStore(tmp_path, most_bytes=4000), time.time()
    for number in range(5):
        store.keep(f"{number:064x}", bytes([number]) * 1000)
        os.utime(next(tmp_path.rglob(f"{number:064x}.*")), (now - 100 + number, now - 100 + number))
    assert store.find(f"{0:064x}") == b"\0" * 1000  # used now
    store.trim()
    assert [number for number in range(5) if store.find(f"{number:064x}") is not None] == [0, 3, 4]
    store.trim()
    assert len(list(store.objects())) == 3


def test_pruning_goes_by_the_last_use(tmp_path: Path) -> None:
    store, day = ObjectStore(tmp_path), 86400.0
    for number, days in enumerate((0.5, 3.0)):
        store.keep(f"{number:064x}", b"code")
        os.utime(next(tmp_path.rglob(f"{number:064x}.*")), (time.time() - days * day,) * 2)
    assert [one.size_bytes for one in store.prune(1.0)] == [4] and store.find(f"{0:064x}") == b"code"
    assert len(store.prune()) == 1 and store.find(f"{0:064x}") is None and store.prune() == []


@pytest.mark.parametrize("fails", [OSError, tvm.error.InternalError])
def test_an_error_of_one_kernel_is_that_of_all(
    fails: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_given: Any, **_options: Any) -> Callable[..., None]:
        raise fails("no code for this")

    monkeypatch.setattr(tirx, "build", refuse)
    with pytest.raises(fails, match="no code for this"):
        build_executable(table(), X86().tvm_target(X86().resolve()), ObjectStore(tmp_path))
    assert not list(ObjectStore(tmp_path).objects())
