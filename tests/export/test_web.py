"""Bundles for browsers as files: what is in them, what it weighs, and what else makes of them."""

from __future__ import annotations

import gzip
import json
import threading
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import compressor.export.web as module
from compressor.cli.commands import main
from compressor.cli.serve import make_server
from compressor.errors import UsageError
from compressor.export.bundle import write_bundle
from compressor.export.facts import BundleFacts
from compressor.export.publish import publishing
from compressor.export.web import WebParts, write_web
from compressor.runtime import load
from compressor.verify.bundle import verify_bundle


def parts(**tensors: torch.Tensor) -> WebParts:
    graph = nn.Module()
    for name, tensor in tensors.items():
        graph.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return WebParts(
        name="small",
        graph=graph,
        parameters=list(tensors),
        constants={"constant_0": torch.arange(3, dtype=torch.int32)},
        program={"steps": []},
        wasm=({"steps": [], "verify": {"steps": []}}, b"\0asm"),
        kernels=[],
    )


def fill_web_bundle(folder: Path, parts: WebParts) -> dict[str, Any]:
    model = {"kind": "decoder", "name": "small", "architecture": "Small", "vocab_size": 0}
    facts = BundleFacts(model=model, recipe={}, sites=[], dense_weight_bytes=1)
    return write_bundle(folder, write_web(folder, parts), facts)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with publishing(tmp_path / "bundle") as folder:
        fill_web_bundle(folder, parts(a=torch.randn(5, 3), b=torch.randint(9, (7,), dtype=torch.int32)))
    return tmp_path / "bundle"


def test_shards_hold_all_tensors_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 64)
    tensors = {
        "a": torch.randn(5, 3),
        "empty": torch.zeros(0, 4),
        "b": torch.randint(9, (70,), dtype=torch.int32),
        "c": torch.randn(9).half(),
        "d": torch.randn(3, 2).bfloat16(),
        "e": torch.randint(200, (13,), dtype=torch.uint8),
        "f": torch.randn(4, 6).t(),
    }
    manifest = fill_web_bundle(tmp_path, parts(**tensors))
    shards = manifest["weights"]["shards"]
    assert [shard["bytes"] for shard in shards[:-1]] == [64] * (len(shards) - 1) and len(shards) > 5
    content = b"".join((tmp_path / shard["file"]).read_bytes() for shard in shards)
    for shard in shards:
        assert sha256((tmp_path / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]
    for name, tensor in {**tensors, "constant_0": torch.arange(3, dtype=torch.int32)}.items():
        place = manifest["weights"]["tensors"][name]
        assert place["offset"] % 16 == 0 and place["shape"] == list(tensor.shape)
        expected = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert content[place["offset"] : place["offset"] + place["bytes"]] == expected
    assert manifest["weight_bytes"] == sum(t.numel() * t.itemsize for t in tensors.values()) + 12


def test_the_manifest_lists_every_file(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    files = {str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file()}
    assert files == {*manifest["files"], "manifest.json", "README.md"}
    assert manifest["bundle_bytes"] == sum((bundle / name).stat().st_size for name in files - {"README.md"})
    for name, entry in manifest["files"].items():
        assert sha256((bundle / name).read_bytes()).hexdigest() == entry["sha256"]


def test_the_run_time_is_small(bundle: Path) -> None:
    served = ("runner.js", "program.js", "webgpu.js")  # what a page loads; wasm.js only where there is no WebGPU
    assert sum((bundle / name).stat().st_size for name in served) < 37_500
    others = [p for p in bundle.rglob("*") if p.is_file() and p.parent.name != "weights"]
    assert sum(len(gzip.compress(p.read_bytes())) for p in others) < 100_000  # with a program it may be 300 kB


def test_a_bundle_for_browsers_is_replaced_like_any_other(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    with publishing(bundle) as folder:
        fill_web_bundle(folder, parts(a=torch.zeros(2, 2)))
    assert (bundle / "manifest.json").read_bytes() != before


def test_other_commands_say_what_it_is(bundle: Path) -> None:
    with pytest.raises(Exception, match="a bundle for browsers; `compress serve"):
        load(bundle)
    for command in (["generate", "--prompt", "x"], ["eval"], ["bench"]):
        result = CliRunner().invoke(main, [command[0], str(bundle), *command[1:]])
        assert result.exit_code == 1 and "a bundle for browsers" in result.stderr, (command, result.output)


def verified(bundle: Path) -> dict[str, bool | None]:
    return {check.name: check.passed for check in verify_bundle(bundle).checks}


def test_inspect_and_verify_read_it(bundle: Path) -> None:
    content = json.loads(CliRunner().invoke(main, ["inspect", str(bundle), "--json"]).stdout)
    assert content["engines"] == ["webgpu", "wasm"] and content["entries"] == ["main", "verify"]
    assert content["weight_bytes"] == 5 * 3 * 4 + 7 * 4 + 3 * 4
    result = CliRunner().invoke(main, ["verify", str(bundle)])
    assert result.exit_code == 0 and "kernels: not checked: a bundle for browsers stores no outputs" in result.stdout
    good = {"schema": True, "files": True, "bytes": True, "signature": None, "kernels": None, "evidence": None}
    assert verified(bundle) == good


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (lambda m: m.update(weight_bytes=m["weight_bytes"] + 1), "bytes"),
        (lambda m: m["weights"]["shards"].pop(), ""),
        (lambda m: m["weights"]["shards"][0].update(sha256="0" * 64), "bytes"),
        (lambda m: m["weights"].pop("tensors"), "bytes"),
        (lambda m: m["files"].pop("runner.js"), "files"),
        (lambda m: m.pop("engines"), "schema"),
        (lambda m: m.update(schema_version=0), "schema"),
        (lambda m: m.update(schema_version=99), "schema"),
        (lambda m: m.update(kernels={}), "schema"),
    ],
)
def test_what_verify_finds_in_a_manifest(bundle: Path, change: Any, failed: str) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    found = verified(bundle)
    assert found.get(failed, False) is False and not verify_bundle(bundle).verified


def test_what_verify_finds_in_files(bundle: Path) -> None:
    shard = bundle / "weights" / "0000.bin"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    assert verified(bundle)["files"] is False
    (bundle / "notes.txt").write_text("")
    assert verified(bundle)["files"] is False


class Running:
    """A server in a thread, as a context."""

    def __init__(self, bundle: Path) -> None:
        self.server = make_server(bundle, 0)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def __enter__(self) -> Running:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exception: Any) -> None:
        self.server.shutdown()
        self.server.server_close()


def test_the_server_gives_files_of_the_bundle_alone(bundle: Path) -> None:
    with Running(bundle) as running:
        for name, kind in [
            ("runner.js", "text/javascript"),
            ("vendor/tokenizers.mjs", "text/javascript"),
            ("", "text/html"),
        ]:
            with urllib.request.urlopen(running.url + name) as response:
                assert response.headers["Content-Type"] == kind
                assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"
                assert response.headers["Cross-Origin-Embedder-Policy"] == "require-corp"
                assert response.read() == (bundle / (name or "index.html")).read_bytes()
        for name in ("weights/", "%2e%2e/%2e%2e/etc/passwd", "nothing"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(running.url + name)


def test_what_cannot_be_served_is_said(bundle: Path, tmp_path: Path, module_bundle: Path) -> None:
    with Running(bundle) as running, pytest.raises(UsageError, match=r"port .*; give another with --port"):
        make_server(bundle, running.server.server_port)
    with pytest.raises(UsageError, match="no bundle for browsers; make one with `target: webgpu`"):
        make_server(module_bundle, 0)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match=r"manifest\.json cannot be read"):
        make_server(tmp_path, 0)


def test_words_of_the_bundle_are_numbers_of_its_formats(tmp_path: Path) -> None:
    """Bytes of weights are the formats' arithmetic and nothing more."""
    codes = torch.randint(99, (4, 4, 1, 16), dtype=torch.int32)
    manifest = fill_web_bundle(tmp_path, parts(codes=codes))
    total = sum(shard["bytes"] for shard in manifest["weights"]["shards"])
    assert total == np.prod(codes.shape) * 4 + 16
