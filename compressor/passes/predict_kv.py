"""Let a small model read prompts, and predict the keys and values that the decoder itself goes on from.

KV Prediction (Horton et al. 2024, arXiv 2410.08391): copies of the first layers read the prompt, and linears map what
they attend to onto the caches of all layers, so that the first token costs the small model's operations.  Every later
token, and the last of the prompt, run the decoder as it was.  The graph is drawn in
:mod:`compressor.graph.kept_tokens.predicted_caches`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.fx import GraphModule

from compressor.errors import UsageError
from compressor.graph.caches import attention_layers
from compressor.graph.kept_tokens.predicted_caches import (
    CannotPredict,
    add_prediction,
    makers_of,
    prediction_weights,
    prompt_operations,
)
from compressor.graph.model import ModelInfo
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pass
from compressor.training.device import Device
from compressor.training.loop import Objective
from compressor.training.objectives.prompts import begin_predictors, measure_prompts, prompts_loss, rows_of
from compressor.training.settings import split
from compressor.training.trainable import TrainableGraph
from compressor.training.training_pass import AddingPass

_PROMPT = 512  # tokens whose cost is stated


@dataclass(frozen=True, kw_only=True)
class PredictKv(AddingPass, Pass):
    """Predict a prompt's caches with a small model, copied from the first layers; the model itself stays as it is.

    This is lossy: text behind a prompt reads predicted keys and values.  Copies and predictors learn the model's own
    predictions behind the first halves of samples, and its keys and values.  A share of the samples is held out; the
    weights with the smallest loss there are kept, and perplexity and agreement behind prompts are reported for them.
    Passes that pack weights come behind; those that change layers, in front.

    Attributes:
        layers: with attention that are copied: how many, or, below 1, their share, rounded down.  The last copy ends
            with its keys and values, so that 1 reads each token alone.
        temperature: logits are divided by it.
        caches: weight of the predicted rows' error, relative to their size, in the loss.
    """

    layers: int | float = 0.5
    temperature: float = 1.0
    caches: float = 1.0
    steps: int = 300
    batch: int = 4
    learning_rate: float = 2e-3
    evaluate_every: int = 50

    adds: ClassVar[str] = "added: it predicts a prompt's caches"

    def __post_init__(self) -> None:
        is_share = isinstance(self.layers, float)
        if not 0 < self.layers < (1 if is_share else 10**9):
            what = "a share of the layers, above 0.0 and below 1.0" if is_share else "a number of layers from 1"
            raise UsageError(f"predict_kv: layers {self.layers} is not {what}")
        if not 0 < self.temperature <= 100:
            raise UsageError(f"predict_kv: temperature {self.temperature:g} is not above 0 and at most 100")
        if not 0 <= self.caches <= 1e6:
            raise UsageError(f"predict_kv: caches {self.caches:g} is not a weight from 0 to a million")
        super().__post_init__()

    @property
    def less_memory(self) -> list[str]:
        """Return what takes less memory."""
        return [super().less_memory[0], "lower `layers`"]

    def run(self, graph: GraphModule, ctx: Context) -> GraphModule:
        """Add copies and predictors, train them, and say what a prompt costs, and what it costs the text behind it."""
        ids = ctx.calibration(self.name).ids
        assert isinstance(ids, Tensor)  # a decoder's are
        if ids.shape[1] < 4:
            raise UsageError(
                f"predict_kv: samples of {ids.shape[1]} tokens hold no prompt with text behind it; give at least 4"
            )
        names = self.add(graph)
        own = attention_layers(graph)[: graph.meta["model"].layers]
        makers = [node for layer in own for node in makers_of(graph, layer)]
        begin_predictors(graph, names, makers, ids)
        graph = super().run(graph, ctx)
        held_out, _ = split(ids, self.held_out, ctx.seed)
        ctx.notes += self._figures(graph, held_out)
        return graph

    def prepare(
        self, graph: GraphModule, ctx: Context, names: Sequence[str], device: Device
    ) -> tuple[TrainableGraph, Objective]:
        """Return the graph, and the distance of the model behind predicted caches to itself."""
        model = TrainableGraph(graph, names, rows_of(graph), device)
        return model, prompts_loss(graph, self.temperature, self.caches, device)

    def added(self, graph: GraphModule) -> list[str]:
        """Return the names of all parameters of copies and predictors."""
        return prediction_weights(graph)

    def _figures(self, graph: GraphModule, held_out: Tensor) -> list[str]:
        info: ModelInfo = graph.meta["model"]
        tokens = min(_PROMPT, info.max_positions or _PROMPT)
        own, whole = prompt_operations(graph, tokens)
        return [
            f"predict_kv: {info.predicts} of {info.layers} layers are copied; a prompt of {tokens} tokens takes "
            f"{own / 1e6:.4g} million multiply-adds a token in place of {whole / 1e6:.4g} ({own / whole:.1%})",
            f"predict_kv: {measure_prompts(graph, held_out, self.batch)}, on held-out samples",
        ]

    def add(self, graph: GraphModule) -> list[str]:
        """Add copies and predictors; return the names of the predictors' weights."""
        count = graph.meta["model"].layers
        layers = self.layers if isinstance(self.layers, int) else max(1, math.floor(self.layers * count))
        try:
            return add_prediction(graph, layers)
        except CannotPredict as error:
            raise UsageError(f"predict_kv: {error}") from error
