"""Check an exported folder in the program that it is for, in a process of its own, against the compressed graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from compressor.data.tokenizer import load_tokenizer
from compressor.errors import UsageError, VerificationError
from compressor.evaluate.quality import GraphLogits, graph_hidden
from compressor.export.exchange.export import Export, Loading
from compressor.graph.model import ModelInfo
from compressor.host.child import Child
from compressor.host.resources import resource

Reference = Callable[..., NDArray[np.float32]]
"""ids int64 [1, S] -> logits or hidden states float32 [S, V]; of a plain module, its inputs -> its first output."""

TOKENS = 64
_PROMPT = 64
TOLERANCES = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}
"""Share of the largest output by which a client's may differ, by the type that it computes in."""
_DEQUANTIZED = 2e-3  # share, where the client rounds weights to the float16 of their scales as it loads them
_ROUNDED = 0.2  # share, where activations are rounded: a rounding that falls the other way moves whole steps


@dataclass(frozen=True)
class Checked:
    """How a client's outputs compare with the compressed graph's on one text.

    Attributes:
        programs: that loaded the folder, with their versions.
        dtype: in which they computed.
        difference: largest one of an output.
        largest: largest output, for comparison.
        tokens: that the client chose greedily; 0 of an encoder.
        equal_tokens: of them, those up to the first that the graph would not have chosen after the same text.
    """

    programs: tuple[str, ...]
    dtype: str
    difference: float
    largest: float
    tokens: int
    equal_tokens: int

    def __str__(self) -> str:
        programs = f"{' + '.join(self.programs)} in {self.dtype}"
        told = f"{programs}: outputs differ by {self.difference:.3g} of {self.largest:.3g}"
        return f"{told}, {self.equal_tokens} of {self.tokens} greedy tokens are equal" if self.tokens else told


def why_unchecked(export: Export, info: ModelInfo) -> str:
    """Say why the client cannot check an export here; empty if it can."""
    if export.unchecked:
        return f"not checked: {export.unchecked}"
    if info.kind not in export.kinds:
        return f"not checked: the check knows {' and '.join(export.kinds)}, and this is of the kind {info.kind}"
    missing = [name for name in export.packages if find_spec(name.replace("-", "_")) is None]
    return f"not checked: pip install {' '.join(missing)}" if missing else ""


def check_export(
    folder: Path,
    export: Export,
    loading: Loading,
    info: ModelInfo,
    reference: Reference,
    rounds: bool,
    inputs: Sequence[NDArray[np.float32]] = (),
) -> Checked:
    """Load a folder in the client's own process and compare.

    Args:
        loading: how the client is to load it.
        reference: outputs of the compressed model.
        rounds: the model rounds activations, so that equal outputs are not to be expected.
        inputs: of a plain module.
    Raises:
        VerificationError: the client does not load it, or computes something else.
    """
    prompt, new = _prompt(folder, info) if info.kind != "module" else ([], 0)
    new = new if info.kind == "decoder" else 0
    arguments = [str(folder.absolute()), json.dumps(asdict(loading)), info.kind]
    with Child(f"{folder}: check", export.client, arguments) as child:
        if wrong := child.loaded["wrong"]:
            raise VerificationError(f"{folder}: the client has other names than the folder: {json.dumps(wrong)[:300]}")
        shapes = [array.shape for array in inputs]
        answer = child.ask(
            json.dumps({"shapes": shapes} if inputs else {"ids": prompt, "new": new}),
            b"".join(array.tobytes() for array in inputs),
        )
        size = int(np.prod(answer["shape"])) * 4
        outputs = np.frombuffer(child.receive(size), np.float32).reshape(answer["shape"])
        programs = tuple(child.loaded["programs"])
    tokens = answer["tokens"]
    wanted = reference(*inputs) if inputs else reference(np.array([prompt + tokens], np.int64))
    difference, largest = float(np.abs(outputs - wanted).max()), float(np.abs(wanted).max())
    chosen = wanted[len(prompt) - 1 : len(prompt) - 1 + len(tokens)].argmax(-1) if tokens else np.array(tokens)
    unequal = np.flatnonzero(chosen != np.array(tokens, np.int64))
    equal = int(unequal[0]) if len(unequal) else len(tokens)
    result = Checked(programs, loading.dtype, difference, largest, len(tokens), equal)
    if not difference <= _tolerance(loading, rounds) * largest:
        raise VerificationError(f"{folder}: the client computes something else: {result}")
    return result


def _tolerance(loading: Loading, rounds: bool) -> float:
    if rounds:
        return _ROUNDED
    return max(TOLERANCES[loading.dtype], _DEQUANTIZED if loading.dequantize else 0.0)


def random_inputs(graph: GraphModule) -> list[NDArray[np.float32]]:
    """Return normally distributed inputs of a plain module; none of a model that reads tokens."""
    if graph.meta["model"].kind != "module":
        return []
    rng = np.random.default_rng(0)
    return [rng.standard_normal(x.shape).astype(np.float32) for x in graph.meta["inputs"][0]]


def _outputs(graph: GraphModule) -> Reference:
    @torch.no_grad()
    def run(*inputs: NDArray[np.float32]) -> NDArray[np.float32]:
        found = pytree.tree_leaves(graph(*map(torch.as_tensor, inputs)))[0]
        return np.asarray(found)

    return run


def graph_reference(graph: GraphModule) -> Reference:
    """Return the outputs of a compressed graph, run in PyTorch by its own definition."""
    if graph.meta["model"].kind == "module":
        return _outputs(graph)
    if graph.meta["model"].kind == "decoder":
        logits = GraphLogits(graph)
        return lambda ids: logits(ids)[0].numpy()
    hidden = graph_hidden(graph)
    return lambda ids: np.asarray(hidden(ids, np.ones(ids.shape, np.float32))[0])


def _prompt(folder: Path, info: ModelInfo) -> tuple[list[int], int]:
    """Return tokens of the shipped text, and how many more the model can take, at most :data:`TOKENS`."""
    longest = info.max_positions or 2 * _PROMPT
    count = max(1, min(_PROMPT, longest // 2))
    try:
        text = (resource("calibration") / "python_docs_heldout.txt").read_text(encoding="utf-8")[: 64 * count]
        ids = load_tokenizer(folder).encode(text, True)
    except UsageError:  # a model without a tokenizer: any tokens will do
        ids = []
    if len(ids) < count or max(ids) >= info.vocab_size:
        ids = np.random.default_rng(0).integers(0, info.vocab_size, count).tolist()
    return ids[:count], min(TOKENS, longest - count)
