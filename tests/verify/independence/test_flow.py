"""Random programs against an experiment: where independence is proven, changing one entry must change no other."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from compressor.graph.model import ModelInfo
from compressor.verify.independence.check import check_independence

aten = torch.ops.aten
WIDTH, ROWS = 4, 6


def examples(batch: int, sequence: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return {
        "x": torch.randn(batch, sequence, WIDTH, generator=generator),
        "y": torch.randn(batch, WIDTH, generator=generator),
        "ids": torch.randint(0, ROWS, (batch, sequence), generator=generator),
    }


@dataclass
class Program:
    """A graph in the making, run on real tensors as it grows, so that each step is a valid one."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)
    values: dict[Node, Any] = field(default_factory=dict)
    tensors: list[Node] = field(default_factory=list)

    def add(self, node: Node, value: Any) -> Node:
        self.values[node] = value
        if isinstance(value, Tensor):
            self.tensors.append(node)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node | None:
        """Append a call if it runs; a tuple of results is taken apart."""
        real = fx.node.map_arg((args, kwargs), lambda node: self.values[node])
        try:
            value = target(*real[0], **real[1])
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, ZeroDivisionError):
            return None
        if isinstance(value, Tensor) and (value.numel() > 4000 or value.dim() > 5 or value.numel() == 0):
            return None
        node = self.add(self.graph.call_function(target, args, kwargs), value)
        if isinstance(value, (tuple, list)):
            for i, part in enumerate(value):
                if isinstance(part, Tensor) and part.numel():
                    self.add(self.graph.call_function(operator.getitem, (node, i)), part)
        return node


def symbolic(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fake inputs whose batch and sequence are symbols."""
    sizes = ShapeEnv()
    symbols = []
    for i, hint in enumerate(tensors["x"].shape[:2]):
        source = ConstantSource(f"s{i}")
        symbol = sizes.create_symbol(hint, source, DimDynamic.DYNAMIC)
        symbols.append(sizes.create_symintnode(symbol, hint=hint, source=source))
    batch, sequence = symbols
    shapes = {"x": (batch, sequence, WIDTH), "y": (batch, WIDTH), "ids": (batch, sequence)}
    with FakeTensorMode(shape_env=sizes):
        return {name: torch.empty(shape, dtype=tensors[name].dtype) for name, shape in shapes.items()}


def start(inputs: dict[str, Tensor], recorded: dict[str, Tensor]) -> Program:
    program = Program()
    generator = torch.Generator().manual_seed(0)
    shared = {
        "w": (WIDTH, WIDTH),
        "table": (ROWS, WIDTH),
        "row": (WIDTH,),
        "spread": (WIDTH,),
        "kernel": (WIDTH, WIDTH, 3),
    }
    for name, shape in shared.items():
        value = torch.rand(shape, generator=generator) if name == "spread" else torch.randn(shape, generator=generator)
        program.root.register_parameter(name, nn.Parameter(value, requires_grad=False))
        program.add(program.graph.get_attr(name), value)
    program.root.register_buffer("turn", torch.tensor([1, 0, 2]))
    program.add(program.graph.get_attr("turn"), program.root.turn)
    for name, value in inputs.items():
        program.add(program.graph.placeholder(name), value).meta["val"] = recorded[name]
    return program


UNARY = [aten.relu.default, aten.neg.default, aten.clone.default, aten.tanh.default, aten.tril.default]
BINARY = [aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.matmul.default]
REDUCTIONS = [aten.sum.dim_IntList, aten.amax.default, aten.mean.dim]
ALONG = [aten.cumsum.default, aten.argsort.default, aten.argmax.default, aten.sort.default, aten.unbind.int]


def grow(program: Program, draw: random.Random) -> None:
    """Append one step with random operands."""

    def pick(*kinds: torch.dtype) -> Node:
        fitting = [n for n in program.tensors if not kinds or program.values[n].dtype in kinds]
        return draw.choice(fitting[-1:] * 3 + fitting[-4:] + fitting[:4])

    def floats() -> Node:
        return pick(torch.float32)

    def whole() -> Node:
        return pick(torch.int64)

    def dim(extra: int = 0) -> int:
        return draw.randint(-2, 2 + extra)

    def sizes(of: Node) -> list[Any]:
        """Draw a new shape made of the sizes of the old one."""
        rank = program.values[of].dim()
        parts: list[Any] = [program.call(aten.sym_size.int, of, i) for i in range(rank)]
        parts = list(draw.sample(parts, rank) if draw.randint(0, 3) == 0 else parts)
        while len(parts) > 1 and (draw.random() < 0.5):
            at = draw.randint(0, len(parts) - 2)
            parts[at : at + 2] = [program.call(operator.mul, parts[at], parts[at + 1])]
        if parts and draw.randint(0, 3) == 0:
            parts[draw.randint(0, len(parts) - 1)] = -1
        if draw.randint(0, 4) == 0:
            parts.insert(draw.randint(0, len(parts)), 1)
        return parts

    a = floats()
    any_value = pick()
    rank = program.values[any_value].dim()
    steps: list[Callable[[], Any]] = [
        lambda: program.call(draw.choice(UNARY), a),
        lambda: program.call(draw.choice(BINARY), a, floats()),
        lambda: program.call(draw.choice(BINARY), a, floats()),
        lambda: program.call(aten.where.self, program.call(aten.gt.Scalar, a, 0.0) or a, floats(), floats()),
        lambda: program.call(draw.choice(REDUCTIONS), a, [dim()], (draw.random() < 0.5)),
        lambda: program.call(aten.amax.default, a),
        lambda: program.call(aten.softmax.int, a, dim()),
        lambda: program.call(draw.choice(ALONG), a, dim()),
        lambda: program.call(aten.flip.default, a, [dim()]),
        lambda: program.call(aten.roll.default, a, [1], [dim()]),
        lambda: program.call(
            aten.permute.default, any_value, draw.sample(range(rank), rank)
        ),
        lambda: program.call(aten.transpose.int, any_value, dim(), dim()),
        lambda: program.call(aten.unsqueeze.default, any_value, dim(1)),
        lambda: program.call(aten.squeeze.dim, any_value, dim()),
        lambda: program.call(aten.select.int, any_value, dim(), 0),
        lambda: program.call(aten.slice.Tensor, any_value, dim(), draw.randint(-1, 1), draw.randint(1, 9)),
        lambda: program.call(aten.cat.default, [a, floats()], dim()),
        lambda: program.call(aten.stack.default, [a, floats()], dim()),
        lambda: program.call(aten.reshape.default, any_value, sizes(any_value)),
        lambda: program.call(aten.reshape.default, any_value, sizes(any_value)),
        lambda: program.call(aten.expand.default, any_value, [draw.randint(2, 3), *[-1] * rank]),
        lambda: program.call(aten.repeat.default, any_value, [draw.randint(1, 2) for _ in range(rank)]),
        lambda: program.call(aten.repeat_interleave.self_int, any_value, 2, dim()),
        lambda: program.call(aten.linear.default, a, node("w")),
        lambda: program.call(aten.layer_norm.default, a, list(program.values[a].shape[dim() :])),
        lambda: program.call(aten.conv1d.default, a, node("kernel"), None, [1], [1]),
        lambda: program.call(aten.embedding.default, floats(), whole()),
        lambda: program.call(aten.gather.default, a, dim(), whole()),
        lambda: program.call(aten.index_select.default, a, dim(), whole()),
        lambda: program.call(aten.index.Tensor, a, [None] * draw.randint(0, 2) + [whole()]),
        lambda: program.call(aten.index.Tensor, a, [whole(), *draw.choice([[], [None]]), whole()]),
        lambda: program.call(aten.index_put.default, a, [None] * draw.randint(0, 2) + [whole()], floats()),
        lambda: program.call(aten.scatter.src, a, dim(), whole(), floats()),
        lambda: program.call(aten.select_scatter.default, a, floats(), dim(), 0),
        lambda: program.call(aten.slice_scatter.default, a, floats(), dim(), 0, draw.randint(1, 9)),
        lambda: program.call(aten.masked_fill.Scalar, a, program.call(aten.gt.Scalar, floats(), 0.0) or a, 2.0),
        lambda: program.call(aten.constant_pad_nd.default, a, draw.choices([-1, 0, 1], k=2 * draw.randint(1, 3))),
        lambda: program.call(aten.topk.default, a, 2, dim()),
        lambda: program.call(
            aten.batch_norm.default, a, None, None, node("row"), node("spread"), draw.random() < 0.5, 0.1, 1e-5, False
        ),
        lambda: program.call(aten.avg_pool1d.default, a, [2]),
        lambda: program.call(aten.unfold.default, a, dim(), 2, 1),
        lambda: program.call(aten.diagonal.default, a, 0, dim(), dim()),
        lambda: program.call(aten.split.Tensor, a, 2, dim()),
        lambda: program.call(aten.fmod.Scalar, any_value, 3),
    ]  # fmt: skip

    def node(name: str) -> Node:
        return next(n for n in program.values if n.name == name)

    draw.choice(steps)()


def finish(program: Program, output: Node) -> GraphModule:
    program.graph.output(output)
    program.graph.eliminate_dead_code()
    module = GraphModule(program.root, program.graph)
    module.meta["model"] = ModelInfo(kind="module", name="random", architecture="random")
    module.meta["inputs"] = ((), None)
    return module


def inputs_of(module: GraphModule, tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensors[node.name] for node in module.graph.nodes if node.op == "placeholder"]


def influenced(module: GraphModule, batch: int, sequence: int, along: int | None) -> bool:
    """Whether some change of an entry's inputs changes what belongs to another entry (all, where none has a place)."""
    tensors = examples(batch, sequence)
    before = module(*inputs_of(module, tensors))
    for entry in range(batch):
        for changed in (examples(batch + 100, sequence), {n: t * 0 + (t.dim() == 2) for n, t in tensors.items()}):
            mine = {name: t.clone() for name, t in tensors.items()}
            for name, t in mine.items():
                t[entry] = changed[name][entry] if changed[name].dtype == t.dtype else changed[name][entry].to(t.dtype)
            after = module(*inputs_of(module, mine))
            if after.shape != before.shape:
                return True
            old, new = before, after
            if along is not None:
                rows = before.shape[along] // batch
                others = [i for i in range(before.shape[along]) if i // rows != entry]
                old, new = (value.index_select(along, torch.tensor(others)) for value in (before, after))
            if not torch.equal(torch.nan_to_num(old), torch.nan_to_num(new)):
                return True
    return False


def place_of_entries(module: GraphModule, batch: int, sequence: int, static: bool) -> int | None:
    """Where a reader looks for the entries: the output's dimension that grows with the batch; None where none does."""
    here = module(*inputs_of(module, examples(batch, sequence))).shape
    place = 0
    if not static:
        there = module(*inputs_of(module, examples(batch - 1, sequence))).shape
        varying = [dim for dim, sizes in enumerate(zip(here, there, strict=True)) if sizes[0] != sizes[1]]
        if not varying:
            return None
        place = varying[0] if len(varying) == 1 else 0
    return place if here and here[place] and here[place] % batch == 0 else None


def random_program(seed: int, static: bool) -> tuple[GraphModule, int, int]:
    """Draw a program of a few steps that reads an input; where static, with a fixed batch as large as the sequence."""
    draw = random.Random(seed)
    batch, sequence = (3, 3) if static else (3, 5)  # equal sizes catch reasoning by size
    real = examples(batch, sequence)
    program = start(real, real if static else symbolic(real))
    reached = set(program.tensors[-3:])  # what depends on an input
    for _ in range(draw.randint(4, 20)):  # many a step does not fit its operands and is not taken
        before = len(program.values)
        grow(program, draw)
        for node in list(program.values)[before:]:
            if reached.intersection(node.all_input_nodes):
                reached.add(node)
    return finish(program, [node for node in program.tensors if node in reached][-1]), batch, sequence


SEEDS = 250


@pytest.mark.parametrize("static", [False, True], ids=["symbolic", "static"])
def test_what_is_proven_holds_in_an_experiment(static: bool) -> None:
    proven = 0
    for seed in range(SEEDS):
        module, batch, sequence = random_program(seed, static)
        verdict = check_independence(module)
        assert verdict.independent == (not verdict.leaks)
        if not verdict.independent:
            continue
        proven += 1
        place = place_of_entries(module, batch, sequence, static)
        assert not influenced(module, batch, sequence, place), f"seed {seed}:\n{module.code}"
    assert SEEDS // 5 < proven < SEEDS * 4 // 5  # neither verdict is empty


# Operators of somebody's own, judged by their definitions


def doubled(x: Tensor) -> Tensor:
    return x * 2


def per_tensor(x: Tensor) -> Tensor:
    return x / x.abs().amax()


def only_for_one_token(x: Tensor) -> Tensor:
    x.sum(1)  # an operator that asks about the size first must not hide the branch
    return x.flip(0) if x.shape[1] == 1 else x * 2


def looped(x: Tensor) -> Tensor:
    for _ in range(x.shape[1]):
        x = x + 1
    return x


def on_data(x: Tensor) -> Tensor:
    return x * 2 if bool(x[0, 0, 0] > 8) else x * 3


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:] = x[:-1]
    return y


CUSTOM = {
    function.__name__: torch.library.custom_op(
        f"compressor_tests::{function.__name__}", mutates_args=(), tags=(torch.Tag.pointwise,)
    )(function)
    for function in (doubled, per_tensor, only_for_one_token, looped, on_data, in_place)
}
for _operator in CUSTOM.values():
    _operator.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("doubled", None),
        ("per_tensor", "aten.amax.default"),
        ("only_for_one_token", "branches on a size"),
        ("looped", "branches on a size"),
        ("on_data", "aten.select.int"),
        ("in_place", "aten.slice.Tensor"),
    ],
)
def test_custom_operators_are_judged_by_their_definitions(name: str, reason: str | None) -> None:
    real = examples(3, 5)
    program = start(real, symbolic(real))
    x = next(node for node in program.values if node.name == "x")
    operator = getattr(torch.ops.compressor_tests, name).default
    first = program.call(operator, x)
    assert first is not None
    second = program.call(operator, program.call(aten.relu.default, first))
    assert second is not None
    verdict = check_independence(finish(program, second))
    if reason is None:
        assert verdict.independent
    else:
        assert verdict.leaks[0].node == first.name and reason in verdict.leaks[0].reason


def test_an_operator_without_definition_proves_nothing() -> None:
    with torch.library._scoped_library("compressor_tests_bare", "DEF") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", torch.clone, "CompositeExplicitAutograd")
        real = examples(3, 5)
        program = start(real, symbolic(real))
        x = next(node for node in program.values if node.name == "x")
        node = program.call(torch.ops.compressor_tests_bare.same.default, x)
        assert node is not None
        (leak,) = check_independence(finish(program, node)).leaks
        assert leak.node == node.name and "nothing is known" in leak.reason
