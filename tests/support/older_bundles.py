"""Bundles laid out as earlier versions wrote them."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from pathlib import Path

_MODULES = (
    *("errors", "arguments", "manifest", "cpu", "check", "vm", "tensors"),
    *(
        "device/driver",
        "device/host",
        "device/gpu",
        "device/recorded",
        "device/choice",
        "device/caches",
        "speculation/parts",
        "depth/stages",
        "depth/falling",
        "depth/prompts",
        "speculation/hidden",
        "batching/sequences",
        "session",
        "generation",
        "speculation/tree",
        "speculation/acceptance",
        "speculation/cost",
        "speculation/pace",
        "speculation/counts",
        "speculation/text",
        "speculation/engine",
        "speculation/chain",
        "speculation/kinds/candidates",
        "speculation/kinds/kind",
        "speculation/kinds/lookup",
        "speculation/kinds/recycling",
        "speculation/kinds/heads",
        "speculation/kinds/layers",
        "speculation/kinds/planes",
        "speculation/kinds/skips",
        "speculation/kinds/sparse",
        "speculation/kinds/registry",
        "speculation/drafts",
        "depth/early",
        "depth/tokens",
        "speculation/measure",
        "source/wave_file",
        "source/features",
        "source/encoding",
        "source/frames",
        "source/pairs",
        "bundle",
        "command",
    ),
)


_LATER = ("batching", "remote", "server")
"""Packages that no bundle of those days had: it served neither requests nor a device."""


def with_a_run_time_of_one_file(bundle: Path) -> Path:
    """Change a bundle to what it was before its run-time became a package, with hashes and the total that agree."""
    package, file = bundle / "compressor_runtime", bundle / "compressor_runtime.py"
    found = {path.relative_to(package).with_suffix("").as_posix() for path in package.rglob("*.py")}
    assert {name for name in found if name in _MODULES or name.partition("/")[0] not in _LATER} == {
        *_MODULES,
        "__init__",
        "__main__",
        "source/__init__",
        "device/__init__",
        "depth/__init__",
        "speculation/__init__",
        "speculation/kinds/__init__",
    }
    file.write_text(_joined(package), encoding="utf-8")
    shutil.rmtree(package)
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    files = {name: entry for name, entry in manifest["files"].items() if not name.startswith("compressor_runtime/")}
    content = file.read_bytes()
    files[file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"] = files
    for _ in range(5):  # the number is part of what it counts
        manifest["bundle_bytes"] = sum(entry["bytes"] for entry in files.values()) + len(json.dumps(manifest))
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return bundle


def _joined(package: Path) -> str:
    """Return the package's modules as one, without the imports of one another."""
    body: list[ast.stmt] = []
    for name in _MODULES:
        for node in ast.parse((package / f"{name}.py").read_text(encoding="utf-8")).body:
            inner = isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("compressor_", "__future__"))
            body += [] if inner else [node]
    return "from __future__ import annotations\n" + ast.unparse(ast.Module(body, type_ignores=[])) + "\n"
