"""`compress check`: what a model is, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from tiny_models import save_model
from torch import Tensor, nn

from compressor.cli.commands import main
from compressor.graph.model import weight_bytes

transformers = pytest.importorskip("transformers")


def check(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)], prog_name="compress")


def test_a_decoder_is_counted_from_its_headers(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "some text to tokenise")
    weights = folder / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:header] + b"\xff" * (size - header))  # NaN everywhere, unread
    found = json.loads(check(folder, "--json").stdout)
    assert (found["kind"], found["architecture"]) == ("decoder", "LlamaForCausalLM")
    linears, tables = found["linears"]
    assert (linears["class"], linears["linears"]) == ("Linear", 7)
    assert (tables["class"], tables["linears"]) == ("Embedding", 1)  # and the head, which is tied to it
    attention, mlp, table = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 64, 320 * 64
    assert (linears["bytes"], tables["bytes"]) == (2 * (attention + mlp), 2 * table)
    assert found["weight_bytes"] - found["dense_bytes"] == 2 * (attention + mlp + table)
    assert found["stays_dense"] == []
    assert [(row["target"], row["serves"]) for row in found["targets"]] == [
        ("arm", True),
        ("cuda", True),
        ("wasm", False),
        ("webgpu", True),
        ("x86", True),
    ]


class Strided(nn.Module):
    """A grouped convolution whose bias is computed stays dense, and browsers do not serve modules."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped, self.head = nn.Conv2d(4, 4, 3, groups=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.grouped.bias is not None
        y = nn.functional.conv2d(x, self.grouped.weight, 2 * self.grouped.bias, groups=2)
        return self.head(y.mean((2, 3)))


def test_what_stays_dense_and_who_does_not_serve_it_have_reasons(tmp_path: Path) -> None:
    module, file = Strided().eval(), tmp_path / "net.pt2"
    torch.export.save(torch.export.export(module, (torch.zeros(1, 4, 8, 8),)), file)
    found = json.loads(check(file, "--json").stdout)
    assert found["kind"] == "module" and found["weight_bytes"] == weight_bytes(module)
    (dense,) = found["stays_dense"]
    assert dense["weight"] == "conv2d" and dense["why"]
    serves = {row["target"]: row for row in found["targets"]}
    assert serves["x86"]["serves"] and not serves["webgpu"]["serves"] and "webgpu" in serves["webgpu"]["why"]
    shown = check(file)
    assert shown.exit_code == 0 and "stays dense" in shown.stdout and "conv2d" in shown.stdout


def test_a_model_that_cannot_be_captured_is_one_message(tmp_path: Path) -> None:
    config = transformers.FNetConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=50)
    transformers.FNetModel(config).save_pretrained(tmp_path / "fnet")
    result = check(tmp_path / "fnet")
    assert result.exit_code and "FNetModel.forward" in result.stderr and "Traceback" not in result.stderr
    assert "no such folder" in check(tmp_path / "nowhere").stderr
