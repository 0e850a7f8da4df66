"""Write a GGUF file for llama.cpp and programs of its family: metadata, tokenizer and tensors in one file.

format                                                          blocks of 32 weights
symmetric integers of 2 to 4 bits, asymmetric ones of 2 and 3   Q4_0, a scale times -8 to 7
symmetric integers of 5 bits                                    Q5_0, a scale times -16 to 15
asymmetric integers of 4 bits                                   Q4_1 where every minimum is a float16, otherwise Q5_0
symmetric integers of 6 to 8 bits, asymmetric ones of 5 to 7    Q8_0, a scale times -128 to 127
MXFP4                                                           MXFP4
dense weights                                                   F16, BF16, F32, as the model stores them; vectors F32
by request: numbers of -1 to 2, or of -2 to 1                   TQ2_0 (256 weights, -1 to 1) or Q2_0 (64 weights)

A larger group, or a whole row, is several blocks with the same scale.  Layout, names and the order of rows:
:mod:`compressor.capture.checkpoints.gguf`, whose reader reads the file again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.checkpoints.gguf.gguf_blocks import (
    BLOCK,
    BLOCK_TYPES,
    SIGNED_RANGES,
    pack_blocks,
    pack_mxfp4,
    pack_two_bits,
)
from compressor.capture.checkpoints.gguf.gguf_file import PLAIN_TYPES, GgufContent, read_gguf, write_gguf
from compressor.capture.checkpoints.gguf.gguf_models import (
    expert_of,
    find_gguf,
    gguf_metadata,
    gguf_place,
    gguf_stack,
    rotary_rows_as_stored,
)
from compressor.capture.checkpoints.gguf.k_quants import K_QUANTS, fit_k_quant
from compressor.errors import UsageError
from compressor.export.checkpoints.folder import FolderForm, why_unwritable
from compressor.export.checkpoints.stored import StoredFiles, StoredModel
from compressor.export.exchange.byte_level_tokens import tokenizer_metadata
from compressor.export.exchange.coded import Coded
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export, Loading
from compressor.export.exchange.integer_layout import why_not_codes, why_not_linear
from compressor.formats.format import Format
from compressor.graph.sites import EXPERT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILE_NAME = "model.gguf"
_MXFP4 = Format.parse("MXFP4")
_BITS = range(2, 9)
_TYPES = {dtype: name for name, dtype in PLAIN_TYPES.items()}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q4_K": 14, "Q6_K": 18, "BF16": 32,
               "TQ2_0": 37, "MXFP4": 38}  # fmt: skip
"""``general.file_type``: of most weights (llama.cpp, ``include/llama.h: llama_ftype``)."""


@dataclass(frozen=True)
class Gguf(Export):
    """Store integers of 2 to 8 bits in blocks of 32; decoders of the classes Llama, Qwen2, Qwen3 and Qwen3Moe.

    Attributes:
        pre: llama.cpp's name for the tokenizer's expressions, where it is not known here; ``none`` writes no tokenizer.
        two_bits: store whole numbers of -1 to 2, or -2 to 1, as TQ2_0 (llama.cpp of September 2024 and later) or Q2_0
            (of June 2026 and later) where groups are of a multiple of 256 or 64.
    """

    pre: str = ""
    two_bits: bool = False

    title = "gguf"
    packages = ("gguf", "accelerate")
    types = K_QUANTS

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format, or of a module, the blocks do not have."""
        fmt = site.packed.format
        if reason := "" if site.reads_table else why_not_linear(site, experts=True):
            return reason
        if fmt == _MXFP4:
            columns = site.packed.shape[1]
            return f"has blocks of {BLOCK}, and rows of {columns} are not a multiple" if columns % BLOCK else ""
        if reason := why_not_codes(site, _BITS, BLOCK, 1):
            return reason
        if fmt.scale_type != "F16":
            return f"has float16 scales, and the format has {fmt.scale_type}"
        if fmt.group_size % BLOCK:
            return f"has blocks of {BLOCK} weights, and groups of {fmt.group_size} are not a multiple"
        if not _signed_type(fmt):
            return f"has whole numbers of 8 bits at most, and codes less zero points of {fmt.bits} bits have one more"
        return ""

    def why_not_together(self, sites: Sequence[PackedSite], linears: Sequence[str]) -> str:
        """Ask for one format of all experts of a layer, which are one tensor."""
        found: dict[str, set[str]] = {}
        for site in sites:
            if site.module_class == EXPERT:
                found.setdefault(gguf_stack(site.module), set()).add(site.packed.format.of_kept.name)
        mixed = next((sorted(names) for names in found.values() if len(names) > 1), [])
        return f"has one type for all experts of a layer, and theirs are {' and '.join(mixed)}" if mixed else ""

    def why_not_model(self, graph: GraphModule, form: FolderForm) -> str:
        """Ask for a model that the metadata describe: a file of holes has to be the same program."""
        why = why_unwritable(graph, form, self.write_weights)
        return f"cannot describe it ({why})" if why else ""

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return the rows of a site as blocks, by the name of their type."""
        fmt, found = site.packed.format, site.coded()
        if fmt == _MXFP4:
            return {"MXFP4": pack_mxfp4(found.codes, found.scales.view(torch.uint8))}
        groups = site.packed.shape[1] // BLOCK
        scales = found.scales.repeat_interleave(groups // found.scales.shape[1], 1)
        if (minima := _minima(fmt, found)) is not None:
            minima = minima.repeat_interleave(groups // minima.shape[1], 1)
            return {"Q4_1": pack_blocks("Q4_1", found.codes.short(), scales, minima)}
        zeros = found.zero_points(fmt).short().repeat_interleave(found.codes.shape[1] // found.scales.shape[1], 1)
        kind, numbers = _signed_type(fmt), found.codes.short() - zeros
        if self.two_bits and (two := _two_bit_form(numbers, found.scales)):
            return two
        return {kind: pack_blocks(kind, numbers, scales)}

    def fit(self, kind: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        """Round a weight to Q4_K or Q6_K."""
        blocks, block = fit_k_quant(kind, weight), BLOCK_TYPES[kind]
        return {kind: blocks}, block.dequantize(blocks.view(-1, block.block_bytes)).view_as(weight)

    def loading(self, sites: Sequence[PackedSite]) -> Loading:
        """Name the file, which transformers dequantises in float32."""
        return Loading(file=FILE_NAME)

    def words(self, form: FolderForm) -> str:
        """Name the file, and what its metadata say otherwise than the model's config.json."""
        return f"{FILE_NAME} and the tokenizer's files" + "".join(f"; {change}" for change in form.changes)

    def write_weights(self, folder: Path, model: StoredModel) -> StoredFiles:
        """Write the one file; config.json is not written, since the metadata take its place."""
        from transformers import AutoConfig

        config = AutoConfig.for_model(**model.config)
        found: dict[str, dict[str, GgufContent]] = {}
        for name in model.tensors:
            # A tied head is told by its absence; what no operator reads, such as old rotary tables, has no name here.
            if name not in model.unread and not (name == "lm_head.weight" and config.tie_word_embeddings):
                place, heads = gguf_place(name, config)
                found.setdefault(place, {})[name] = _content(model, name, heads)
        contents = {place: _stacked(place, parts) for place, parts in found.items()}
        sizes = {name: part.size_bytes for parts in found.values() for name, part in parts.items()}
        types: dict[str, int] = {}
        for content in contents.values():
            types[content.type] = types.get(content.type, 0) + content.size_bytes
        most = max(types, key=types.__getitem__)
        metadata = gguf_metadata(config) | {
            "general.name": model.origin.name,
            **({} if most not in _FILE_TYPES else {"general.file_type": _FILE_TYPES[most]}),
            "general.quantization_version": 2,
        }
        metadata |= self._tokenizer(model.origin, config)
        return StoredFiles({FILE_NAME: write_gguf(folder / FILE_NAME, metadata, contents)}, sizes)

    def _tokenizer(self, origin: Path, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the tokenizer's metadata: those of the model's own GGUF file, where that is all there is."""
        file = None if (origin / "tokenizer.json").is_file() or self.pre else find_gguf(origin)
        if file is None:
            return tokenizer_metadata(origin, config, self.pre)
        return {key: value for key, value in read_gguf(file).metadata.items() if key.startswith("tokenizer.")}

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say what blocks cost, and how llama.cpp computes."""
        formats = {site.packed.format for site in sites}
        found = ["llama.cpp rounds activations to 8 bits as it multiplies blocks: the stored numbers are exact"]
        if any(not fmt.symmetric and fmt.bits == 4 for fmt in formats):
            found.append("zero points of 4 bits: Q5_0 where a minimum is not a float16 (5.5 bits a weight), else Q4_1")
        if any(site.module_class == EXPERT for site in sites):
            found.append("experts: transformers 5.24 takes 768 channels of each; give it moe_intermediate_size=NUMBER")
        if wide := sorted({fmt.name for fmt in formats if fmt.group_size != BLOCK}):
            found.append(f"each 32 weights have a scale of their own, of which {' and '.join(wide)} repeat one")
        return found


def _signed_type(fmt: Format) -> str:
    """Return the smallest type for codes less their zero points; empty if there is none."""
    highest = fmt.levels - 1
    low, high = (-int(fmt.zero_point), highest - int(fmt.zero_point)) if fmt.symmetric else (-highest, highest)
    return next((kind for kind, (least, most) in SIGNED_RANGES.items() if least <= low and high <= most), "")


def _two_bit_form(numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return a weight as blocks of 2-bit codes; empty where there are none for it.

    Args:
        numbers: int16 [out, in].
        scales: float16 [out, groups].
    """
    lowest, highest = int(numbers.min()), int(numbers.max())
    if lowest < -1:  # a symmetric grid has -2 to 1: with negative scales, -1 to 2
        lowest, highest, numbers, scales = -highest, -lowest, -numbers, -scales
    if lowest < -1 or highest > 2:
        return {}
    columns = numbers.shape[1]
    for kind, most in (("TQ2_0", 1), ("Q2_0", 2)):
        block, group = BLOCK_TYPES[kind].elements, columns // scales.shape[1]
        if highest <= most and not group % block:
            return {kind: pack_two_bits(kind, numbers, scales.repeat_interleave(group // block, 1))}
    return {}


def _minima(fmt: Format, found: Coded) -> Tensor | None:
    """Return the minima that ``Q4_1`` adds, float16 [out, groups]; None where one would be rounded."""
    if found.zeros is None or fmt.bits != 4:
        return None
    exact = -(found.zeros.float() * found.scales.float())
    minima = exact.half()
    return minima if torch.equal(minima.float(), exact) else None


def _stacked(place: str, parts: Mapping[str, GgufContent]) -> GgufContent:
    """Return experts as one tensor, in the order of their numbers; another part is a tensor of its own.

    Raises:
        UsageError: they are of several types.
    """
    if any(expert_of(name) is None for name in parts):
        return next(iter(parts.values()))
    ordered = [parts[name] for name in sorted(parts, key=lambda name: expert_of(name) or 0)]
    if len(kinds := sorted({part.type for part in ordered})) > 1:
        raise UsageError(f"{place}: gguf has one type for all experts of a layer, and theirs are {' and '.join(kinds)}")
    shape = (len(ordered), *ordered[0].shape)
    return GgufContent(ordered[0].type, shape, lambda: torch.stack([part.read() for part in ordered]))


def _content(model: StoredModel, name: str, heads: int | None) -> GgufContent:
    """Return how a weight is stored: packed, or in a float type, with rows in rotary order for a number of heads."""
    tensor = model.tensors[name]
    rows = None if heads is None else rotary_rows_as_stored(tensor.shape[0], heads)
    if name in model.parts:
        ((kind, blocks),) = model.parts[name].items()
        return GgufContent(kind, tuple(tensor.shape), lambda: blocks if rows is None else blocks[rows])
    dtype = model.types[name] if tensor.dim() > 1 else torch.float32

    def read() -> Tensor:
        typed = tensor.to(dtype)
        return typed if rows is None or typed.is_meta else typed[rows]

    return GgufContent(_TYPES[dtype], tuple(tensor.shape), read)
