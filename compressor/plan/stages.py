"""The stages of a run, and what each takes: where amounts come from, for memory, time and disk alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node

from compressor.evaluate.generation.continuations import NEW_TOKENS, TOGETHER
from compressor.graph.costs import NodeCost, eager_work, node_costs
from compressor.graph.kinds.encoder_decoder import encoder_nodes
from compressor.graph.model import ModelInfo, state_bytes, weight_bytes
from compressor.numerics.range_search import Work
from compressor.plan.durations import (
    bundle_seconds,
    capture_work,
    child_work,
    compile_seconds,
    emulated_work,
    linear_kernels,
    lowered_nodes,
    plan_work,
    proof_work,
    scoring_work,
    text_work,
    timing_graphs_seconds,
    timing_seconds,
    write_work,
)
from compressor.plan.memory import Amounts, StageMemory, memory_stages
from compressor.plan.prices import Prices
from compressor.plan.roofline import PROMPT_TOKENS, Roofline
from compressor.plan.streaming import Streaming, one_after_another, plan_calibration, plan_forward, plan_training
from compressor.recipe.data_spec import DataSource
from compressor.recipe.recipe import Recipe

if TYPE_CHECKING:
    from compressor.codegen.backend import Backend
    from compressor.codegen.isa import Isa
    from compressor.plan.model import PassPlan
    from compressor.plan.passes import PlannedPasses

_NEW_TOKENS = 64  # timed single steps
_CHECKED_RUNS, _CHECKED_TOKENS = 10, 18  # sequences that are computed for it, in float64
_FLOAT64 = 2.0  # times as slow as float32
_SPARE_TOKENS = 1 << 20  # read beyond the samples, see samples.load_samples
_TOKEN_CHARACTERS = 3  # of text, a token
_SPOKEN_TOKENS, _SOUNDS = 48, 128  # of a sound that is not looked at for a plan; of an evaluation that states no number


@dataclass(frozen=True)
class Evaluation:
    """How quality will be measured: so many windows of so many tokens, of each of which so many are scored.

    So many prompts are continued by single steps, as well.
    """

    windows: int
    window: int
    scored: int
    continuations: int = 0

    @property
    def steps(self) -> int:
        """Return how many steps all continuations take, of :data:`TOGETHER` sequences at most."""
        return NEW_TOKENS * -(-self.continuations // TOGETHER)


@dataclass(frozen=True)
class Costs:
    """Amounts of a run, from which memory and time follow.

    Attributes:
        amounts: what memory depends on, but for the two choices.
        work: of each stage but those of :func:`_compiling` and timing, by unit.
        again: of passes, what is added to it if hidden states lie on disk.
        timed: of passes, graphs that kernels are made of to be timed.
        graphs: captured, and compressed; parameters may be on the meta device.
        tune: as in the recipe.
        isa: instruction set of the kernels; None for browsers, of which nothing that kernels do is foreseen.
        evaluation: None where nothing is evaluated.
        runs_here: whether this machine executes the kernels, and what that costs is known.
        times_dense: whether the dense model would be timed.
        emulated: what an emulator does in the checks, and to evaluate; None where kernels run by themselves.
        bundle_bytes, cache_bytes, spilled_bytes: on disk: the bundle, weights in the cache (packed ones, and dense ones
            of a quantised checkpoint), hidden states.
    """

    amounts: Amounts
    work: dict[str, Work]
    again: dict[str, Work]
    timed: dict[str, int]
    graphs: tuple[GraphModule, GraphModule]
    tune: str
    isa: Isa | None
    evaluation: Evaluation | None
    runs_here: bool
    times_dense: bool
    emulated: tuple[Work, Work] | None
    bundle_bytes: int
    cache_bytes: int
    spilled_bytes: int

    def memory(self, prices: Prices, *, spill: bool, dense_speed: bool) -> list[StageMemory]:
        """Return the memory of each stage."""
        chosen = replace(self.amounts, spill=spill, dense_speed=dense_speed and self.times_dense)
        skipped = set() if self.runs_here else {"check", "evaluate", "time"}
        return [stage for stage in memory_stages(chosen, prices) if stage.stage not in skipped]

    def seconds(
        self, prices: Prices, bounds: Sequence[Roofline], *, spill: bool, dense_speed: bool
    ) -> dict[str, float]:
        """Return the seconds of each stage, given the bounds on the bundle's speed."""
        graph, final = self.graphs
        info: ModelInfo = graph.meta["model"]
        seconds = {"start": prices.seconds["import_all"]}
        seconds |= {stage: prices.cost(self.work[stage]) for stage in ("capture", "text", "plan") if stage in self.work}
        passes = {stage: work for stage, work in self.work.items() if stage.startswith("pass ")}
        for stage, amounts in passes.items():
            again = prices.cost(self.again.get(stage, {})) if spill else 0.0
            timed = timing_graphs_seconds(graph, self.timed[stage], prices)
            seconds[stage.removeprefix("pass ")] = prices.cost(amounts) + again + timed
        seconds["independence"] = prices.cost(self.work["independence"])
        if self.isa is not None:
            seconds["compile"] = compile_seconds(final, prices, self.tune, self.isa)
        seconds["write"] = prices.cost(self.work["write"])
        if not self.runs_here:
            return seconds
        if self.emulated is not None:
            check, evaluate = map(prices.cost, self.emulated)
            seconds["check"] = check
            if self.evaluation is not None:
                seconds["evaluate"] = evaluate + prices.cost(self.work["evaluate"])
            return seconds
        child = prices.seconds["import_bundle"] + prices.cost(self.work["check"])
        seconds["check"] = child
        calls = sum(node.op == "call_function" for node in final.graph.nodes) // 3
        if self.evaluation is not None:
            prompt = bundle_seconds(bounds[0], calls) * self.evaluation.window / bounds[0].tokens
            seconds["evaluate"] = child + prices.cost(self.work["evaluate"]) + self.evaluation.windows * prompt
            if steps := self.evaluation.steps:
                # Of several sequences it takes as long as of one, or as a prompt of as many tokens.
                rows = min(self.evaluation.continuations, TOGETHER)
                first, one = (bundle_seconds(bound, calls) for bound in bounds[:2])
                seconds["evaluate"] += steps * max(one, first * rows / bounds[0].tokens)
        if info.generates and not info.hears:
            prompt_tokens = bounds[0].tokens
            once = set(encoder_nodes(graph))
            step = node_costs(graph, 1, 1, prompt_tokens, rows=1)
            step = {node: cost for node, cost in step.items() if node not in once}
            dense = [node_costs(graph, 1, prompt_tokens, rows=1), step]
            bundle = [bundle_seconds(bound, calls) for bound in bounds]
            steps = min(_NEW_TOKENS, prompt_tokens)
            seconds["time"] = timing_seconds(prices, dense, bundle, steps, dense_speed and self.times_dense)
        return seconds


def run_costs(graph: GraphModule, planned: PlannedPasses, recipe: Recipe, backend: Backend) -> Costs:
    """Count the amounts of a run.

    Args:
        graph: as captured.
        planned: the passes, and the graph before each and after the last.
    """
    info: ModelInfo = graph.meta["model"]
    final, isa = planned.final, backend.isa
    runs_here = isa is not None and backend.runs_here
    evaluation = _evaluation(recipe, info) if runs_here else None
    forward = plan_forward(graph, evaluation.windows, evaluation.window) if evaluation is not None else None
    tokens = _text_tokens(recipe, info, evaluation)
    learning = [_streaming(step, given, recipe) for step, given in zip(planned.passes, planned.before, strict=True)]
    bundle_bytes = backend.estimate_bytes(final)
    work = _other_work(graph, final, tokens, bundle_bytes)
    if evaluation is not None and forward is not None:
        work["evaluate"] = _evaluation_work(graph, forward, evaluation)
    passes, again = _pass_work(planned.passes, learning)
    hidden = [one.hidden_bytes for one in (*learning, forward) if one is not None]
    sites = [site for step in planned.passes for site in step.sites]
    return Costs(
        amounts=Amounts(
            nodes=len(graph.graph.nodes),
            lowered_nodes=lowered_nodes(graph),
            text_tokens=tokens,
            passes=[
                (step.name, streaming, max((site.working_bytes for site in step.sites), default=0))
                for step, streaming in zip(planned.passes, learning, strict=True)
            ],
            evaluation=forward,
            logits=evaluation.window * info.vocab_size if evaluation is not None and info.generates else 0,
            largest=max((site.out_features * site.in_features for site in sites), default=0),
            largest_operand_bytes=max((kernel.bytes for kernel in linear_kernels(final)), default=0),
            weight_bytes=weight_bytes(final),
            dense_weight_bytes=weight_bytes(graph),
            dense_float_bytes=4 * info.parameters,
            child_activation_bytes=_session_bytes(info),
            spill=False,
            dense_speed=True,
        ),
        work={**work, **passes},
        again=again,
        timed=sum((Counter({f"pass {step.name}": step.timed_graphs}) for step in planned.passes), Counter()),
        graphs=(graph, final),
        tune=recipe.tune,
        isa=isa,
        evaluation=evaluation,
        runs_here=runs_here,
        emulated=_emulated(final, backend, evaluation),
        times_dense=runs_here
        and not backend.launcher
        and info.source is not None
        and info.kind != "module"
        and not info.unpacked_bytes,
        bundle_bytes=bundle_bytes,
        cache_bytes=sum(site.bytes_after for site in sites if site.format) + info.unpacked_bytes,
        spilled_bytes=max(hidden, default=0),
    )


def _other_work(graph: GraphModule, final: GraphModule, tokens: int, bundle_bytes: int) -> dict[str, Work]:
    """Count the work of all stages but passes and evaluation."""
    info: ModelInfo = graph.meta["model"]
    nodes = len(graph.graph.nodes)
    work: dict[str, Work] = {"capture": capture_work(nodes, weight_bytes(graph) if info.source is not None else 0)}
    if tokens:
        work["text"] = text_work(tokens)
    work["plan"], work["independence"] = plan_work(nodes), proof_work(nodes)
    work["write"] = Counter(write_work(bundle_bytes)) + Counter(_vectors(final, info))
    work["check"] = child_work(bundle_bytes)
    return work


def _evaluation_work(graph: GraphModule, forward: Streaming, evaluation: Evaluation) -> Work:
    """Count the work of PyTorch's model in an evaluation, and of comparing the two."""
    scoring = Counter(scoring_work(evaluation.windows * evaluation.scored, graph.meta["model"].vocab_size))
    work = Counter(forward.work) + scoring
    if evaluation.steps:
        step_costs = node_costs(graph, min(evaluation.continuations, TOGETHER), 1, NEW_TOKENS, rows=1).values()
        work += Counter({unit: evaluation.steps * x for unit, x in eager_work(step_costs).items()})
    return work


def _emulated(final: GraphModule, backend: Backend, evaluation: Evaluation | None) -> tuple[Work, Work] | None:
    """Return the work of an emulator in the checks and for the evaluation; None where there is none."""
    if not backend.launcher or backend.timed:
        return None
    info: ModelInfo = final.meta["model"]
    module = info.kind == "module"
    length = min(_CHECKED_TOKENS, info.max_positions or _CHECKED_TOKENS)
    costs = node_costs(final, 1, 1) if module else node_costs(final, _CHECKED_RUNS, length)
    flops = sum(cost.flops for cost in costs.values())
    check = {unit: backend.processes * amount for unit, amount in emulated_work(flops).items()}
    if evaluation is None:
        return check, emulated_work(0.0)
    tokens = evaluation.windows * evaluation.window + evaluation.steps * min(evaluation.continuations, TOGETHER)
    return check, emulated_work(flops / (_CHECKED_RUNS * length) * tokens)


def _pass_work(
    passes: Sequence[PassPlan], learning: Sequence[Streaming | None]
) -> tuple[dict[str, Work], dict[str, Work]]:
    """Count the work of each pass by name, and what is added where hidden states lie on disk."""
    work: dict[str, Work] = {}
    again: dict[str, Work] = {}
    for step, streaming in zip(passes, learning, strict=True):
        name, stored = f"pass {step.name}", sum(site.bytes_after for site in step.sites if site.format)
        amounts = Counter[str]({"write_byte": stored, "hash_byte": stored})
        if streaming is None:
            for site in step.sites:
                amounts.update(site.work)
        else:
            amounts.update(streaming.work)
            again[name] = Counter(again.get(name, {})) + Counter(streaming.again)
        work[name] = Counter(work.get(name, {})) + amounts
    return work, again


def _session_bytes(info: ModelInfo) -> int:
    """Count the bytes of logits, keys, values and states in the process that times the bundle."""
    positions = min(PROMPT_TOKENS, (info.max_positions or 256) // 2) + _NEW_TOKENS
    caches = 4 * (info.vocab_size + 4 * sum(info.cache_heads) * info.head_dim * positions)
    return caches + 2 * state_bytes(info.states)


def _streaming(step: PassPlan, graph: GraphModule, recipe: Recipe) -> Streaming | None:
    spec, info = recipe.calibration, graph.meta["model"]
    if spec is None or not (step.runs_samples or step.training or any(site.needs for site in step.sites)):
        return None
    length = 0 if info.kind == "module" else _SPOKEN_TOKENS if info.hears else spec.sequence_length
    found: list[Streaming] = []
    if any(site.needs for site in step.sites):
        found.append(plan_calibration(graph, step.sites, spec.samples, length))
    if step.training is not None:
        found.append(plan_training(graph, step.training, step.sites, length))
    if step.runs_samples:
        forward, share = plan_forward(graph, spec.samples, length), step.forward_samples / spec.samples
        found.append(replace(forward, work={unit: share * amount for unit, amount in forward.work.items()}))
    return reduce(one_after_another, found)


def _evaluation(recipe: Recipe, info: ModelInfo) -> Evaluation | None:
    spec = recipe.evaluation
    if info.kind == "module" or (spec.kind is None and recipe.calibration is None):
        return None
    if info.hears:  # each sound twice: what it says, and how it predicts what was said
        calibrated = recipe.calibration.samples if recipe.calibration is not None else 0
        return Evaluation(2 * (spec.limit or calibrated or _SOUNDS), _SPOKEN_TOKENS, _SPOKEN_TOKENS // 2)
    window, stride = spec.window, spec.stride
    if info.max_positions and window > info.max_positions:  # as in run.py
        window, stride = info.max_positions, max(1, info.max_positions // 2)
    source: DataSource | None = spec if spec.kind is not None else recipe.calibration
    tokens = min(spec.tokens, _tokens(source)) if source is not None else spec.tokens
    if info.kind == "encoder":  # texts are shorter than the window, and padded to one another's length
        return Evaluation(-(-tokens // window), min(window, tokens), 0)
    windows = 1 + max(0, -(-(tokens - 1 - window) // stride))
    if info.kind != "decoder":
        return Evaluation(windows, min(window, tokens), stride)
    return Evaluation(windows + (spec.in_domain or 0), min(window, tokens), stride, spec.continuations or 0)


def _text_tokens(recipe: Recipe, info: ModelInfo, evaluation: Evaluation | None) -> int:
    """Tokens that are read, at most."""
    total = 0
    if info.hears:
        return 0
    if (spec := recipe.calibration) is not None and spec.kind != "images":
        total += min(_tokens(spec), 4 * spec.samples * spec.sequence_length + _SPARE_TOKENS)
    if evaluation is not None and recipe.evaluation.kind is not None:
        total += min(_tokens(recipe.evaluation), recipe.evaluation.tokens)
    return total


def _tokens(source: DataSource) -> int:
    """Tokens of a text, from its size; as many as are asked for where it is not a local file."""
    if source.kind in (None, "hub"):
        return 1 << 40
    return sum(path.stat().st_size for path in source.find_files()) // _TOKEN_CHARACTERS


def _vectors(final: GraphModule, info: ModelInfo) -> Work:
    """Price the outputs that the bundle is checked against: the compressed graph in PyTorch, in float64."""
    if info.kind == "module":
        costs: dict[Node, NodeCost] = node_costs(final, 1, 1)
    else:
        length = min(_CHECKED_TOKENS, info.max_positions or _CHECKED_TOKENS)
        costs = node_costs(final, _CHECKED_RUNS, length)
    return {unit: _FLOAT64 * amount for unit, amount in eager_work(costs.values()).items()}
