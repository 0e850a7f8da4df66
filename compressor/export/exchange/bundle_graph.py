"""Make the compressed graph of a bundle again: the model that it was made from, with the bundle's own weights.

The graph stands for the bundle only if both have the same parameters, of the same shapes.  Passes that prune, or that
add operators, leave bundles of which this cannot be said, and which are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor_runtime.manifest import field
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.capture import capture
from compressor.errors import UsageError
from compressor.export.exchange.dense_form import refuse_packed_caches
from compressor.formats.format import Format
from compressor.formats.packing import PackedWeight
from compressor.graph.kinds.tables import embedding_tables, replace_table
from compressor.graph.model import ModelInfo
from compressor.graph.rewrite import replace_linear, set_tensor
from compressor.graph.sites import weight_sites
from compressor.host.tensor_files import map_safetensors
from compressor.recipe.recipe import Recipe
from compressor.runtime import check_files, read_manifest

_WEIGHTS = "weights.safetensors"


def bundle_graph(bundle: Path, model: str | None = None) -> GraphModule:
    """Return a bundle's graph, its weights memory-mapped.

    Args:
        model: folder or id of the model that the bundle was made from; None takes the recipe's.
    Raises:
        BundleError: it is damaged, or for browsers.
        UsageError: the model is another one, or passes have changed more than the formats of its weights.
    """
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    if not (bundle / _WEIGHTS).is_file():
        raise UsageError(f"{bundle}: has no {_WEIGHTS}; exports are made of bundles for processors and GPUs")
    tensors = map_safetensors(bundle / _WEIGHTS)
    graph = capture(_source(bundle, manifest, model), trust_remote_code=_trusts(manifest), weights=False)
    _check_model(bundle, manifest, graph.meta["model"])
    _put_packed(graph, manifest, tensors)
    held = dict(graph.named_parameters())
    unlike = sorted(name for name in held if name in tensors and held[name].shape != tensors[name].shape)
    other = sorted(held.keys() ^ tensors.keys()) + unlike
    if other:
        raise UsageError(
            f"{bundle}: its passes changed more than formats ({other[0]}); write the export while the recipe runs: add "
            "`exports: [{to: NAME}]` to it"
        )
    for name in held:
        set_tensor(graph, name, tensors[name])
    graph.recompile()
    return graph


def bundle_recipe(bundle: Path) -> Recipe:
    """Return a bundle's recipe, as far as an export needs it: its calibration, and its trust in code.

    Raises:
        RecipeError: the calibration's files are not where they were.
    """
    stated = field(read_manifest(bundle), "recipe", dict)
    kept = {key: stated[key] for key in ("calibration", "trust_remote_code") if stated.get(key) is not None}
    return Recipe.from_dict({**kept, "passes": []})


def _trusts(manifest: dict[str, Any]) -> bool:
    return bool(field(manifest, "recipe", dict).get("trust_remote_code"))


def _source(bundle: Path, manifest: dict[str, Any], model: str | None) -> Path | str:
    named = model or field(manifest, "recipe", dict).get("model")
    if named is None:
        raise UsageError(f"{bundle}: its recipe names no model; name the model that it was made from: --model FOLDER")
    try:
        return Recipe.from_dict({"model": named, "passes": []}).model_source()
    except UsageError as error:
        raise UsageError(f"{bundle}: the model that it was made from: {error}; name it with --model FOLDER") from error


def _check_model(bundle: Path, manifest: dict[str, Any], info: ModelInfo) -> None:
    stated = field(manifest, "model", dict)
    if stated.get("config_sha256") not in (None, info.config_sha256):
        raise UsageError(f"{bundle}: was made from another model than {info.name}: config.json has another SHA-256")
    refuse_packed_caches(bundle, stated.get("cache_format") or info.cache_format)


def _put_packed(graph: GraphModule, manifest: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put the bundle's packed weights in the places of the dense ones, in the last format of each site."""
    records = [site for site in field(manifest, "sites", list) if isinstance(site, dict)]
    formats = {site.get("site"): str(site["format"]) for site in records if site.get("format")}
    for table in embedding_tables(graph):
        if table.site.name in formats:
            shape = (table.site.out_features, table.site.in_features)
            replace_table(graph, table, _packed(table.site.name, formats[table.site.name], shape, tensors))
    for site in weight_sites(graph):
        if site.name in formats:
            shape = (site.out_features, site.in_features)
            replace_linear(graph, site, _packed(site.name, formats[site.name], shape, tensors))


def _packed(name: str, format_name: str, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> PackedWeight:
    fmt = Format.parse(format_name)
    sizes = {part: size for part, (_, size) in fmt.parts(*shape).items()}
    parts = {part: tensors.get(f"{name}.{part}") for part in sizes}
    for part, tensor in parts.items():
        if tensor is None or tuple(tensor.shape) != sizes[part]:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}, not {list(sizes[part])}"
            raise UsageError(
                f"{name}.{part} {found}: passes changed this weight's size; write the export while the recipe runs: "
                "add `exports: [{to: NAME}]` to it"
            )
    return PackedWeight({part: tensor for part, tensor in parts.items() if tensor is not None}, fmt, shape)
