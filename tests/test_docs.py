"""What README and docs say that a machine can check: links, keys, options, recipes, commands, files and functions."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from missing import skip_or_fail

from compressor.cli.commands import main
from compressor.formats.format import Format
from compressor.recipe.gates import METRICS
from compressor.recipe.recipe import EvaluationSpec, Recipe, TextSpec, load_recipe, load_text_spec
from compressor.recipe.sources import SOURCE_KEYS
from compressor.registry import PASSES, TARGETS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MENTIONS = re.compile(r"`([\w/]+\.py):([\w.]+)`")
LAST_BEFORE_THE_ROOMS = 40  # decisions are records: their text stays
CODE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in CODE.findall(page.read_text(encoding="utf-8")) if language in languages]


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading is ``heading``, without the two heading lines."""
    body = text(page).split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()[2:]]


def named(cell: str) -> list[str]:
    """Return the text in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def documented(page: str, heading: str) -> list[str]:
    return [name for row in rows(page, heading) for name in named(row[0])]


def by_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_no_page_holds_marks_of_a_merge() -> None:
    marks = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
    assert not [by_page(page) for page in PAGES if marks.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{by_page(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{by_page(page)}: {target}"


@pytest.mark.parametrize(
    ("heading", "keys"),
    [
        ("key", {*Recipe.yaml_keys(), "extends"}),
        ("key of `calibration`", set(TextSpec.yaml_keys()) - set(EvaluationSpec.yaml_keys())),
        ("key of `evaluation`", set(EvaluationSpec.yaml_keys()) - set(TextSpec.yaml_keys())),
        ("metric", set(METRICS)),
    ],
)
def test_every_key_is_documented_and_every_documented_key_exists(heading: str, keys: set[str]) -> None:
    assert sorted(documented("docs/recipes.md", heading)) == sorted(keys)


def test_the_keys_of_a_data_source_are_documented() -> None:
    data = text("docs/recipes.md").split("\n## Data\n", 1)[1]
    table = data.split("\n| key |", 1)[1].split("\n\n", 1)[0]
    found = [named(line.split("|")[1])[0] for line in table.splitlines()[2:]]
    assert sorted(found) == sorted(set(TextSpec.yaml_keys()) & set(EvaluationSpec.yaml_keys()))


def test_defaults_of_recipe_keys_are_the_documented_ones() -> None:
    for heading, model in (
        ("key", Recipe),
        ("key of `calibration`", TextSpec),
        ("key of `evaluation`", EvaluationSpec),
    ):
        for name, default, *_ in rows("docs/recipes.md", heading):
            key = named(name)[0]
            if key == "extends" or not default.startswith("`"):
                continue
            field = model.model_fields[model.yaml_keys()[key]]
            value = getattr(field.default, "name", field.default)
            assert value == yaml.safe_load(named(default)[0]) or str(value) in named(default), f"{heading} {key}"


TABLES = re.findall(r"^\| option of `(\w+)` \|", text("docs/recipes.md"), re.MULTILINE)


def described_options(cls: type[Any]) -> dict[str, str]:
    """Read each option's meaning from the section ``Attributes:`` of the nearest dataclass that describes it."""
    found: dict[str, str] = {}
    for kind in filter(dataclasses.is_dataclass, cls.__mro__):
        section = inspect.cleandoc(vars(kind)["__doc__"] or "").partition("Attributes:\n")[2].split("\n\n")[0]
        entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
        found = {name: " ".join(meaning.split()) for name, meaning in entries} | found
    return {field.name: found[field.name] for field in own_first(cls) if field.name in found}


def own_first(cls: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return a dataclass's fields: those that it declares itself in front."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.name not in vars(cls).get("__annotations__", {}))


def as_written(value: object) -> str:
    """Return an option's value as a recipe would write it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_written, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def default_cell(field: dataclasses.Field[Any]) -> str:
    """Return the table's cell for an option's default."""
    if field.default is dataclasses.MISSING:
        return "required"
    return "none" if field.default in (None, ()) else f"`{as_written(field.default)}`"


def option_table(name: str) -> str:
    """Generate the table of a pass's or a target's options from its dataclass."""
    cls = TARGETS.find(name) if name in TARGETS.names() else PASSES.find(name)
    meanings, lines = described_options(cls), [f"| option of `{name}` | default | meaning |", "|---|---|---|"]
    for field in own_first(cls):
        meaning = re.sub(r":\w+:`([^`]+)`", r"`\1`", meanings[field.name]).replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{field.name}` | {default_cell(field)} | {meaning.removesuffix('.')} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_options_follow_the_dataclasses(name: str, pytestconfig: pytest.Config) -> None:
    page = text("docs/recipes.md")
    table = next(re.finditer(rf"^\| option of `{name}` \|.*\n(?:\|.*\n)*", page, re.MULTILINE)).group()
    if pytestconfig.getoption("--update-docs"):
        (ROOT / "docs" / "recipes.md").write_text(page.replace(table, option_table(name)), encoding="utf-8")
    else:
        assert table == option_table(name), "stale: run pytest tests/test_docs.py --update-docs"


@pytest.mark.parametrize("name", [*PASSES.names(), *TARGETS.names()])
def test_every_option_is_described_where_it_is_declared(name: str) -> None:
    """``compress show`` prints this description, and the tables are made of it."""
    cls = TARGETS.find(name) if name in TARGETS.names() else PASSES.find(name)
    assert described_options(cls).keys() == {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "recipes.md"], ids=by_page)
def test_recipes_in_the_pages_load(page: Path, tmp_path: Path) -> None:
    found = blocks(page, "yaml")
    assert found
    for number, body in enumerate(found):
        file = tmp_path / f"block_{number}.yaml"
        file.write_text(body, encoding="utf-8")
        if set(SOURCE_KEYS) & set(yaml.safe_load(body)):  # a data set, for either purpose
            assert load_text_spec(str(file)).samples
            assert load_text_spec(str(file), evaluation=True).tokens
        else:
            assert load_recipe(file).passes


def test_overrides_in_the_pages_apply() -> None:
    lines = [line for body in blocks(ROOT / "docs" / "recipes.md", "sh") for line in body.splitlines()]
    assert lines
    for line in lines:
        words = shlex.split(line)
        load_recipe(words[2], [words[i + 1] for i, word in enumerate(words) if word == "--set"])


def test_the_table_of_commands_is_complete() -> None:
    assert isinstance(main, click.Group)
    found = [command.split()[1] for command in documented("README.md", "command")]
    assert sorted(found) == sorted(main.commands)


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_commands_in_the_pages_exist_with_their_options(page: Path) -> None:
    assert isinstance(main, click.Group)
    lines = [line for body in blocks(page, "sh") for line in body.splitlines()]
    lines += [span for span in named(CODE.sub("", page.read_text(encoding="utf-8"))) if "\n" not in span]
    for line in lines:
        for part in line.split("&&"):
            words = part.split("#")[0].split()
            if words[:1] != ["compress"] or len(words) == 1 or words[1].startswith("-"):
                continue
            assert words[1] in main.commands, f"{by_page(page)}: {line}"
            command, rest = main.commands[words[1]], words[2:]
            if isinstance(command, click.Group) and rest:
                assert rest[0] in command.commands, f"{by_page(page)}: {line}"
                command, rest = command.commands[rest[0]], rest[1:]
            known = {option for parameter in command.params for option in parameter.opts}
            passes_on = command.context_settings.get("ignore_unknown_options", False)  # to a program of others
            for word in () if passes_on else rest:
                if word.startswith("-") and word != "--help":
                    assert word in known, f"{by_page(page)}: {line}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_python_in_the_pages_parses_and_imports_what_exists(page: Path) -> None:
    for body in blocks(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "compressor":
                try:
                    module = importlib.import_module(node.module or "")
                except ModuleNotFoundError as error:
                    if (error.name or "").startswith("compressor"):
                        raise
                    skip_or_fail(error)  # what an extra brings
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{by_page(page)}: {node.module}.{alias.name}"


def functions(path: Path) -> set[str]:
    """Names of functions, classes and ``Class.method`` that a file defines at its top."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_functions_that_are_named_with_their_file_exist(page: Path) -> None:
    if page.parent.name == "decisions" and int(page.name[:4]) <= LAST_BEFORE_THE_ROOMS:
        assert "Names of files are those of its time" in page.read_text(encoding="utf-8") or not MENTIONS.search(
            page.read_text(encoding="utf-8")
        )
        return
    for path, name in MENTIONS.findall(page.read_text(encoding="utf-8")):
        files = [place for place in (ROOT / path, ROOT / "compressor" / path) if place.is_file()]
        assert len(files) == 1, f"{by_page(page)}: {path}: name a file from the root or from compressor/"
        assert name in functions(files[0]), f"{by_page(page)}: {path}:{name}"


def described_folder(folder: Path) -> tuple[str, str]:
    """Read a folder's sentence and its invariant from the docstring of its ``__init__.py``."""
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    parts = (doc.split("\n\n")[0], doc.partition("Invariant: ")[2].split("\n\n")[0])
    sentence, invariant = (" ".join(part.split()).replace("``", "`") for part in parts)
    assert sentence.count(". ") == 0, f"{folder}: more than one sentence"
    return sentence, invariant


def test_the_map_has_every_folder_with_its_invariant(pytestconfig: pytest.Config) -> None:
    package, page = ROOT / "compressor", text("docs/architecture.md")
    names = {
        str(path.parent.relative_to(package)) for path in package.rglob("__init__.py") if "_data" not in path.parts
    }
    entries = re.findall(r"^\*\*`([\w/]+)/`\*\* (.+?)\n\n", page, re.MULTILINE | re.DOTALL)
    assert {name for name in names - {"."} if "/" not in name} <= {name for name, _ in entries} <= names
    for name, entry in entries:
        sentence, invariant = described_folder(package / name)
        about = re.fullmatch(r".*?\.(?= )(.*) \*Invariant: [^*]*\*", " ".join(entry.split()))
        assert about is not None, f"{name}: sentence, what else there is to say, *Invariant: ...*"
        wanted = f"**`{name}/`** {sentence}{about.group(1)} *Invariant: {invariant}*"
        if wanted == " ".join(f"**`{name}/`** {entry}".split()):
            continue
        assert pytestconfig.getoption("--update-docs"), f"{name} is stale: run pytest tests/test_docs.py --update-docs"
        lines = textwrap.fill(wanted, 120, break_long_words=False, break_on_hyphens=False)
        page = page.replace(f"**`{name}/`** {entry}", lines)
        (ROOT / "docs" / "architecture.md").write_text(page, encoding="utf-8")


def test_the_phases_are_those_of_the_code() -> None:
    source = (ROOT / "compressor" / "codegen" / "lowering" / "phases.py").read_text(encoding="utf-8")
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == "phases")
    pairs = [node for node in ast.walk(body) if isinstance(node, ast.Tuple) and isinstance(node.elts[0], ast.Constant)]
    assert documented("docs/architecture.md", "phase") == [pair.elts[0].value for pair in pairs]  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=by_page)
def test_formats_in_the_pages_exist(page: Path) -> None:
    for name in re.findall(r"\bW\dA\d+(?:_ASYM)?(?:_(?:G\d+|[CT]))?\b", page.read_text(encoding="utf-8")):
        assert Format.parse(name).name.startswith(name)


def test_the_readme_stays_short() -> None:
    assert len(text("README.md").splitlines()) < 200
