"""A tiny encoder with kernels of its own, for tests of what embeds texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from native_bundles import write_native_bundle
from torch import nn

VOCAB, WIDTH, POSITIONS = 300, 16, 40


class TinyEncoder(nn.Module):
    """A model whose hidden states are its tokens' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(5)))


def build_library(file: Path) -> None:
    """Kernels with the entry that lowering gives to encoders."""
    import tvm
    from tvm import relax
    from tvm.script import ir as I
    from tvm.script import relax as R

    @I.ir_module
    class Kernels:
        @R.function
        def main(
            ids: R.Tensor(("B", "S"), "int64"),
            mask: R.Tensor(("B", "S"), "float32"),
            params: R.Tuple(R.Tensor((300, 16), "float32")),
        ) -> R.Tensor(("B", "S", 16), "float32"):
            hidden = R.take(params[0], ids, axis=0)
            return R.multiply(hidden, R.expand_dims(mask, 2))

    target = tvm.target.Target({"kind": "llvm"})
    tvm.compile(Kernels, target, relax_pipeline=relax.get_default_pipeline(target)).export_library(str(file))


def write_tiny_encoder(folder: Path, model: TinyEncoder, tokenizer: Path, **facts: Any) -> Path:
    """Write the bundle of the tiny encoder below a folder.

    Args:
        tokenizer: folder of one.
        facts: about the model, beside those that all have.
    """
    build_library(folder / "kernels.so")
    parts = dict(
        graph=model,
        parameters=["embed"],
        library=folder / "kernels.so",
        vectors={"ids": torch.zeros(1, 2, dtype=torch.int64)},
        model={"kind": "encoder", "name": "encoder", "vocab_size": VOCAB, "max_positions": POSITIONS, **facts},
        recipe={},
        sites=[],
        kernels=[{"name": "main", "evidence": "executed"}],
        cpu_features=["sse2"],
        dense_weight_bytes=0,
        tokenizer=tokenizer,
    )
    return write_native_bundle(folder / "bundle", parts)
