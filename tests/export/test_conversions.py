"""Conversions: values are those of the original to the last bit, or the loss is told; bad input leaves nothing."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from families import DECODERS, save
from missing import skip_or_fail
from numpy.typing import NDArray
from quantized_checkpoints import store_quantized
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

from compressor.capture.checkpoints.gguf.gguf_blocks import BLOCK_TYPES, pack_mxfp4, pack_two_bits
from compressor.capture.checkpoints.gguf.k_quants import K_QUANTS, fit_k_quant
from compressor.capture.checkpoints.open_checkpoint import dense_folder
from compressor.cli.commands import main
from compressor.export.conversion.job import convert
from compressor.export.exchange.dense_form import PackedSite
from compressor.formats.format import Format
from compressor.graph.provenance import Stored
from compressor.numerics.exact_grid import pack_exact
from compressor.recipe.exports import make_export

Q_PROJ = "model.layers.0.self_attn.q_proj"
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 97}


pytestmark = pytest.mark.usefixtures("one_thread_throughout")


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a GPTQ checkpoint of a tiny Llama, with random codes and zero points of 4 bits."""
    folder = tmp_path_factory.mktemp("models") / "gptq"
    cls, sizes = DECODERS["Llama"]
    save(folder, cls, {**sizes, **SIZES}, True)
    shutil.copytree(folder, folder.with_name("dense"))
    store_quantized(folder, "gptq")
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder


def converted(folder: Path, to: str, out: Path, *options: str, **more: Any) -> dict[str, Any]:
    return convert(folder, out, make_export(to, options), check=False, **more).content()


def values(folder: Path, name: str = f"{Q_PROJ}.weight") -> torch.Tensor:
    return dense_folder(folder, weights=True).source.read(name)


def mlx_codes(words: bytes, bits: int, count: int) -> NDArray[np.int64]:
    stream = int.from_bytes(words, "little")
    return np.array([stream >> (bits * place) & (2**bits - 1) for place in range(count)])


def test_codes_become_those_of_another_layout(gptq: Path, tmp_path: Path) -> None:
    content = converted(gptq, "mlx", tmp_path / "mlx")
    assert content["weights"] == content["equal_weights"] == 7 and not content["refitted"]
    stated = json.loads((tmp_path / "mlx/config.json").read_text())
    assert stated["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert "quantization_config" not in stated
    parts = load_file(tmp_path / "mlx/model.safetensors")
    words, scales, biases = (parts[f"{Q_PROJ}.{name}"].numpy() for name in ("weight", "scales", "biases"))
    assert words.dtype == np.uint32 and biases.dtype == np.float32  # minima that float16 would round
    codes = np.array([mlx_codes(row.tobytes(), 4, 256) for row in words])
    spread = [np.repeat(each.astype(np.float64), 32, 1) for each in (scales, biases)]
    assert np.array_equal(codes * spread[0] + spread[1], values(gptq).double().numpy())


@pytest.fixture(scope="module")
def refitted(gptq: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert a checkpoint with one weight without a grid: refused, then by request to GGUF, with its loss."""
    root = tmp_path_factory.mktemp("refitted")
    folder, out = root / "model", root / "out"
    shutil.copytree(gptq, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{Q_PROJ}.scales"] = tensors[f"{Q_PROJ}.scales"].float() * 1.0001  # 24 bits, which no format here has
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = command(folder, out, "--to", "gguf", "--set", "pre=none")
    assert result.exit_code == 2 and f"{Q_PROJ}: its values lie on no grid of gguf's" in result.output
    assert "--refit" in result.output and not out.exists()
    (root / "text.txt").write_text(" ".join(f"w{i * 7 % 97}" for i in range(100)))
    content = converted(folder, "gguf", out, "pre=none", refit="q4_k", text=root / "text.txt")
    (root / "content.json").write_text(json.dumps(content))
    return root


def test_onnx_holds_the_very_values(gptq: Path, tmp_path: Path) -> None:
    done = convert(gptq, tmp_path / "onnx", make_export("onnx", ()), check=True).content()
    assert (done["equal_weights"], done["refitted"]) == (done["weights"], {})
    assert done["checked"]["equal_tokens"] == done["checked"]["tokens"] > 0


def test_a_loss_is_told_by_weight(refitted: Path) -> None:
    content = json.loads((refitted / "content.json").read_text())
    assert content["equal_weights"] == 6 and content["refitted"].keys() == {f"{Q_PROJ}.weight"}
    wanted, found = values(refitted / "model"), values(refitted / "out")
    told = content["refitted"][f"{Q_PROJ}.weight"]
    error = float((wanted - found).norm() / wanted.norm())
    assert told["to"] == "Q4_K" and told["relative_error"] == pytest.approx(error, rel=1e-4) and 0 < error < 0.1
    assert content["bits_by_tensor"][f"{Q_PROJ}.weight"] == 4.5
    assert 0 < content["quality"]["kl_divergence"] < 0.1 and content["quality"]["tokens"] > 50
    others = (f"{Q_PROJ.replace('q_', each)}.weight" for each in ("k_", "v_", "o_"))
    assert all(torch.equal(values(refitted / "out", name), values(refitted / "model", name)) for name in others)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)], prog_name="compress")


def test_bad_input_leaves_nothing(gptq: Path, refitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, gguf, out = tmp_path / "cut", tmp_path / "gguf", tmp_path / "out"
    shutil.copytree(gptq, cut)
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    gguf.mkdir()
    sound = (refitted / "out/model.gguf").read_bytes()
    place = sound.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4
    (gguf / "model.gguf").write_bytes(sound[: place + 8] + (1 << 40).to_bytes(8, "little") + sound[place + 16 :])
    for arguments, words in (
        ((cut, out, "--to", "awq"), "model.safetensors: not a readable safetensors file"),
        ((gguf, out, "--to", "awq"), "model.gguf: not a readable GGUF file: 'blk.0.attn_q.weight' ends at byte"),
        ((gptq.parent / "dense", out, "--to", "awq"), "are not quantised"),
        ((gptq, out, "--to", "awqq"), "no export is called 'awqq'"),
        ((gptq, out, "--to", "awq", "--refit", "Q9"), "--refit"),
        ((gptq, out, "--to", "awq", "--refit", "W4A8_G64"), "more than codes of weights"),
        ((gptq, gptq / "inside", "--to", "awq"), "need folders apart"),
        ((gptq, out, "--to", "awq", "--text", tmp_path / "none.txt"), "none.txt"),
    ):
        result = command(*arguments)
        assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output, result.output
    before = sorted(tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compressor.export.checkpoints.stored.write_safetensors", full)
    result = command(gptq, out, "--to", "awq", "--no-check")
    assert result.exit_code == 5 and "No space left" in result.output
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_mlx_packs_all_widths_by_definition(bits: int) -> None:
    from compressor.capture.checkpoints.mlx_words import mlx_tensors, mlx_values

    rng = np.random.default_rng(bits)
    codes, zeros = (torch.from_numpy(rng.integers(0, 2**bits, size).astype(np.uint8)) for size in ((4, 64), (4, 2)))
    scales = torch.from_numpy(rng.uniform(0.01, 0.04, (4, 2))).half()
    parts = mlx_tensors(codes, scales, zeros, bits)
    found = np.array([mlx_codes(row.tobytes(), bits, 64) for row in parts["weight"].numpy()])
    assert np.array_equal(found, codes.numpy())
    wanted = (codes.double() - zeros.double().repeat_interleave(32, 1)) * scales.double().repeat_interleave(32, 1)
    assert torch.equal(mlx_values(**parts, bits=bits, group_size=32).double(), wanted)


def test_blocks_are_those_of_the_package_gguf() -> None:
    try:
        import gguf
    except ImportError:
        skip_or_fail("gguf is not installed")
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.normal(0, 0.05, (8, 512)).astype(np.float32))
    weight[0], weight[1] = 0, 0.3
    packed = {kind: fit_k_quant(kind, weight) for kind in K_QUANTS}
    numbers = torch.from_numpy(rng.integers(-1, 2, (8, 512))).short()
    scales = torch.from_numpy(rng.uniform(-1, 1, (8, 2))).half()
    packed["TQ2_0"] = pack_two_bits("TQ2_0", numbers, scales)
    codes, exponents = rng.integers(0, 16, (8, 512)), rng.integers(90, 140, (8, 16))
    packed["MXFP4"] = pack_mxfp4(torch.from_numpy(codes).byte(), torch.from_numpy(exponents).byte())
    oracle: dict[str, NDArray[Any]] = {}
    for kind, blocks in packed.items():
        oracle[kind] = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
        ours = BLOCK_TYPES[kind].dequantize(blocks.view(-1, BLOCK_TYPES[kind].block_bytes)).view(8, 512)
        assert np.array_equal(ours.numpy(), oracle[kind]), kind
    assert np.array_equal(oracle["TQ2_0"], (numbers.float() * scales.float().repeat_interleave(256, 1)).numpy())
    rest = weight[2:].numpy()
    for kind, most in (("Q4_K", 0.08), ("Q6_K", 0.02)):
        assert np.linalg.norm(oracle[kind][2:] - rest) < most * np.linalg.norm(rest)
        assert not oracle[kind][0].any() and np.abs(oracle[kind][1] - 0.3).max() < 1e-3


def test_two_bits_by_definition() -> None:
    rng = np.random.default_rng(0)
    numbers, scales = rng.integers(-1, 3, (3, 128)), rng.uniform(-1, 1, (3, 2)).astype(np.float16)
    blocks = pack_two_bits("Q2_0", torch.from_numpy(numbers).short(), torch.from_numpy(scales)).numpy()
    assert blocks.shape == (3, 36)
    for row, place in np.ndindex(3, 128):
        block = blocks[row].reshape(2, 18)[place // 64]
        code = block[2 + place % 64 // 4] >> (2 * (place % 4)) & 3
        assert int(code) - 1 == numbers[row, place] and block[:2].view(np.float16)[0] == scales[row, place // 64]


@pytest.mark.parametrize(
    ("scheme", "span", "kind"), [("W2A16_G64", 2, "Q2_0"), ("W2A16_C", 1, "TQ2_0"), ("MXFP4", 3, "MXFP4")]
)
def test_the_smallest_type_is_taken_by_request(scheme: str, span: int, kind: str) -> None:
    weight = torch.from_numpy(np.random.default_rng(0).integers(-span, 2, (8, 256)).astype(np.float32))
    packed = pack_exact(weight, Format.parse(scheme))
    assert packed is not None
    site = PackedSite(f"{Q_PROJ}.weight", packed, "Linear", "x", Stored((f"{Q_PROJ}.weight",)))
    export = make_export("gguf", ("two_bits=true",))
    ((found, blocks),) = export.encode(site).items()
    block = BLOCK_TYPES[kind]
    assert found == kind and not export.why_not(site)
    assert torch.equal(block.dequantize(blocks.view(-1, block.block_bytes)).view(8, 256), weight)
    assert make_export("gguf", ()).encode(site).keys() == {"MXFP4" if kind == "MXFP4" else "Q4_0"}
