"""What capture refuses, and how it says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressor.capture.capture import capture
from compressor.cli.commands import main
from compressor.errors import CaptureError, UsageError

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}


def build(config: transformers.PreTrainedConfig, kind: type = transformers.AutoModelForCausalLM) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind.from_config(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(transformers.LlamaConfig(**GROUPED)).save_pretrained(tmp_path)
    return tmp_path


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_folder(tmp_path: Path) -> None:
    for model in (tmp_path / "none", str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(UsageError, match=r"no such folder.*give a model folder"):
            capture(model)


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> str:
        raise OSError("cannot connect\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UsageError, match=r"org/name: no such folder here, and .* \(cannot connect\); check the name"):
        capture("org/name")


def test_hub_id_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    info = capture("org/name").meta["model"]
    assert (info.name, info.source) == ("org/name", folder)


def test_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(UsageError, match="a file; give the folder"):
        capture(folder / "model.safetensors")


def test_no_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CaptureError, match=r"config\.json: cannot be used"):
        capture(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CaptureError, match=r"no config\.json"):
        capture(folder)


def test_only_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CaptureError, match=r"no safetensors .*only pytorch_model\.bin.*safe_serialization"):
        capture(folder)


def test_truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CaptureError, match=r"not a readable safetensors file.*fetch it again"):
        capture(folder)


def test_broken_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"lm_head.weight": "model-00002.safetensors"}}')
    with pytest.raises(CaptureError, match=r"model-00002\.safetensors: .* lists this file, and it is missing"):
        capture(folder)
    index.write_text("[]")
    with pytest.raises(CaptureError, match="not a safetensors index"):
        capture(folder)


def test_missing_and_unexpected_weights(folder: Path) -> None:
    def rename(stored: dict[str, Tensor]) -> None:
        stored["model.layers.0.mlp.extra_proj.weight"] = stored.pop("model.layers.0.mlp.up_proj.weight")

    edit_weights(folder, rename)
    message = (
        r"1 weights are missing \(model\.layers\.0\.mlp\.up_proj\.weight\) and 1 weights have no place .*extra_proj"
    )
    with pytest.raises(CaptureError, match=message):
        capture(folder)


def test_buffers_that_old_checkpoints_store(tmp_path: Path) -> None:
    """BERT's positions: the model makes them itself, so they may be there, if they are what it makes."""
    build(transformers.BertConfig(**SIZES), transformers.AutoModel).save_pretrained(tmp_path)
    positions = torch.arange(SIZES["max_position_embeddings"])[None]
    for prefix in ("", "bert."):
        edit_weights(tmp_path, lambda stored, name=f"{prefix}embeddings.position_ids": stored.update({name: positions}))
        assert capture(tmp_path).meta["model"].kind == "encoder"
    edit_weights(tmp_path, lambda stored: stored.update({"embeddings.position_ids": positions.flip(1)}))
    with pytest.raises(CaptureError, match=r"1 weights have no place in the model \(embeddings\.position_ids\)"):
        capture(tmp_path)


def test_weights_of_another_size(folder: Path) -> None:
    edit_weights(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(32)}))
    with pytest.raises(CaptureError, match=r"model\.norm\.weight has shape \[32\], the configuration says \[64\]"):
        capture(folder)


def test_one_weight_under_two_spellings(folder: Path) -> None:
    edit_weights(folder, lambda stored: stored.update({"norm.weight": torch.zeros(64)}))
    with pytest.raises(CaptureError, match=r"model\.norm\.weight and norm\.weight are one parameter .* and differ"):
        capture(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonesuch"}, r"config\.json: cannot be used .*trust_remote_code"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CaptureError, match=message):
        capture(folder)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Gate())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_error_names_module_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        CaptureError, match=r"Branching: .*inner\.1 \(Gate\) at .*test_errors\.py:\d+: .*tensor's value"
    ):
        capture(Branching(), (torch.ones(2, 4),))
    assert capfd.readouterr() == ("", "")  # torch prints the graph so far


def test_a_model_that_is_refused_is_bad_input(folder: Path) -> None:
    """Exit code 2 and one message, as of any other bad input."""
    edit_json(folder / "config.json", model_type="openai-gpt", architectures=["OpenAIGPTLMHeadModel"])
    for command in ("check", "inspect"):
        done = CliRunner().invoke(main, [command, str(folder)])
        assert done.exit_code == 2 and done.stderr.count("error: ") == 1, done.output


def test_plain_module_needs_inputs_and_float32() -> None:
    with pytest.raises(CaptureError, match="plain module: give an example of its inputs"):
        capture(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"call module\.float\(\) first"):
        capture(nn.Linear(4, 4).half(), (torch.ones(2, 4),))


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody_of_that_name/model", Path("a\0b")], ids=["long", "home", "NUL"])
def test_what_cannot_be_a_path_is_refused(path: str | Path) -> None:
    with pytest.raises((UsageError, CaptureError), match=r"no path that can be looked up|no such folder"):
        capture(path)
