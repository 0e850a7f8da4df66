"""What passes that train have in common: choose the weights, run the loop, put the best weights back, record, plan."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, get_args

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import CompressorError, UsageError
from compressor.formats.parts import PARTS
from compressor.graph.model import ModelInfo, clone_graph
from compressor.graph.rewrite import set_parameter
from compressor.graph.sites import Site, is_parameter, linear_sites
from compressor.host.digests import digest
from compressor.numerics.products.deterministic import total
from compressor.pipeline.context import Context, SiteRecord
from compressor.pipeline.pipeline import Pass, TrainingNeeds
from compressor.pipeline.site_plan import SitePlan, plan_untouched
from compressor.pipeline.sites import choose_sites
from compressor.progress import Task
from compressor.training.checkpoints import Checkpoints
from compressor.training.device import Device, DeviceName, gpu_bytes, gpu_facts
from compressor.training.loop import History, Objective, Training
from compressor.training.settings import LoopOptions, Settings, TrainingOptions
from compressor.training.trainable import TrainableGraph
from compressor.training.zeros.masks import KeptZeros, Masks

_COPIES = 7  # float32 copies of a weight: itself, its gradient, two means, the best, and what a step works in
_FUSED = 4  # of a weight that has adapters: itself, with these added, its gradient, and the best


class TrainingPass(TrainingOptions, Pass):
    """Share what passes that train have in common: all but the loss and the masks.

    Their options are those of :mod:`compressor.training.settings`; one that chooses what it trains itself has no
    :class:`~compressor.training.settings.WeightOptions`.

    Attributes:
        may_train_nothing: ``steps`` may be 0.
        teaches_itself: the model as the pass finds it runs beside the one that is trained.
    """

    may_train_nothing: ClassVar[bool] = False
    teaches_itself: ClassVar[bool] = False
    vectors: bool
    tables: bool
    targets: str | tuple[str, ...]
    ignore: str | tuple[str, ...]
    adapter_rank: int = 0

    @abstractmethod
    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph with the parameters of these names to train on a device, and the loss of its outputs."""

    def masks(self, graph: GraphModule, ctx: Context, model: TrainableGraph, sites: Sequence[Site]) -> Masks:
        """Return which entries are zero: those of the linears that are zero already."""
        return KeptZeros(
            model.weights, {site.weight_name for site in sites} & model.weights.keys()
        )  # adapters keep their own

    def __post_init__(self) -> None:
        try:
            self._settings()
            if not 0 <= self.adapter_rank <= 10**9:
                raise UsageError(f"adapter_rank {self.adapter_rank} is not a whole number from 0")
            if self.device not in get_args(DeviceName):
                raise UsageError(f"device {self.device} is none of {', '.join(get_args(DeviceName))}")
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error

    @property
    def name(self) -> str:
        """Name of the pass, for messages and keys."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def more_copies(self) -> int:
        """Return how many float32 copies of a weight its masks hold."""
        return 0

    @property
    def less_memory(self) -> list[str]:
        """Return what takes less of a GPU's memory, as advice."""
        return ["lower `batch`, and raise `accumulate` by as much", "name fewer linears in `targets`"]

    @property
    def training(self) -> TrainingNeeds | None:
        """Return what it takes forwards and backwards, with the model that teaches; None where nothing is trained."""
        samples, is_taught = self.steps * self.batch * self.accumulate, self.needs_dense or self.teaches_itself
        return TrainingNeeds(samples, self.batch, is_taught, self.device == "cuda") if samples else None

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse samples of more than one tensor, patterns that match nothing, adapters that save nothing, and a GPU
        that is not here or too small for the weights alone.
        """
        if self.device == "cuda":
            gpu_facts(self.name)
            if (least := self._least_gpu_bytes(graph)) > gpu_bytes():
                raise UsageError(
                    f"{self.name}: what is trained takes {least / 2**30:.1f} GiB beside the model, and the GPU has "
                    f"{gpu_bytes() / 2**30:.1f}; {', or '.join(self.less_memory[1:])}, or set `device: cpu`"
                )
        info: ModelInfo = graph.meta["model"]
        if info.hears or info.pair is not None:
            what = "of speech" if info.hears else "of pictures with texts"
            raise UsageError(f"{self.name}: {info.name} is a model {what}, which is not trained; leave the pass out")
        for site in self.chosen(graph)[0]:
            rows, columns, rank = site.out_features, site.in_features, self.adapter_rank
            if rank * (rows + columns) >= rows * columns:
                raise UsageError(
                    f"{self.name}: adapters of rank {rank} have as many numbers as {site.name}, {rows}x{columns}; "
                    "lower `adapter_rank`, or name the linear in `ignore`"
                )

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Train, and put the best weights in the place of the old ones."""
        return self.run_prepared(graph, ctx, self.prepare)

    def run_prepared(
        self,
        graph: GraphModule,
        ctx: Context,
        begin: Callable[[GraphModule, Context, Sequence[str], Device], tuple[TrainableGraph, Objective]],
    ) -> GraphModule:
        """Train what is prepared in another way.

        Args:
            begin: in the place of :meth:`prepare`.
        """
        samples, sites, names = ctx.calibration(self.name), *self.chosen(graph)
        assert isinstance(samples.ids, Tensor)  # `requires` refuses models whose samples are not
        key = self.key(ctx)
        device = Device(self.device)
        with device.computing(self.name, self.less_memory), ctx.reporter.task(self.name, self.steps) as task:
            prepare = functools.partial(begin, graph, ctx, names, device)
            tensors, history = self.train(graph, ctx, sites, samples.ids, key, task, prepare)
        ctx.notes += self._notes(history)
        self.replace(graph, ctx, sites, tensors)
        return graph

    def key(self, ctx: Context) -> str:
        """Return the digest of everything that determines the result."""
        samples, gpu = ctx.calibration(self.name), gpu_facts(self.name) if self.device == "cuda" else {}
        return digest(ctx.state, self.name, dataclasses.asdict(self), samples.sha256, ctx.seed, gpu)

    def train(
        self,
        graph: GraphModule,
        ctx: Context,
        sites: Sequence[Site],
        samples: Tensor,
        key: str,
        task: Task,
        prepare: Callable[[], tuple[TrainableGraph, Objective]],
    ) -> tuple[Mapping[str, Tensor], History]:
        """Train what is prepared, or take what an earlier run ended with: the best weights, and its figures.

        Args:
            sites: linears whose weights are among those.
            key: digest of everything that determines the result.
        """
        checkpoints = Checkpoints(ctx.results, key, f"{graph.meta['model'].name}: {self.name}")
        ctx.blocks += 1
        if (found := checkpoints.result()) is not None:
            ctx.reused += 1
            task.advance(self.steps)
            return found.tensors, History(**found.records[0])
        model, objective = prepare()
        if self.adapter_rank:
            model.adapt(list(dict.fromkeys(site.weight_name for site in sites)), self.adapter_rank, ctx.seed)
        masks = self.masks(graph, ctx, model, sites)
        training = Training(model, objective, samples, self._settings(), masks, checkpoints, ctx.seed)
        tensors = training.run(task)
        return checkpoints.finish(tensors, [dataclasses.asdict(training.history)]), training.history

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Say which linears are trained: neither shapes nor bytes change."""
        if not self.steps:
            return plan_untouched(graph)
        sites, names = self.chosen(graph)
        trained = {site.name for site in sites}
        working = max(self._working_bytes(graph, sites, part) for part in self.parts(graph, names))
        return [
            dataclasses.replace(plan, note="is trained", working_bytes=working) if plan.site in trained else plan
            for plan in plan_untouched(graph)
        ]

    def parts(self, graph: GraphModule, names: Sequence[str]) -> list[list[str]]:
        """Return the parameters that are trained at once, for each time."""
        return [list(names)]

    def _working_bytes(self, graph: GraphModule, sites: Sequence[Site], names: Sequence[str]) -> int:
        """Return the bytes that training these parameters takes beside the graph."""
        working = 4 * (_COPIES + self.more_copies) * sum(graph.get_parameter(name).numel() for name in names)
        if self.adapter_rank:
            mine = [site for site in sites if site.weight_name in names]
            shapes = {site.weight_name: (site.out_features, site.in_features) for site in mine}.values()
            saved = ((_COPIES - _FUSED) * rows * columns for rows, columns in shapes)
            working -= 4 * (sum(saved) - _COPIES * self.adapter_rank * sum(map(sum, shapes)))
        return working

    def _least_gpu_bytes(self, graph: GraphModule) -> int:
        """Return the bytes that no training can do without: float32 weights, gradients and two means."""
        sites, names = self.chosen(graph)
        held = {site.weight_name for site in sites} if self.adapter_rank else set()
        parts = ([name for name in part if name not in held] for part in self.parts(graph, names))
        return 4 * 4 * max(sum(graph.get_parameter(name).numel() for name in part) for part in parts)

    def _settings(self) -> Settings:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(LoopOptions)}
        return Settings(**given | ({"steps": 1} if self.may_train_nothing and given["steps"] == 0 else {}))

    def chosen(self, graph: GraphModule) -> tuple[list[Site], list[str]]:
        """Return the linears, and the names of all parameters to train."""
        sites = choose_sites(graph, self.name, None, self.targets, self.ignore)
        names = dict.fromkeys(site.weight_name for site in sites)
        for node in graph.graph.find_nodes(op="get_attr"):
            if not is_parameter(graph, node) or node.target.rpartition(".")[2] in PARTS:
                continue
            value = graph.get_parameter(node.target)
            is_table = any("embedding" in str(user.target) for user in node.users)
            if value.is_floating_point() and (self.tables if is_table else self.vectors and value.dim() == 1):
                names[node.target] = None
        return sites, list(names)

    def _notes(self, history: History) -> list[str]:
        if history.best_step < 0:
            raise CompressorError(f"{self.name}: {history.why}")
        ended = f"; it ended after step {history.step}: {history.why}" if history.why else ""
        if history.best_step == 0:
            loss = f"{history.begun:.4g}"
            return [f"{self.name}: no state had a smaller held-out loss than the start, {loss}: it stays{ended}"]
        first = f"after step {history.begun_step}" if history.begun_step else "at the start"
        return [
            f"{self.name}: held-out loss {history.begun:.4g} {first}, {history.best:.4g} after step "
            f"{history.best_step} of {self.steps}{ended}"
        ]

    def replace(self, graph: GraphModule, ctx: Context, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> None:
        """Put trained weights in the place of the old ones, for all that read them, and record each linear."""
        for site in sites:
            old, new = graph.get_parameter(site.weight_name).detach(), tensors[site.weight_name]
            size, norm = new.numel() * new.element_size(), total(old.double().square())
            error = float(total((new.double() - old.double()).square()) / norm) if float(norm) else 0.0
            note = f"tied: {site.weight_name} is trained for all that read it" if site.tied else ""
            ctx.records.append(
                SiteRecord(site.name, self.name, "", size, size, float(f"{error:.6g}"), "weight", None, note)
            )
        for name, value in tensors.items():
            set_parameter(graph, name, value)


class AddingPass(TrainingPass, Pass):
    """Share what passes have in common that add weights to a model, train these alone, and leave the model as it is.

    Attributes:
        adds: the note of each linear that is added.
    """

    adds: ClassVar[str]

    @abstractmethod
    def add(self, graph: GraphModule) -> list[str]:
        """Add the weights, and return the names of those that have no values yet.

        Raises:
            UsageError: the model cannot have them.
        """

    @abstractmethod
    def added(self, graph: GraphModule) -> list[str]:
        """Return the names of all parameters that were added."""

    def requires(self, graph: GraphModule, ctx: Context) -> None:
        """Refuse models that cannot have the weights, and what training refuses."""
        self.add(changed := clone_graph(graph))
        super().requires(changed, ctx)

    def plan(self, graph: GraphModule, ctx: Context) -> list[SitePlan]:
        """Add the weights, which are to be trained."""
        self.add(graph)
        return super().plan(graph, ctx)

    def masks(self, graph: GraphModule, ctx: Context, model: TrainableGraph, sites: Sequence[Site]) -> Masks:
        """Keep no zeros: added weights may begin with some."""
        return KeptZeros(model.weights, set())

    def chosen(self, graph: GraphModule) -> tuple[list[Site], list[str]]:
        """Return the added linears, and all added parameters."""
        names = self.added(graph)
        return [site for site in linear_sites(graph) if site.weight_name in names], names

    def replace(self, graph: GraphModule, ctx: Context, sites: Sequence[Site], tensors: Mapping[str, Tensor]) -> None:
        """Put trained weights in their place, and record the linears as added."""
        for name, value in tensors.items():
            set_parameter(graph, name, value)
        for site in sites:
            value = tensors[site.weight_name]
            size = value.numel() * value.element_size()
            ctx.records.append(SiteRecord(site.name, self.name, "", 0, size, 0.0, "weight", note=self.adds))
