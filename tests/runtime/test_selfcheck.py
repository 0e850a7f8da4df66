"""The bundle's check of itself against its stored vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compressor_selfcheck
import numpy as np
import pytest
from tiny_bundle import VOCAB, TinyLanguageModel, edit_manifest, greedy, python

from compressor.runtime import Bundle, BundleError, load


def test_a_bundle_checks_itself(bundle_folder: Path) -> None:
    code = "import runpy\nsys.path[0] = sys.argv[1]\n"
    code += "runpy.run_path(sys.argv[1] + '/compressor_selfcheck.py', run_name='__main__')"
    done = python(code, str(bundle_folder), "--threads", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] and found["errors"]["output_0"] < 1e-6 and found["errors"]["top_0"] == 0
    assert found["tolerance"] == 1e-3 and found["threads"] == 1
    assert found["runtime"] == "compressor_runtime/__init__.py"
    assert min(found[name] for name in ("load_s", "first_token_ms", "decode_ms")) > 0
    assert found["peak_rss_bytes"] > 10_000_000
    assert not list(bundle_folder.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("name", "position", "value", "wrong"),
    [
        ("output_0", (17 * 100 + 99), 9.0, "output_0"),  # the second decode step of the first sequence
        ("output_0", 0, float("nan"), "output_0"),
        ("top_0", 35, 5, "top_0"),
        ("ids", 3, 7, "output_0"),
    ],
)
def test_outputs_that_differ_anywhere_are_found(
    bundle: Bundle, monkeypatch: Any, name: str, position: int, value: float, wrong: str
) -> None:
    changed = dict(compressor_selfcheck.read_safetensors(bundle.path / "vectors.safetensors"))
    changed[name] = changed[name].copy()
    assert changed[name].flat[position] != value
    changed[name].flat[position] = value
    monkeypatch.setattr(compressor_selfcheck, "read_safetensors", lambda file: changed)
    errors, tolerance = compressor_selfcheck.compare(bundle)
    assert not errors[wrong] <= tolerance


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.pop("ids"),
        lambda v: v.pop("tolerance"),
        lambda v: v.update(tolerance=np.array([np.inf])),
        lambda v: v.update(tolerance=np.array([np.nan])),
        lambda v: v.update(prompt=np.array([0])),
        lambda v: v.update(ids=v["ids"] + VOCAB),
        lambda v: v.update(columns_0=v["columns_0"] + VOCAB),
        lambda v: v.update(rows_0=v["rows_0"].astype(np.float32)),
        lambda v: v.update(output_0=v["output_0"][:, :5]),
        lambda v: v.update(output_1=v["output_0"]),
    ],
    ids=range(10),
)
def test_vectors_that_do_not_suit_the_model(bundle: Bundle, monkeypatch: Any, change: Any) -> None:
    changed = dict(compressor_selfcheck.read_safetensors(bundle.path / "vectors.safetensors"))
    change(changed)
    monkeypatch.setattr(compressor_selfcheck, "read_safetensors", lambda file: changed)
    with pytest.raises(BundleError, match=r"does not suit this model|token ids from"):
        compressor_selfcheck.compare(bundle)


def test_bundles_of_schema_1_load_and_have_nothing_to_compare_with(
    copy: Path, model: TinyLanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    def to_schema_1(manifest: dict[str, Any]) -> None:
        manifest.update(schema_version=1)
        del manifest["parameter_types"]
        for name in ("vectors.safetensors", "compressor_selfcheck.py"):
            (copy / name).unlink()
            del manifest["files"][name]

    edit_manifest(copy, to_schema_1)
    assert list(load(copy).generate_ids([0, 9], max_tokens=5)) == greedy(model, [0, 9], 5)
    assert compressor_selfcheck.main([str(copy)]) == 4
    assert "has no vectors.safetensors" in capsys.readouterr().err
