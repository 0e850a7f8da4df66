from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from compressor.errors import RecipeError
from compressor.host.resources import resource
from compressor.pipeline.pipeline import Pass
from compressor.recipe.gates import METRICS, Gate
from compressor.recipe.recipe import EvaluationSpec, Recipe, TargetSpec, TextSpec, load_recipe, load_text_spec
from compressor.recipe.sources import shipped_names
from compressor.registry import Registry

AS_IT_STANDS = """\
model: path/or/hub-id
calibration: {text: stories.txt, samples: 64, sequence_length: 256, seed: 0}   # or the name of a set in calibration/
evaluation: {text: other.txt, tokens: 16384}     # left out: the part of the calibration data that was not sampled
passes:
  - gptq: {scheme: W4A16_G128, targets: Linear, ignore: [lm_head]}
target: x86
gates: {perplexity_increase: "<= 3%"}
"""


@dataclass(frozen=True)
class Round(Pass):
    """A pass with every kind of option."""

    scheme: str
    targets: str | Sequence[str] = "Linear"
    ignore: tuple[str, ...] = ()
    group_size: int = 0
    dampening_frac: float = 0.01
    actorder: bool = True
    order: Literal["up", "down"] = "up"

    def __post_init__(self) -> None:
        if self.group_size < 0:
            raise ValueError(f"group_size {self.group_size} is negative")

    def run(self, graph: Any, ctx: Any) -> Any:
        return graph


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry hold one pass, which costs no import."""
    places = {"round": f"{Round.__module__}:{Round.__qualname__}", "rtn": "nowhere"}
    names, find = Registry.names, Registry.find
    monkeypatch.setattr(Registry, "names", lambda self: places if self.kind == "pass" else names(self))
    monkeypatch.setattr(Registry, "find", lambda self, name: Round if self.kind == "pass" else find(self, name))


MINIMAL = "passes:\n  - round: {scheme: W4A16_G128}\n"


def load(folder: Path, text: str, *overrides: str, **options: str) -> Recipe:
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides, **options)


def error(folder: Path, text: str, *overrides: str) -> str:
    """Return the message, with the folder's name left out."""
    with pytest.raises(RecipeError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_the_recipe_of_the_readme(tmp_path: Path) -> None:
    recipe = load(tmp_path, AS_IT_STANDS)
    assert isinstance(recipe.calibration, TextSpec)
    assert (recipe.calibration.samples, recipe.calibration.sequence_length, recipe.calibration.seed) == (64, 256, 0)
    assert recipe.evaluation.files == ("other.txt",)
    assert (recipe.evaluation.tokens, recipe.evaluation.window, recipe.evaluation.stride) == (16384, 256, 128)
    assert [type(step).__name__ for step in recipe.passes] == ["Gptq"]
    assert (recipe.target, recipe.tune, recipe.seed) == (TargetSpec("x86"), "quick", 0)
    assert recipe.gates == (Gate("perplexity_increase", "<=", 3.0, "%"),)

    with pytest.raises(RecipeError, match=r"r\.yaml:1: model: 'path/or/hub-id' is neither a folder"):
        recipe.check_files()
    (tmp_path / "path" / "or" / "hub-id").mkdir(parents=True)
    (tmp_path / "stories.txt").touch()
    with pytest.raises(RecipeError, match=r"r\.yaml:3: evaluation\.text: 'other\.txt' is missing; looked at .* and "):
        recipe.check_files()
    (tmp_path / "other.txt").touch()
    recipe.check_files()
    assert recipe.model_source() == tmp_path / "path" / "or" / "hub-id"
    assert recipe.calibration.find_files() == (tmp_path / "stories.txt",)


@pytest.mark.usefixtures("rounding")
def test_a_model_that_an_installed_package_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "site" / "brings_model" / "model"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise SystemExit('the package ran')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert load(tmp_path, f"model: package:brings_model/model\n{MINIMAL}").model_source() == inner
    for name, message in (
        (
            "package:brings_no_model/model",
            r"r\.yaml:1: model: .* no Python package 'brings_no_model' is installed; ",
        ),
        ("package:brings_model/other", r"r\.yaml:1: model: .* has no folder 'other'; looked in .*brings_model"),
        ("package:__main__/model", r"no Python package '__main__' is installed"),
        ("package:../model", r"names no Python package; write package:NAME/FOLDER"),
    ):
        with pytest.raises(RecipeError, match=message):
            load(tmp_path, f"model: {name}\n{MINIMAL}").model_source()


@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_shipped_recipes_load_and_are_all_there(name: str, require_model: Callable[[Recipe], Path]) -> None:
    recipe = load_recipe(name)
    if recipe.model is None:
        assert "--model" in (resource("recipes") / f"{name}.yaml").read_text().partition("\n")[0]
    else:
        assert require_model(recipe) == resource("models") / "reference" or recipe.model.startswith("package:")
        recipe.check_files()
    assert Recipe.from_dict(recipe.resolved()).resolved() == recipe.resolved()


@pytest.mark.parametrize("name", shipped_names("calibration"))
def test_shipped_data_sets_load(name: str) -> None:
    spec = load_text_spec(name, evaluation=True)
    assert (spec.name, bool(spec.description)) == (name, True)
    assert all(path.parent == resource("calibration") for path in spec.find_files())


LOCATED = [
    ("modle: x\n" + MINIMAL, "r.yaml:1: modle: unknown key; nearest: model; there are: calibration, "),
    ("passes:\n- rund: {}\n", "r.yaml:2: passes.0: no pass is called 'rund'; nearest: round; there are: round, rtn"),
    (
        "passes:\n- round:\n    scheme: W4A16_G128\n    group_sise: 3\n",
        "r.yaml:4: passes.0.round.group_sise: round has no such option; nearest: group_size; there are: actorder, ",
    ),
    ("passes: [round]\n", "r.yaml:1: passes.0.round: scheme: missing; round needs it"),
    ("\npasses: [{round: {scheme: W4A16_G12x}}]\n", "r.yaml:2: passes.0.round.scheme: format 'W4A16_G12x' is unknown"),
    ("passes:\n- round: {scheme: W4A16,\n    group_size: yes}", "r.yaml:3: passes.0.round.group_size: 'yes' does not"),
    ("passes:\n- round: {scheme: W4A16, group_size: true}", "r.yaml:2: passes.0.round.group_size: True does not fit"),
    ("passes:\n- round: {scheme: W4A16, group_size: -1}", "r.yaml:2: passes.0.round: group_size -1 is negative"),
    ("passes:\n- round: {scheme: W4A16, order: left}", "r.yaml:2: passes.0.round.order: 'left' does not fit; Input"),
    ("passes:\n- round: {scheme: W4A16, ignore: [1]}", "r.yaml:2: passes.0.round.ignore: [1] does not fit"),
    ("passes:\n- round: 3\n", "r.yaml:2: passes.0.round: expected a mapping of options; found 3"),
    ("passes:\n- {a: 1, b: 2}\n", "r.yaml:2: passes.0: expected one `name: {options}`"),
    ("passes: round\n", "r.yaml:1: passes: expected a list"),
    ("seed: 1\n", "r.yaml:1: passes: missing"),
    ("seed: 1.5\n" + MINIMAL, "r.yaml:1: seed: 1.5 does not fit"),
    ("seed: true\n" + MINIMAL, "r.yaml:1: seed: True does not fit"),
    ("tune: fast\n" + MINIMAL, "r.yaml:1: tune: 'fast' does not fit; Input should be 'off', 'quick' or 'full'"),
    ("speculate: lookups\n" + MINIMAL, "r.yaml:1: speculate: unknown kind of drafts 'lookups'; nearest: lookup; there"),
    ("target: x68\n" + MINIMAL, "r.yaml:1: target: no target is called 'x68'; nearest: x86"),
    ("target: {x86: {isa: [avx2]}}\n" + MINIMAL, "r.yaml:1: target.x86.isa: ['avx2'] does not fit"),
    ("target: {x86: avx2}\n" + MINIMAL, "r.yaml:1: target.x86: expected a mapping of options; found 'avx2'"),
    ("target: [x86]\n" + MINIMAL, "r.yaml:1: target: expected a name or `name: {options}`; found ['x86']"),
    (
        "target:\n  x86:\n    iso: avx2\n" + MINIMAL,
        "r.yaml:3: target.x86.iso: x86 has no such option; nearest: isa; there are: isa",
    ),
    ("calibration: {texd: a}\n" + MINIMAL, "r.yaml:1: calibration.texd: unknown key; nearest: text"),
    ("calibration: {text: a, hub: b}\n" + MINIMAL, "r.yaml:1: calibration: give exactly one of text, json, parquet"),
    ("calibration: {samples: 3}\n" + MINIMAL, "r.yaml:1: calibration: give exactly one of text, json, parquet, hub"),
    ("calibration: {text: []}\n" + MINIMAL, "r.yaml:1: calibration.text: [] does not fit"),
    ("calibration: {text: a, split: b}\n" + MINIMAL, "r.yaml:1: calibration: `split` has no meaning without hub"),
    ("calibration: {text: a,\n  samples: 0}\n" + MINIMAL, "r.yaml:2: calibration.samples: 0 does not fit"),
    (
        "calibration: python_dogs\n" + MINIMAL,
        "r.yaml:1: calibration: no data set 'python_dogs' is shipped; nearest: pyt",
    ),
    ("calibration: sets/a.yaml\n" + MINIMAL, "r.yaml:1: calibration: no file at 'sets/a.yaml'"),
    ("calibration: python_docs_heldout\n" + MINIMAL, "r.yaml:1: calibration: python_docs_heldout is held out"),
    ("evaluation: {samples: 1}\n" + MINIMAL, "r.yaml:1: evaluation.samples: unknown key"),
    ("evaluation: {text: a, window: 8, stride: 9}\n" + MINIMAL, "r.yaml:1: evaluation: stride 9 is larger than"),
    ("gates: {perplexity: '<= 3'}\n" + MINIMAL, "r.yaml:1: gates.perplexity: there is no text to measure it on"),
    ("gates:\n  weight_byte: 3\n" + MINIMAL, "r.yaml:2: gates.weight_byte: unknown metric; nearest: weight_bytes"),
    (
        "gates: {batch_independent: 1}\n" + MINIMAL,
        "r.yaml:1: gates.batch_independent: 1 is not a condition; batch_indep",
    ),
    (
        "gates:\n  weight_bytes: 3\n" + MINIMAL,
        "r.yaml:2: gates.weight_bytes: 3 is not a condition; write <=, >=, < or >",
    ),
    ("gates: {weight_bytes: '< 3%'}\n" + MINIMAL, "r.yaml:1: gates.weight_bytes: '< 3%': unit '%' does not fit"),
    ("gates: 3\n" + MINIMAL, "r.yaml:1: gates: expected `metric:"),
    ("extends: quickstar\n" + MINIMAL, "r.yaml:1: extends: no recipe at"),
    ("extends: 3\n" + MINIMAL, "r.yaml:1: extends: 3 is not the path or the name of a recipe"),
    ("extends: r.yaml\n" + MINIMAL, "r.yaml:1: extends: recipes extend one another in a circle"),
    ("seed: 1\nseed: 2\n" + MINIMAL, "r.yaml:2: seed: given twice, first in line 1"),
    ("seed: 1\n1: 2\n", "r.yaml:2: a key must be text"),
    ("seed: !!python/name:os.system x\n", "r.yaml:1: seed: the tag 'tag:yaml.org,2002:python/name:os.system'"),
    ("seed: !!set {a}\n", "r.yaml:1: seed: the tag 'tag:yaml.org,2002:set' is not allowed"),
    ("seed: !!int x\n", "r.yaml:1: seed: 'x' is not a valid int"),
    ("- a\n", "r.yaml:1: expected `key: value` lines; found a list"),
    ("", "r.yaml:1: expected `key: value` lines; found nothing"),
    ("a: 1\nb: [\n", "r.yaml:3: not YAML: "),
    ("a: 1\n---\nb: 1\n", "r.yaml:2: not YAML: but found another document"),
    ("a: 1\nb: \x01\n", "r.yaml:2: not YAML: special characters are not allowed"),
    ('a: 1\nb: "\\ud800"\n', "r.yaml:2: b: holds half of a surrogate pair"),
    ("a: &a [*a]\n", "r.yaml:1: a.0.0: more than 2000 values or 32 levels"),
    ("[" * 5000, "r.yaml:1: not YAML: nested too deeply"),
    ("a: " + "x" * 300_000, "r.yaml:1: larger than 256 KiB"),
    ("a: " + "9" * 9000, "r.yaml:1: a: '9999"),
]


@pytest.mark.parametrize(("text", "message"), LOCATED)
@pytest.mark.usefixtures("rounding")
def test_an_error_says_where_what_and_why(tmp_path: Path, text: str, message: str) -> None:
    found = error(tmp_path, text)
    assert found.startswith(message)
    assert len(found) < 1000


@pytest.mark.usefixtures("rounding")
def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = error(tmp_path, "passes: [rund]\nseed: x\ntune: y\ngates: {a: 1}\ntarget: z\n")
    assert [line.split(":")[1] for line in found.splitlines()] == ["1", "4", "5", "3", "2"]


@pytest.mark.usefixtures("rounding")
def test_alias_bomb(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "more than 2000 values" in error(tmp_path, "\n".join(lines))


@pytest.mark.usefixtures("rounding")
def test_anchors_are_fine_and_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    text = """\
    tune: off
    passes:
      - round: &options {scheme: W4A16_G128, ignore: [a, "re:.*b"], dampening_frac: 1e-3, targets: no}
      - round: *options
    """
    recipe = load(tmp_path, text)
    assert recipe.tune == "off"
    assert recipe.passes == (Round("W4A16_G128", "no", ("a", "re:.*b"), 0, 0.001),) * 2
    assert hash(recipe.passes[0]) == hash(recipe.passes[1])


@pytest.mark.usefixtures("rounding")
def test_null_means_the_default(tmp_path: Path) -> None:
    recipe = load(tmp_path, "seed: null\ncalibration:\n  text: a\n  samples:\ngates:\n  perplexity:\n" + MINIMAL)
    assert recipe.seed == 0
    assert recipe.calibration is not None
    assert recipe.calibration.samples == 128
    assert recipe.gates == ()


@pytest.mark.usefixtures("rounding")
def test_overrides(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "passes: [round]\ncalibration: python_docs\ntarget: x86\n",
        "passes.round.scheme=W3A16_G64",
        "passes.0.ignore=[a, b]",
        "calibration.samples=8",
        "target.x86.isa=avx2",
        "gates.peak_rss_bytes=<= 3GiB",
        "tune=off",
        "evaluation=python_docs_heldout",
        model="other",
        output="there",
    )
    assert recipe.passes == (Round("W3A16_G64", ignore=("a", "b")),)
    assert recipe.calibration is not None
    assert (recipe.calibration.samples, recipe.calibration.name) == (8, "python_docs")
    assert recipe.evaluation.name == "python_docs_heldout"
    assert (recipe.model, recipe.output, recipe.tune) == ("other", "there", "off")
    assert recipe.target == TargetSpec("x86", (("isa", "avx2"),))
    assert recipe.target.build().isa == "avx2"
    assert recipe.gates[0].limit == 3 * 2**30


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "--set 'seed': write it as KEY=VALUE"),
        ("=3", "--set '=3': write it as KEY=VALUE"),
        ("a..b=3", "--set 'a..b=3': write it as KEY=VALUE"),
        ("seed=x", "--set 'seed=x': seed: 'x' does not fit"),
        ("sede=3", "--set 'sede=3': sede: unknown key; nearest: seed"),
        ("seed=[", "--set 'seed=[': not YAML"),
        ("seed.a=3", "--set 'seed.a=3': seed is 1, which has no keys of its own"),
        ("passes.rtn.scheme=x", "--set 'passes.rtn.scheme=x': the recipe has no pass 'rtn'; "),
        ("passes.round.scheme=W4A16", "--set 'passes.round.scheme=W4A16': the recipe has 'round' 2 times; address one"),
        ("passes.2.scheme=W4A16", "--set 'passes.2.scheme=W4A16': the recipe has no pass '2'"),
        ("passes.1=x", "--set 'passes.1=x': name an option of the pass"),
        (
            "passes.1.shceme=x",
            "--set 'passes.1.shceme=x': passes.1.round.shceme: round has no such option; nearest: sch",
        ),
        ("passes.1.scheme=x", "--set 'passes.1.scheme=x': passes.1.round.scheme: format 'x' is unknown"),
    ],
)
@pytest.mark.usefixtures("rounding")
def test_an_error_of_an_override_points_at_it(tmp_path: Path, override: str, message: str) -> None:
    text = "seed: 1\npasses: [round: {scheme: W4A16}, round: {scheme: W4A16}]\n"
    assert error(tmp_path, text, override).startswith(message)


@pytest.mark.usefixtures("rounding")
def test_extends(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "base.yaml").write_text(
        "model: m\ncalibration: {text: a.txt, samples: 3}\ntarget: {x86: {isa: avx2}}\nseed: 4\n"
        "gates: {weight_bytes: '<= 3MB', peak_rss_bytes: '<= 1GB'}\n" + MINIMAL
    )
    (tmp_path / "base" / "a.txt").touch()
    recipe = load(
        tmp_path,
        "extends: base/base.yaml\ncalibration: {samples: 5}\ntarget: x86\n"
        "gates: {peak_rss_bytes: null, weight_bytes: '<= 2MB'}\npasses: [round: {scheme: W8A8}]\n",
    )
    assert recipe.passes == (Round("W8A8"),)
    assert (recipe.model, recipe.seed, recipe.target) == ("m", 4, TargetSpec("x86"))
    assert [str(gate) for gate in recipe.gates] == ["<= 2MB"]
    assert recipe.calibration is not None
    assert recipe.calibration.samples == 5
    assert recipe.calibration.find_files() == (tmp_path / "base" / "a.txt",)  # relative to the file that names it

    other = load(tmp_path, "extends: base/base.yaml\ncalibration: {json: b.json}\n")
    assert other.calibration is not None
    assert (other.calibration.kind, other.calibration.samples) == ("json", 128)  # another source: nothing is inherited

    (tmp_path / "base" / "base.yaml").write_text("\nseed: x\n" + MINIMAL)
    assert error(tmp_path, "extends: base/base.yaml\n").startswith("base/base.yaml:2: seed: 'x' does not fit")


def test_a_missing_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match="no shipped recipe has that name; nearest: quickstart; `compress list recipes`"
    ):
        load_recipe("quickstrat")
    with pytest.raises(RecipeError, match="no such file"):
        load_recipe(tmp_path)
    (tmp_path / "r.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(RecipeError, match=r"r\.yaml:2: not UTF-8"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.usefixtures("rounding")
def test_python_api(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    step = Round("W4A16_G32")
    recipe = Recipe.from_dict({"passes": [step], "calibration": {"text": "a.txt"}, "tune": "off"}, tmp_path)
    assert recipe.passes == (step,)
    assert recipe.calibration is not None
    assert recipe.calibration.find_files() == (tmp_path / "a.txt",)
    assert recipe.resolved()["passes"] == [
        {
            "round": {
                "scheme": "W4A16_G32", "targets": "Linear", "ignore": [], "group_size": 0,
                "dampening_frac": 0.01, "actorder": True, "order": "up",
            }
        }
    ]  # fmt: skip
    assert Recipe.from_dict(recipe.resolved(), tmp_path).resolved() == recipe.resolved()
    with pytest.raises(RecipeError, match="model: missing; add `model:`, or name one with --model"):
        recipe.check_files()
    with pytest.raises(RecipeError, match="recipe: sede: unknown key; nearest: seed"):
        Recipe.from_dict({"passes": [], "sede": 1})
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]


def test_a_stated_hash_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    digest = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1"
    for sha256, passes in ((digest, True), (digest[::-1], False)):
        recipe = Recipe.from_dict({"passes": [], "calibration": {"text": "a.txt", "sha256": sha256}}, tmp_path)
        assert recipe.calibration is not None
        if passes:
            recipe.calibration.find_files()
        else:
            with pytest.raises(RecipeError, match=r"calibration\.text: the content has SHA-256 982d"):
                recipe.calibration.find_files()


def test_data_given_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "set.yaml").write_text("text: a.txt\nsamples: 3\ntokens: 5\n")
    assert load_text_spec(str(tmp_path / "a.txt")).find_files() == (tmp_path / "a.txt",)
    spec = load_text_spec(str(tmp_path / "set.yaml"), evaluation=True)
    assert isinstance(spec, EvaluationSpec)
    assert (spec.tokens, spec.name, spec.find_files()) == (5, "set", (tmp_path / "a.txt",))
    assert load_text_spec("{hub: a/b, split: test}").split == "test"
    for wrong in ("no_such_set", "3", "{tokens: 3}", "no.txt"):
        with pytest.raises(RecipeError, match="--data"):
            load_text_spec(wrong, evaluation=True)


@pytest.mark.parametrize(
    ("metric", "text", "limit", "good", "bad"),
    [
        ("perplexity_increase", "<= 3%", 0.03, 0.03, 0.031),
        ("perplexity", "<=1.5x  dense", 1.5, 1.4, 1.6),
        ("weight_bytes", "< 120MB", 120e6, 119e6, 120e6),
        ("bundle_bytes", "<= 1.5 KiB", 1536.0, 1536, 1537),
        ("decode_tokens_per_s", ">= 1.2x dense", 1.2, 1.2, 1.19),
        ("prefill_tokens_per_s", "> 1e3", 1000.0, 1001, 1000),
        ("top1_agreement", ">= 98%", 0.98, 0.99, 0.97),
        ("top1_agreement", ">= 0.98", 0.98, 0.99, float("nan")),
    ],
)
def test_gates(metric: str, text: str, limit: float, good: float, bad: float) -> None:
    gate = Gate.parse(metric, text)
    assert gate.limit == pytest.approx(limit)
    assert gate.holds(good)
    assert not gate.holds(bad)
    assert Gate.parse(metric, str(gate)) == gate


@given(metric=st.sampled_from(sorted(METRICS)), text=st.one_of(st.text(), st.integers(), st.none(), st.booleans()))
def test_no_text_breaks_a_gate(metric: str, text: object) -> None:
    with contextlib.suppress(RecipeError):
        Gate.parse(metric, text)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    ["model", "calibration", "evaluation", "passes", "target", "tune", "gates", "output", "seed", "extends", "x"]
)
shapes = st.sampled_from(
    [
        {"text": "a"}, {"json": ["a"]}, {"hub": "a", "split": 3}, [{"round": {"scheme": "W4A16"}}], ["round"], "round",
        {"x86": {"isa": "avx2"}}, {"x86": None}, {"perplexity": "<= 3"}, "python_docs", "quickstart", "a.yaml",
        "\0.yaml",
    ]
)  # fmt: skip
documents = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab:-[]{}&*!|>?%@\"'#, \n\\xu0", max_size=60),
    st.builds(yaml.safe_dump, st.dictionaries(keys, plain | shapes, max_size=5), allow_unicode=st.booleans()),
)


@given(text=documents, override=st.none() | st.text(max_size=20) | st.builds("{}={}".format, keys, st.text(max_size=9)))
@example("%YAML 9.9\n--- a", None)
@example('a: "\\U00ffffff"', None)
@example("a: !<tag:x> b", None)
@example("? [a]\n: b", None)
@example("extends: '" + "a" * 5000 + "'", None)
@example("calibration: '" + "a" * 5000 + ".yaml'", None)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("rounding")
def test_no_text_raises_anything_but_a_recipe_error(tmp_path: Path, text: str, override: str | None) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        recipe = load_recipe(path, [] if override is None else [override])
    except RecipeError as caught:
        str(caught).encode()  # can be printed
        return
    assert Recipe.from_dict(recipe.resolved()).resolved() == recipe.resolved()
