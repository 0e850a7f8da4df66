"""Export a compressed graph: plan, write, check in the client, and give the folder its name, or leave nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from compressor.errors import CompressorError, VerificationError
from compressor.evaluate.models import BundleProcess
from compressor.export.exchange.bundle_graph import bundle_graph, bundle_recipe
from compressor.export.exchange.check import Checked, check_export, graph_reference, random_inputs, why_unchecked
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export, Form, Written
from compressor.export.publish import check_destination, explaining_failed_writes, publishing
from compressor.progress import Reporter, Silent

_KERNELS_DIFFER = 0.1  # share of the largest output that a bundle's kernels may be away from its graph


@dataclass(frozen=True)
class Exported:
    """Tell the result of an export.

    Attributes:
        folder: where it lies.
        to: name of the layout.
        written: bytes of each weight.
        folder_bytes: of all files.
        checked: how the client computes; None if it was not asked.
        unchecked: why not; empty if it was.
        notes: what a reader should know.
    """

    folder: Path
    to: str
    written: Written
    folder_bytes: int
    checked: Checked | None
    unchecked: str
    notes: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        sizes = self.written.sizes
        return {
            "export": str(self.folder),
            "to": self.to,
            "weight_bytes": sum(size.bytes for size in sizes.values()),
            "folder_bytes": self.folder_bytes,
            "bits_per_weight": self.written.bits,
            "bits_by_tensor": {name: size.bits for name, size in sorted(sizes.items())},
            "checked": None if self.checked is None else asdict(self.checked),
            "not_checked": self.unchecked or None,
            "notes": list(self.notes),
        }


def export_graph(
    graph: GraphModule,
    form: Form,
    partial: Path,
    destination: Path,
    check: bool | None = None,
    reporter: Reporter | None = None,
    bundle: Path | None = None,
) -> Exported:
    """Write a planned export of a compressed graph into an empty folder, and check it there.

    Args:
        destination: the name that the folder will have.
        check: True asks the client, or fails where it is not installed; False does not; None asks it if it is here.
        bundle: whose kernels are compared as well, where they run here.
    Raises:
        VerificationError: what was written is another model, for our readers or for the client.
        ResourceError: the disk is full.
    """
    reporter, export = reporter or Silent(), form.export
    sites = export.sites(graph)
    reporter.note(f"{export.title}: {form.words}")
    with explaining_failed_writes(destination):
        written = form.write(partial, graph)
        size = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    checked, unchecked, more = _check(graph, form, partial, sites, check, bundle)
    packed = [site for site in sites if site.parameter in form.packed]
    notes = (*export.notes(packed or sites), *more)
    return Exported(destination, export.title, written, size, checked, unchecked, notes)


def _check(
    graph: GraphModule, form: Form, folder: Path, sites: list[PackedSite], check: bool | None, bundle: Path | None
) -> tuple[Checked | None, str, list[str]]:
    """Ask the client; return what it found, or why it was not asked, and what the bundle's kernels make of the text."""
    if check is False:
        return None, "not checked: --no-check", []
    info = graph.meta["model"]
    if why := why_unchecked(form.export, info):
        if check:
            raise CompressorError(why)
        return None, why, []
    packed = [site for site in sites if site.parameter in form.packed]
    rounds = form.export.rounds or any(site.packed.format.activations is not None for site in sites)
    loading = form.export.loading(packed)
    inputs = random_inputs(graph)
    checked = check_export(folder, form.export, loading, info, graph_reference(graph), rounds, inputs)
    return checked, "", [] if bundle is None else [_kernels(graph, bundle)]


def _kernels(graph: GraphModule, bundle: Path) -> str:
    """Say how far a bundle's own kernels are from its graph, which the client was compared with.

    Raises:
        VerificationError: so far that the graph is not the bundle's.
    """
    import numpy as np

    info = graph.meta["model"]
    ids = np.arange(32, dtype=np.int64)[None] % max(1, info.vocab_size)
    images = random_inputs(graph)
    wanted = graph_reference(graph)(*images or [ids])
    try:
        with BundleProcess(bundle) as process:
            if images:
                found = process.classes(images[0])
            elif info.kind == "decoder":
                found = process.logits(ids)[0]
            else:
                found = process.hidden(ids, np.ones((1, 32), np.float32))[0]
    except CompressorError as error:
        return f"the bundle's kernels do not run here ({error}): the client was compared with its graph in PyTorch"
    difference, largest = float(np.abs(found - wanted).max()), float(np.abs(wanted).max())
    if not difference <= _KERNELS_DIFFER * largest:
        raise VerificationError(
            f"{bundle}: its kernels compute something else than the graph that was exported (outputs differ by "
            f"{difference:.3g} of {largest:.3g}); write the export while the recipe runs: add `exports:` to it"
        )
    return f"the bundle's kernels differ from its graph by {difference:.3g} of {largest:.3g}"


def export_bundle(
    bundle: Path,
    export: Export,
    destination: Path,
    model: str | None = None,
    check: bool | None = None,
    reporter: Reporter | None = None,
) -> Exported:
    """Export a bundle to a folder, which appears whole or not at all.

    The arguments are those of :func:`bundle_graph` and :func:`export_graph`.
    """
    check_destination(destination)
    graph = bundle_graph(bundle, model)
    form = export.plan_for(graph, bundle_recipe(bundle)) if export.reads_text else export.plan(graph)
    with publishing(destination) as partial:
        return export_graph(graph, form, partial, destination, check, reporter, bundle)
