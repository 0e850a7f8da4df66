"""Observers that check or write the graph between passes."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from compressor.errors import CaptureError, VerificationError
from compressor.formats.parts import PARTS
from compressor.graph.rules import listing
from compressor.graph.sites import weight_sites
from compressor.host.tensor_files import release
from compressor.pipeline.context import Context
from compressor.registry import PASSES


class VerifyStages:
    """Observer that checks that the graph is well formed, that all parameters are finite, and that records are right.

    A packed weight is counted in its format's parts, a dense one in the linear's own weight, and a weight that was
    merged away counts as 0 bytes.
    """

    def __init__(self) -> None:
        self._finite: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # and how often each had been written to

    def __call__(self, index: int, name: str, graph: GraphModule, ctx: Context) -> None:
        """Check one stage.

        Raises:
            CaptureError: a parameter of the model itself is not finite.
            VerificationError: names the pass and the parameter.
        """
        try:
            graph.graph.lint()
        except RuntimeError as error:
            raise VerificationError(f"after {name}: the graph is not well formed: {error}") from error
        if not PASSES.ships(name):  # it may have written to tensors behind PyTorch's back
            self._finite.clear()
        for key, parameter in graph.named_parameters():
            if not parameter.is_floating_point() or self._finite.get(parameter) == parameter._version:
                continue
            if what := _odd_number(parameter):
                if index == 0:
                    raise CaptureError(f"the model's {key} holds {what}; repair the checkpoint, or copy it again")
                raise VerificationError(f"after {name}: {key} holds {what}")
            self._finite[parameter] = parameter._version
        _verify_records(name, graph, ctx)


def _verify_records(name: str, graph: GraphModule, ctx: Context) -> None:
    dense = {site.name: site.weight_name for site in weight_sites(graph)}
    sizes = {key: value.numel() * value.element_size() for key, value in graph.named_parameters()}
    latest = {record.site: record for record in ctx.records}
    for record in latest.values():
        stored = sum(sizes.get(f"{record.site}.{part}", 0) for part in PARTS)
        if not record.format:
            stored += sizes[dense[record.site]] if record.site in dense else 0
        if stored != record.bytes_after:
            raise VerificationError(
                f"after {name}: {record.site} is said to take {record.bytes_after} bytes and takes {stored}"
            )


def _odd_number(parameter: Tensor) -> str:
    """Return NaN or an infinity and its place, or nothing where all numbers are finite."""
    total = parameter.sum(dtype=torch.float32)  # which one of them would make its like
    odd = torch.empty(0) if bool(torch.isfinite(total)) else torch.isfinite(parameter).logical_not_().nonzero()
    what = f"{float(parameter[tuple(odd[0])])} at {odd[0].tolist()}" if len(odd) else ""
    release([parameter])
    return what + (f", and {len(odd) - 1} more such numbers" if len(odd) > 1 else "")


@dataclass(frozen=True)
class Dump:
    """Observer that writes each stage's printed code to ``<folder>/<index>_<name>.py``.

    Beside the captured graph, ``00_normalise.txt`` lists what each rule of the normalisation did.
    """

    folder: Path

    def __call__(self, index: int, name: str, graph: GraphModule, ctx: Context) -> None:
        """Write the stage's files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{index:02d}_{name}.py"
        path.write_text(graph.print_readable(print_output=False), encoding="utf-8")
        if index == 0:
            (self.folder / "00_normalise.txt").write_text(listing(graph.meta["rules"]), encoding="utf-8")


def phase_writer(folder: Path | None, isa: str) -> Callable[[str, str], None] | None:
    """Return what writes the program after each phase of lowering into a folder: (phase, text) -> None.

    Args:
        folder: None writes nothing.
        isa: name of the instruction set that is lowered for; empty where there is one alone.
    """
    if folder is None:
        return None
    count, of = iter(range(1, 1000)), f"_{isa}" if isa else ""

    def write(phase: str, text: str) -> None:
        ending = "txt" if phase == "fuse" else "py"
        (folder / f"lower{of}_{next(count):02d}_{phase}.{ending}").write_text(text, encoding="utf-8")

    return write
