from __future__ import annotations

import hashlib
import json
import os
import py_compile
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressor_runtime
import pytest
import torch
from compressor_runtime import read_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from native_bundles import write_native_bundle
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn

from compressor.errors import CompressorError, ResourceError, UsageError
from compressor.export.manifest import write_measurements
from compressor.export.publish import check_destination, publishing
from compressor.export.tokenizer import write_chat_template, write_tokenizer
from compressor.host.tensor_files import write_safetensors
from compressor.runtime import DamagedBundleError, check_files, read_manifest

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool]


def some_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    numbers = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype)


# --- safetensors


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=6))
def test_the_official_library_and_the_run_time_read_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    file = tmp_path_factory.mktemp("weights") / "w.safetensors"
    tensors = {f"t{i}": some_tensor(dtype, shape, i) for i, (dtype, shape) in enumerate(kinds)}
    digest = write_safetensors(file, tensors)
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    official, ours = load_file(file), read_safetensors(file)
    assert set(official) == set(ours) == set(tensors)
    for name, tensor in tensors.items():
        assert official[name].dtype == tensor.dtype and torch.equal(official[name], tensor)
        bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        assert ours[name].tolist() == bits.tolist()


def test_tensors_of_whole_64_bytes_are_aligned_and_the_rest_to_their_elements(tmp_path: Path) -> None:
    sizes = {"a": (3, torch.uint8), "b": (16, torch.float32), "c": (5, torch.float32), "d": (64, torch.int8)}
    sizes["e"] = (7, torch.float16)
    write_safetensors(tmp_path / "w", {k: some_tensor(dtype, [n], 0) for k, (n, dtype) in sizes.items()})
    for name, array in read_safetensors(tmp_path / "w").items():
        assert array.ctypes.data % (64 if name in "bd" else array.itemsize) == 0, name


def test_views_and_memory_mapped_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "in")
    with safe_open(tmp_path / "in", "pt") as mapped:
        weight = mapped.get_tensor("w")
    write_safetensors(tmp_path / "out", {"turned": weight.t(), "part": weight[:, 1:3], "scalar": torch.tensor(2.0)})
    read = load_file(tmp_path / "out")
    assert torch.equal(read["turned"], weight.t()) and torch.equal(read["part"], weight[:, 1:3])
    assert read["scalar"].shape == () and read["scalar"] == 2


def test_the_order_of_the_tensors_does_not_matter(tmp_path: Path) -> None:
    tensors = {name: some_tensor(torch.float32, [n], n) for name, n in (("x", 3), ("a", 16), ("m", 5))}
    assert write_safetensors(tmp_path / "1", tensors) == write_safetensors(
        tmp_path / "2", dict(reversed(tensors.items()))
    )


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompressorError, match=r"odd: torch\.complex64"):
        write_safetensors(tmp_path / "w", {"odd": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(CompressorError, match=r"gone: .* on meta"):
        write_safetensors(tmp_path / "w", {"gone": torch.zeros(2, device="meta")})


def header(entries: object, data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{]",
        header([]),
        header({"w": 1}),
        header({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
        header({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
        header({"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}),
        header({"w": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}),
        header({"w": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}),
        header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
        header({"w": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}}),
        header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
        header({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        header({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", 8]}}),
        (40000).to_bytes(8, "little") + b"[" * 40000,
    ],
    ids=range(18),
)
def test_a_broken_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(DamagedBundleError, match="not a valid safetensors file"):
        read_safetensors(tmp_path / "w")


# --- bundles


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Any]:
    graph = nn.ModuleDict({"lm": nn.Linear(4, 6, bias=True)})
    (tmp_path / "kernels.so").write_bytes(b"kernels")
    source = tmp_path / "model"
    source.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a")).save(str(source / "tokenizer.json"))
    return dict(
        graph=graph,
        parameters=["lm.weight", "lm.bias"],
        library=tmp_path / "kernels.so",
        vectors={"tolerance": torch.tensor([1e-3], dtype=torch.float64)},
        model={"kind": "decoder", "name": "tiny", "vocab_size": 6, "eos_ids": (1,), "source": source},
        recipe={"seed": 0},
        sites=[{"name": "lm", "format": "W4A16_G128", "bytes_before": 96, "bytes_after": 120}],
        kernels=[{"name": "main", "evidence": "executed"}],
        cpu_features=["sse2", "avx2"],
        dense_weight_bytes=96,
        tokenizer=source,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def counted(bundle: Path) -> dict[str, bytes]:
    """Return the contents that a manifest counts: measured figures, which README.md states, are apart."""
    return {name: content for name, content in contents(bundle).items() if name != "README.md"}


def test_a_bundle_holds_what_its_manifest_says(tmp_path: Path, parts: dict[str, Any]) -> None:
    bundle = write_native_bundle(tmp_path / "deep" / "bundle", parts)
    own = {"README.md", "compressor_runtime.py", "compressor_selfcheck.py", "manifest.json", "model.so"}
    own |= {"tokenizer.json", "vectors.safetensors", "weights.safetensors"}
    python = Path(compressor_runtime.__file__).parents[1]
    own |= {file.relative_to(python).as_posix() for file in (python / "compressor_runtime").rglob("*.py")}
    tvm = {"lib/LICENSE-apache-tvm", "lib/NOTICE-apache-tvm", "lib/libtvm_runtime.so"}
    assert set(contents(bundle)) == own | tvm
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    assert sorted(manifest["files"]) == sorted(set(counted(bundle)) - {"manifest.json"})
    assert manifest["bundle_bytes"] == sum(map(len, counted(bundle).values()))
    assert (manifest["weight_bytes"], manifest["dense_weight_bytes"]) == (4 * (24 + 6), 96)
    assert manifest["formats"] == ["W4A16_G128"] and manifest["kind"] == "decoder"
    assert str(tmp_path) not in (bundle / "manifest.json").read_text()  # where it was made is nobody's business
    assert torch.equal(
        load_file(bundle / "weights.safetensors")["lm.weight"], parts["graph"].get_parameter("lm.weight")
    )
    assert "sse2" in (bundle / "README.md").read_text()
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o777 & ~umask


def test_large_files_are_listed_with_their_pieces(
    tmp_path: Path, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = read_manifest(write_native_bundle(tmp_path / "small", parts))["files"]
    assert not any("pieces" in entry for entry in small.values())
    monkeypatch.setattr("compressor_runtime.check.PIECE_BYTES", 8192)
    bundle = write_native_bundle(tmp_path / "b", parts)
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    for name, entry in manifest["files"].items():
        content = (bundle / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(content).hexdigest() == small[name]["sha256"]
        parts_of_it = [content[start : start + 8192] for start in range(0, len(content), 8192)]
        hashes = [hashlib.sha256(part).hexdigest() for part in parts_of_it]
        assert entry.get("pieces") == (hashes if len(content) > 8192 else None), name
    assert manifest["bundle_bytes"] == sum(map(len, counted(bundle).values()))


def test_the_same_parts_give_the_same_bytes(tmp_path: Path, parts: dict[str, Any]) -> None:
    first = contents(write_native_bundle(tmp_path / "1", parts))
    again = contents(write_native_bundle(tmp_path / "2", parts | dict(cpu_features=["avx2", "sse2"])))
    assert first == again


def test_measurements_stand_outside_the_hashes(tmp_path: Path, parts: dict[str, Any]) -> None:
    bundle = write_native_bundle(tmp_path / "b", parts)
    before = (bundle / "manifest.json").read_bytes()
    write_measurements(bundle, {"perplexity": 3.5})
    write_measurements(bundle, {"perplexity": 4.5})
    assert json.loads((bundle / "measurements.json").read_text()) == {"perplexity": 4.5}
    assert (bundle / "manifest.json").read_bytes() == before
    check_files(bundle, read_manifest(bundle))
    assert not list(bundle.glob(".*"))


def test_a_bundle_takes_the_place_of_a_bundle_and_of_an_empty_folder(tmp_path: Path, parts: dict[str, Any]) -> None:
    (tmp_path / "b").mkdir()
    write_native_bundle(tmp_path / "b", parts)
    write_native_bundle(tmp_path / "b", parts | dict(recipe={"seed": 1}))
    assert read_manifest(tmp_path / "b")["recipe"] == {"seed": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "kernels.so", "model"]


def test_the_former_bundle_survives_a_failure(tmp_path: Path, parts: dict[str, Any]) -> None:
    before = contents(write_native_bundle(tmp_path / "b", parts))
    with pytest.raises(CompressorError, match=r"lm\.nothing"):
        write_native_bundle(tmp_path / "b", parts | dict(parameters=["lm.nothing"]))
    with pytest.raises(KeyboardInterrupt), publishing(tmp_path / "b") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt
    assert contents(tmp_path / "b") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "kernels.so", "model"]


def test_a_file_system_that_cannot_exchange_names(
    tmp_path: Path, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.export.publish._EXCHANGE", 1 << 20)  # no such flag: the kernel refuses it
    for seed in (0, 1):
        write_native_bundle(tmp_path / "b", parts | dict(recipe={"seed": seed}))
    assert read_manifest(tmp_path / "b")["recipe"] == {"seed": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "kernels.so", "model"]


def test_what_is_no_bundle_is_not_overwritten(tmp_path: Path, parts: dict[str, Any]) -> None:
    folder, file, link = tmp_path / "thesis", tmp_path / "file", tmp_path / "link"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"name": "a browser extension"}')
    file.write_text("text")
    link.symlink_to(folder)
    for destination in (folder, file, link, file / "below"):
        with pytest.raises(UsageError, match=r"thesis|file|link"):
            write_native_bundle(destination, parts)
        with pytest.raises(UsageError):
            check_destination(destination)
    assert (folder / "manifest.json").read_text() == '{"name": "a browser extension"}' and file.read_text() == "text"


def test_a_bundle_with_a_user_s_files_is_not_replaced(tmp_path: Path, parts: dict[str, Any]) -> None:
    bundle = write_native_bundle(tmp_path / "b", parts)
    write_measurements(bundle, {"perplexity": 4.5})
    py_compile.compile(str(bundle / "compressor_runtime" / "errors.py"))  # as an import does
    write_native_bundle(bundle, parts | dict(recipe={"seed": 1}))
    (bundle / "notes").mkdir()
    (bundle / "notes" / "a.txt").write_text("precious")
    before = contents(bundle)
    for attempt in (check_destination, lambda folder: write_native_bundle(folder, parts)):
        with pytest.raises(UsageError, match=r"b: holds notes/a\.txt beside a bundle; move that away"):
            attempt(bundle)
    with pytest.raises(UsageError, match=r"notes/b\.txt"), publishing(tmp_path / "b2") as folder:
        (folder / "new").write_text("made")
        write_native_bundle(tmp_path / "b2", parts)  # both come while the bundle is made
        (tmp_path / "b2" / "notes").mkdir()
        (tmp_path / "b2" / "notes" / "b.txt").write_text("precious")
    assert contents(bundle) == before and (tmp_path / "b2" / "notes" / "b.txt").read_text() == "precious"


def test_places_that_are_no_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for name, message in ((".", "name one of its own"), ("/", "name one of its own"), ("..", "name one of its own")):
        with pytest.raises(UsageError, match=message):
            check_destination(Path(name))
    with pytest.raises(UsageError, match=r"link: is a link to .*; name the folder itself"):
        check_destination(Path("link"))


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not hold for root
    with pytest.raises(UsageError, match="cannot be written"):
        write_native_bundle(tmp_path / "b", parts)
    monkeypatch.undo()

    def full(path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compressor.export.publish._flush", full)
    with pytest.raises(ResourceError, match="No space left"):
        write_native_bundle(tmp_path / "b", parts)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kernels.so", "model"]


# --- tokenizers


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(tmp_path: Path, parts: dict[str, Any]) -> None:
    assert parts["tokenizer"] is not None
    with pytest.raises(CompressorError, match="ids up to 5, the model knows 3"):
        write_tokenizer(parts["tokenizer"], tmp_path / "t.json", 3)
    (parts["tokenizer"] / "tokenizer.json").write_text("{}")
    with pytest.raises(CompressorError, match="not a tokenizer"):
        write_native_bundle(tmp_path / "b", parts)
    assert not (tmp_path / "b").exists()


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 7}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    write_tokenizer(tmp_path, tmp_path / "out.json", 7)
    assert Tokenizer.from_file(str(tmp_path / "out.json")).encode("hello world").tokens == [
        "[CLS]",
        "hello",
        "world",
        "[SEP]",
    ]


def test_a_folder_without_a_tokenizer(tmp_path: Path, shared_data: Callable[[str], Path]) -> None:
    (tmp_path / "config.json").write_bytes((shared_data("models/stories260K") / "config.json").read_bytes())
    with pytest.raises(CompressorError, match=r"no tokenizer\.json"):
        write_tokenizer(tmp_path, tmp_path / "out.json", 512)


@pytest.mark.parametrize("name", ["x" * 5000, "y" * 300, "a\0b"], ids=["long", "long name", "NUL"])
def test_what_cannot_be_a_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no path (for a bundle|may hold a NUL)"):
        check_destination(tmp_path / name)


@pytest.mark.parametrize(
    ("known", "beside", "template"),
    [
        ({"chat_template": "one"}, None, "one"),
        ({"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "two"}]}, None, "two"),
        ({"chat_template": "one"}, "three", "three"),  # transformers' own order
        ({"chat_template": [{"name": "rag", "template": "x"}]}, None, None),
        ({}, None, None),
    ],
)
def test_chat_templates_are_carried_with_the_tokens_they_name(
    tmp_path: Path, known: dict[str, Any], beside: str | None, template: str | None
) -> None:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**known, **tokens, "model_max_length": 9}))
    if beside is not None:
        (tmp_path / "chat_template.jinja").write_text(beside)
    file = tmp_path / "out.json"
    write_chat_template(tmp_path, file)
    expected = {"template": template, "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}}
    assert (json.loads(file.read_text()) if file.exists() else None) == (expected if template else None)
