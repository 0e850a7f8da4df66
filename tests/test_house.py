"""The house: light imports, and what would break silently when files move (pyproject.toml has the floors)."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import compressor_runtime
import compressor_selfcheck
import pytest
from whole import LEFT_OUT

import compressor
from compressor.host.digests import code_digest
from compressor.host.resources import PACKAGE, resource
from compressor.registry import PASSES, TARGETS

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "_data" not in path.parts)
RUNTIME_FOLDER = Path(compressor_runtime.__file__).parent
RUNTIME = [*sorted(RUNTIME_FOLDER.rglob("*.py")), Path(compressor_selfcheck.__file__)]  # what bundles get
HEAVY = ("torch", "transformers", "datasets", "tvm")
MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_KERNEL = 12, 350, 60, 100


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else RUNTIME_FOLDER.parent))


@pytest.mark.parametrize("path", [*SOURCES, *RUNTIME], ids=relative)
def test_a_file_stays_small_and_imports_by_full_names(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    most = MOST_LINES_OF_A_KERNEL if {"kernels", "gpu"} & {*path.parts} else MOST_LINES_OF_A_FUNCTION
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < most, node.name
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"line {node.lineno}: a relative import"


def test_a_folder_stays_small_and_says_what_it_is_for() -> None:
    for folder in {path.parent for path in SOURCES} | {RUNTIME_FOLDER}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if folder != PACKAGE / "passes":  # one file a pass
            assert len(files) <= MOST_FILES, folder
        if folder != PACKAGE:
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
            assert "Invariant: " in text, folder


def test_every_source_is_part_of_the_digest_of_our_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches and locks rest on it: a file that is left out could change without their notice."""
    read: list[Path] = []

    def watch(path: Path) -> str:
        read.append(path)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr("compressor.host.digests.read_sha256", watch)
    code_digest.__wrapped__()
    assert set(SOURCES) <= set(read)
    assert set(RUNTIME) <= set(read) and len(RUNTIME) > 10


def test_every_kernel_is_part_of_the_tuner_s_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    from compressor.codegen.tuning import kernels_digest

    read: list[Path] = []
    content = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or content(path))
    kernels_digest.__wrapped__()
    wanted = [path for path in SOURCES if relative(path).startswith(("codegen/kernels/", "codegen/isa.py"))]
    assert len(wanted) > 20 and set(wanted) <= set(read)


def test_modules_that_are_named_in_strings_exist() -> None:
    """Children import them, and no tool follows a string."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            names = re.findall(r"^(?:import|from) (compressor[\w.]*)", node.value, re.MULTILINE)
            names += [node.value.partition(":")[0]] if re.fullmatch(r"compressor(\.\w+)+(:\w+)?", node.value) else []
            for name in names:
                if name not in ("compressor.exports", "compressor.targets"):  # groups of entry points
                    assert importlib.util.find_spec(name) is not None, f"{path}: {name}"


@pytest.mark.parametrize("name", LEFT_OUT)
def test_tests_that_are_left_out_exist(name: str) -> None:
    path, _, test = name.partition("::")
    text, left_out = (Path(__file__).parent / path).read_text(encoding="utf-8"), LEFT_OUT[name]
    assert re.search(rf"^def {test}\(", text, re.MULTILINE)
    if isinstance(left_out, int):
        assert left_out > 1
        return
    support = [path for path in (Path(__file__).parent / "support").glob("*.py") if path.stem != "whole"]
    names = "".join(path.read_text(encoding="utf-8") for path in support)
    recipes = {path.stem for path in resource("recipes").glob("*.yaml")}
    assert all(not case or case in recipes or f'"{case}"' in text + names for case in left_out)


def test_the_shipped_passes_and_targets_are_ours() -> None:
    """The keys of the cache tell our passes from others' by the module that they are in."""
    for registry in (PASSES, TARGETS):
        folder = PACKAGE.joinpath(*registry.package.split(".")[1:])
        names = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
        assert names and names == {name for name, place in registry.names().items() if place.startswith("compressor.")}
        for name in names:
            assert registry.owns(object.__new__(registry.find(name)))
            assert registry.name_of(object.__new__(registry.find(name))) == name


def loaded_by(code: str) -> set[str]:
    """List the heavy packages that are loaded in a fresh process after ``code``."""
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
        "from compressor.registry import PASSES; PASSES.names()",
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
