"""Train weights so that the model predicts what the dense one does (Hinton et al. 2015, arXiv 1503.02531)."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.pipeline.pipeline import Pass
from compressor.training.settings import Shape
from compressor.training.teacher import TaughtPass


@dataclass(frozen=True)
class Distill(TaughtPass, Pass):
    """Train weights so that the outputs come near to those of the dense model, the one before the first pass.

    The loss is the divergence of the predictions, softened by a temperature; an encoder's is the error of its hidden
    states.  No labels are needed, and each token teaches the whole distribution of its successor.
    Linears that are dense yet are trained in float32 by AdamW, and stored in the type that they had.  What is zero in
    them stays zero, so that pruning passes go in front, with ``pack: false``, and passes that pack behind.  A share of
    the samples is held out; the weights with the smallest loss there are kept, the first ones included.

    Attributes:
        temperature: logits are divided by it; above 1, unlikely tokens count for more.
        hidden: weight of the hidden states' error in the loss, at the places where only the residual stream is live,
            behind each attention and each feed-forward network; 0 leaves them out.
        steps: of the optimiser.
        batch: samples that run at once.
        accumulate: batches whose gradients are added up for one step.
        learning_rate: at its highest.
        schedule: how it falls to zero: ``cosine`` or ``linear``.
        warmup: share of the steps in which it rises.
        weight_decay: of matrices, times the learning rate a step.
        clip: largest norm of all gradients together.
        held_out: share of the samples that are not trained on.
        evaluate_every: steps between two looks at these.
        patience: looks without a smaller loss after which training ends; 0 goes on to the last step.
        checkpoint_every: steps between two states in the cache, from which a killed run goes on.
        vectors: train norms and biases too.
        tables: train embedding tables too; one that is tied to a linear is trained with it.
        targets: class names, module names or ``re:`` patterns of the linears to train.
        ignore: patterns of linears to leave as they are.
        adapter_rank: train, for each linear, two matrices of this rank, whose product is added to its weight at the end
            (LoRA); 0 trains the weight itself.
    """

    temperature: float = 1.0
    hidden: float = 0.0
    steps: int = 200
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 3e-4
    schedule: Shape = "cosine"
    warmup: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    held_out: float = 0.1
    evaluate_every: int = 25
    patience: int = 0
    checkpoint_every: int = 50
    vectors: bool = True
    tables: bool = False
    targets: str | tuple[str, ...] = "Linear"
    ignore: str | tuple[str, ...] = ()
    adapter_rank: int = 0
