"""The C++ runner, built once, and small bundles for it."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from native_runner import POSITIONS, Runner, edit_manifest

SOURCE = Path(__file__).resolve().parents[2] / "export" / "native"


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], Path]) -> Iterator[Runner]:
    """``runner(bundle, ids, *arguments)`` is the finished process.  It is built while the first bundle is made."""
    cmake = str(require_tool("cmake"))
    require_tool("g++")
    folder = tmp_path_factory.mktemp("native")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"]

    def build() -> Path:
        for command in (["-S", str(SOURCE), "-B", str(folder), *options], ["--build", str(folder)]):
            done = subprocess.run([cmake, *command], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "warning" not in done.stderr, done.stderr
        return folder / "compressor_run"

    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build)

        def run(bundle: Path, ids: list[int], *arguments: object) -> subprocess.CompletedProcess[str]:
            command = [str(built.result()), str(bundle), "--ids", ",".join(map(str, ids)), *map(str, arguments)]
            return subprocess.run(command, capture_output=True, text=True, timeout=60)

        yield run


@pytest.fixture(scope="session")
def write_llama(
    tmp_path_factory: pytest.TempPathFactory,
    random_llama: Callable[..., Any],
    write_module: Callable[[Any, Any, int, Path], Path],
) -> Callable[..., Path]:
    """``write_llama(pass, ...)`` is the bundle of a Llama of one layer, whose linears all share one kernel."""
    from compressor.capture.capture import capture
    from compressor.graph.model import weight_bytes
    from compressor.pipeline.context import Context

    def write(*passes: Any, speculates: bool = False, layers: int = 1) -> Path:
        sizes = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 2}
        graph = capture(random_llama(**sizes, max_position_embeddings=POSITIONS, initializer_range=0.3))
        # It goes on to the last position.
        graph.meta["model"] = dataclasses.replace(graph.meta["model"], eos_ids=(), speculates=speculates)
        context, dense_weight_bytes = Context(), weight_bytes(graph)
        for step in passes:
            graph = step.run(graph, context)
        return write_module(graph, context, dense_weight_bytes, tmp_path_factory.mktemp("native-bundle"))

    return write


@pytest.fixture(scope="session")
def bundle(write_llama: Callable[..., Path]) -> Path:
    from compressor.passes.rtn import Rtn

    return write_llama(Rtn("W4A16_G32"))


class AddHeads:
    """Add two heads that draft, with random weights."""

    def run(self, graph: Any, ctx: Any) -> Any:
        from compressor.graph.kinds.draft_heads import add_heads
        from compressor.graph.rewrite import set_parameter

        generator = torch.Generator().manual_seed(0)
        for name in add_heads(graph, 2, 32):
            set_parameter(graph, name, torch.randn(graph.get_parameter(name).shape, generator=generator) / 5)
        return graph


@pytest.fixture(scope="session")
def packed_bundle(write_llama: Callable[..., Path]) -> Path:
    """Its caches are packed, its prompts take AMX where the CPU has it, and heads draft."""
    from compressor.passes.kv_cache import KvCache
    from compressor.passes.rtn import Rtn

    return write_llama(AddHeads(), Rtn("W4A8_G32"), KvCache("INT8"), speculates=True)


class SkipInputs:
    """Let drafts skip small inputs of the linears that can."""

    def run(self, graph: Any, ctx: Any) -> Any:
        from compressor.graph.kinds.sparse_drafts import limit_drafts, may_draft_sparse

        limit_drafts(graph, {site.name: torch.full((site.in_features,), 0.3) for site in may_draft_sparse(graph)})
        return graph


@dataclasses.dataclass
class DraftFirst:
    """Let drafts be those of the first blocks; 0 makes a part of each half of a block."""

    blocks: int

    def run(self, graph: Any, ctx: Any) -> Any:
        graph.meta["model"] = dataclasses.replace(graph.meta["model"], first_blocks=self.blocks)
        return graph


@pytest.fixture(scope="session")
def exit_bundle(write_llama: Callable[..., Path]) -> Path:
    """Return a bundle whose first block of two drafts, with packed caches."""
    from compressor.passes.kv_cache import KvCache
    from compressor.passes.rtn import Rtn

    folder = write_llama(DraftFirst(1), Rtn("W8A8"), KvCache("INT8"), speculates=True, layers=2)
    edit_manifest(folder, lambda manifest: manifest["model"].update(speculate="exit"))
    return folder


@pytest.fixture(scope="session")
def drafting_bundle(write_llama: Callable[..., Path]) -> Path:
    """Return a bundle that drafts without its last feed-forward network, from upper planes, and from few inputs."""
    from compressor.passes.rtn import Rtn

    planes, columns = Rtn("W8A8_G32_P4", targets="re:.*mlp.*"), Rtn("W8A16", targets="re:.*self_attn.*")
    folder = write_llama(DraftFirst(0), planes, columns, SkipInputs(), speculates=True, layers=2)
    skips = [{"without": ["ffn_1"], "agreement": 0.5, "cost": 0.5}]
    edit_manifest(folder, lambda manifest: manifest["model"].update(skips=skips, speculate="self"))
    return folder


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))
