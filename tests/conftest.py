"""What several tests need from their surroundings: outside tools, and data that is not in the repository."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compressor.host.threads import wait_passively

wait_passively()  # as the command does; before torch is imported
os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "0")  # two test workers share the processors with all pools
gc.set_threshold(10_000)

from missing import skip_or_fail  # noqa: E402
from own_caches import share_kernels, share_prices  # noqa: E402
from pages import browser, made, open_page, serve  # noqa: E402, F401 (fixtures)
from whole import always_runs  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the files that generated kernels must equal")
    parser.addoption(
        "--update-docs", action="store_true", help="write what docs take from docstrings: options and the map"
    )
    parser.addoption("--whole", action="store_true", help="run all tests, also those like others that always run")
    parser.addoption("--arm", metavar="LEVEL", help="run tests of kernels for ARM's level, or each, under qemu")
    parser.addoption("--most-cases", metavar="N", type=int, help="run so many cases of each test at most")


def pytest_configure(config: pytest.Config) -> None:
    """Let the names of x86's instruction sets stand for a level of ARM, or for a different one each."""
    config.addinivalue_line("markers", "of_x86: checks what only x86 has; --arm leaves it out")
    if level := config.getoption("--arm"):
        from compressor.codegen import neon
        from compressor.codegen.targets import x86

        each = {"AMX": "i8mm", "AVX512_VPOPCNTDQ": "i8mm", "AVX512_VNNI": "dotprod", "AVX2": "neon"}
        for name, its_level in each.items():
            setattr(x86, name, neon.ISAS[its_level if level == "each" else level])
        x86.ISAS = dict(neon.ISAS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests like others, what only x86 has where ARM is asked for, and what lies beyond the most cases."""
    is_asked_for = config.option.keyword or any("::" in argument for argument in config.args)
    if not (is_asked_for or config.getoption("--whole") or config.getoption("--arm")):
        items[:], left_out = always_runs(items)
        config.hook.pytest_deselected(items=left_out)
    if config.getoption("--arm"):
        items[:] = [item for item in items if item.get_closest_marker("of_x86") is None]
    if most := config.getoption("--most-cases"):
        seen: dict[str, list[pytest.Item]] = {}
        for item in items:
            seen.setdefault(item.nodeid.partition("[")[0], []).append(item)
        items[:] = [item for cases in seen.values() for item in cases[:most]]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each worker whole files, and to one all that share a bundle's page, or the C++ runner."""
    from xdist.scheduler import LoadFileScheduling

    class ByBundle(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            is_native = Path(file).parent.name == "native"
            return "pages" if Path(file).name.startswith("test_page") else "native" if is_native else file

    return ByBundle(config, log)


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage, one a run at least, a look at PyTorch, TVM and thousands of tests."""
    gc.collect()
    gc.freeze()


def _one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread: small models are quicker so, and two test workers share the processors."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


one_thread = pytest.fixture(name="one_thread")(_one_thread)  # of each test
one_thread_throughout = pytest.fixture(name="one_thread_throughout", scope="module")(_one_thread)  # its fixtures too


@pytest.fixture(scope="module")
def captures_once() -> Iterator[None]:
    """Let runs, plans and evaluations of a module's tests capture each folder of a model once."""
    from captures import captures_once

    yield from captures_once()


@pytest.fixture(scope="session")
def require_adapter() -> None:
    """WebGPU from Python; without it the test is skipped, and in CI it fails."""
    from compressor.codegen.web.execute_webgpu import device
    from compressor.errors import ToolchainError

    try:
        device()
    except ToolchainError as error:
        skip_or_fail(error)


@pytest.fixture(scope="session")
def require_half(require_adapter: None) -> None:
    """Require an adapter that computes in float16."""
    from compressor.codegen.web.execute_webgpu import has_half

    if not has_half():
        if os.environ.get("CI"):
            pytest.fail("the adapter has no shader-f16; Mesa's lavapipe has it", pytrace=False)
        pytest.skip("the adapter has no shader-f16")


@pytest.fixture(scope="session", autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep tests away from the user's database of schedules."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        is_worker = hasattr(request.config, "workerinput")  # of pytest-xdist; a test may start a pytest of its own
        session = folder.parent.parent if is_worker else folder.parent
        share_prices(patch, session)
        share_kernels(folder, session)
        patch.setenv("COMPRESS_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def require_tool() -> Callable[..., Path]:
    """``require_tool("g++")`` is the tool's path; without it, or with one older than the version after it, the test is
    skipped, and in CI it fails.
    """

    def require(name: str, *least: int) -> Path:
        found = shutil.which(name)
        reason = f"{name} is not on PATH"
        if found is not None and least:
            stated = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()
            if tuple(map(int, re.findall(r"\d+", stated))) < least:
                found, reason = None, f"{name} is {stated}, older than {'.'.join(map(str, least))}"
        if found is None:
            skip_or_fail(reason)
        return Path(found)

    return require


@pytest.fixture(scope="session")
def require_model() -> Callable[[Any], Path]:
    """``require_model(recipe)``: its model's folder; the test is skipped without the package that brings it, and in CI
    fails.
    """

    def require(recipe: Any) -> Path:
        from compressor.errors import RecipeError

        try:
            return Path(recipe.model_source())
        except RecipeError as error:
            if not recipe.model.startswith("package:"):
                raise
            skip_or_fail(error)

    return require


@pytest.fixture(scope="session")
def shared_data(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """``shared_data("models/x")`` is a path in ``../shared/data`` beside the checkout; absent, the test is skipped."""

    def find(relative: str) -> Path:
        path = request.config.rootpath.parent / "shared" / "data" / relative
        if not path.exists():
            pytest.skip(f"../shared/data/{relative} is not here")
        return path

    return find


@pytest.fixture(scope="session")
def write_module(require_tool: Callable[[str], Path]) -> Callable[..., Path]:
    """``write_module(graph, context, dense_weight_bytes, folder, isa="native")`` is a module's or decoder's bundle."""
    require_tool("g++")

    def write(graph: Any, context: Any, dense_weight_bytes: int, folder: Path, isa: Any = "native") -> Path:
        from native_bundles import write_native_bundle

        from compressor.codegen.lowering.compile import compile_graph
        from compressor.codegen.targets.x86 import X86
        from compressor.export.facts import model_facts
        from compressor.export.vectors import make_vectors

        target = X86(isa)
        library = compile_graph(graph, target, tune="off", threads=1)
        library.save(folder / "kernels.so", target)
        model: dict[str, Any] = {**model_facts(graph), "name": "small"}
        parts = dict(
            graph=graph,
            parameters=library.parameters,
            library=folder / "kernels.so",
            vectors=make_vectors(graph),
            model=model,
            recipe={},
            sites=[dataclasses.asdict(record) for record in context.records],
            kernels=library.kernels,
            entries=library.entries,
            parts=library.parts,
            cpu_features=library.isa.cpu_flags,
            dense_weight_bytes=dense_weight_bytes,
        )
        return write_native_bundle(folder / "bundle", parts)

    return write


@pytest.fixture(scope="session")
def module_bundle(tmp_path_factory: pytest.TempPathFactory, write_module: Callable[..., Path]) -> Path:
    """Write a finished bundle of a plain module with two packed linears.  Shared: copy it before changing anything."""
    import torch
    from torch import nn

    from compressor.capture.capture import capture
    from compressor.graph.model import weight_bytes
    from compressor.passes.rtn import Rtn
    from compressor.pipeline.context import Context

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 7)).eval().requires_grad_(False)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    graph, context = capture(module, (x,)), Context()
    dense_weight_bytes = weight_bytes(graph)
    graph = Rtn("W8A16", targets="Linear").run(graph, context)
    return write_module(graph, context, dense_weight_bytes, tmp_path_factory.mktemp("module"))


@pytest.fixture
def no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the two processes in which a run measures speed."""
    from compressor.evaluate.comparison import Speed

    monkeypatch.setattr("compressor.run.job.measure_speed", lambda *_: Speed({}, {}))


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory, random_llama: Callable[..., Any]) -> Path:
    """Save a random Llama of one narrow layer, with the tokenizer of the shipped model."""
    import json

    from compressor.host.resources import resource

    tokenizer = resource("models") / "reference" / "tokenizer.json"
    vocabulary = len(json.loads(tokenizer.read_text())["model"]["vocab"])
    folder = tmp_path_factory.mktemp("small_llama")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 256}
    random_llama(vocab_size=vocabulary, **sizes).save_pretrained(folder)
    shutil.copy(tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def short_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the shipped model's first two blocks, with its embedding, head and tokenizer.  Shared: only read it."""
    import json

    from safetensors.torch import load_file, save_file

    from compressor.host.resources import resource

    shipped, folder = resource("models") / "reference", tmp_path_factory.mktemp("short") / "reference"
    shutil.copytree(shipped, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    left_out = tuple(f"model.layers.{block}." for block in range(2, config["num_hidden_layers"]))
    tensors = load_file(shipped / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def random_llama() -> Callable[..., Any]:
    """``random_llama(vocab_size=12, ...)``: a Llama of transformers with the weights of seed 0, small in all else."""
    import torch
    import transformers

    small = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}

    def make(**sizes: Any) -> transformers.LlamaForCausalLM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**small, **sizes})).eval()

    return make
