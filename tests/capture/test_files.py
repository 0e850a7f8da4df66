"""Model folders that were made to do harm: no code of theirs runs, no pickle is opened, no file outside is read."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.capture.capture import capture
from compressor.capture.files import check_config, listed_files
from compressor.data.text import load_samples
from compressor.errors import CaptureError, CompressorError, UsageError
from compressor.export.tokenizer import write_tokenizer
from compressor.host.json_files import read_object
from compressor.recipe.data_spec import TextSpec
from compressor.recipe.recipe import Recipe

transformers = pytest.importorskip("transformers")

CODE = """
from pathlib import Path
Path({marker!r}).write_text("this code ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizer
class OddConfig(LlamaConfig):
    model_type = "odd"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
class OddTokenizer(PreTrainedTokenizer):
    pass
"""


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.marker, "this pickle was opened")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.random.fork_rng(devices=[]):
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture
def marker(folder: Path, tmp_path: Path) -> Path:
    """Return the file that appears when anything of the folder's code runs; pickles lie beside the weights."""
    file = tmp_path / "marker"
    (folder / "odd.py").write_text(CODE.format(marker=str(file)))
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(file)))
    return file


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


OWN_CODE = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}


@pytest.mark.parametrize("trusted", [None, False, True])
def test_a_models_code_runs_only_when_the_recipe_says_so(
    folder: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool | None
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    edit_config(folder, model_type="odd", architectures=["OddForCausalLM"], auto_map=OWN_CODE)
    recipe = Recipe.from_dict({"passes": [], **({} if trusted is None else {"trust_remote_code": trusted})})
    if trusted:
        assert (
            capture(folder, trust_remote_code=recipe.trust_remote_code).meta["model"].architecture == "OddForCausalLM"
        )
        assert marker.read_text() == "this code ran"
    else:
        with pytest.raises(CaptureError, match="trust_remote_code"):
            capture(folder, trust_remote_code=recipe.trust_remote_code)
        assert not marker.exists()


def test_a_known_models_own_code_and_pickles_are_left_aside(folder: Path, marker: Path) -> None:
    edit_config(folder, auto_map=OWN_CODE)
    assert capture(folder).meta["model"].architecture == "LlamaForCausalLM"
    (folder / "model.safetensors").unlink()
    with pytest.raises(CaptureError, match="which can run code when loaded"):
        capture(folder)
    assert not marker.exists()


def test_a_tokenizers_code_never_runs(folder: Path, marker: Path) -> None:
    own = {"tokenizer_class": "OddTokenizer", "auto_map": {"AutoTokenizer": ["odd.OddTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(CompressorError, match="no tokenizer"):
        write_tokenizer(folder, folder / "out.json", 64)
    with pytest.raises(UsageError, match="no tokenizer"):
        load_samples(TextSpec(text=("a.txt",)), folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "x.bin", "..", "", "a\0.safetensors", 3, None,
     "x\n.safetensors", "x" * 300 + ".safetensors"],
)  # fmt: skip
def test_an_index_names_safetensors_beside_it_only(folder: Path, name: object) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CaptureError, match=r"not a safetensors index: .* is not a safetensors file beside it"):
        capture(folder)


def test_an_index_gives_each_file_once(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    file.write_text('{"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}')
    assert listed_files(file) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 100_000, "\ud800", "9" * 9000, " " * (65 << 20)])
def test_files_that_are_no_objects(folder: Path, text: str) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        file = folder / name
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(CaptureError, match=rf"{name}: (not a safetensors index|cannot be used)"):
            capture(folder)
        file.unlink() if before is None else file.write_bytes(before)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    for file in (Path("/dev/zero"), tmp_path, tmp_path / "none"):
        with pytest.raises(CaptureError, match="missing, or no regular file"):
            read_object(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**6},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"num_labels": 10**9},
        {"max_position_embeddings": 10**9},
        {"parts": [{"n_layer": 513}]},
    ],
)
def test_configurations_that_ask_for_the_absurd(folder: Path, changes: dict[str, object]) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CaptureError, match=r"config\.json: cannot be used \(\w+ is \d+, more than"):
        capture(folder)


def test_layers_are_held_against_the_stored_tensors(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"num_hidden_layers": 600, "layer_norm_eps": 1e-5, "vocab_size": 2000000, "id2label": {"0": 7}}')
    check_config(file, 600)
    with pytest.raises(CaptureError, match="num_hidden_layers is 600, more than 512; 100 tensors are stored"):
        check_config(file, 100)


@pytest.mark.parametrize(("key", "value"), [("eos_token_id", "2"), ("eos_token_id", [[1]]), ("bos_token_id", [1])])
def test_special_tokens_are_numbers(folder: Path, key: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(CaptureError, match=f"{key} is "):
        capture(folder)
