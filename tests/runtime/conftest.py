"""A bundle of the tiny language model, written as export writes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from native_bundles import write_native_bundle
from tiny_bundle import POSITIONS, TEXT, VOCAB, WIDTH, TinyLanguageModel, build_library, vectors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from compressor.runtime import Bundle, load


@pytest.fixture(scope="session")
def model() -> TinyLanguageModel:
    return TinyLanguageModel()


@pytest.fixture(scope="session")
def bundle_folder(
    tmp_path_factory: pytest.TempPathFactory, model: TinyLanguageModel, require_tool: Callable[[str], Path]
) -> Path:
    require_tool("g++")
    folder = tmp_path_factory.mktemp("tiny")
    build_library(folder / "kernels.so")
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
            "max_positions": POSITIONS,
            "eos_ids": [1],
            "bos_id": 0,
        },
        recipe={},
        sites=[],
        kernels=[{"name": "main", "evidence": "executed"}],
        cpu_features=["sse2"],
        dense_weight_bytes=0,
        tokenizer=folder,
    )
    return write_native_bundle(folder / "bundle", parts)


@pytest.fixture(scope="session")
def bundle(bundle_folder: Path) -> Bundle:
    return load(bundle_folder, threads=1)


@pytest.fixture
def copy(bundle_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle_folder, tmp_path / "copy"))
