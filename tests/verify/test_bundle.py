from __future__ import annotations

import hashlib
import json
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from compressor_runtime import read_safetensors
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from older_bundles import with_a_run_time_of_one_file
from torch import nn

from compressor.capture.capture import capture
from compressor.cli.commands import main
from compressor.errors import UsageError
from compressor.export.schema import Manifest, check_schema
from compressor.graph.model import weight_bytes
from compressor.host.tensor_files import write_safetensors
from compressor.passes.rtn import Rtn
from compressor.pipeline.context import Context
from compressor.verify import bundle as module
from compressor.verify.bundle import Check, Verification, verify_bundle

NAMES = ["schema", "files", "bytes", "signature", "kernels", "evidence"]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def copy(module_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(module_bundle, tmp_path / "copy"))


def edit(bundle: Path, change: Edit) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def rehash(bundle: Path, change: Edit = lambda manifest: None) -> None:
    """Make hashes, sizes and the total agree with the files again, and then change the manifest."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (bundle / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    total = manifest["bundle_bytes"]
    change(manifest)
    if manifest["bundle_bytes"] == total:
        listed = sum(entry["bytes"] for entry in manifest["files"].values())
        for _ in range(5):  # the number is part of what it counts
            manifest["bundle_bytes"] = listed + len(json.dumps(manifest))
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def replace_tensors(bundle: Path, name: str, change: Edit) -> None:
    arrays = {key: array.copy() for key, array in read_safetensors(bundle / name).items()}
    change(arrays)
    write_safetensors(bundle / name, {key: torch.as_tensor(array) for key, array in arrays.items()})


def find(result: Verification, name: str) -> Check:
    assert [check.name for check in result.checks] == NAMES
    assert result.verified == all(check.passed is not False for check in result.checks)
    return next(check for check in result.checks if check.name == name)


@pytest.fixture
def not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For bundles of which nothing may be executed: what would be is an error."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"executed: {arguments}")

    monkeypatch.setattr(module, "smoke_test", refuse)


def test_a_good_bundle(module_bundle: Path) -> None:
    result = verify_bundle(module_bundle, threads=1)
    assert [check.passed for check in result.checks] == [True, True, True, None, True, True]
    assert result.verified and result.smoke is not None and result.smoke.error < 1e-5
    content = json.loads(json.dumps(result.content()))
    assert (
        content["verified"] is True
        and [set(check) for check in content["checks"]] == [{"name", "passed", "detail"}] * 6
    )


# --- files


def test_every_kind_of_damage_to_every_file_is_found(copy: Path, not_executed: None) -> None:
    for name in json.loads((copy / "manifest.json").read_text())["files"]:
        content = (copy / name).read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        for damaged, message in (
            (bytes(flipped), "SHA-256"),
            (content[:-1], "bytes, the manifest says"),
            (None, "missing"),
        ):
            (copy / name).unlink()
            if damaged is not None:
                (copy / name).write_bytes(damaged)
            result = verify_bundle(copy)
            check = find(result, "files")
            assert check.passed is False and name in check.detail and message in check.detail
            assert find(result, "kernels").passed is None and find(result, "evidence").passed is None
            (copy / name).write_bytes(content)
    assert module._files(copy, check_schema(json.loads((copy / "manifest.json").read_text())))


def test_a_whole_that_is_not_that_of_its_pieces(copy: Path, not_executed: None) -> None:
    content = (copy / "model.so").read_bytes()
    pieces = [hashlib.sha256(content).hexdigest()]
    rehash(copy, lambda m: m["files"]["model.so"].update(pieces=pieces))
    assert module._files(copy, check_schema(json.loads((copy / "manifest.json").read_text())))
    rehash(copy, lambda m: m["files"]["model.so"].update(pieces=pieces, sha256="0" * 64))
    check = find(verify_bundle(copy), "files")
    assert check.passed is False and "model.so: its pieces have the SHA-256" in check.detail


def test_bundles_from_before_there_were_pieces_and_libraries(copy: Path) -> None:
    rehash(copy, lambda m: m.pop("libraries"))
    assert module._files(copy, check_schema(json.loads((copy / "manifest.json").read_text())))


def test_a_bundle_from_before_the_run_time_was_a_package(copy: Path) -> None:
    result = verify_bundle(with_a_run_time_of_one_file(copy), threads=1)
    assert [check.passed for check in result.checks] == [True, True, True, None, True, True], result.checks


def test_files_that_the_manifest_does_not_list(copy: Path, not_executed: None) -> None:
    cached = "__pycache__/compressor_runtime.cpython-311.pyc"
    for name in ("notes.txt", "lib/libc.so", "compressor_runtime/more.py", cached, ".hidden"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(b"")
        check = find(verify_bundle(copy), "files")
        assert check.passed is False and repr(name) in check.detail
        assert ("delete __pycache__" in check.detail) == ("__pycache__" in name)
        (copy / name).unlink()
    (copy / "elsewhere").symlink_to(copy.parent)
    assert "'elsewhere'" in find(verify_bundle(copy), "files").detail


def test_what_python_compiled_from_the_bundle_s_sources(copy: Path) -> None:
    sources = copy / "compressor_runtime"
    compiled = py_compile.compile(str(sources / "errors.py"))  # as an import does
    assert find(verify_bundle(copy), "files").passed
    py_compile.compile(str(sources / "check.py"), compiled)  # what Python would run in place of the source
    check = find(verify_bundle(copy), "files")
    assert check.passed is False and "not what this Python makes of the bundle's sources" in check.detail


def test_a_link_that_leads_outside(copy: Path, not_executed: None) -> None:
    shutil.move(copy / "weights.safetensors", copy.parent / "weights.safetensors")
    (copy / "weights.safetensors").symlink_to(copy.parent / "weights.safetensors")
    check = find(verify_bundle(copy), "files")
    assert check.passed is False and "leads outside" in check.detail


def test_measurements_and_signatures_stand_outside_the_manifest(copy: Path) -> None:
    for name in ("measurements.json", "report.html", "README.md"):
        (copy / name).write_text("{}")
    (copy / "manifest.json.sig").write_bytes(b"-" * 64)
    manifest = check_schema(json.loads((copy / "manifest.json").read_text()))
    assert "there are no others" in module._files(copy, manifest)


# --- the manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("weight_bytes"), "weight_bytes: field required"),
        (lambda m: m.update(weight_bytes="12"), "weight_bytes: input should be a valid integer"),
        (lambda m: m.update(weight_bytes=-1), "weight_bytes"),
        (lambda m: m.update(bundle_bytes=True), "bundle_bytes"),
        (lambda m: m.update(kind="program"), "kind"),
        (lambda m: m.update(schema_version=0), "schema_version"),
        (lambda m: m.update(schema_version=4), "schema version 4"),
        (lambda m: m["kernels"][0].update(evidence="proven"), "kernels.0.evidence: input should be 'executed'"),
        (lambda m: m["kernels"][0].pop("evidence"), "kernels.0.evidence"),
        (lambda m: m.update(kernels=[]), "kernels"),
        (lambda m: m["sites"][0].pop("bytes_after"), "sites.0.bytes_after"),
        (lambda m: m["files"]["model.so"].update(sha256="x"), "files.model.so.sha256"),
        (lambda m: m["files"]["model.so"].update(pieces=["x"]), "files.model.so.pieces.0"),
        (lambda m: m.update(libraries=[]), "libraries"),
        (lambda m: m["files"].pop("vectors.safetensors"), "vectors.safetensors not listed"),
        (lambda m: m["files"].pop("lib/libtvm_runtime.so"), "lib/libtvm_runtime.so not listed"),
        (lambda m: m.pop("parameter_types"), "parameter_types"),
        (lambda m: m.update(formats=["W4A16_G128"]), "not those of the sites"),
        (lambda m: m["sites"][0].update(format="W4A16_C"), "not those of the sites"),
        (
            lambda m: [kernel.update(format="W4A16_C") for kernel in m["kernels"] if "format" in kernel],
            "not those of the sites",
        ),
        (lambda m: m.update(entries={"main": [0], "verify": [0]}), "entries: main, verify: not those of a module"),
        (lambda m: m.update(entries={"main": [0, 99], "text": [0]}), "entries.main: names parameters that are not"),
        (lambda m: m["model"].update(eos_ids=[-1]), "model.eos_ids.0"),
        (lambda m: m.update(versions={"python": 3}), "versions.python"),
    ],
)
def test_manifests_that_are_wrong(copy: Path, not_executed: None, change: Edit, message: str) -> None:
    rehash(copy, change)
    result = verify_bundle(copy)
    check = find(result, "schema")
    assert check.passed is False and message in check.detail
    assert [other.passed for other in result.checks[1:]] == [None] * 5


def test_many_problems_are_counted(module_bundle: Path) -> None:
    with pytest.raises(Exception, match=r"and \d+ more$"):
        check_schema({"format": "compressor bundle", **dict.fromkeys(list(Manifest.model_fields)[1:9])})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "compressor bundle", "a": 1, "a": 2}'])
def test_manifests_that_are_no_manifests(copy: Path, not_executed: None, text: str) -> None:
    (copy / "manifest.json").write_text(text)
    assert find(verify_bundle(copy), "schema").passed is False


# --- bytes, with hashes that agree


def test_bytes_of_caches_are_their_format_s(copy: Path, not_executed: None) -> None:
    def claim_caches(manifest: dict[str, Any]) -> None:
        sizes = {"layers": 3, "kv_heads": 2, "head_dim": 40, "cache_format": "INT4", "cache_bytes_per_token": 276}
        manifest.update(kind="decoder")
        manifest["model"].update(sizes)

    rehash(copy, claim_caches)
    check = find(verify_bundle(copy), "bytes")  # 3 layers, keys and values, 2 heads, 20 + 2 * 2 bytes
    assert check.passed is False and "cache_bytes_per_token is 276, INT4 takes 288" in check.detail


def claim(manifest: dict[str, Any], fmt: str) -> None:
    """Another format, wherever one is named."""
    manifest["formats"] = [fmt]
    for entry in (*manifest["sites"], *(kernel for kernel in manifest["kernels"] if "format" in kernel)):
        entry["format"] = fmt


def empty(part: str, arrays: dict[str, Any]) -> None:
    name = next(name for name in arrays if name.endswith(part))
    arrays[name] = arrays[name][:, :0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(weight_bytes=m["weight_bytes"] - 64), "weight_bytes is"),
        (lambda m: m["sites"][0].update(bytes_after=m["sites"][0]["bytes_after"] - 2), "bytes_after is"),
        (lambda m: m.update(bundle_bytes=m["bundle_bytes"] // 2), "bundle_bytes is"),
        (lambda m: m.update(dense_weight_bytes=m["dense_weight_bytes"] * 2), "dense_weight_bytes is"),
        (lambda m: m.update(dense_weight_bytes=0), "dense_weight_bytes is"),
        (lambda m: claim(m, "W3A16_C"), "stored as"),
        (lambda m: claim(m, "W8A16_ASYM"), "stored as"),
        (lambda m: claim(m, "W8A16_G32"), "stored as"),
        (lambda m: claim(m, "best"), "format 'best' is unknown"),
        (lambda m: m["sites"][0].update(site="elsewhere"), "elsewhere: stored as {}"),
        (lambda m: m["parameters"].append(m["parameters"][0]), "listed twice"),
        (lambda m: m["parameters"].pop(), "`parameters` differ"),
    ],
)
def test_figures_that_are_wrong(copy: Path, not_executed: None, change: Edit, message: str) -> None:
    rehash(copy, change)
    result = verify_bundle(copy)
    check = find(result, "bytes")
    assert check.passed is False and message in check.detail
    assert find(result, "schema").passed and find(result, "files").passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.update(extra=np.zeros(16, np.float32)), "`parameters` differ: extra"),
        (lambda arrays: empty("scales", arrays), "stored as"),
        (
            lambda arrays: arrays.update({n: a.view(np.int16) for n, a in arrays.items() if n.endswith("scales")}),
            "stored as",
        ),
    ],
)
def test_weights_that_are_not_as_their_format_says(copy: Path, not_executed: None, change: Edit, message: str) -> None:
    replace_tensors(copy, "weights.safetensors", change)
    size_bytes = sum(array.nbytes for array in read_safetensors(copy / "weights.safetensors").values())
    rehash(copy, lambda manifest: manifest.update(weight_bytes=size_bytes))
    check = find(verify_bundle(copy), "bytes")
    assert check.passed is False and message in check.detail


# --- kernels and evidence


def test_other_vectors_refute_the_kernels_and_their_evidence(copy: Path) -> None:
    replace_tensors(copy, "vectors.safetensors", lambda arrays: arrays["output_0"].__imul__(1.01))
    rehash(copy)
    result = verify_bundle(copy, threads=1)
    assert [check.name for check in result.checks if check.passed is False] == ["kernels", "evidence"]
    assert "relative error 0.0099" in find(result, "kernels").detail
    assert "refuted" in find(result, "evidence").detail and result.smoke is None


@pytest.mark.parametrize("evidence", ["compiled", "emulated", "modelled"])
def test_other_evidence_is_stated_and_then_executed_here(copy: Path, evidence: str) -> None:
    rehash(copy, lambda manifest: manifest["kernels"][0].update(evidence=evidence))
    check = find(verify_bundle(copy, threads=1), "evidence")
    assert check.passed and f"1 {evidence}" in check.detail and "executed here as well" in check.detail


def test_kernels_for_another_cpu_are_not_executed_here(copy: Path, not_executed: None) -> None:
    rehash(copy, lambda manifest: manifest["cpu_features"].append("avx999"))
    result = verify_bundle(copy)
    assert result.verified and find(result, "kernels").passed is None and find(result, "evidence").passed is None
    assert "not re-executed here" in find(result, "kernels").detail and "avx999" in find(result, "kernels").detail
    assert "not re-executed here" in find(result, "evidence").detail


def test_a_bundle_of_schema_1_has_no_vectors(copy: Path, not_executed: None) -> None:
    def to_schema_1(manifest: dict[str, Any]) -> None:
        manifest["schema_version"] = 1
        for name in ("vectors.safetensors", "compressor_selfcheck.py"):
            (copy / name).unlink()
            del manifest["files"][name]

    rehash(copy, to_schema_1)
    result = verify_bundle(copy)
    assert [check.passed for check in result.checks] == [True, True, True, None, None, None]
    assert "no vectors" in find(result, "kernels").detail


# --- the command, and signatures


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    key, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="compress")


def test_the_commands_sign_and_verify(copy: Path, keys: tuple[Path, Path]) -> None:
    assert find(verify_bundle(copy, threads=1), "signature").detail == "none"
    signed = invoke("sign", copy, "--key", keys[0], "--json")
    assert json.loads(signed.stdout) == {"signature": str(copy / "manifest.json.sig")}
    shown = invoke("verify", copy, "--threads", "1")
    assert shown.exit_code == 0 and [line.split(":")[0] for line in shown.stdout.splitlines()] == NAMES
    assert "signature: not checked: present" in shown.stdout and "kernels: passed: " in shown.stdout
    checked = invoke("verify", copy, "--public-key", keys[1], "--threads", "1", "--json")
    assert checked.exit_code == 0
    content = json.loads(checked.stdout)
    assert content["verified"] and [check["passed"] for check in content["checks"]] == [True] * 6


def test_a_signature_that_does_not_hold_executes_nothing(
    copy: Path, keys: tuple[Path, Path], not_executed: None
) -> None:
    unsigned = invoke("verify", copy, "--public-key", keys[1], "--json")
    assert unsigned.exit_code == 4 and unsigned.stderr == f"error: {copy}: not what it should be: signature failed\n"
    assert json.loads(unsigned.stdout)["verified"] is False
    invoke("sign", copy, "--key", keys[0])
    rehash(copy, lambda manifest: manifest.update(recipe={"seed": 1}))
    result = invoke("verify", copy, "--public-key", keys[1])
    assert result.exit_code == 4 and "signature: FAILED: " in result.stdout
    assert "kernels: not checked: nothing of a bundle is executed when signature failed" in result.stdout


def test_a_key_that_cannot_be_used_is_a_usage_error(copy: Path, not_executed: None) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        verify_bundle(copy, public_key=copy / "no.pem")
    assert invoke("verify", copy, "--public-key", copy / "no.pem").exit_code == 2


def test_a_bundle_with_outliers(tmp_path: Path, write_module: Callable[..., Path]) -> None:
    """Their columns are int16, as long as there are fewer than 32,768 inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 7)).eval().requires_grad_(False)
    graph, context = capture(module, (torch.randn(3, 64),)), Context()
    dense_weight_bytes = weight_bytes(graph)
    graph = Rtn("W4A16_G32_S5", targets="Linear").run(graph, context)
    assert {value.dtype for name, value in graph.named_parameters() if "outlier_columns" in name} == {torch.int16}
    result = verify_bundle(write_module(graph, context, dense_weight_bytes, tmp_path))
    assert result.verified and find(result, "bytes").passed
