"""The layers of the package: who may import whom, and what a light import must not pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import compressor

PACKAGE = Path(compressor.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)

# A module may import its own layer and those before it.  A name stands for the module and whatever begins with it
# and an underscore (`capture` for `capture_weights` too), a folder for all in it.
LAYERS = (
    ("errors", "resources", "cache", "fingerprint", "timing", "threads", "cpu"),
    (
        "elements",
        "activations",
        "formats",
        "codebooks",
        "grids",
        "packing",
        "outliers",
        "grid_search",
        "rounding",
        "precision",
        "compensation",
        "ops",
        "steady",
        "hadamard",
    ),
    (
        "recipe",
        "text_spec",
        "gates",
        "graph",
        "capture",
        "pipeline",
        "calibration",
        "samples",
        "sites",
        "results",
        "independence",
        "blocks",
        "streaming",
        "gradients",
        "tensor_files",
        "absorbers",
        "scaling",
        "residual",
        "images",
        "input_scales",
        "search",
    ),
    ("passes",),
    ("codegen",),
    ("export", "runtime", "signing", "webgpu", "wasm", "web_session"),
    ("evaluate", "embeddings", "verify", "bench", "run", "child", "plan", "machine", "lock", "report", "comparison"),
    ("cli", "inspection", "terminal", "serve"),
)
# A recipe's passes are found by name, and the pipeline is the registry of passes: both import them while running.
HEAVY = ("torch", "transformers", "datasets", "tvm")


def layer(module: str) -> int | None:
    for number, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}_") for name in names):
            return number
    return None


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module, whether it happens when the module itself is imported)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            deferred.update(ast.walk(node))
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            deferred.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, node not in deferred
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, str(node.module), node not in deferred
            if node.module == "compressor":
                for alias in node.names:
                    yield node.lineno, f"compressor.{alias.name}", node not in deferred


def first_part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_from_its_own_layer_or_lower(path: Path) -> None:
    part = first_part(path)
    if part == "__init__":
        assert not [name for _, name, at_import in imports(path) if at_import and name.startswith("compressor.")]
        return
    own = layer(part)
    assert own is not None, f"{part}: put it into LAYERS"
    for line, name, at_import in imports(path):
        if not at_import or not name.startswith("compressor."):
            continue
        imported = layer(name.split(".")[1])
        if imported is not None:
            assert imported <= own, f"{path}:{line}: {part} imports {name}, from a layer above"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_tvm_is_imported_only_by_codegen(path: Path) -> None:
    if first_part(path) == "codegen":
        return
    found = [(line, name) for line, name, _ in imports(path) if name.split(".")[0] == "tvm"]
    assert not found, f"{path}: {found}"
    if first_part(path) != "runtime":
        assert not [(line, name) for line, name, _ in imports(path) if name.split(".")[0] == "tvm_ffi"]


def loaded_by(code: str) -> set[str]:
    """The heavy packages that are loaded in a fresh process after ``code``."""
    probe = f"{code}\nimport sys; print('loaded:', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize(
    "code",
    [
        "import compressor",
        "from compressor import Format",
        "import compressor.recipe.recipe",
        "from compressor.pipeline.pipeline import available_passes; PASSES.names()",
        "from click.testing import CliRunner; from compressor.cli.commands import main\n"
        "done = CliRunner().invoke(main, ['--help']); assert done.exit_code == 0, done.output",
    ],
    ids=["package", "Format", "recipe", "list passes", "compress --help"],
)
def test_light_things_import_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


@pytest.mark.parametrize("name", compressor.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(compressor, name).__name__ == name
    assert name in dir(compressor)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="it offers Bundle"):
        _ = compressor.Compress  # type: ignore[attr-defined]
