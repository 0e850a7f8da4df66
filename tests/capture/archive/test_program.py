"""Archives of torch.export: the same function as PyTorch's own loading gives, and nothing of theirs is executed."""

from __future__ import annotations

import contextlib
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import relative_error
from torch import Tensor, nn
from torch.nn import functional

from compressor.capture.archive.reader import read_archive
from compressor.capture.capture import capture
from compressor.errors import CaptureError
from compressor.graph.model import weight_bytes
from compressor.graph.sites import linear_sites

MODEL, SAMPLES, WEIGHTS = "models/model.json", "data/sample_inputs/model.pt", "data/weights/model_weights_config.json"


class Net(nn.Module):
    """In-place ReLU, batch norm, constants, buffers, a split, sizes of the batch, tied weights, a named result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8 * 16, 5)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.register_buffer("gains", torch.linspace(0.5, 2, 8).view(1, 8, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.relu(self.norm(self.first(x))) * self.gains + torch.tensor([0.5])
        left, right = torch.split(y, 4, 1)
        y = functional.avg_pool2d(torch.cat([right, left], 1), 2).permute(0, 2, 3, 1)
        y = self.third(functional.gelu(self.second(y), approximate="tanh"))
        return {"logits": self.head(y.reshape(x.shape[0], -1))}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net().eval()
        module.norm.running_mean.uniform_(-0.5, 0.5)
        module.norm.running_var.uniform_(0.5, 2)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    path = tmp_path_factory.mktemp("archive") / "net.pt2"
    torch.export.save(torch.export.export(module, (torch.zeros(2, 3, 8, 8),), dynamic_shapes=shapes), path)
    return path


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """Copy an archive file by file; a change to None leaves one out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        for name in old.namelist():
            content = change(name.partition("/")[2], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def program(source: Path, target: Path, edit: Callable[[dict[str, Any]], None], file: str = MODEL) -> Path:
    """Copy an archive with an edited program, or another of its JSON files."""

    def change(name: str, content: bytes) -> bytes:
        if name != file:
            return content
        plain = json.loads(content)
        edit(plain)
        return json.dumps(plain).encode()

    return rewritten(source, target, change)


def call(content: dict[str, Any], operator: str) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = content["graph_module"]["graph"]["nodes"]
    return next(node for node in nodes if operator in node["target"])


def test_a_graph_computes_what_pytorch_s_loading_does(archive: Path) -> None:
    graph = capture(archive)
    info = graph.meta["model"]
    assert (info.kind, info.name, info.architecture) == ("module", "net", "Net")
    assert (info.image_shape, info.classes, graph.meta["outputs"]) == ((3, 8, 8), 5, ["logits"])
    sites = {site.name: site.module_class for site in linear_sites(graph)}
    assert sites == {"first": "Conv2d", "second": "Linear", "head": "Linear"} or sites == {
        "first": "Conv2d", "second": "Linear", "third": "Linear", "head": "Linear"
    }  # fmt: skip
    reference = torch.export.load(archive).module()
    for count in (1, 5):
        x = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            assert relative_error(graph(x).numpy(), reference(x)["logits"]) < 1e-5
    tensors = read_archive(archive).tensors
    assert tensors["second.weight"] is tensors["third.weight"]
    meta = capture(archive, weights=False)
    assert weight_bytes(meta) == weight_bytes(graph) and all(p.is_meta for p in meta.parameters())


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.file, "boom")


def test_nothing_is_unpickled_or_evaluated(archive: Path, tmp_path: Path) -> None:
    file = tmp_path / "boom"
    bomb = pickle.dumps(Bomb(file))
    rewritten(archive, tmp_path / "a.pt2", lambda n, c: bomb if n == SAMPLES else c)
    with contextlib.suppress(Exception):
        torch.export.load(tmp_path / "a.pt2")
    assert file.exists()  # PyTorch's own loading runs it
    file.unlink()
    capture(tmp_path / "a.pt2")  # example inputs are left aside
    code = f"__import__('pathlib').Path({str(file)!r}).write_text('boom')"

    def evaluated(content: dict[str, Any]) -> None:
        for value in content["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = code
        content["guards_code"] = [code]

    with pytest.raises(CaptureError, match="size 0 follows from others"):
        capture(program(archive, tmp_path / "b.pt2", evaluated))
    assert not file.exists()
    pickled = program(
        archive, tmp_path / "c.pt2", lambda c: c["config"]["first.weight"].update(use_pickle=True), WEIGHTS
    )
    with pytest.raises(CaptureError, match=r"first\.weight is pickled, which can run code"):
        capture(pickled)
    legacy = rewritten(archive, tmp_path / "d.pt2", lambda n, c: None if n == WEIGHTS else c)
    with pytest.raises(CaptureError, match="its weights are pickled"):
        capture(legacy)


def renamed_argument(content: dict[str, Any]) -> None:
    text = json.dumps(content).replace('"name": "x"', '"name": "x=print()"').replace('"x": {', '"x=print()": {')
    content.update(json.loads(text))


@pytest.mark.parametrize(("edit", "words"), [
    (lambda c: call(c, "gelu").update(target="torch.os.system"), r"calls 'torch\.os\.system', which is not"),
    (lambda c: call(c, "gelu").update(target="torch.ops.aten.__class__.mro"), "not an operator of ATen"),
    (lambda c: call(c, "gelu").update(target="torch.ops.higher_order.cond"), "not an operator of ATen"),
    (lambda c: call(c, "gelu")["inputs"][1].update(arg={"as_string": "/etc/passwd"}), "not known to be harmless"),
    (lambda c: call(c, "gelu")["inputs"][1].update(arg={"as_device": {"type": "cuda", "index": 0}}), "as_device"),
    (renamed_argument, r"argument 'x=print"),
    (lambda c: c["schema_version"].update(major=9), "in another form"),
    (lambda c: c["graph_module"]["signature"]["output_specs"].append({"buffer_mutation": {}}), "changes its state"),
    (lambda c: c["graph_module"]["signature"]["input_specs"].append({"custom_obj": {}}), "takes a custom_obj"),
    (lambda c: c["graph_module"].pop("graph"), "not a program as torch.export writes it"),
])  # fmt: skip
def test_what_is_not_a_plain_program_is_refused(
    archive: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], words: str
) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(program(archive, tmp_path / "net.pt2", edit))


def test_damaged_files_and_other_zips_are_refused(archive: Path, tmp_path: Path) -> None:
    content = archive.read_bytes()
    file = tmp_path / "net.pt2"
    for damaged in (b"", content[: len(content) // 2], content[:100] + content[200:]):
        file.write_bytes(damaged)
        with pytest.raises(CaptureError, match=r"net\.pt2"):
            capture(file)
    torch.save({"a": torch.zeros(2)}, file)
    with pytest.raises(CaptureError, match="a checkpoint or a TorchScript file"):
        capture(file)
    rewritten(archive, file, lambda n, c: c, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CaptureError, match="compressed, or too short"):
        capture(file)
    short = program(
        archive, file, lambda c: c["config"]["first.weight"]["tensor_meta"]["sizes"][0].update(as_int=10**6), WEIGHTS
    )
    with pytest.raises(CaptureError, match="too short for its tensor"):
        capture(short)


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_change_of_the_program_is_answered(
    archive: Path, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """One value of the program, anywhere but in comments, becomes another: an error for the user, or a module."""
    from compressor.capture.archive.program import archive_module

    def edit(content: dict[str, Any]) -> None:
        place: Any = content["graph_module"]
        while True:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from([k for k in keys if k not in ("metadata", "tensor_values")]))
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 7)) == 0:
                place[key] = data.draw(st.sampled_from([None, -1, 2**70, "x y", "relu_", True, [], {}, [[1]], 0.5]))
                return
            place = inner

    path = program(archive, tmp_path_factory.mktemp("fuzz") / "net.pt2", edit)
    try:
        archive_module(path)
    except CaptureError as error:
        assert str(path) in str(error)
