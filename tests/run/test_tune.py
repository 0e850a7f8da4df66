"""Batches round trip: exported, timed by a stub in place of a GPU, taken home, and the choice follows; or refused."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import lockstep
import pytest
from captures import capture_once
from click.testing import CliRunner, Result
from torch.fx import GraphModule

from compressor.cli.commands import main
from compressor.codegen import device_tuning
from compressor.codegen.batch import results as reading
from compressor.codegen.batch.collect import with_memory
from compressor.codegen.device_tuning import DeviceTuner, Measured, device_class, gpu_kernels_digest
from compressor.codegen.gpu import spaces, toolchain
from compressor.codegen.gpu.kernel_set import gpu_kernels
from compressor.codegen.lowering.compile import Lowered, lower_graph
from compressor.codegen.targets.cuda import Cuda
from compressor.codegen.tuning import summary
from compressor.errors import DriftError
from compressor.plan.passes import plan_passes
from compressor.recipe.recipe import Recipe
from compressor.run.cuda import CudaBackend
from compressor.run.lock import Lock

pytestmark = pytest.mark.usefixtures("captures_once")

RECIPE = {
    "passes": [{"rtn": {"scheme": "W4A16_G32", "targets": "Linear"}}, {"embedding": {"scheme": "W8A16"}}],
    "target": {"cuda": {"arch": "sm_90"}},
}
DEVICE = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": [9, 0],
    "copy_bytes_per_s": 3e12,
    "peak_bytes_per_s": 3.35e12,
    "nvidia_smi": {"driver_version": "580.1"},
}
H100 = "cuda|sm_90|NVIDIA H100"


@dataclass(frozen=True)
class Way:
    """A schedule."""

    a: int


class Stub:
    """Answers with made-up times, the last candidate being the fastest, in place of a process with a GPU."""

    is_cold = False

    def __init__(self, given: Any) -> None:
        self.given = given

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None: ...

    def facts(self) -> dict[str, Any]:
        return DEVICE

    def __call__(self, index: int, skipped: list[int], seconds: float) -> Any:
        count = len(type(self).kernels[index]["candidates"])
        times = [{"microseconds": 20.0 + 2 * (count - i), "least": 1.0} for i in range(count)]
        return {"candidates": times, "is_cold": self.is_cold, "copies": 1}, None, ""

    kernels: ClassVar[list[Mapping[str, Any]]] = []


@pytest.fixture(scope="module")
def batch(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Export a batch of two candidates a choice, whose machine code is not any."""
    lockstep.start()
    folder = tmp_path_factory.mktemp("tune")
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({**RECIPE, "model": str(small_llama)}))  # JSON is YAML
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_CACHE_DIR", str(folder / "cache"))
        patch.setattr(toolchain, "find_nvcc", lambda: Path("nvcc"))
        patch.setattr(toolchain, "compile_fatbin", lambda _text, _archs: (b"machine code", ""))
        two_candidates(patch)
        arguments = ["tune", str(recipe), "--export-batch", str(folder / "batch"), "--json"]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
    return json.loads(done.stdout), folder, small_llama


def two_candidates(patch: pytest.MonkeyPatch) -> None:
    for name in ("_streaming", "_tilings"):
        whole = getattr(spaces, name)
        patch.setattr(spaces, name, lambda *given, whole=whole: whole(*given)[:2])


@pytest.fixture
def home(batch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache that knows the batch and nothing else, and an empty shipped database."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "batches").symlink_to(batch[1] / "cache" / "batches")
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device_tuning, "SHIPPED", tmp_path / "shipped.json")
    two_candidates(monkeypatch)
    return tmp_path / "cache" / "tuning.json"


def runner(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("batch_runner", folder / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(batch: Any, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Have the batch's runner write results."""
    folder = batch[1] / "batch"
    Stub.kernels = json.loads((folder / "batch.json").read_text())["kernels"]
    assert runner(folder).main(["--output", str(tmp_path / "results.json")], Stub) == 0
    return tmp_path / "results.json", json.loads((tmp_path / "results.json").read_text())


def take(file: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["tune", "--import-results", str(file), *options])


@cache
def planned(model: Path) -> GraphModule:
    recipe = Recipe.from_dict({**RECIPE, "model": str(model)})
    return plan_passes(capture_once(model, weights=False), recipe, CudaBackend(recipe.target.build())).final


def lowered(model: Path, tuner: DeviceTuner) -> Lowered:
    target = Cuda(arch="sm_90")
    isa = target.resolve()
    return lower_graph(with_memory(planned(model)), target.tvm_target(isa), gpu_kernels(isa), tuner)


def test_the_choice_follows_what_was_measured(
    batch: Any, home: Path, results: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    exported, _, model = batch
    assert exported["kernels"] == len(Stub.kernels) > 3 and exported["archs"] == ["sm_90"]
    assert exported["candidates"] == sum(len(kernel["candidates"]) for kernel in Stub.kernels)
    before = DeviceTuner.make("quick", ["sm_90"], None)
    lowered(model, before)
    assert set(before.reasons(list(before.chosen)).values()) == {"modelled"}
    assert summary(before.tried) == [f"schedules: {len(before.tried)} choices: {len(before.tried)} modelled"]

    done = take(results[0], "--json")
    assert done.exit_code == 0, done.output
    imported = json.loads(done.stdout)
    assert imported["device"] == H100 and not imported["missing"] and imported["database"] == str(home)
    assert {times[0] - times[1] for times in imported["won"].values()} == {2.0}
    after = DeviceTuner.make("quick", ["sm_90"], None)
    program = lowered(model, after)
    assert [entry["won"] for entry in after.tried] == [1] * len(after.tried)
    assert set(after.reasons(list(after.chosen)).values()) == {"measured on NVIDIA H100"}
    linears = [kernel for kernel in program.kernels if kernel["family"] == "packed_linear"]
    assert linears
    for kernel in linears:
        assert kernel["schedule_chosen"] == dict.fromkeys(("1", "4", "16", "128", "1024"), "measured on NVIDIA H100")

    lock = Lock()
    lock.add_schedules(after.chosen)
    home.unlink()
    again = DeviceTuner.make("quick", ["sm_90"], lock.facts["schedules"])
    assert lowered(model, again).kernels == program.kernels and again.chosen == after.chosen and not again.tried
    wrong = {
        kernel: {**fields, "one": {"warps": 3, "blocks": 1, "loads": 1}} for kernel, fields in after.chosen.items()
    }
    with pytest.raises(DriftError, match="which is none of those possible"):
        lowered(model, DeviceTuner.make("quick", ["sm_90"], wrong))


def test_other_gpus_and_modes_do_not_take_it(batch: Any, home: Path, results: tuple[Path, dict[str, Any]]) -> None:
    assert take(results[0]).exit_code == 0
    for mode, archs, reason in (("quick", ["sm_80"], "modelled"), ("off", ["sm_90"], "the default")):
        tuner = DeviceTuner.make(mode, archs, None)
        lowered(batch[2], tuner)
        assert set(tuner.reasons(list(tuner.chosen)).values()) == {reason}


def test_a_database_is_shipped(batch: Any, home: Path, results: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert take(results[0], "--database", str(tmp_path / "shipped.json")).exit_code == 0
    assert not home.exists()
    tuner = DeviceTuner.make("quick", ["sm_90"], None)
    lowered(batch[2], tuner)
    assert set(tuner.reasons(list(tuner.chosen)).values()) == {"measured on NVIDIA H100"}


def sealed(results: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return {**results, "sha256": runner(folder).content_digest(results)}


Change = Callable[[dict[str, Any]], object]


def first(results: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(results["kernels"].values()))
    return found


def no_reason(results: dict[str, Any]) -> None:
    first(results)["candidates"][0].clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["kernels"].popitem(), "partial: 1 of the batch's .* were not measured"),
        (lambda r: r.update(complete=False), "partial: 0 of"),
        (lambda r: r.update(batch="0" * 64), "a batch that was not exported here \\(000000000000\\)"),
        (lambda r: r.update(kernels_digest="0" * 12), "other sources of the kernels"),
        (lambda r: r["kernels"].update(other=first(r)), "other is not in the batch"),
        (lambda r: first(r)["candidates"].pop(), "1 candidates, and the batch has 2"),
        (lambda r: first(r)["candidates"][0].update(microseconds=-3.0), "-3 us cannot be"),
        (lambda r: first(r)["candidates"][0].update(microseconds=0.1), "0.1 us cannot be"),
        (lambda r: first(r)["candidates"][0].update(microseconds=None), "neither a time nor a reason"),
        (lambda r: r["device"].update(name=""), "device.name"),
        (lambda r: r.update(schema_version=2), "schema_version"),
    ],
)
def test_what_is_not_of_this_batch_is_refused(
    batch: Any, home: Path, results: tuple[Path, dict[str, Any]], change: Change, message: str
) -> None:
    file, content = results
    change(content)
    file.write_text(json.dumps(sealed(content, batch[1] / "batch")))
    done = take(file)
    assert done.exit_code == 2 and not home.exists()
    assert re.search(message, done.output), done.output


def test_damage_is_noticed(home: Path, results: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    file, text = results[0], results[0].read_text()
    for damaged, message in (
        (text.replace("22.0", "21.0", 1), "damaged"),
        (text[:-20], "cannot be read"),
        (text.replace("22.0", "NaN", 1), "it holds NaN"),
        ("[]", "not results of a batch"),
        ("\0", "cannot be read"),
    ):
        file.write_text(damaged)
        done = take(file)
        assert done.exit_code == 2 and message in done.output and not home.exists(), done.output
    done = take(tmp_path / "none.json")
    assert done.exit_code == 2 and "cannot be read" in done.output


def test_a_part_is_taken_where_asked(
    batch: Any, home: Path, results: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, content = results
    name, _ = content["kernels"].popitem()
    content["complete"] = False
    file.write_text(json.dumps(sealed(content, batch[1] / "batch")))
    done = take(file, "--partial", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["missing"] == [name]
    assert len(json.loads(home.read_text())) == len(content["kernels"])
    other = batch[1] / "batch"
    done = take(file, "--partial", "--batch", str(other))
    assert done.exit_code == 0
    done = take(file, "--partial", "--batch", str(batch[1]))
    assert done.exit_code == 2 and "results of another batch" in done.output


def test_weights_are_not_read_faster_than_memory_gives_them(
    batch: Any, home: Path, results: tuple[Path, dict[str, Any]]
) -> None:
    file, content = results
    first(content)["is_cold"] = True
    content["device"].update(peak_bytes_per_s=1e6, copy_bytes_per_s=None)
    file.write_text(json.dumps(sealed(content, batch[1] / "batch")))
    done = take(file)
    assert done.exit_code == 2 and "reading its weights takes" in done.output and not home.exists()
    content["device"].update(peak_bytes_per_s=1e15)
    file.write_text(json.dumps(sealed(content, batch[1] / "batch")))
    done = take(file)
    assert done.exit_code == 2 and "the bandwidth that was measured" in done.output


def test_usage() -> None:
    for arguments, message in (
        ([], "give either"),
        (["quickstart_cuda"], "give either"),
        (["quickstart_cuda", "--import-results", "x"], "takes no recipe"),
        (["--export-batch", "x"], "takes a RECIPE"),
        (["quickstart", "--export-batch", "x"], "batches are for the target cuda"),
    ):
        done = CliRunner().invoke(main, ["tune", *arguments])
        assert done.exit_code == 2 and message in done.output, done.output


def test_classes_of_gpus() -> None:
    for name, capability, expected in (
        ("NVIDIA H100 80GB HBM3", (9, 0), H100),
        ("NVIDIA H100 PCIe", (9, 0), H100),
        ("NVIDIA H200", (9, 0), "cuda|sm_90|NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "cuda|sm_80|NVIDIA A100"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "cuda|sm_89|NVIDIA GeForce RTX 4090"),
    ):
        assert device_class(name, capability) == expected


def test_several_gpus_count_together_and_older_kernels_are_named() -> None:
    def entry(*microseconds: float | None) -> dict[str, Any]:
        return {"schedules": [{"a": i} for i in range(len(microseconds))], "microseconds": list(microseconds)}

    now = gpu_kernels_digest()
    measured = Measured(
        {
            f"k:1|{H100}|{now}": entry(10.0, 11.0, 30.0),
            f"k:1|cuda|sm_90|NVIDIA H200|{now}": entry(20.0, 11.0, None),
            f"k:1|{H100}|older": entry(1.0, 2.0, 3.0),
            f"old:1|{H100}|older": entry(3.0, 2.0),
            "k:1|avx2|a CPU|2 threads|x": {"index": 0, "tried": 3},
            f"broken:1|{H100}|{now}": entry(None, float("nan")),
        }
    )
    tuner = DeviceTuner("quick", 1, None, "cuda", archs=["sm_90"], databases=[measured])
    assert not measured.of("broken:1", ["sm_90"]) and len(measured.of("k:1", ["sm_90"])) == 2

    def best(kernel: str, count: int) -> tuple[int, str]:
        space = [Way(i) for i in range(count)]
        return tuner.fastest(kernel, space, None, None, lambda way: float(way.a)).a, tuner.reasons([kernel])[kernel]

    assert best("k:1", 3) == (1, "measured on NVIDIA H100, NVIDIA H200")
    assert best("old:1", 2) == (1, "measured on NVIDIA H100, of an earlier version of the kernels")
    assert best("broken:1", 2) == (0, "modelled")
    assert best("k:1", 1) == (0, "the only one")
    assert reading._bandwidth("", reading._Device(name="x", capability=(9, 0))) == 2e13
