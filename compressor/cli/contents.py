"""List what is in a bundle or which linears a model has, for `compress inspect` and `compress check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressorError, UsageError
from compressor.report.sites import totals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from compressor.graph.kinds.tables import Table
    from compressor.graph.sites import Site


def inspect_path(path: Path) -> dict[str, Any]:
    """Contents of a bundle (its manifest) or of a Hugging Face folder (its linears); lists become tables.

    Raises:
        CompressorError: it is neither.
    """
    if (path / "manifest.json").is_file():
        return _inspect_bundle(path)
    from compressor.capture.capture import capture
    from compressor.graph.model import weight_bytes
    from compressor.graph.sites import weight_sites

    graph = capture(path)
    info = graph.meta["model"]
    sites = [
        {
            "site": site.name,
            "class": site.module_class,
            "out": site.out_features,
            "in": site.in_features,
            "dtype": str(graph.get_parameter(site.weight_name).dtype).removeprefix("torch."),
            "tied": site.tied,
        }
        for site in weight_sites(graph)
    ]
    return {
        "model": info.name,
        "architecture": info.architecture,
        "kind": info.kind,
        "parameters": info.parameters,
        "weight_bytes": weight_bytes(graph),
        "linears": sites,
    }


_OF_KERNELS = ("name", "evidence", "registers", "spill_bytes", "shared_bytes", "schedule_chosen")
"""Fields of a kernel that are listed; the last four are of kernels for GPUs: registers and spilled bytes of a thread,
shared memory of a block, and why the schedule was chosen."""


def _inspect_bundle(path: Path) -> dict[str, Any]:
    from compressor_runtime.check import check_listed
    from compressor_runtime.manifest import WEB_FORMAT, any_manifest, field

    from compressor.runtime import DamagedBundleError, check_files, read_manifest

    if any_manifest(path)["format"] == WEB_FORMAT:
        manifest = any_manifest(path)
        check_listed(path, field(manifest, "files", dict))
    else:
        manifest = read_manifest(path)
        check_files(path, manifest)
    try:
        return _contents(manifest)
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedBundleError(
            f"{path}: the manifest lacks something, or has something else in its place ({error}); copy the bundle again"
        ) from error


def _contents(manifest: Mapping[str, Any]) -> dict[str, Any]:
    model = manifest["model"]
    generates = manifest["kind"] in ("decoder", "seq2seq")
    known = ("cache_format", "cache_bytes_per_token", "state_bytes") if generates else ()
    cache = {key: model[key] for key in known if key in model}  # bundles from before caches had formats lack them
    keys = ("site", "pass_name", "format", "bytes_before", "bytes_after", "error", "note")
    return {
        "model": model["name"],
        "architecture": model["architecture"],
        "kind": manifest["kind"],
        "schema_version": manifest["schema_version"],
        "weight_bytes": manifest["weight_bytes"],
        "dense_weight_bytes": manifest["dense_weight_bytes"],
        "bundle_bytes": manifest["bundle_bytes"],
        **cache,
        "entries": list(manifest.get("entries", ["main"])),
        **{key: model[key] for key in ("speculate", "skips", "lossy") if key in model},
        **{key: list(manifest[key]) for key in ("cpu_features", "engines", "cuda_capabilities") if key in manifest},
        "formats": totals(manifest["sites"]),
        "sites": [{key: site[key] for key in keys} for site in manifest["sites"]],
        "kernels": [{key: k[key] for key in _OF_KERNELS if key in k} for k in manifest["kernels"]],
    }


def check_model(path: Path) -> dict[str, Any]:
    """Return the kind of a model, its linears by class, what stays dense and why, and which targets serve it.

    Args:
        path: a Hugging Face folder, or a file that is a model of itself.
    Raises:
        CompressorError: it cannot be captured; the message names the module and its line.
    """
    from compressor.capture.capture import capture
    from compressor.graph.kinds.tables import embedding_tables
    from compressor.graph.model import weight_bytes
    from compressor.graph.sites import weight_sites

    if (path / "manifest.json").is_file():
        raise UsageError(f"{path}: a bundle; `compress verify` checks it")
    graph = capture(path, weights=False)
    info = graph.meta["model"]
    tables = embedding_tables(graph)
    packable = [table.site for table in tables if not table.others]
    tied = {table.site.weight_name for table in tables if table.linears}
    sites = [site for site in weight_sites(graph) if site.weight_name not in tied] + packable
    own = {site.weight_name for site in sites if not site.tied}  # a tied weight stays for its other reader
    total_bytes = weight_bytes(graph)
    return {
        "model": info.name,
        "architecture": info.architecture,
        "kind": info.kind,
        "parameters": info.parameters,
        "weight_bytes": total_bytes,
        "dense_bytes": total_bytes - sum(graph.get_parameter(name).nbytes for name in own),
        "notes": list(graph.meta.get("notes", [])),
        "linears": _linears(graph, sites),
        "stays_dense": _dense(graph, tables),
        "targets": _targets(graph),
    }


def _linears(graph: GraphModule, sites: Sequence[Site]) -> list[dict[str, Any]]:
    """Count the linears and tables that passes can compress, by class; a weight that several share counts once."""
    rows: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for site in sites:
        row = rows.setdefault(site.module_class, {"class": site.module_class, "linears": 0, "bytes": 0})
        row["linears"] += 1
        if site.weight_name not in seen:
            row["bytes"] += graph.get_parameter(site.weight_name).nbytes
        seen.add(site.weight_name)
    return list(rows.values())


def _dense(graph: GraphModule, tables: Sequence[Table]) -> list[dict[str, str]]:
    """List tables, convolutions and gates that stay dense; norms and biases are not worth a line each."""
    from compressor.capture.convolution.rewrite import dense_convolutions
    from compressor.graph.kinds.gate_projections import WHY_DENSE, gate_projections

    rows = [
        {"weight": table.site.weight_name, "why": f"{len(table.others)} other operators read the table as it is"}
        for table in tables
        if table.others
    ]
    rows += [{"weight": name, "why": WHY_DENSE} for name in sorted(gate_projections(graph))]
    for line in dense_convolutions(graph):
        name, _, why = line.partition(": stays dense: ")
        rows.append({"weight": name, "why": why})
    return rows


def _targets(graph: GraphModule) -> list[dict[str, Any]]:
    """Ask each target whether it serves the model as it is; formats are asked for when a recipe names one."""
    from compressor.codegen.backend import make_backend
    from compressor.registry import TARGETS

    rows = []
    for name in TARGETS.names():
        if name == "null":
            continue  # serves everything, and runs nothing
        why = ""
        try:
            make_backend(TARGETS.find(name)()).check(graph)
        except CompressorError as error:
            why = str(error)
        rows.append({"target": name, "serves": not why, "why": why})
    return rows
