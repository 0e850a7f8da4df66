"""Write a GGUF file for llama.cpp and programs of its family: metadata, tokenizer and tensors in one file.

format                                                          blocks of 32 weights
symmetric integers of 2 to 4 bits, asymmetric ones of 2 and 3   Q4_0, a scale times -8 to 7
symmetric integers of 5 bits                                    Q5_0, a scale times -16 to 15
asymmetric integers of 4 bits                                   Q4_1 where every minimum is a float16, otherwise Q5_0
symmetric integers of 6 to 8 bits, asymmetric ones of 5 to 7    Q8_0, a scale times -128 to 127
dense weights                                                   F16, BF16, F32, as the model stores them; vectors F32

A larger group, or a whole row, is several blocks with the same scale.  Layout, names and the order of rows:
:mod:`compressor.capture.checkpoints.gguf`, whose reader reads the file again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from compressor.capture.checkpoints.gguf.gguf_blocks import BLOCK, SIGNED_RANGES, pack_blocks
from compressor.capture.checkpoints.gguf.gguf_file import PLAIN_TYPES, GgufContent, write_gguf
from compressor.capture.checkpoints.gguf.gguf_models import gguf_metadata, gguf_place, rotary_rows_as_stored
from compressor.export.checkpoints.folder import FolderForm, why_unwritable
from compressor.export.checkpoints.stored import StoredFiles, StoredModel
from compressor.export.exchange.byte_level_tokens import tokenizer_metadata
from compressor.export.exchange.coded import Coded, coded
from compressor.export.exchange.dense_form import PackedSite
from compressor.export.exchange.export import Export, Loading
from compressor.export.exchange.integer_layout import why_not_codes, why_not_linear
from compressor.formats.format import Format

FILE_NAME = "model.gguf"
_BITS = range(2, 9)
_TYPES = {dtype: name for name, dtype in PLAIN_TYPES.items()}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "BF16": 32}
"""``general.file_type``: of most weights (llama.cpp, ``include/llama.h: llama_ftype``)."""


@dataclass(frozen=True)
class Gguf(Export):
    """Store integers of 2 to 8 bits in blocks of 32; decoders of the classes Llama, Qwen2 and Qwen3.

    Attributes:
        pre: llama.cpp's name for the tokenizer's expressions, where it is not known here; ``none`` writes no tokenizer.
    """

    pre: str = ""

    title = "gguf"
    packages = ("gguf", "accelerate")

    def why_not(self, site: PackedSite) -> str:
        """Say which part of a format, or of a module, the blocks do not have."""
        fmt = site.packed.format
        if reason := "" if site.reads_table else why_not_linear(site):
            return reason
        if reason := why_not_codes(site, _BITS, BLOCK, 1):
            return reason
        if fmt.scale_type != "F16":
            return f"has float16 scales, and the format has {fmt.scale_type}"
        if fmt.group_size % BLOCK:
            return f"has blocks of {BLOCK} weights, and groups of {fmt.group_size} are not a multiple"
        if not _signed_type(fmt):
            return f"has whole numbers of 8 bits at most, and codes less zero points of {fmt.bits} bits have one more"
        return ""

    def why_not_model(self, graph: GraphModule, form: FolderForm) -> str:
        """Ask for a model that the metadata describe: a file of holes has to be the same program."""
        why = why_unwritable(graph, form, self.write_weights)
        return f"cannot describe it ({why})" if why else ""

    def encode(self, site: PackedSite) -> Mapping[str, Tensor]:
        """Return the rows of a site as blocks, by the name of their type."""
        fmt, found = site.packed.format, coded(site.packed)
        groups = site.packed.shape[1] // BLOCK
        scales = found.scales.repeat_interleave(groups // found.scales.shape[1], 1)
        if (minima := _minima(fmt, found)) is not None:
            minima = minima.repeat_interleave(groups // minima.shape[1], 1)
            return {"Q4_1": pack_blocks("Q4_1", found.codes.short(), scales, minima)}
        zeros = found.zero_points(fmt).short().repeat_interleave(found.codes.shape[1] // found.scales.shape[1], 1)
        kind = _signed_type(fmt)
        return {kind: pack_blocks(kind, found.codes.short() - zeros, scales)}

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
        contents: dict[str, GgufContent] = {}
        sizes: dict[str, int] = {}
        for name in model.tensors:
            # A tied head is told by its absence; what no operator reads, such as old rotary tables, has no name here.
            if name not in model.unread and not (name == "lm_head.weight" and config.tie_word_embeddings):
                place, heads = gguf_place(name, config)
                contents[place] = _content(model, name, heads)
                sizes[name] = contents[place].size_bytes
        types: dict[str, int] = {}
        for content in contents.values():
            types[content.type] = types.get(content.type, 0) + content.size_bytes
        metadata = gguf_metadata(config) | {
            "general.name": model.origin.name,
            "general.file_type": _FILE_TYPES[max(types, key=types.__getitem__)],
            "general.quantization_version": 2,
        }
        metadata |= tokenizer_metadata(model.origin, config, self.pre)
        return StoredFiles({FILE_NAME: write_gguf(folder / FILE_NAME, metadata, contents)}, sizes)

    def notes(self, sites: Sequence[PackedSite]) -> list[str]:
        """Say what blocks cost, and how llama.cpp computes."""
        formats = {site.packed.format for site in sites}
        found = ["llama.cpp rounds activations to 8 bits as it multiplies blocks: the stored numbers are exact"]
        if any(not fmt.symmetric and fmt.bits == 4 for fmt in formats):
            found.append("zero points of 4 bits: Q5_0 where a minimum is not a float16 (5.5 bits a weight), else Q4_1")
        if wide := sorted({fmt.name for fmt in formats if fmt.group_size != BLOCK}):
            found.append(f"each 32 weights have a scale of their own, of which {' and '.join(wide)} repeat one")
        return found


def _signed_type(fmt: Format) -> str:
    """Return the smallest type for codes less their zero points; empty if there is none."""
    highest = fmt.levels - 1
    low, high = (-int(fmt.zero_point), highest - int(fmt.zero_point)) if fmt.symmetric else (-highest, highest)
    return next((kind for kind, (least, most) in SIGNED_RANGES.items() if least <= low and high <= most), "")


def _minima(fmt: Format, found: Coded) -> Tensor | None:
    """Return the minima that ``Q4_1`` adds, float16 [out, groups]; None where one would be rounded."""
    if found.zeros is None or fmt.bits != 4:
        return None
    exact = -(found.zeros.float() * found.scales.float())
    minima = exact.half()
    return minima if torch.equal(minima.float(), exact) else None


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
