"""Training passes on the CPU and on a GPU: the same losses, the same bits in a second run and in one that was killed.

    python benchmarks/training_gpu.py [--steps 24] [--large-steps 4] [--threads N]

Passes run on the shipped reference model, on the text of its training, and `distill` on a Llama of 109 M random
weights too.  Losses are those of all batches, trained on and held out; a difference is relative, of losses below 0.01
to that.  Of blocks one by one, weights at the end are compared: how far they lie apart over how far they moved.  Times
of a step are medians.  Memory is what PyTorch had allocated at most.  Neither TVM nor datasets is needed.  Exit code 1
if anything does not hold.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from compressor.capture.capture import capture
from compressor.data.text import Samples, tokens_sha256
from compressor.graph.model import clone_graph
from compressor.host.resources import resource
from compressor.passes.distill import Distill
from compressor.passes.finetune import Finetune
from compressor.passes.learned_mask import LearnedMask
from compressor.passes.magnitude import Magnitude
from compressor.passes.sparse_train import SparseTrain
from compressor.pipeline.context import Context
from compressor.pipeline.pipeline import Pipeline
from compressor.pipeline.segment_cache import SegmentCache
from compressor.training.device import gpu_facts

CHOSEN = 0.1  # where blocks are chosen: on the CPU alone, noise of 1e-7 in the norms moves losses by 4.3%
TOLERANCE = 0.01  # of a loss: sums in another order, each step on weights that differ by as much
MOVED = 0.1  # of weights: AdamW's first steps are as long where gradients are nearly zero
REFERENCE = resource("models") / "reference"
COMMON = {"batch": 4, "checkpoint_every": 8, "evaluate_every": 8, "held_out": 0.05, "ignore": ("lm_head",)}
PASSES: dict[str, Any] = {
    "finetune": Finetune(**COMMON),
    "distill": Distill(**COMMON, hidden=0.1),
    "distill, adapters": Distill(**COMMON, adapter_rank=8),
    "distill, by block": Distill(**COMMON, by_block=True),
    "sparse_train, cubic": SparseTrain(scheme="W8A16_B16x1@90", **COMMON),
    "sparse_train, ADMM": SparseTrain(scheme="W8A16_B16x1@90", **COMMON, method="admm", project_every=4),
    "learned_mask": LearnedMask(scheme="W8A16_2:4", **COMMON, refit=False, learning_rate=0.3),
}
DENSE = (
    "sparse_train, cubic",
    "sparse_train, ADMM",
    "learned_mask",
)  # the others begin with half of the blocks at zero
HALF = [Magnitude("W8A16_B16x1@50", pack=False, ignore=("lm_head",))]
KILLED = ("distill", "sparse_train, ADMM")


class Steps:
    """Reporter that notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Steps]:
        """Begin a task."""
        yield self

    def advance(self, amount: int = 1) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def note(self, text: str) -> None:
        """Do nothing."""

    def expect(self, seconds: Any) -> None:
        """Do nothing."""


@dataclasses.dataclass
class Run:
    """Losses of all batches, weights at the end, seconds of a step, and the GPU's memory at its fullest."""

    losses: torch.Tensor
    weights: dict[str, torch.Tensor]
    seconds: float
    peak_bytes: int

    def same_bits(self, other: Run) -> bool:
        """Return whether losses and weights are the same."""
        same = all(torch.equal(value, other.weights[name]) for name, value in self.weights.items())
        return same and (not len(other.losses) or torch.equal(self.losses, other.losses))


def samples(count: int) -> Samples:
    """Return so many windows of 256 tokens of the text that the shipped recipes train on."""
    tokenizer = Tokenizer.from_file(str(REFERENCE / "tokenizer.json"))
    tokens = tokenizer.encode((resource("calibration") / "python_docs.txt").read_text(encoding="utf-8")).ids
    windows = torch.tensor(tokens[: len(tokens) // 256 * 256]).view(-1, 256)
    ids = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[:count]]
    return Samples(ids, ids.flatten(), tokens_sha256(ids), "python_docs")


def train(graph: Any, step: Any, given: Samples, half: bool, cache: Path | None = None) -> Run:
    """Run one pass on a copy of a graph.

    Args:
        half: begin with half of the blocks at zero.
    """
    losses: list[torch.Tensor] = []
    if not getattr(step, "by_block", False):
        made = step.prepare

        def prepare(*arguments: Any) -> Any:
            model, objective = made(*arguments)

            def record(*outputs: Any) -> Any:
                losses.append((found := objective(*outputs)).detach())
                return found

            return model, record

        object.__setattr__(step, "prepare", prepare)
    steps = Steps()
    ctx = Context(samples=given, reporter=steps, results=SegmentCache(cache) if cache else None, state="reference")
    ctx.dense = graph
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    after = step.run(
        Pipeline(HALF).run(clone_graph(graph), Context(samples=given)) if half else clone_graph(graph), ctx
    )
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    weights = {name: value.detach() for name, value in after.named_parameters()}
    assert all(value.device.type == "cpu" for value in weights.values())
    pairs = zip(steps.ends, steps.ends[1:], strict=False)
    seconds = statistics.median([later - earlier for earlier, later in pairs] or [0.0])
    found = torch.stack(losses).double().cpu() if losses else torch.empty(0)
    return Run(found, weights, seconds, peak)


def killed(name: str, device: str, steps: int, cache: Path) -> None:
    """Train in a process of its own until it has kept a state, and kill it."""
    command = [
        sys.executable,
        __file__,
        "--child",
        name,
        "--device",
        device,
        "--steps",
        str(steps),
        "--work",
        str(cache),
    ]
    child = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while not list(cache.glob("[0-9a-f]*/entry.json")):
        assert child.poll() is None and time.monotonic() < deadline, f"{name}: it ended before it kept a state"
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()


def large() -> tuple[Any, Samples]:
    """Return a Llama of random weights, and random tokens."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = transformers.LlamaConfig(vocab_size=16384, max_position_embeddings=512, **sizes)
    ids = torch.randint(3, 16384, (40, 256))
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    return capture(model), Samples(ids, ids.flatten(), tokens_sha256(ids), "random tokens")


def loss_difference(first: Run, second: Run) -> float:
    """Return the largest relative difference of two runs' losses."""
    return float(((first.losses - second.losses).abs() / first.losses.abs().clamp_min(0.01)).max())


def weight_difference(begun: Any, first: Run, second: Run) -> float:
    """Return how far the weights of two runs lie apart, over how far those of the first moved."""
    old = dict(begun.named_parameters())
    apart = sum(float((value - second.weights[name]).double().square().sum()) for name, value in first.weights.items())
    moved = sum(float((value - old[name]).double().square().sum()) for name, value in first.weights.items())
    return float((apart / moved) ** 0.5)


def row(name: str, begun: Any, cpu: Run, gpu: Run, others: list[Run]) -> bool:
    """Print a row; return whether it holds."""
    if len(cpu.losses):
        far, most = loss_difference(cpu, gpu), CHOSEN if name.startswith("sparse_train") else TOLERANCE
        shown = f"{far:.1e} | {float(cpu.losses[-1]):.4f} | {float(gpu.losses[-1]):.4f}"
    else:
        far, most = weight_difference(begun, cpu, gpu), MOVED
        shown = f"(weights) {far:.1e} | - | -"
    bits = [gpu.same_bits(other) for other in others]
    speed = f"{cpu.seconds * 1000:.1f} | {gpu.seconds * 1000:.1f} | {cpu.seconds / gpu.seconds:.1f}x"
    words = " and ".join(["again", "killed"][: len(bits)]) if all(bits) else f"**no: {bits}**"
    print(f"| {name} | {shown} | {words or '-'} | {speed} | {gpu.peak_bytes / 2**20:.0f} |", flush=True)
    return far <= most and all(bits)


def main() -> int:
    """Run all passes on both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--large-steps", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cuda", help="cpu compares the CPU with itself")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=PASSES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    graph, given, few = capture(REFERENCE), samples(200), samples(40)

    def run(name: str, device: str, cache: Path | None = None) -> Run:
        by_block = name.endswith("by block")  # all steps for each of 11 blocks, on few samples
        step = dataclasses.replace(PASSES[name], device=device, steps=max(1, options.steps // (3 if by_block else 1)))
        return train(graph, step, few if by_block else given, name not in DENSE, cache)

    if options.child:
        run(options.child, options.device, options.work)
        return 0
    facts = gpu_facts("this benchmark") if options.device == "cuda" else {"name": "the CPU again"}
    print(f"{facts}; {torch.get_num_threads()} threads of the CPU; {options.steps} steps of 1,024 tokens\n")
    heads = ["pass", "losses differ by", "last, CPU", "last, GPU", "same bits", "CPU ms", "GPU ms", "faster", "GPU MiB"]
    print(f"| {' | '.join(heads)} |\n{len(heads) * '|---'}|")
    fine = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in PASSES:
            cpu, gpu, again = (run(name, device) for device in ("cpu", options.device, options.device))
            others = [again]
            if name in KILLED:
                cache = Path(scratch) / name.replace(" ", "-")
                killed(name, options.device, options.steps, cache)
                resumed = run(name, options.device, cache)
                assert len(resumed.losses) < len(gpu.losses), f"{name}: began anew"
                others.append(dataclasses.replace(resumed, losses=torch.empty(0)))  # those of the killed one are gone
            fine.append(row(name, graph, cpu, gpu, others))
    if options.large_steps:
        big, tokens = large()
        step = Distill(**{**COMMON, "steps": options.large_steps, "held_out": 0.1})
        cpu, gpu = (
            train(big, dataclasses.replace(step, device=device), tokens, True) for device in ("cpu", options.device)
        )
        fine.append(row("distill, 109 M", big, cpu, gpu, []))
    verdict = "all of it holds" if all(fine) else "NOT all of it holds"
    print(f"\n{verdict} (losses within {TOLERANCE:.0%}, of sparse_train within {CHOSEN:.0%})")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
