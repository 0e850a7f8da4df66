"""Remove whole layers: which there are and which were named, what their removal leaves, records and plans of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.blocks import Block, Branch, find_blocks, remove_branches
from compressor.graph.kinds.encoder_decoder import SampleInputs
from compressor.graph.sites import packed_weight_sites, weight_sites
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.resume import cached_tensors
from compressor.pipeline.site_plan import SitePlan, plan_untouched
from compressor.pipeline.structured.layer_ranking import Layer, Ranking, Removal, choose_layers

Part: TypeAlias = Literal["block", "attention", "ffn", "either"]
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")
_WORDS = {
    "attention": "the attention of",
    "ffn": "the feed-forward network of",
    "convolution": "the convolutions of",
}


def find_layers(graph: GraphModule, pass_name: str, part: Part, keep_first: int, keep_last: int) -> list[Layer]:
    """List the layers of a model, in dataflow order: its blocks, or branches of them.

    Args:
        keep_first, keep_last: blocks of each residual stream that stay.
    Raises:
        UsageError: the model has no such layers, or weights of it are packed.
    """
    if packed := packed_weight_sites(graph):
        raise UsageError(
            f"{pass_name}: {packed[0].name} is packed already; put the pass before those that pack weights"
        )
    blocks, name = find_blocks(graph), graph.meta["model"].name
    if graph.meta["model"].leaves_early:
        raise UsageError(f"{pass_name}: tokens leave {name} early; put the pass in front of early_exit or skip_decode")
    if graph.meta["model"].predicts:
        raise UsageError(f"{pass_name}: copies of layers predict caches; put the pass in front of predict_kv")
    if not blocks:
        raise UsageError(
            f"{pass_name}: {name} has no blocks: between no two of its layers one tensor alone is passed on, to which "
            "they add; leave the pass out"
        )
    sizes = Counter(block.stream for block in blocks)
    before: Counter[int] = Counter()
    found: list[Layer] = []
    for block, shown in zip(blocks, _names(blocks), strict=True):
        place = before[block.stream]
        before[block.stream] += 1
        is_kept = place < keep_first or place >= sizes[block.stream] - keep_last
        for words, branches in _parts(block, part):
            found.append(Layer(f"{words} {shown}".strip(), len(found), branches, is_kept))
    if not found:
        raise UsageError(f"{pass_name}: no block of {name} has {part} alone; take `part: block`")
    return found


def _names(blocks: Sequence[Block]) -> list[str]:
    """Name blocks by their modules; those of one module, or of none, by their numbers as well."""
    counts = Counter(block.name for block in blocks)
    return [
        block.name if block.name and counts[block.name] == 1 else f"block {block.index} ({block.name or 'unnamed'})"
        for block in blocks
    ]


def _parts(block: Block, part: Part) -> Iterator[tuple[str, tuple[Branch, ...]]]:
    if part == "block":
        yield "", block.branches
        return
    for branch in block.branches:
        if part in ("either", branch.part):
            words = "the cross-attention of" if branch.crosses else _WORDS[branch.part]
            yield words, (branch,)


def named_layers(
    graph: GraphModule, pass_name: str, layers: Sequence[Layer], wanted: Sequence[int | str]
) -> list[Layer]:
    """Return the layers in the blocks that a recipe names: numbers, ranges such as ``2-4``, names of modules.

    Raises:
        UsageError: a block is unknown, or cannot go.
    """
    blocks = find_blocks(graph)
    numbers: set[int] = set()
    for text in map(str, wanted):
        numbers |= _numbers(pass_name, blocks, text)
    nodes = {branch.sum for number in numbers for branch in blocks[number].branches}
    found = [layer for layer in layers if layer.branches[0].sum in nodes]
    for layer in found:
        if reason := layer.reason or ("it is among those that keep_first and keep_last keep" if layer.is_kept else ""):
            raise UsageError(f"{pass_name}: {layer.name} cannot be removed: {reason}")
    if len(found) == len(layers):
        raise UsageError(f"{pass_name}: layers {', '.join(map(str, wanted))} are all that there are; leave one")
    if not found:
        raise UsageError(f"{pass_name}: layers {', '.join(map(str, wanted))}: nothing of that part is in them")
    return found


def _numbers(pass_name: str, blocks: Sequence[Block], text: str) -> set[int]:
    last = len(blocks) - 1
    if (match := _RANGE.fullmatch(text.strip())) is not None:
        first, end = int(match[1]), int(match[2] or match[1])
        if first > end:
            raise UsageError(f"{pass_name}: layers: {text!r} begins behind its end")
        if end > last:
            raise UsageError(f"{pass_name}: layers: {text!r}: the model has blocks 0 to {last}")
        return set(range(first, end + 1))
    hits = {block.index for block in blocks if text == block.name or block.name.endswith(f".{text}")}
    if not hits:
        known = ", ".join(dict.fromkeys(block.name for block in blocks))
        raise UsageError(f"{pass_name}: layers: no block is called {text!r:.80}; there are: {known:.300}")
    return hits


def count_removed(graph: GraphModule, pass_name: str, layers: Sequence[Layer], remove: float) -> int:
    """Return how many layers go.

    Args:
        remove: a share of all of them, below 1, or their number.
    Raises:
        UsageError: none would go, or more than may.
    """
    count = round(remove * len(layers)) if remove < 1 else int(remove)
    free = [layer for layer in layers if not layer.is_kept and not layer.reason]
    fixed = [f"{layer.name} ({layer.reason})" for layer in layers if layer.reason and not layer.is_kept]
    if not count:
        raise UsageError(
            f"{pass_name}: remove {remove:g} of {len(layers)} is none; {1 / len(layers):.3g} is one: raise it"
        )
    if count > len(free) or count == len(layers):
        most = min(len(free), len(layers) - 1)
        kept = f", and {'; '.join(fixed)} cannot go" if fixed else ""
        raise UsageError(
            f"{pass_name}: remove {remove:g} is {count} of {len(layers)} in {graph.meta['model'].name}, of which "
            f"{most} may go: keep_first and keep_last keep {sum(layer.is_kept for layer in layers)}{kept}"
        )
    return count


def layers_to_remove(
    graph: GraphModule,
    ctx: Context,
    pass_name: str,
    layers: Sequence[Layer],
    count: int,
    ranking: Ranking,
    compare_halves: bool,
) -> list[Layer]:
    """Choose layers on the samples, and note what was chosen, and how much of it each half of the samples chooses."""
    samples, what = ctx.calibration(pass_name), "loss" if ranking == "perplexity" else "influence"
    ids = samples.ids
    half = len(ids) // 2
    parts: list[tuple[str, SampleInputs]] = [("all", ids)]
    if compare_halves and half:
        parts += [("first", ids[:half]), ("second", ids[half:])]
    found: list[list[Removal]] = []
    with ctx.reporter.task(pass_name, len(parts)) as task:
        for part, given in parts:

            def remember(gone: Sequence[int], make: Callable[[], Tensor], part: str = part) -> Tensor:
                decides = [
                    samples.sha256,
                    part,
                    ranking,
                    [layer.name for layer in layers if not layer.is_kept],
                    [*gone],
                ]
                return cached_tensors(graph, ctx, pass_name, decides, lambda: {"scores": make()})["scores"]

            found.append(choose_layers(graph, given, layers, count, ranking, remember, ctx.spill))
            task.advance()
    chosen, *halves = ([removal.layer for removal in removals] for removals in found)
    told = ", ".join(f"{removal.layer.name} ({what} {removal.score:.4g})" for removal in found[0])
    ctx.notes.append(f"{pass_name}: {told} of {len(layers)} went, by {ranking}, in this order")
    if halves:
        first, second = (", ".join(layer.name for layer in half) for half in halves)
        common = len({layer.number for layer in halves[0]} & {layer.number for layer in halves[1]})
        depends = "" if common == count else "; the choice depends on what is calibrated on"
        ctx.notes.append(
            f"{pass_name}: by the samples' first half alone {first} would go, by the second {second}: {common} of "
            f"{count} in common{depends}"
        )
    elif compare_halves:
        ctx.notes.append(f"{pass_name}: one sample has no halves, whose choices could be compared")
    return chosen


def remove_layers(graph: GraphModule, ctx: Context, pass_name: str, gone: Sequence[Layer]) -> None:
    """Remove layers, and record each linear that goes, whose outputs are as if they were zero; and what else goes.

    Norms and biases of a layer are one record, by the layer's name, so that all bytes that go are accounted for.
    """
    sizes = {name: value.numel() * value.element_size() for name, value in graph.named_parameters()}
    weights = {site.weight_name for site in weight_sites(graph)}
    readers = {str(node.target): set(node.users) for node in graph.graph.find_nodes(op="get_attr")}
    for site, (_, _, before, after, note) in _without(graph, gone).items():
        ctx.records.append(SiteRecord(site, pass_name, "", before, after, 1.0, "output", None, note))
    lost = set(sizes) - {name for name, _ in graph.named_parameters()} - weights
    note = "norms and biases go with it"
    for layer in gone:
        nodes = {node for branch in layer.branches for node in branch.nodes}
        own = {name for name in lost if readers.get(name, set()) & nodes}
        lost -= own
        if own:
            size = sum(sizes[name] for name in own)
            ctx.records.append(SiteRecord(layer.name, pass_name, "", size, 0, 1.0, "output", None, note))
    if lost:  # tables of positions, say, which depend on no token
        size, name = sum(sizes[name] for name in lost), ", ".join(sorted(lost))
        ctx.records.append(SiteRecord(name, pass_name, "", size, 0, 1.0, "output", None, "nothing reads it any more"))


def plan_layers(graph: GraphModule, gone: Sequence[Layer]) -> list[SitePlan]:
    """Remove layers of a graph without weights, and return one plan for each linear that there was."""
    order = {site.name: i for i, site in enumerate(weight_sites(graph))}
    plans = []
    for site, (rows, columns, before, after, note) in _without(graph, gone).items():
        plans.append(SitePlan(site, rows, columns, "", before, after, note))
    return sorted([*plans, *plan_untouched(graph)], key=lambda plan: order[plan.site])


def _without(graph: GraphModule, gone: Sequence[Layer]) -> Mapping[str, tuple[int, int, int, int, str]]:
    """Remove layers; return rows, columns, bytes before and after, and a note, of each linear that goes, in order."""
    owners = {node: layer for layer in gone for branch in layer.branches for node in branch.nodes}
    before = [(site, graph.get_parameter(site.weight_name)) for site in weight_sites(graph)]
    remove_branches(graph, [branch for layer in gone for branch in layer.branches])
    left = {name for name, _ in graph.named_parameters()}
    nodes = set(graph.graph.nodes)
    found = {}
    for site, weight in before:
        if site.node in nodes:
            continue
        size, stays = weight.numel() * weight.element_size(), site.weight_name in left
        note = f"goes with {owners[site.node].name}" if site.node in owners else "nothing reads it any more"
        note += f"; {site.weight_name} stays, which others read" if stays else ""
        found[site.name] = (site.out_features, site.in_features, size, size if stays else 0, note)
    return found


def layer_bytes(graph: GraphModule, layer: Layer) -> int:
    """Return the bytes of the parameters that nothing but a layer reads."""
    nodes = {node for branch in layer.branches for node in branch.nodes}
    read = {node for inner in nodes for node in inner.all_input_nodes if node.op == "get_attr"}
    own = {str(node.target) for node in read if set(node.users) <= nodes}
    held: dict[str, Tensor] = dict(graph.named_parameters())
    return sum(held[name].numel() * held[name].element_size() for name in own if name in held)


def are_alike(layers: Sequence[Layer]) -> bool:
    """Return whether layers are the same operators on tensors of the same shapes, so that any of them may go."""
    return len({_signature(layer) for layer in layers}) <= 1


def _signature(layer: Layer) -> str:
    parts = []
    for branch in layer.branches:
        for node in branch.nodes:
            given = [_described(arg) for arg in node.args]
            parts.append(f"{node.target}({', '.join(given)})")
    return ";".join(parts)


def _described(arg: object) -> str:
    value = arg.meta.get("val") if hasattr(arg, "meta") else None
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return "node" if hasattr(arg, "meta") else repr(arg) if isinstance(arg, int | float | None) else type(arg).__name__
