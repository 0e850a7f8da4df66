"""What the Python API is given: wrong arguments, passes and modules are sentences, and outputs have names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import compressor
from compressor.errors import CaptureError, CompressorError, RecipeError, UsageError, VerificationError
from compressor.pipeline.context import Context

pytestmark = pytest.mark.usefixtures("no_speed")

X = torch.linspace(-1, 1, 64).reshape(2, 32)
RECIPE: dict[str, Any] = {"passes": [{"rtn": {"scheme": "W8A16"}}], "tune": "off", "target": "null"}


class Net(nn.Module):
    """Returns whatever ``give`` makes of its input and a linear's output."""

    def __init__(self, give: Any = lambda x, y: y) -> None:
        super().__init__()
        self.linear, self.give = nn.Linear(32, 32), give

    def forward(self, x: Tensor) -> Any:
        return self.give(x, self.linear(x))


@dataclasses.dataclass(frozen=True)
class Custom(compressor.Pass):
    """Does what ``work`` does."""

    work: Any = None

    def run(self, graph: GraphModule, ctx: Context) -> Any:
        return self.work(graph)


def compressed(tmp_path: Path, module: Any = None, **changes: Any) -> Any:
    recipe = changes.pop("recipe", {**RECIPE, **changes.pop("more", {})})
    arguments = {"output": tmp_path / "bundle", "example": (X,), **changes}
    return compressor.compress(Net() if module is None else module, recipe, **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"recipe": None}, UsageError, "give a Recipe, a mapping, a file, or a shipped recipe's name"),
        ({"recipe": "quickstrat"}, RecipeError, "no shipped recipe has that name; nearest: quickstart"),
        ({"recipe": 3}, UsageError, "recipe: 3; give"),
        ({"module": 3}, UsageError, "model: 3; give a folder"),
        ({"module": {}}, UsageError, "model: {}; give a folder"),
        ({"output": 5}, UsageError, "output: 5; give a folder"),
        ({"example": None}, CaptureError, "Net is a plain module: give an example of its inputs"),
        ({"example": "x"}, CaptureError, "the example is 'x'; give a tensor, or a tuple"),
        ({"example": ()}, CaptureError, r"the example is \(\); give a tensor, or a tuple"),
        ({"example": (None,)}, CaptureError, "the example holds NoneType; give a tensor"),
        ({"example": X[:0]}, CaptureError, "the example holds a tensor without elements"),
        ({"example": X[:, :31]}, CaptureError, "check that the module runs on the example"),
        ({"more": {"passes": [Custom]}}, RecipeError, r"passes\.0: .* a class; give an instance: Custom\(...\)"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        compressed(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def scaled(graph: GraphModule) -> GraphModule:
    for parameter in graph.parameters():
        parameter.data[0] = float("inf")  # behind PyTorch's back
    return graph


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (lambda graph: None, UsageError, r"Custom\.run returned None; a pass returns the rewritten graph"),
        (lambda graph: 1 / 0, CompressorError, r"Custom\.run: ZeroDivisionError: division by zero \(.*\.py:\d+\)"),
        (scaled, VerificationError, r"after custom: linear\.weight holds inf at \[0, 0\], and 31 more"),
    ],
)
def test_passes_that_go_wrong(work: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        compressed(tmp_path, more={"passes": [Custom(work)]})
    assert not list(tmp_path.iterdir())


def test_a_pass_that_is_not_frozen(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Thawed(compressor.Pass):
        def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
            return graph

    with pytest.raises(RecipeError, match=r"write @dataclass\(frozen=True\) above its class"):
        compressed(tmp_path, more={"passes": [Thawed()]})


@pytest.mark.parametrize("name", ["linear.weight", "linear.bias"])
def test_weights_that_are_not_finite_are_named_before_any_pass_works(name: str, tmp_path: Path) -> None:
    module = Net()
    module.get_parameter(name).data[3] = float("nan")
    with pytest.raises(CaptureError, match=rf"the model's {name} holds nan at \[3.*repair the checkpoint"):
        compressed(tmp_path, module, more={"passes": [Custom(lambda graph: pytest.fail("began to work"))]})


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda x, y: None, "Net returns None; a bundle returns tensors"),
        (lambda x, y: (y, 3), "Net returns 3 as '1'; a bundle returns tensors"),
        (lambda x, y: {"y": y, "n": 3}, "Net returns 3 as 'n'; a bundle returns tensors"),
        (lambda x, y: (), "Net returns no tensor"),
    ],
)
def test_modules_that_do_not_return_tensors(give: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=message):
        compressed(tmp_path, Net(give))


@pytest.mark.parametrize(
    ("give", "operator"),
    [
        (lambda x, y: y.sort()[0], "sort.default"),
        (lambda x, y: torch.fft.fft(y).real, "fft_fft.default"),
    ],
)
def test_operators_without_kernels_are_refused_with_their_line(give: Any, operator: str, tmp_path: Path) -> None:
    custom = {"passes": [Custom(lambda graph: pytest.fail("began to work"))], "target": "x86"}
    with pytest.raises(CaptureError, match=rf"test_arguments\.py:\d+: the operator {operator} has no kernel; write it"):
        compressed(tmp_path, Net(give), more=custom)


def test_outputs_keep_their_names_and_their_order(tmp_path: Path) -> None:
    cases = {
        "dict": (lambda x, y: {"b": y, "a": x + 1}, {"b": 0, "a": 1}),
        "nested": (lambda x, y: {"y": y, "z": (x + 1, [x - 1])}, {"y": 0, "z.0": 1, "z.1.0": 2}),
        "one": (lambda x, y: {"y": y}, {"y": 0}),
        "tuple": (lambda x, y: (y, (x + 1,)), None),
    }
    for name, (give, names) in cases.items():
        module = Net(give)
        bundle = compressed(tmp_path, module, output=tmp_path / name, more={"target": "x86"})
        found, y = bundle.run(X.numpy()), module.linear(X).detach().numpy()
        if names is None:
            assert isinstance(found, list) and len(found) == 2
            continue
        wanted = [y, X.numpy() + 1, X.numpy() - 1]
        assert list(found) == list(names)
        for key, place in names.items():
            np.testing.assert_allclose(found[key], wanted[place], atol=2e-2)


def test_a_single_tensor_may_stand_for_the_example(tmp_path: Path) -> None:
    bundle = compressed(tmp_path, example=X, more={"target": "x86"})
    assert bundle.run(X.numpy()).shape == (2, 32)


def test_a_bundle_that_cannot_be_opened_here_is_complete_and_named(tmp_path: Path) -> None:
    with pytest.raises(CompressorError, match=r"bundle is written, and cannot be opened here .*run_recipe does"):
        compressed(tmp_path)
    assert (tmp_path / "bundle" / "manifest.json").is_file()


@pytest.mark.parametrize("shapes", [[], (), {}])
def test_empty_dynamic_shapes_are_none(shapes: Any, tmp_path: Path) -> None:
    with pytest.raises(CompressorError, match="is written"):
        compressed(tmp_path, dynamic_shapes=shapes)
