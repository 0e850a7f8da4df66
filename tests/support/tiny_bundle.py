"""A tiny language model with kernels of its own, for tests of the run-time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compressor_runtime
import numpy as np
import torch
from native_bundles import write_native_bundle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

VOCAB, WIDTH, POSITIONS = 300, 16, 40
TEXT = "the rain in Spain stays mainly in the plain; ça coûte très cher; 한국어 🙂🙃 and so on and on. "
RUNTIME = Path(compressor_runtime.__file__).parent


class TinyLanguageModel(nn.Module):
    """A model of the bundles' kind whose every token is remembered: state = state / 2 + embed[token]."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=random))
        self.head = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=random).half())
        self.bias = nn.Parameter(torch.randn(VOCAB, generator=random))  # 1,200 bytes: what follows is not aligned
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def logits(self, ids: list[int]) -> np.ndarray:
        state = np.zeros(WIDTH, np.float32)
        for token in ids:
            state = state / 2 + self.embed.detach()[token].numpy()
        return (state @ self.head.detach().float().numpy().T + self.bias.detach().numpy()) * self.scale.item()


def build_library(file: Path, target: Any = None, verifies: bool = False) -> None:
    """Kernels of TinyLanguageModel with the entry that lowering gives to decoders: caches written in place.

    Args:
        target: TVM's target of a GPU; None takes this CPU.
        verifies: with an entry `verify` as well.
    """
    import tvm
    from tvm import relax
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Kernels:
        @T.prim_func(s_tir=True)
        def remember(
            ids: T.handle,
            position: T.handle,
            table: T.Buffer((300, 16), "float32"),
            keys: T.handle,
            values: T.handle,
            out: T.handle,
        ):
            B = T.int64()
            S = T.int64()
            C = T.int64()
            i = T.match_buffer(ids, (B, S), "int64")
            p = T.match_buffer(position, (S,), "int64")
            k = T.match_buffer(keys, (B, T.int64(1), C, T.int64(16)), "float32")
            v = T.match_buffer(values, (B, T.int64(1), C, T.int64(16)), "float32")
            o = T.match_buffer(out, (B, S, T.int64(16)), "float32")
            for b, s, d in T.grid(B, S, 16):
                with T.sblock("write"):
                    vb, vs, vd = T.axis.remap("SSS", [b, s, d])
                    k[vb, 0, p[vs], vd] = table[i[vb, vs], vd]
                    v[vb, 0, p[vs], vd] = T.float32(0)
            for b, s, d in T.grid(B, S, 16):
                with T.sblock("sum"):
                    vb, vs, vd = T.axis.remap("SSS", [b, s, d])
                    o[vb, vs, vd] = T.float32(0)
                    for t in T.serial(p[vs] + 1):
                        o[vb, vs, vd] = o[vb, vs, vd] * T.float32(0.5) + k[vb, 0, t, vd]

        @R.function
        def main(
            ids: R.Tensor(("B", "S"), "int64"),
            position: R.Tensor(("S",), "int64"),
            keep: R.Tensor(("N",), "int64"),
            k_0: R.Tensor(("B", 1, "C", 16), "float32"),
            v_0: R.Tensor(("B", 1, "C", 16), "float32"),
            params: R.Tuple(
                R.Tensor((300, 16), "float32"),
                R.Tensor((300, 16), "float16"),
                R.Tensor((300,), "float32"),
                R.Tensor((1,), "float32"),
            ),
        ) -> R.Tensor(("B", "N", 300), "float32"):
            B = T.int64()
            S = T.int64()
            C = T.int64()
            cls = Kernels
            state = R.call_tir_inplace(
                cls.remember,
                (ids, position, params[0], k_0, v_0),
                inplace_indices=[3, 4, -1],
                out_ty=[
                    R.Tensor((B, 1, C, 16), "float32"),
                    R.Tensor((B, 1, C, 16), "float32"),
                    R.Tensor((B, S, 16), "float32"),
                ],
            )
            head = R.astype(R.permute_dims(params[1]), "float32")
            logits = R.matmul(R.take(state[2], keep, axis=1), head)
            return R.multiply(R.add(logits, params[2]), params[3])

    if target is not None:
        Kernels["remember"] = _remember_on_a_gpu().with_attr("tirx.is_scheduled", 1)
    if verifies:
        Kernels.update(_verification())
    target = target or tvm.target.Target({"kind": "llvm"})
    tvm.compile(Kernels, target, relax_pipeline=relax.get_default_pipeline(target)).export_library(str(file))


def _verification() -> Any:
    """Return a module with the entry `verify`: rows of trees behind the tokens that each sequence has stored."""
    from tvm.script import ir as I
    from tvm.script import relax as R
    from tvm.script import tirx as T

    @I.ir_module
    class Verification:
        @T.prim_func(s_tir=True)
        def remember_trees(
            ids: T.handle,
            position: T.handle,
            parent: T.handle,
            slot: T.handle,
            row: T.handle,
            table: T.Buffer((300, 16), "float32"),
            keys: T.handle,
            values: T.handle,
            out: T.handle,
        ):
            T.func_attr({"tirx.is_scheduled": 1})
            B = T.int64()
            S = T.int64()
            C = T.int64()
            i = T.match_buffer(ids, (T.int64(1), S), "int64")
            p = T.match_buffer(position, (S,), "int64")
            before = T.match_buffer(parent, (S,), "int64")
            of = T.match_buffer(slot, (S,), "int64")
            r = T.match_buffer(row, (S,), "int64")
            k = T.match_buffer(keys, (B, T.int64(1), C, T.int64(16)), "float32")
            v = T.match_buffer(values, (B, T.int64(1), C, T.int64(16)), "float32")
            o = T.match_buffer(out, (T.int64(1), S, T.int64(16)), "float32")
            for s, d in T.grid(S, 16):
                k[of[s], 0, r[s], d] = table[i[0, s], d]
                v[of[s], 0, r[s], d] = T.float32(0)
                o[0, s, d] = T.float32(0)
                if before[s] >= T.int64(0):
                    o[0, s, d] = o[0, before[s], d]
                else:
                    for t in T.serial(p[s]):
                        o[0, s, d] = o[0, s, d] * T.float32(0.5) + k[of[s], 0, t, d]
                o[0, s, d] = o[0, s, d] * T.float32(0.5) + table[i[0, s], d]

        @R.function
        def verify(
            ids: R.Tensor((1, "S"), "int64"),
            position: R.Tensor(("S",), "int64"),
            keep: R.Tensor(("N",), "int64"),
            parent: R.Tensor(("S",), "int64"),
            slot: R.Tensor(("S",), "int64"),
            row: R.Tensor(("S",), "int64"),
            k_0: R.Tensor(("B", 1, "C", 16), "float32"),
            v_0: R.Tensor(("B", 1, "C", 16), "float32"),
            params: R.Tuple(
                R.Tensor((300, 16), "float32"),
                R.Tensor((300, 16), "float16"),
                R.Tensor((300,), "float32"),
                R.Tensor((1,), "float32"),
            ),
        ) -> R.Tensor((1, "N", 300), "float32"):
            B = T.int64()
            S = T.int64()
            C = T.int64()
            cls = Verification
            state = R.call_tir_inplace(
                cls.remember_trees,
                (ids, position, parent, slot, row, params[0], k_0, v_0),
                inplace_indices=[6, 7, -1],
                out_ty=[
                    R.Tensor((B, 1, C, 16), "float32"),
                    R.Tensor((B, 1, C, 16), "float32"),
                    R.Tensor((1, S, 16), "float32"),
                ],
            )
            head = R.astype(R.permute_dims(params[1]), "float32")
            logits = R.matmul(R.take(state[2], keep, axis=1), head)
            return R.multiply(R.add(logits, params[2]), params[3])

    return Verification


def _remember_on_a_gpu() -> Any:
    """Return the kernel ``remember`` of :func:`build_library`: a block a sequence, a thread a channel."""
    from tvm.script import tirx as T

    from compressor.codegen.kernels.linear.weights import parameter

    @T.prim_func(s_tir=True)
    def remember():
        B = T.int64()
        S = T.int64()
        C = T.int64()
        i = parameter((B, S), "int64")
        p = parameter((S,), "int64")
        table = parameter((VOCAB, WIDTH), "float32")
        k = parameter((B, 1, C, WIDTH), "float32")
        v = parameter((B, 1, C, WIDTH), "float32")
        o = parameter((B, S, WIDTH), "float32")
        with T.launch_thread("blockIdx.x", B) as b, T.launch_thread("threadIdx.x", WIDTH) as d:
            for s in T.serial(S):
                k[b, 0, p[s], d] = table[i[b, s], d]
                v[b, 0, p[s], d] = T.float32(0)
            state = T.alloc_buffer((1,), "float32", scope="local")
            for s in T.serial(S):
                state[0] = T.float32(0)
                for t in T.serial(p[s] + 1):
                    state[0] = state[0] * T.float32(0.5) + k[b, 0, t, d]
                o[b, s, d] = state[0]

    return remember


def vectors(model: TinyLanguageModel) -> dict[str, torch.Tensor]:
    """Return the vectors that compressor.export.vectors would store, by the model's own arithmetic; every third
    column.
    """
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 18))
    logits = np.array([model.logits(list(row[: i + 1])) for row in ids for i in range(18)])
    rows, columns = np.arange(len(logits)), np.arange(0, VOCAB, 3)
    stored = {"ids": ids, "prompt": np.array([16]), "output_0": logits[:, columns].astype(np.float32), "rows_0": rows}
    stored |= {"columns_0": columns, "top_0": logits.argmax(1), "tolerance": np.array([1e-3])}
    return {name: torch.as_tensor(value) for name, value in stored.items()}


def write_tiny_bundle(
    folder: Path,
    model: TinyLanguageModel,
    target: Any = None,
    archs: Sequence[str] = (),
    verifies: bool = False,
    positions: int = POSITIONS,
) -> Path:
    """Write the bundle of the tiny language model below a folder, as export writes it.

    Args:
        target, archs: TVM's target of a GPU, and what the kernels were compiled for.
        verifies: with kernels that verify drafted tokens.
    """
    build_library(folder / "kernels.so", target, verifies)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)  # as sentence encoders have it: must not cut the prompt
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = dict(
        graph=model,
        parameters=["embed", "head", "bias", "scale"],
        library=folder / "kernels.so",
        vectors=vectors(model),
        model={
            "kind": "decoder",
            "name": "tiny",
            "vocab_size": VOCAB,
            "layers": 1,
            "kv_heads": 1,
            "head_dim": WIDTH,
            "max_positions": positions,
            "eos_ids": [1],
            "bos_id": 0,
        },
        recipe={},
        sites=[],
        kernels=[{"name": "main", "evidence": "executed"}],
        cpu_features=["sse2"],
        archs=archs,
        dense_weight_bytes=0,
        tokenizer=folder,
        entries={"main": range(4), "verify": range(4)} if verifies else {},
    )
    return write_native_bundle(folder / "bundle", parts)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def greedy(model: TinyLanguageModel, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.logits(ids).argmax()))
    return ids[-count:]


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has neither PyTorch, nor transformers, nor compressor."""
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'compressor')))\n"
    command = [sys.executable, "-B", "-c", block + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
