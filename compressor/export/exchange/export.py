"""Define an export: one file of :mod:`compressor.export.foreign` each, found by name, its fields its options.

    graph --plan--> Form(what is written, in words)    refuses what the layout cannot hold, without a weight
          --write--> folder, bytes of each tensor            the folder is captured again, and is the same program

A site is written dequantised only where ``dense`` names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.checkpoints.open_checkpoint import dense_folder, is_model_folder
from compressor.errors import UsageError
from compressor.export.checkpoints.folder import FolderForm, plan_folder, write_folder
from compressor.export.checkpoints.stored import StoredFiles, StoredModel, write_safetensors_files
from compressor.export.exchange.dense_form import (
    PackedSite,
    as_loaded,
    dense_form,
    list_packed,
    refuse_packed_caches,
    routers,
    spilled_value,
)
from compressor.graph.model import ModelInfo
from compressor.graph.provenance import Stored
from compressor.graph.sites import EXPERT
from compressor.host.cache import cache_folder
from compressor.host.tensor_files import Spill

if TYPE_CHECKING:
    from compressor.recipe.recipe import Recipe

_SHOWN = 3


@dataclass(frozen=True)
class StoredSize:
    """Bytes that a weight takes in an export, and its number of elements."""

    bytes: int
    elements: int

    @property
    def bits(self) -> float:
        """Bits a weight, scales and zero points included."""
        return 8 * self.bytes / self.elements


@dataclass(frozen=True)
class Written:
    """A written folder: the size of each weight by its name in the model's class."""

    sizes: Mapping[str, StoredSize]

    @property
    def bits(self) -> float:
        """Bits a weight over all tensors of the model: those that stay dense as well."""
        return sum(s.bytes for s in self.sizes.values()) * 8 / sum(s.elements for s in self.sizes.values())


@dataclass(frozen=True)
class Loading:
    """How a client loads a folder.

    Attributes:
        dtype: that it computes in, as torch calls it.
        dequantize: weights become dense as they are loaded, not at the first call.
        file: the one file of the folder that is loaded; empty if the folder is.
    """

    dtype: str = "float32"
    dequantize: bool = False
    file: str = ""


@dataclass(frozen=True)
class Export(ABC):
    """How a compressed graph is written for another program.  Subclasses are frozen dataclasses too.

    Attributes:
        dense: names or endings of names of sites that are written dequantised, in float32, by request.
    """

    dense: str | tuple[str, ...] = ()

    title: ClassVar[str]
    """Name of the layout, for messages."""
    client: ClassVar[str] = "compressor.export.exchange.transformers_client"
    """Module of the process that loads what was written."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that the client needs beside transformers."""
    types: ClassVar[tuple[str, ...]] = ()
    """Types of the layout on whose grids no format of ours lies: weights are fitted to them by request."""
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "encoder")
    """Kinds of models that the client can run."""
    unchecked: ClassVar[str] = ""
    """Why no client can be asked; empty if one can."""
    reads_text: ClassVar[bool] = False
    """True where the export describes a text: the calibration of the recipe, or the text of an option."""

    @property
    def rounds(self) -> bool:
        """Tell whether the client rounds activations that the bundle does not."""
        return False

    def sites(self, graph: GraphModule) -> list[PackedSite]:
        """List the packed weights of a graph, one for each that is stored.

        Raises:
            UsageError: an operator reads packed weights that the layout has no place for.
        """
        return list_packed(graph)

    @abstractmethod
    def why_not(self, site: PackedSite) -> str:
        """Say why the layout cannot hold a site exactly; empty if it can.  Weights may be on the meta device."""

    def loading(self, sites: Sequence[PackedSite]) -> Loading:
        """Say how the client loads the folder when it is checked."""
        return Loading()

    def why_not_together(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> str:
        """Say why the layout cannot hold the packed sites beside each other; empty if it can.

        Args:
            linears: all modules of the class Linear, by the loader's names.
        """
        return ""

    def why_not_model(self, graph: GraphModule, form: FolderForm) -> str:
        """Say why the layout cannot hold the model itself; empty if it can.

        Args:
            graph: with dense operators, packed weights on the meta device.
            form: the configuration that describes it.
        """
        return ""

    @abstractmethod
    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return what is stored for a site, by the last part of the name."""

    def value(self, parts: Mapping[str, Tensor]) -> Tensor | None:
        """Return what the stored tensors stand for, float32, where that is not the site's own value to the last bit."""
        return None

    def fit(self, kind: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """Round a weight, float32 [out, in], to one of :attr:`types`: what is stored, and what that stands for.

        Raises:
            UsageError: a row of the weight does not divide into blocks.
        """
        raise NotImplementedError(f"{self.title} has no type {kind}")

    def configuration(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> Mapping[str, Any]:
        """Return what config.json says of the packed sites; ``linears`` are all modules of the class Linear."""
        return {}

    def words(self, form: FolderForm) -> str:
        """Say what is written."""
        return form.words

    def write_weights(self, folder: Path, model: StoredModel) -> StoredFiles:
        """Write the configuration and the weights, or holes for weights on the meta device."""
        return write_safetensors_files(folder, model)

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say what a reader should know of the sites."""
        return []

    def plan(self, graph: GraphModule, trust_remote_code: bool = False) -> Form:
        """Check that a compressed graph can be written; weights are not read.

        Raises:
            UsageError: a site, or the model, cannot be held; the site and its format are named.
        """
        refuse_packed_caches(graph.meta["model"].name, graph.meta["model"].cache_format)
        kept = self._kept(self.sites(graph))
        refuse_sites(self.title, [(piece, self._why_not(piece)) for site in kept for piece in site.pieces()])
        folder = model_folder(graph)
        source = dense_folder(folder, weights=False).source

        def hole(site: PackedSite) -> Tensor:
            if not site.stored.names:
                raise UsageError(f"{site.module}: {self.title} has no place for it: {site.stored.reason}")
            return torch.empty(site.packed.shape, dtype=source.read(site.stored.names[0]).dtype, device="meta")

        dense = dense_form(graph, hole)
        form = FolderExport(self, tuple(site.parameter for site in kept), plan_folder(dense, trust_remote_code))
        if why := self.why_not_model(dense, form.folder):
            raise UsageError(f"{graph.meta['model'].name}: {self.title} {why}; choose another export")
        if kept:
            linears, named = form.linears(), as_loaded(kept, dense)
            listed = [site.module for site in named if not site.reads_table and site.module_class != EXPERT]
            if unknown := [module for module in listed if module not in linears]:
                raise UsageError(f"{unknown[0]}: {self.title} names modules, and the loader has none of this name")
            if why := self.why_not_together(named, linears):
                raise UsageError(f"{self.title} {why}; choose another export, or other formats")
        return form

    def plan_for(self, graph: GraphModule, recipe: Recipe) -> Form:
        """Check that a graph can be written beside the bundle of a recipe; weights are not read.

        Raises:
            UsageError: as :meth:`plan`, or the recipe does not have what the export needs.
        """
        return self.plan(graph, recipe.trust_remote_code)

    def _kept(self, sites: Sequence[PackedSite]) -> list[PackedSite]:
        named = [self.dense] if isinstance(self.dense, str) else list(self.dense)
        hits = {name: {s.module for s in sites if _matches(name, s.module)} for name in named}
        if unused := [name for name, found in hits.items() if not found]:
            raise UsageError(f"dense: {unused[0]!r} is not a packed site; there are {_some([s.module for s in sites])}")
        return [site for site in sites if not any(site.module in found for found in hits.values())]

    def _why_not(self, site: PackedSite) -> str:
        if site.stored.reason:
            return f"has no place for it: {site.stored.reason}"
        return self.why_not(site)


def refuse_sites(title: str, reasons: Sequence[tuple[PackedSite, str]]) -> None:
    """Refuse the sites that a layout cannot hold.

    Args:
        reasons: why not, beside each site; empty where it can.
    Raises:
        UsageError: there are such sites; they are named, with their formats.
    """
    wrong = [f"{site.module}: {site.packed.format.name}: {title} {why}" for site, why in reasons if why]
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more sites)" if len(wrong) > _SHOWN else ""
        raise UsageError(
            "\n".join(wrong[:_SHOWN]) + f"{more}; choose another export, or have such sites written dequantised, "
            f"in float32: --set dense={wrong[0].partition(':')[0]}"
        )


@dataclass(frozen=True)
class Form(ABC):
    """Hold how a graph is written, as a plan has found it.

    Attributes:
        export: the layout.
        packed: parameters that stay packed.
    """

    export: Export
    packed: tuple[str, ...]

    @property
    @abstractmethod
    def words(self) -> str:
        """Say what is written."""

    @abstractmethod
    def write(self, folder: Path, graph: GraphModule) -> Written:
        """Write a compressed graph into an empty folder."""


@dataclass(frozen=True)
class FolderExport(Form):
    """Write a graph as a Hugging Face folder.

    Attributes:
        folder: the configuration and the names.
        fitted: of dense parameters, what is stored in their place: blocks that stand for exactly their values.
    """

    folder: FolderForm
    fitted: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Say what is written."""
        return self.export.words(self.folder)

    def write(self, folder: Path, graph: GraphModule) -> Written:
        """Write a compressed graph into an empty folder, read that again, and compare the two programs.

        Raises:
            VerificationError: what was written is another model.
        """
        stored: Mapping[str, Stored] = graph.meta["stored"]
        packed: dict[str, Mapping[str, Tensor]] = {
            name: {kind: stored[parameter].piece(blocks, name) for kind, blocks in parts.items()}
            for parameter, parts in self.fitted.items()
            for name in stored[parameter].names
        }
        spill = Spill(cache_folder() / "spilled", "dense weights, for the comparison of an export")

        def value(site: PackedSite) -> Tensor:
            if site.parameter in self.packed:
                encoded = {piece.stored.names: self.export.encode(piece) for piece in site.pieces()}
                packed.update({name: parts for names, parts in encoded.items() for name in names})
                exact = [each for each in map(self.export.value, encoded.values()) if each is not None]
                if exact:
                    return torch.cat(exact)
            return spilled_value(site, spill)

        dense = dense_form(graph, value)
        sites = [site for site in list_packed(graph) if site.parameter in self.packed]
        linears = [*self.linears(), *routers(dense)]
        more = self.export.configuration(as_loaded(sites, dense), linears) if sites else {}
        sizes = write_folder(folder, dense, self.folder, packed, more, self.export.write_weights)
        return Written({name: StoredSize(*size) for name, size in sizes.items()})

    def linears(self) -> list[str]:
        """Return the modules of the class Linear that the configuration makes, by the loader's names."""
        import transformers
        from transformers import AutoConfig

        content = dict(self.folder.config)
        name = (content.get("architectures") or ["no class"])[0]
        architecture: Any = getattr(transformers, name, None)
        if architecture is None:
            raise UsageError(f"{name} is not a class of transformers: names of its modules are not known")
        with torch.device("meta"):
            model = architecture(AutoConfig.for_model(**content))
        return [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]


def model_folder(graph: GraphModule) -> Path:
    """Return the Hugging Face folder that a graph was captured from.

    Raises:
        UsageError: it comes from something else.
    """
    info: ModelInfo = graph.meta["model"]
    if info.source is None or not is_model_folder(info.source):
        raise UsageError(f"{info.name} does not come from a Hugging Face folder: it can be a bundle only")
    return info.source


def _matches(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
