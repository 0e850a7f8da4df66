"""What comes from elsewhere and means harm: recipes, bundles and model folders that were made to break their reader."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from compressor_runtime import BundleError, DamagedBundleError, load, read_manifest, read_safetensors, sha256
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.errors import RecipeError
from compressor.graph.sites import Site, match_sites
from compressor.recipe.data_spec import TextSpec
from compressor.recipe.recipe import Recipe, load_recipe

FUZZ = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
LIMIT_S, LIMIT_BYTES = 5.0, 1 << 30
PASSES = "passes: [rtn: {scheme: W4A16}]\n"


@pytest.fixture(scope="module")
def fuzz() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_fuzz", FUZZ)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    module.load_tvm()
    return module


@contextmanager
def within_limits() -> Iterator[None]:
    """At most a few seconds, and not a gigabyte more memory than before, even for a moment."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, begin = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - begin < LIMIT_S


# --- any input


values = st.sampled_from(
    [
        None, True, 0, -1, 2**64, 10**400, 1e308, "", "x", "../x", "/dev/zero", "fifo", "a\0b", "\x1b[2J", "é", "1e999",
        "W4A16_G128", "W4A16_G99999999999", "W٤A16", "re:(.*)*x", "<= 1e999GB", "python_docs", "quickstart", "base",
    ]
)  # fmt: skip
names = st.sampled_from(
    [*Recipe.yaml_keys(), *TextSpec.yaml_keys(), "extends", "rtn", "gptq", "scheme", "group_size", "x86", "isa", "<<"]
)
trees = st.recursive(
    values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=st.dictionaries(names, trees, max_size=6), override=st.tuples(st.lists(names | st.just("0")), values))
def test_no_tree_breaks_the_recipe_reader(
    fuzz: types.ModuleType, tmp_path: Path, tree: dict[str, Any], override: tuple[list[str], Any]
) -> None:
    if not (tmp_path / "fifo").exists():
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "base.yaml").write_text(PASSES)
    text = yaml.safe_dump(tree, allow_unicode=True) + f"\0{'.'.join(override[0])}={override[1]}"
    with within_limits():
        fuzz.read_recipe(tmp_path, text.encode())


@pytest.fixture(scope="module", params=["recipe", "manifest", "weights"])
def sandbox(request: pytest.FixtureRequest, fuzz: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sandbox")
    return request.param, folder / "inside", fuzz.make_seeds(request.param, folder)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(choose=st.randoms(use_true_random=False), rounds=st.integers(1, 4))
def test_no_mutation_of_a_real_file_breaks_its_reader(
    fuzz: types.ModuleType, sandbox: Any, choose: random.Random, rounds: int
) -> None:
    name, folder, seeds = sandbox
    data: bytes = choose.choice(seeds)
    for _ in range(rounds):
        data = fuzz.READERS[name].mutate(data, choose, lambda given: given[: choose.randrange(len(given) + 1)])
    with within_limits():
        fuzz.READERS[name].run(folder, data)


# --- recipes


HOSTILE = {
    "escape beyond Unicode": (b'a: "\\Uffffffff"', "not YAML"),
    "UTF-16": (PASSES.encode("utf-16"), "not UTF-8"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "deep mappings": (b"? " * 100_000, "nested too deeply"),
    "many values": (b"a: [" + b"1," * 100_000 + b"]", "more than 2000 values"),
    "many passes": (b"passes: [" + b"rtn: {scheme: W4A16}," * 600 + b"]", "600 passes; a recipe has at most 100"),
    "version": (b"%YAML " + b"1" * 5000 + b".1\n--- a", "not YAML"),
    "control characters": (b'model: "\\e[2J"\n' + PASSES.encode(), r"holds the control character U\+001B"),
    "NUL in a path": (b'extends: "a\\0b"\n', r"U\+0000"),
    "infinity": (b"passes: [gptq: {scheme: W4A16, dampening_frac: 1e999}]", "too large a number"),
    "large": (b"passes: [gptq: {scheme: W4A16, dampening_frac: " + b"9" * 4000 + b"}]", "too large a number"),
    "group size": (b"passes: [rtn: {scheme: W4A16_G999999999}]", "the largest is 1048576"),
    "absurd group size": (b"passes: [rtn: {scheme: W4A16_G" + b"9" * 5000 + b"}]", "format 'W4A16_G9999.* is unknown"),
    "group size option": (b"passes: [rtn: {scheme: W4A16, group_size: 9999999999}]", "the largest is 1048576"),
    "endless gate": (b"gates: {weight_bytes: '<= 1e999'}\n" + PASSES.encode(), "gates.weight_bytes: .* too large"),
    "endless unit": (b"gates: {weight_bytes: '<= 1e305GB'}\n" + PASSES.encode(), "gates.weight_bytes: .* too large"),
    "tokens": (b"evaluation: {text: a, tokens: 99999999999}\n" + PASSES.encode(), "tokens"),
    "target": (b"target: {x86: 0}\n" + PASSES.encode(), "expected a mapping of options"),
    "data set that is a path": (b"evaluation: {hub: ../../etc}\n" + PASSES.encode(), "evaluation.hub"),
    "pipe": (b"extends: fifo\n", "no recipe at"),
    "device": (b"extends: /dev/zero\n", "no recipe at"),
    "circle": (b"extends: r.yaml\n", "in a circle"),
    "output above": (b"output: a/../../x\n" + PASSES.encode(), "leads out of the current folder"),
    "output elsewhere": (b"output: /x\n" + PASSES.encode(), "give that folder with --output"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_recipes_that_mean_harm(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    (tmp_path / "r.yaml").write_bytes(content)
    os.mkfifo(tmp_path / "fifo")
    with within_limits(), pytest.raises(RecipeError, match=message) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_chains_of_recipes_and_large_merges_end(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml\n")
    with pytest.raises(RecipeError, match="more than 16 recipes extend one another"):
        load_recipe(tmp_path / "0.yaml")
    keys = [f"k{i}: [1]\n" for i in range(900)]
    (tmp_path / "base.yaml").write_text("".join(keys))
    (tmp_path / "r.yaml").write_text("extends: base.yaml\n" + "".join(keys))
    with within_limits(), pytest.raises(RecipeError, match="unknown key"):
        load_recipe(tmp_path / "r.yaml")


def test_the_command_line_may_name_any_output(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(PASSES)
    assert load_recipe(tmp_path / "r.yaml", output="/x/y").output == "/x/y"


@pytest.mark.parametrize(
    "override", ["passes." + "9" * 5000 + ".x=1", ".".join("a" * 3000) + "=1", "seed=" + "[" * 9000]
)
def test_overrides_that_mean_harm(tmp_path: Path, override: str) -> None:
    (tmp_path / "r.yaml").write_text(PASSES)
    with within_limits(), pytest.raises(RecipeError):
        load_recipe(tmp_path / "r.yaml", [override])


def test_plain_data_that_means_harm() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for data in ({"passes": deep}, {"passes": [], 1: 2}, {"passes": [{"rtn": {"scheme": "W4A16", None: 1}}]}):
        with within_limits(), pytest.raises(RecipeError, match=r"levels|is not text"):
            Recipe.from_dict(data)


@pytest.mark.parametrize(
    "pattern", ["re:(a|aa)+$", "re:(" + "(" * 900 + ")" * 900, "re:a{4294967296}", "re:" + "a" * 2000, "re:(", "re:*"]
)
def test_patterns_take_bounded_time(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressor.graph.sites._MATCH_SECONDS", 0.2)
    node: Any = None  # no pattern looks at it
    sites = [Site("a" * 60 + "!", node, node, "Linear", "w", None, 1, 1, False) for _ in range(3)]
    with within_limits(), pytest.raises(re.error):
        match_sites(sites, pattern)
    assert match_sites(sites, "re:a+!")[0] == sites


# --- bundles


@pytest.fixture
def bundle(fuzz: types.ModuleType, tmp_path: Path) -> Path:
    fuzz.make_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def set_file(manifest: dict[str, Any], name: str) -> None:
    manifest["files"][name] = manifest["files"]["model.so"]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a truth value for a number": (lambda m: m.update(schema_version=True), "`schema_version`"),
    "more than 64 bits": (lambda m: m["model"].update(max_positions=2**64), "`max_positions`"),
    "not a number": (lambda m: m.update(dense_weight_bytes=float("nan")), "not readable as JSON"),
    "half a character": (lambda m: set_file(m, "\ud800"), "not readable as JSON"),
    "what a terminal obeys": (lambda m: m["model"].update(name="\x1b[2J"), "control characters"),
    "features that are no names": (lambda m: m.update(cpu_features=[{"a": 1}]), "`cpu_features`"),
    "an unknown kind": (lambda m: m.update(kind="worm"), "`kind` has a value"),
    "a million layers": (lambda m: m["model"].update(layers=10**6), "`layers` has a value"),
    "no width": (lambda m: m["model"].update(head_dim=0), "`head_dim` has a value"),
    "half a row": (lambda m: m["model"].update(cache_format="INT8", cache_bytes_per_token=7), "`cache_bytes_per_t"),
    "rows of no bytes": (lambda m: m["model"].update(cache_format="X", cache_bytes_per_token=0), "`cache_bytes_per_t"),
    "heads of too many layers": (lambda m: m["model"].update(uneven_heads=[1, 1, 1]), "`uneven_heads` has a value"),
    "a layer of no heads": (lambda m: m["model"].update(uneven_heads=[0, 1]), "`uneven_heads` has a value"),
    "heads of no layer": (lambda m: m["model"].update(uneven_heads=[]), "`uneven_heads` has a value"),
    "short dense rows": (lambda m: m["model"].update(cache_bytes_per_token=8), "`cache_bytes_per_token` has a value"),
    "a format that is a list": (lambda m: m["model"].update(cache_format=[]), "`cache_format`"),
    "ids that are lists": (lambda m: m["model"].update(eos_ids=[[1]]), "`eos_ids`"),
    "a first id that is text": (lambda m: m["model"].update(bos_id="1"), "`bos_id` has a value"),
    "a vocabulary beyond the table": (lambda m: m["model"].update(vocab_size=41), "`vocab_size` exceeds the rows"),
    "another shape": (lambda m: m["parameter_types"][0]["shape"].__setitem__(0, 3), r"'codes' is int32 .* take I32"),
    "another type": (lambda m: m["parameter_types"][1].update(dtype="BF16"), r"'scales' is float16 .* take BF16"),
    "an unknown type": (lambda m: m["parameter_types"][4].update(dtype="?"), r"'bias' is float64 .* take \?"),
    "another order": (lambda m: m["parameters"].reverse(), "the kernels take"),
    "fewer types": (lambda m: m["parameter_types"].pop(), "5 `parameters`, 4 `parameter_types`"),
    "no types": (lambda m: m.pop("parameter_types"), "`parameter_types` is missing"),
    "a name that is too long": (lambda m: set_file(m, "x" * 5000), "cannot be a file|leads outside"),
    "a second name of a file": (lambda m: set_file(m, "./model.so"), "not a plain name"),
    "a backslash": (lambda m: set_file(m, "..\\outside"), "not a plain name"),
    "a pipe": (lambda m: set_file(m, "fifo"), "fifo: missing"),
    "a circle of links": (lambda m: set_file(m, "circle"), "do not trust|cannot be a file"),
    "a link within the bundle": (lambda m: set_file(m, "again.so"), "leads outside the bundle, or is no"),
    "a file in a linked folder": (lambda m: set_file(m, "here/model.so"), "leads outside the bundle, or is no"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_manifests_that_mean_harm(bundle: Path, name: str) -> None:
    change, message = CHANGES[name]
    os.mkfifo(bundle / "fifo")
    (bundle / "circle").symlink_to("circle")
    (bundle / "again.so").symlink_to("model.so")
    (bundle / "here").symlink_to(".")
    edit(bundle, change)
    with within_limits(), pytest.raises(DamagedBundleError, match=message):
        load(bundle)


def test_the_untouched_bundle_fails_at_its_library_only(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"model\.so: cannot be loaded"):
        load(bundle)


def test_a_manifest_must_lie_in_its_bundle_and_be_small(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    twice = text.replace('"format"', '"format": "x", "format"', 1)
    for content in (twice, text + " " * (17 << 20)):
        (bundle / "manifest.json").write_text(content)
        with pytest.raises(DamagedBundleError, match=r"a key is there twice|too many for a manifest"):
            read_manifest(bundle)
    (bundle / "manifest.json").unlink()
    (bundle.parent / "elsewhere").write_text(text)
    (bundle / "manifest.json").symlink_to("../elsewhere")
    with pytest.raises(DamagedBundleError, match="leads outside"):
        read_manifest(bundle)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**400], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [0, 2**64], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 1000 + [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 10**400]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_headers_that_mean_harm(tmp_path: Path, entry: dict[str, Any]) -> None:
    text = json.dumps({"w": entry}).encode()
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with within_limits(), pytest.raises(DamagedBundleError, match="not a valid safetensors file"):
        read_safetensors(tmp_path / "w")


def test_packed_weights_of_another_shape_are_not_given_to_the_kernels(bundle: Path) -> None:
    file = bundle / "weights.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    shape = header["codes"]["shape"]
    header["codes"]["shape"] = [shape[0] * shape[1], 1, *shape[2:]]  # as many bytes
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    entry = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    edit(bundle, lambda manifest: manifest["files"].update({file.name: entry}))
    with pytest.raises(BundleError, match=r"'codes' is int32 .*, the kernels take I32"):
        load(bundle)
