"""Run a meta model once, to find its layers, its positions, and what its attention asks for.

Inputs are real and parameters fake: numbers that do not depend on weights, such as positions and masks, are real.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from compressor.capture.arithmetic.sizes import READS
from compressor.capture.attention.interface import (
    Recorder,
    SelfMadeAttention,
    mask_requests,
    masks_left_out,
)
from compressor.capture.attention.masks import MaskRequest, MaskRule, find_rule, mask_rules
from compressor.capture.export import error_context
from compressor.capture.meta_model import DecoderProgram, EncoderProgram, MetaModel, attend_as_written, cache_argument
from compressor.errors import CaptureError
from compressor.graph.provenance import module_path, source_line

_LONGEST = 4096  # tokens, where a model states no limit
_TOKENS = 5


@dataclass(frozen=True)
class Probed:
    """State what one run has shown.

    Attributes:
        program: to export.
        facts: fields of :class:`compressor.graph.model.ModelInfo`.
        self_made: attention is written out in the model's code, not called through transformers' interface.
        notes: what the user should know.
    """

    program: nn.Module
    facts: dict[str, Any]
    self_made: bool
    notes: tuple[str, ...] = ()


def probe(meta_model: MetaModel, positions: int) -> Probed:
    """Probe a model that attends through transformers' interface, else one that writes its attention out.

    Args:
        positions: longest sequence that the configuration states; 0 for none.
    Raises:
        CaptureError: it takes other arguments, or its layers cannot be served.
    """
    run = _probe_decoder if meta_model.kind == "decoder" else _probe_encoder
    if meta_model.interface:
        try:
            return run(meta_model, positions, False)
        except CaptureError as error:
            written_out = isinstance(error, SelfMadeAttention) or isinstance(error.__cause__, SelfMadeAttention)
            if not written_out and MaskRequest.__name__ not in str(error):
                raise
    if meta_model.interface:
        attend_as_written(meta_model.model)
    return run(meta_model, positions, True)


def _probe_decoder(meta_model: MetaModel, positions: int, self_made: bool) -> Probed:
    """Run a decoder without a cache; its position is given, and once left out, to see where it begins to count."""
    model = meta_model.model
    _require_arguments(meta_model, "input_ids", cache_argument(model))
    program = DecoderProgram(model, self_made)
    ids, position, keep = torch.full((2, _TOKENS), 3), torch.arange(_TOKENS), torch.zeros(3, dtype=torch.int64)
    recorder = Recorder(program.names, position=position)
    with torch.no_grad(), mask_requests(), error_context(model, meta_model.name):
        with _Lookups() as given:
            program.run(recorder, ids, keep)
        if program.takes_positions:
            with _Lookups() as default:
                program.run(Recorder(program.names, position=position), ids, keep, own_positions=True)
            program.first_position = _first_position(given.indices, default.indices)
        elif self_made:
            program.counts_from_cache = _counts_from_cache(program, ids, keep, given.indices)
    layers = len(recorder.keys)
    program.layers, program.state_keys = sorted(recorder.keys), sorted(recorder.new_states)
    if not program.state_keys and (not layers or program.layers != list(range(layers))):
        raise CaptureError(
            f"{meta_model.name}: {layers} layers of {type(model).__name__} store keys and values in a cache; every "
            "layer must, or keep a state that it computes by one of the functions that our operators replace "
            "(docs/decisions/0058-recurrent-layers.md)"
        )
    if not self_made and len(recorder.attended) != layers:
        raise SelfMadeAttention(f"{meta_model.name}: a layer does not attend through transformers' interface")
    kv_heads, head_dim = _cache_size(recorder, program, meta_model.name)
    if not self_made:
        with error_context(None, meta_model.name):
            program.rules = mask_rules(recorder.calls, causal=True, positions=positions or _LONGEST)
    states = tuple(tuple(map(int, recorder.new_states[key].shape[1:])) for key in program.state_keys)
    facts = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "states": states}
    notes = tuple(sorted(recorder.notes))
    return Probed(program, facts | _usable(positions, program.first_position), self_made, notes)


def _cache_size(recorder: Recorder, program: DecoderProgram, name: str) -> tuple[int, int]:
    """Return heads and channels of the caches: one size for all, the largest where layers differ.

    Raises:
        CaptureError: heads of one layer cannot be repeated to be as many as another's.
    """
    sizes = {(int(x.shape[1]), int(x.shape[3])) for x in (*recorder.keys.values(), *recorder.values.values())}
    if len(sizes) < 2:
        return next(iter(sizes), (0, 0))
    heads, width = (max(size[i] for size in sizes) for i in (0, 1))
    differ = f"layers differ in heads and channels of their keys and values, {sorted(sizes)}"
    if program.self_made or any(heads % own for own, _ in sizes):
        raise CaptureError(
            f"{name}: {differ}, and some cannot be repeated or filled up to {(heads, width)}; not covered"
        )
    program.cache_size = (heads, width)
    recorder.notes.add(f"{differ}: all are cached as {heads} heads of {width}, repeated or filled up with zeros")
    return heads, width


def _probe_encoder(meta_model: MetaModel, positions: int, self_made: bool) -> Probed:
    model = meta_model.model
    _require_arguments(meta_model, "input_ids", "attention_mask")
    program = EncoderProgram(model, self_made)
    program.typed = program.typed and _takes_the_first_type(program, meta_model)
    ids, mask = torch.full((2, _TOKENS), 3), torch.ones(2, _TOKENS, dtype=torch.float32)
    recorder = Recorder(program.names, mask=mask)
    with torch.no_grad(), error_context(model, meta_model.name), _Lookups() as lookups:
        if self_made:
            with masks_left_out() as wanted:
                program.run(recorder, ids)
            if any(find_rule(f, 0, causal=False, positions=positions or _LONGEST) != MaskRule() for f in wanted):
                raise CaptureError("its mask hides more than padding, which its own attention cannot be told of here")
        else:
            with mask_requests():
                program.run(recorder, ids)
    first = _first_position([torch.arange(_TOKENS).expand(2, -1)] * len(lookups.indices), lookups.indices)
    if self_made:
        return Probed(program, _usable(positions, first), True)
    if not recorder.calls:
        raise SelfMadeAttention(f"{meta_model.name}: no layer attends through transformers' interface")
    with error_context(None, meta_model.name):
        program.rules = mask_rules(recorder.calls, causal=False, positions=positions or _LONGEST)
    return Probed(program, {"layers": len(recorder.calls)} | _usable(positions, first), False)


def _takes_the_first_type(program: EncoderProgram, meta_model: MetaModel) -> bool:
    """Return whether a model that is told no types of tokens looks up the same as for tokens of the first type.

    Most do, and constants of our own spare a table of zeros; XLM adds nothing where no types are given.
    """
    ids, mask, found = torch.full((2, _TOKENS), 3), torch.ones(2, _TOKENS), list[list[list[int]]]()
    for typed in (True, False):
        program.typed = typed
        quiet = error_context(meta_model.model, meta_model.name)
        with torch.no_grad(), mask_requests(), masks_left_out(), quiet, _Lookups() as lookups:
            program.run(Recorder(program.names, mask=mask), ids)
        found.append(sorted(indices.flatten().tolist() for indices in lookups.indices))
    return found[0] == found[1]


def _usable(positions: int, first: int) -> dict[str, int]:
    """Return how many tokens a table of positions serves: some begin to count after the number of padding."""
    return {"max_positions": max(positions - first, 0)}


class _Lookups(TorchFunctionMode):
    """Collects the indices that embeddings are asked for, where they are known without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding and not isinstance(args[0], FakeTensor):
            self.indices.append(args[0])
        return func(*args, **(kwargs or {}))


def _first_position(given: list[Tensor], default: list[Tensor]) -> int:
    """Return how much later a model counts the first position by itself than when it is told 0."""
    for told, own in zip(given, default, strict=False):
        if {tuple(own.shape), tuple(told.shape)} <= {(2, _TOKENS), (1, _TOKENS), (_TOKENS,)}:
            ahead = (own - told).flatten()
            if len(set(own.flatten().tolist())) == _TOKENS and bool((ahead == ahead[0]).all()):
                return max(int(ahead[0]), 0)
    return 0


_AHEAD = 3  # tokens


class _LongerCache(Recorder):
    """A stand-in for a cache that says that some tokens came before."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many."""
        return _AHEAD


def _counts_from_cache(program: DecoderProgram, ids: Tensor, keep: Tensor, first: list[Tensor]) -> bool:
    """Return whether a model looks positions up that begin where its cache ends.

    Args:
        first: the indices that it looks up with an empty cache.
    """
    with suppress(Exception), _Lookups() as later:  # its masks may not fit: positions are looked up in front of them
        program.run(_LongerCache(program.names, position=torch.arange(_TOKENS)), ids, keep)
    pairs = list(zip(first, later.indices, strict=False))
    counted = [(x, y) for x, y in pairs if x.numel() > 1 and bool((x.flatten()[:_TOKENS].diff() == 1).all())]
    return bool(counted) and all(torch.equal(x + _AHEAD, y) for x, y in counted)


def check_positions(graph: fx.Graph, program: nn.Module, name: str) -> None:
    """Let a decoder that takes no positions, and counts them from its cache, read them; refuse one that counts alone.

    Its graph was traced on an empty cache, so that it counts from 0 in each step.

    Raises:
        CaptureError: names the module and the line that count.
    """
    if not isinstance(program, DecoderProgram) or program.takes_positions:
        return
    ids, position = graph.find_nodes(op="placeholder")[:2]
    for node in list(graph.nodes) if program.counts_from_cache else ():
        from_zero = str(node.target) in ("aten.arange.default", "aten.arange.start") and node.args[:-1] in ((), (0,))
        if from_zero and str(node.meta["val"].shape[0]) == str(ids.meta["val"].shape[1]):
            node.replace_all_uses_with(position)
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(("aten.arange", "aten.cumsum")):
            where = " at ".join(filter(None, (module_path(node), source_line(node))))
            raise CaptureError(f"{name}: {where or node.name} counts positions, and the model takes no position_ids")


def bias_notes(graph: fx.Graph) -> list[str]:
    """Tell the user of biases that are kept as numbers, because no rule expresses them."""
    masked = graph.find_nodes(op="call_function", target=torch.ops.compressor.masked_attention.default)
    biased = [node for node in masked if len(node.args) > 6 and node.args[6] is not None]
    if not biased:
        return []
    return [
        f"{len(biased)} attention layers add biases that no rule expresses: 4 bytes for each pair of tokens and head"
    ]


def check_numbers(graph: fx.Graph, name: str) -> None:
    """Refuse a graph that reads a number out of a tensor: its shapes would depend on values.

    Raises:
        CaptureError: names the module and the line that do.
    """
    for node in graph.nodes:
        if node.target in READS:
            where = " at ".join(filter(None, (module_path(node), source_line(node))))
            raise CaptureError(
                f"{name}: {where or node.name} reads a number out of a tensor, which no program can follow; rewrite "
                "the line, or capture the part you need as a module with an example of its inputs"
            )


def _require_arguments(meta_model: MetaModel, *names: str) -> None:
    known = inspect.signature(meta_model.model.forward).parameters
    absent = [name for name in names if name not in known]
    if absent:
        cls = type(meta_model.model)
        raise CaptureError(
            f"{meta_model.name}: {cls.__name__}.forward ({inspect.getsourcefile(cls)}) takes no {', '.join(absent)}; "
            "capture it as a module with example inputs"
        )
