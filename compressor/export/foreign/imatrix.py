"""Write an importance matrix for llama.cpp's quantiser: how large the inputs of each linear are, column by column.

    <tensor>.in_sum2    float32 [in]   squares of the inputs, summed over the tokens; of experts [experts, in]
    <tensor>.counts     float32 [1]    tokens; of experts [experts, 1], those of each
    metadata            general.type, imatrix.datasets, imatrix.chunk_count, imatrix.chunk_size (tokens)

The statistics are those of the dense model, of which ``llama-quantize --imatrix imatrix.gguf`` then rounds the weights:
errors in columns of large inputs count more.  The linears of transformer blocks have entries, under the names of
:mod:`compressor.capture.checkpoints.gguf.gguf_models`; the head has none, as from llama.cpp's own program.

Source: llama.cpp, ``tools/imatrix/imatrix.cpp: save_imatrix`` and ``common/imatrix-loader.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import MeanSquares
from compressor.capture.capture import capture
from compressor.capture.checkpoints.gguf.gguf_file import GgufContent, read_gguf, write_gguf
from compressor.capture.checkpoints.gguf.gguf_models import expert_of, gguf_metadata, gguf_place
from compressor.capture.checkpoints.open_checkpoint import dense_folder
from compressor.data.load import check_kind
from compressor.data.text import Samples, load_samples
from compressor.errors import UsageError, VerificationError
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export, Form, StoredSize, Written, model_folder
from compressor.graph.provenance import Stored
from compressor.graph.sites import Site, linear_sites
from compressor.host.cache import cache_folder
from compressor.host.tensor_files import Spill
from compressor.recipe.recipe import Recipe, load_text_spec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from compressor.recipe.data_spec import TextSpec

FILE_NAME = "imatrix.gguf"


@dataclass(frozen=True)
class Imatrix(Export):
    """Store the squared inputs of each linear of the dense model; decoders of the classes Llama, Qwen2, Qwen3 and
    Qwen3Moe.

    Attributes:
        text: a shipped calibration set or a text file, in place of the recipe's ``calibration``.
        samples: windows of it; 0 takes as many as the calibration has.
        sequence_length: tokens of a window; 0 takes as many as the calibration has.
    """

    text: str = ""
    samples: int = 0
    sequence_length: int = 0

    title = "imatrix"
    unchecked = "statistics compute nothing; llama-quantize --imatrix reads them"
    reads_text = True

    def why_not(self, site: PackedSite) -> str:
        """Refuse weights."""
        return "holds statistics, and no weights"

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return no tensors: the file has no weights."""
        return {}

    def plan(self, graph: GraphModule, trust_remote_code: bool = False) -> NoReturn:
        """Refuse a graph without a text.

        Raises:
            UsageError: always.
        """
        raise UsageError("imatrix holds statistics of a model on a text, and no weights: `compress export BUNDLE`, or "
                         "`exports` in a recipe")  # fmt: skip

    def plan_for(self, graph: GraphModule, recipe: Recipe) -> ImatrixForm:
        """Read the text, and check that the model's linears have names; weights are not read.

        Raises:
            UsageError: no text is given, it is too short, or llama.cpp has no names for this model.
        """
        if self.dense:
            raise UsageError("dense: imatrix holds statistics, and no weights; remove it")
        spec, info = self._spec(recipe), graph.meta["model"]
        check_kind("calibration", spec, info)
        gguf_metadata(_config(folder := model_folder(graph)))
        if 0 < info.max_positions < spec.sequence_length:
            raise UsageError(
                f"sequence_length: {spec.sequence_length}, and {info.name} has {info.max_positions} positions; lower it"
            )
        return ImatrixForm(self, (), load_samples(spec, folder, info.vocab_size), recipe.trust_remote_code)

    def _spec(self, recipe: Recipe) -> TextSpec:
        spec = load_text_spec(self.text) if self.text else recipe.calibration
        if spec is None:
            raise UsageError(
                "imatrix holds statistics of a model on a text, and the recipe has no `calibration`; add it, or give "
                "the export a `text`: --set text=python_docs"
            )
        given = {"samples": self.samples, "sequence_length": self.sequence_length}
        if wrong := [f"{key}: {value}" for key, value in given.items() if value < 0]:
            raise UsageError(f"{wrong[0]}; a number above 0 is expected")
        return spec.model_copy(update={key: value for key, value in given.items() if value})


@dataclass(frozen=True)
class ImatrixForm(Form):
    """Write the statistics of a model on its samples.

    Attributes:
        samples: windows of tokens.
        trust_remote_code: as the recipe says.
    """

    samples: Samples
    trust_remote_code: bool

    @property
    def words(self) -> str:
        """Name the file, and how much text it is about."""
        return f"{FILE_NAME} of {len(self.samples.ids)} windows of {self.samples.source}"

    def write(self, folder: Path, graph: GraphModule) -> Written:
        """Run the dense model that the graph was made from, write its statistics, and read them again.

        Raises:
            VerificationError: what was written holds other numbers.
        """
        origin, facts = model_folder(graph), self.samples.facts()
        dense = capture(origin, trust_remote_code=self.trust_remote_code)
        names, sites = _names(dense, origin), _block_linears(dense)
        options = CalibrationOptions(true_sequential=False, spill=Spill(cache_folder() / "spilled"))
        found: dict[str, dict[int | None, tuple[Tensor, Tensor]]] = {}
        for group, squares in CalibrationRun(dense, self.samples.ids, sites, MeanSquares, options).groups():
            entry = (squares.value * squares.tokens).float(), torch.tensor([squares.tokens], dtype=torch.float32)
            for place, expert in (each for site in group for each in names[site.name]):
                found.setdefault(place, {})[expert] = entry
        tensors: dict[str, Tensor] = {}
        for place, entries in found.items():
            rows = zip(*(entry for _, entry in sorted(entries.items())), strict=True)
            sums, counts = (torch.stack(each)[0 if None in entries else slice(None)] for each in rows)
            tensors |= {f"{place}.in_sum2": sums, f"{place}.counts": counts}
        contents = {name: _content(tensor) for name, tensor in sorted(tensors.items())}
        metadata = {
            "general.type": "imatrix",
            "imatrix.datasets": [self.samples.source],
            "imatrix.chunk_count": facts["samples"],
            "imatrix.chunk_size": facts["sequence_length"],
        }
        write_gguf(folder / FILE_NAME, metadata, contents)
        again = read_gguf(folder / FILE_NAME)
        read = {name: again.bytes_of(name).view(torch.float32) for name in tensors}
        wrong = [name for name, tensor in tensors.items() if not torch.equal(read[name], tensor.flatten())]
        if wrong or again.tensors.keys() != tensors.keys():
            raise VerificationError(f"{folder / FILE_NAME}: holds other numbers than were written: {wrong[:3]}")
        sizes = {site: 4 * site.in_features * len(names[site.name]) for site in sites}
        return Written({f"{s.name}.weight": StoredSize(n, s.in_features * s.out_features) for s, n in sizes.items()})


def _content(tensor: Tensor) -> GgufContent:
    return GgufContent("F32", tuple(tensor.shape), lambda: tensor)


def _block_linears(dense: GraphModule) -> list[Site]:
    """Return the linears but the head, which llama.cpp's own program leaves out too."""
    return [site for site in linear_sites(dense) if site.name != "lm_head"]


def _names(dense: GraphModule, folder: Path) -> dict[str, list[tuple[str, int | None]]]:
    """Return llama.cpp's names of each linear's weight, by the linear's, and the numbers of experts.

    Raises:
        UsageError: one has none.
    """
    config, stored, found = _config(folder), dense.meta["stored"], {}
    for site in _block_linears(dense):
        form: Stored = stored[site.weight_name]
        pieces = form.names if form.joined else (site.weight_name,)
        found[site.name] = [(gguf_place(name, config)[0], expert_of(name)) for name in pieces]
    return found


def _config(folder: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.for_model(**dense_folder(folder, weights=False).config)
