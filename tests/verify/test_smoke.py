from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from compressor_runtime import read_safetensors

from compressor.errors import VerificationError
from compressor.verify import smoke as verify_smoke
from compressor.verify.smoke import BLOCKED, smoke_test, worst_error


@pytest.fixture
def copy(module_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(module_bundle, tmp_path / "copy"))


def rewrite(bundle: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file and make its hash agree."""
    content = change((bundle / name).read_bytes())
    (bundle / name).write_bytes(content)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_a_good_bundle(module_bundle: Path) -> None:
    before = sorted(module_bundle.rglob("*"))
    result = smoke_test(module_bundle, threads=1)
    assert 0 <= result.error < 1e-5 and result.tolerance == 1e-3 and result.threads == 1
    assert result.load_s > 0 and result.first_token_ms > 0 and result.decode_ms is None
    assert 10_000_000 < result.peak_rss_bytes < 150_000_000  # torch alone would take more
    assert sorted(module_bundle.rglob("*")) == before


@pytest.mark.parametrize("name", BLOCKED)
def test_an_import_of_what_a_bundle_must_do_without_fails(copy: Path, name: str) -> None:
    rewrite(copy, "compressor_runtime/cpu.py", lambda text: text.replace(b"import os", b"import " + name.encode(), 1))
    with pytest.raises(VerificationError, match=rf"must do without .*{name}"):
        smoke_test(copy, 1)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import os; os.kill(os.getpid(), 11)", r"signal 11 \(Segmentation fault\)"),
        ("import time; time.sleep(60)", "did not end within"),
        ("sys.exit(0)", "does not run in a fresh process"),
        ("print(5); sys.exit(0)", "does not run in a fresh process"),
        ('print(\'{"errors": {}, "tolerance": 1}\'); sys.exit(0)', "does not run in a fresh process"),
        ("print('[' * 100000); sys.exit(0)", "does not run in a fresh process"),
        ("raise RuntimeError('no such kernel')", r"RuntimeError: no such kernel \(exit code 1\)"),
    ],
)
def test_a_process_that_goes_wrong(copy: Path, monkeypatch: pytest.MonkeyPatch, statement: str, message: str) -> None:
    monkeypatch.setattr(verify_smoke, "_TIMEOUT_S", 3.0 if "sleep" in statement else 300.0)
    rewrite(copy, "compressor_selfcheck.py", lambda text: f"import sys\n{statement}\n".encode())
    with pytest.raises(VerificationError, match=message):
        smoke_test(copy, 1)


def test_other_weights_compute_something_else(copy: Path) -> None:
    name = next(name for name in read_safetensors(copy / "weights.safetensors") if name.endswith("codes"))
    codes = read_safetensors(copy / "weights.safetensors")[name].tobytes()
    rewrite(copy, "weights.safetensors", lambda data: data.replace(codes, codes[::-1], 1))
    with pytest.raises(VerificationError, match=r"do not compute what the graph does: relative error .* \(output_0\)"):
        smoke_test(copy, 1)


def test_a_damaged_bundle_does_not_load(copy: Path) -> None:
    (copy / "model.so").write_bytes((copy / "model.so").read_bytes()[:-1] + b"x")
    with pytest.raises(VerificationError, match=r"model\.so: its SHA-256 is not the manifest's"):
        smoke_test(copy, 1)


def test_a_run_time_from_elsewhere_does_not_count(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    for name in [name for name in manifest["files"] if name.startswith("compressor_runtime")]:
        del manifest["files"][name]
        (copy / name).unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(VerificationError, match="no compressor_runtime of its own"):
        smoke_test(copy, 1)
    (copy / "compressor_selfcheck.py").unlink()
    with pytest.raises(VerificationError, match="a bundle without vectors"):
        smoke_test(copy, 1)


@pytest.mark.parametrize("worst", [None, float("nan"), float("inf"), 0.2])
def test_the_worst_output_decides(worst: float | None) -> None:
    assert worst_error({"output_0": 0.05, "top_0": 0.1}, 0.1) == 0.1
    with pytest.raises(VerificationError, match=r"\(output_1\)"):
        worst_error({"output_0": 0.0, "output_1": worst, "output_2": 0.1}, 0.1)
