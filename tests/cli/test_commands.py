"""The command: what it prints, what it leaves behind, and what it says to bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from own_caches import with_prices
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, save_model
from torch.fx import GraphModule

from compressor.cli.commands import main
from compressor.codegen.lowering.phases import phases
from compressor.evaluate.comparison import Speed
from compressor.export.vectors import make_vectors
from compressor.recipe.gates import METRICS
from compressor.runtime import load

COMMAND = "from compressor.cli.commands import main; main(prog_name='compress')"
QUALITY = {"perplexity", "dense_perplexity", "top1_agreement"}
SIZES = {"weight_bytes", "dense_weight_bytes", "bundle_bytes"}
SPEED = {"prefill_tokens_per_s", "decode_tokens_per_s", "bytes_per_token", "bandwidth_fraction", "peak_rss_bytes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, a text, a recipe for them, and things that are wrong."""
    root = tmp_path_factory.mktemp("cli")
    text = Path(pytest.__file__).read_text(encoding="utf-8") * 4
    (root / "text.txt").write_text(text, encoding="utf-8")
    model = save_model(root / "model", text)
    (root / "recipe.yaml").write_text(
        "model: model\n"
        "calibration: {text: text.txt, samples: 4, sequence_length: 32}\n"
        "evaluation: {text: text.txt, tokens: 96}\n"
        "passes:\n"
        "  - rtn: {scheme: W4A16_G32, targets: Linear, ignore: [lm_head]}\n"
        'tune: "off"\n'
        "target: {x86: {isa: avx2}}\n"  # the quickest to generate
    )
    save_model(root / "small_vocabulary", text, vocab_size=VOCAB - 1)
    weights = (model / "model.safetensors").read_bytes()
    for name, content in (("truncated", weights[:-100]), ("header_only", weights[:500]), ("garbage", b"\xff" * 3000)):
        shutil.copytree(model, root / name)
        (root / name / "model.safetensors").write_bytes(content)
    for name, missing in (("no_config", "config.json"), ("no_tokenizer", "tokenizer.json")):
        shutil.copytree(model, root / name)
        (root / name / missing).unlink()
    shutil.copytree(model, root / "bad_tokenizer")
    (root / "bad_tokenizer" / "tokenizer.json").write_text("{}")
    shutil.copytree(model, root / "not_a_number")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, root / "not_a_number" / "model.safetensors", {"format": "pt"})
    (root / "empty").mkdir()
    (root / "empty.txt").write_text("")
    (root / "blank.txt").write_text(" \n\n \n")
    return root


UNCOUNTED = ("measurements.json", "README.md", "report.html")


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the same prices of work as in this process
    )


@pytest.fixture(scope="module")
def ran(folder: Path, require_tool: Callable[[str], Path], own_cache: Path) -> Iterator[dict[str, Any]]:
    """Return what a whole run printed; its bundle is ``folder / "bundle"``."""
    require_tool("g++")
    with_prices(own_cache)
    gates = "gates={decode_tokens_per_s: '>= 0.0001x dense', latency_ms: <= 1000s}"
    files = ("--junit", folder / "junit.xml", "--report", folder / "report.json")
    done = process("run", folder / "recipe.yaml", "-o", folder / "bundle", "--json", "--set", gates, *files)
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout)


@pytest.fixture
def bundle(folder: Path, ran: dict[str, Any]) -> Path:
    return folder / "bundle"


pytestmark = pytest.mark.usefixtures("one_thread", "captures_once")


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``invoke("run", ...)`` runs the command in this process, in the folder with the recipe."""
    monkeypatch.chdir(folder)

    def call(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="compress")

    return call


@pytest.fixture
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the two processes that measure speed."""
    speed = Speed(dict.fromkeys((*SPEED, "threads"), 1.0), {})
    monkeypatch.setattr("compressor.run.job.measure_speed", lambda *_: speed)


def one_message(result: Result) -> str:
    """Return the command's message on stderr; it must have ended by itself, without a traceback or other output."""
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.lower().startswith("error: ")]
    assert len(lines) == 1, result.stderr
    message = lines[0].partition(": ")[2]
    if result.stdout:  # with --json
        stated = json.loads(result.stdout)["error"]
        assert stated["exit_code"] == result.exit_code and stated["message"].startswith(message)
    return message


# --- what it prints


def test_run_prints_one_json_object_with_the_promised_names(ran: dict[str, Any], bundle: Path) -> None:
    assert set(ran) >= QUALITY | SIZES | SPEED
    assert {f"dense_{name}" for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "peak_rss_bytes")} <= set(ran)
    assert Path(ran["bundle"]) == bundle and (bundle / "manifest.json").is_file()
    assert [stage["name"] for stage in ran["passes"]] == ["capture", "rtn"]
    assert len(ran["sites"]) == 7 and {site["format"] for site in ran["sites"]} == {"W4A16_G32"}
    assert ran["weight_bytes"] < ran["dense_weight_bytes"] < ran["bundle_bytes"]
    assert 0 < ran["bandwidth_fraction"] < 1.5 and 0 <= ran["top1_agreement"] <= 1
    assert ran["kernel_error"] < 1e-5
    sizes = {file.name: file.stat().st_size for file in bundle.iterdir() if file.is_file()}
    inner = sum(file.stat().st_size for file in bundle.glob("*/**/*") if file.is_file())
    assert inner + sum(sizes.values()) - sum(sizes[name] for name in UNCOUNTED) == ran["bundle_bytes"]


def test_the_bundle_knows_what_its_run_measured(ran: dict[str, Any], bundle: Path) -> None:
    measurements = load(bundle, threads=1).measurements
    assert {name: measurements[name] for name in QUALITY | SIZES} == {name: ran[name] for name in QUALITY | SIZES}


def test_run_writes_what_it_prints_and_a_test_case_for_each_gate(ran: dict[str, Any], folder: Path) -> None:
    assert json.loads((folder / "report.json").read_text()) == ran
    assert ran["gates"] == {"decode_tokens_per_s": True, "latency_ms": True}
    for gate in ran["gate_results"]:
        assert gate["repeats"] == 7 and gate["interval"] is not None and gate["decided"]
    suite = ElementTree.parse(folder / "junit.xml").getroot()
    assert {case.attrib["name"] for case in suite} >= {
        "kernels against PyTorch", "decode_tokens_per_s >= 0.0001x dense", "latency_ms <= 1000s",
    }  # fmt: skip
    assert (suite.attrib["failures"], suite.attrib["errors"]) == ("0", "0")


def test_nothing_but_the_bundle_is_left(folder: Path, bundle: Path) -> None:
    assert not [path for path in folder.iterdir() if path.name.startswith(".") or "partial" in path.name]


def test_eval_of_a_bundle_and_of_a_model(invoke: Callable[..., Result], ran: dict[str, Any]) -> None:
    data = ("--data", "{text: text.txt, tokens: 96, window: 32}", "--json")
    result = invoke("eval", "bundle", *data)
    assert result.exit_code == 0, result.stderr
    measured = json.loads(result.stdout)
    assert measured["perplexity"] == pytest.approx(ran["perplexity"], rel=1e-9)
    assert {key: measured[key] for key in SIZES} == {key: ran[key] for key in SIZES}
    dense = json.loads(invoke("eval", "model", *data).stdout)
    assert dense["perplexity"] == pytest.approx(ran["dense_perplexity"], rel=1e-9)
    assert dense["weight_bytes"] == ran["dense_weight_bytes"]


def test_eval_says_on_which_text_and_how_certain_it_is(invoke: Callable[..., Result], folder: Path) -> None:
    result = invoke("eval", "model", "--data", "text.txt", "--tokens", "200", "--json")
    found = json.loads(result.stdout)
    assert found["text"] == "text.txt" or found["text"].endswith("/text.txt")
    low, high = found["perplexity_interval"]
    assert low < found["perplexity"] < high
    few = invoke("eval", "model", "--data", "text.txt", "--tokens", "10", "--json")
    assert few.exit_code == 2 and "a figure of fewer than 64 says nothing" in few.stderr
    all_there_is = invoke("eval", "model", "--data", "text.txt", "--tokens", "100000", "--json")
    assert re.search(r"note: evaluation: .* has \d+ tokens, of the 100000 asked for", all_there_is.stderr)


def test_shipped_models_are_known_by_name(invoke: Callable[..., Result]) -> None:
    found = json.loads(invoke("inspect", "reference", "--json").stdout)
    assert found["architecture"] == "LlamaForCausalLM"


def test_bench_prints_one_json_object(invoke: Callable[..., Result], bundle: Path) -> None:
    options = ("--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1", "--threads", "1", "--json")
    result = invoke("bench", bundle, *options)
    assert result.exit_code == 0, result.stderr
    measured = json.loads(result.stdout)
    assert set(measured) >= SPEED and measured["threads"] == 1
    assert all(measured[name] > 0 for name in SPEED)
    assert (measured["prompt_tokens"], measured["new_tokens"]) == (8, 4)
    assert not [name for name in measured if name.endswith("_spread")]  # of one repeat nobody knows


def test_prune_takes_a_number_of_days(invoke: Callable[..., Result]) -> None:
    assert "nan is not a number of days" in one_message(invoke("cache", "prune", "--older-than", "nan"))


def test_generate_streams_text_and_repeats_with_a_seed(invoke: Callable[..., Result], bundle: Path) -> None:
    plain = invoke("generate", bundle, "--prompt", "import ", "--max-tokens", "8")
    assert plain.exit_code == 0 and plain.stderr == ""
    as_json = json.loads(invoke("generate", bundle, "--prompt", "import ", "--max-tokens", "8", "--json").stdout)
    assert as_json["text"] + "\n" == plain.stdout and as_json["prompt"] == "import "
    assert (as_json["new_tokens"], as_json["finish_reason"]) == (8, "length") and as_json["prompt_tokens"] > 0

    def sampled(seed: int) -> str:
        options = ("--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--seed", str(seed), "--threads", "1")
        return invoke("generate", bundle, "--prompt", "def ", "--max-tokens", "12", *options).stdout

    assert sampled(1) == sampled(1) != sampled(2)


def test_inspect_shows_bundles_and_models(invoke: Callable[..., Result], bundle: Path) -> None:
    content = json.loads(invoke("inspect", bundle, "--json").stdout)
    assert set(content) >= SIZES and content["kind"] == "decoder"
    assert {kernel["evidence"] for kernel in content["kernels"]} == {"executed"}
    assert content["sites"][0]["site"] == "model.layers.0.self_attn.q_proj"
    linears = json.loads(invoke("inspect", "model", "--json").stdout)["linears"]
    assert len(linears) == 8 and linears[-1]["tied"]
    shown = invoke("inspect", bundle).stdout
    assert "model.layers.0.self_attn.q_proj" in shown and "W4A16_G32" in shown  # not cut where there is no terminal


@pytest.mark.parametrize(
    ("what", "some"),
    [
        ("passes", {"rtn", "gptq"}),
        ("formats", {"W4A16_G128", "W8A8"}),
        ("targets", {"x86"}),
        ("recipes", {"quickstart"}),
        ("calibration", {"python_docs", "python_docs_heldout"}),
    ],
)
def test_list_and_show(what: str, some: set[str], invoke: Callable[..., Result]) -> None:
    listed = json.loads(invoke("list", what, "--json").stdout)
    assert some <= set(listed) and all(listed.values())
    lines = invoke("list", what).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(listed)
    for name in some:
        shown = json.loads(invoke("show", name, "--json").stdout)
        assert shown["name"] == name and shown["kind"] == what.removesuffix("es" if what == "passes" else "s")
        assert invoke("show", name).stdout == shown["text"] + "\n"
    unlisted = json.loads(invoke("show", "W5A8_ASYM_G96", "--json").stdout)  # no preset
    assert unlisted["kind"] == "format" and 5 < unlisted["bits_per_weight"] < 6


def test_catalogues_have_whole_sentences_and_data(invoke: Callable[..., Result]) -> None:
    recipes = json.loads(invoke("list", "recipes", "--json").stdout)
    assert not [text for text in recipes.values() if not text.endswith((".", ")"))]
    assert json.loads(invoke("show", "gptq", "--json").stdout)["options"]["dampening_frac"].startswith("0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "nowhere", "--prompt", "a", "--json"),
        ("show", "gptqq", "--json"),
        ("plan", "nowhere.yaml", "--json"),
        ("list", "nothing", "--json"),
        ("cache", "prune", "--older-than", "nan", "--json"),
        ("run", "--json"),
    ],
)
def test_a_failure_is_one_json_object(arguments: tuple[str, ...], invoke: Callable[..., Result]) -> None:
    result = invoke(*arguments)
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == error["exit_code"] == 2
    assert error["message"] in " ".join(result.stderr.split()) or error["message"] in result.stderr


def test_a_table_for_people_a_dump_and_the_time_of_passes(
    invoke: Callable[..., Result], tmp_path: Path, ran: dict[str, Any], no_timing: None
) -> None:
    result = invoke("run", "recipe.yaml", "-o", tmp_path / "out", "--dump", tmp_path / "dump", "--time-passes")
    assert result.exit_code == 0, result.stderr
    for word in ("dense", "compressed", "perplexity", "weights", "decode, tokens/s", "top-1 agreement", "seconds"):
        assert word in result.stdout
    dumped = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert dumped[:5] == [
        "00_capture.py", "00_normalise.txt", "01_rtn.py", "lower_01_fuse.txt", "lower_02_bundle_parameters.py",
    ]  # fmt: skip
    assert len(dumped) == 4 + len(phases())
    normalised, fused = ((tmp_path / "dump" / name).read_text() for name in (dumped[1], dumped[3]))
    assert "\nlinear: " in normalised and "  left     " in normalised and " it turns " in normalised
    assert "  matched  packed_linear (model.layers.0.self_attn.q_proj)\n" in fused
    assert "packed_linear" in (tmp_path / "dump" / "01_rtn.py").read_text()
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (tmp_path / "out", Path(ran["bundle"]))]
    assert manifests[0]["files"]["weights.safetensors"] == manifests[1]["files"]["weights.safetensors"]


# --- bad input


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere/model", r"--model: model: './nowhere/model' is neither a folder .*nowhere/model\) nor a hub id"),
        ("truncated", r"truncated/model\.safetensors: not a readable safetensors file .*fetch it again"),
        ("header_only", r"header_only/model\.safetensors: not a readable safetensors file .*fetch it again"),
        ("garbage", r"garbage/model\.safetensors: not a readable safetensors file .*fetch it again"),
        ("empty", r"empty: no config\.json; give a folder as .*save_pretrained writes it"),
        ("no_config", r"no_config: no config\.json"),
        ("no_tokenizer", r"no_tokenizer: no tokenizer: .*put the model's tokenizer files beside its weights"),
        ("bad_tokenizer", r"bad_tokenizer/tokenizer\.json: not a tokenizer"),
        (
            "small_vocabulary",
            r"small_vocabulary: the tokenizer does not match the model: it gives token 319 .*vocabulary has 319",
        ),
        ("not_a_number", r"the model's .* holds nan at \[3, 5\]; repair the checkpoint"),
    ],
)
def test_bad_models(model: str, message: str, invoke: Callable[..., Result], tmp_path: Path) -> None:
    result = invoke("run", "recipe.yaml", "--model", model, "-o", tmp_path / "out")
    assert result.exit_code == 2
    said = one_message(result)
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


RTN = "{rtn: {scheme: W4A16_G32}}"
MODEL_REFUSES = [
    (f"passes=[{RTN}, {{rotation: {{}}}}]", r"passes\.1\.rotation: 'Linear': an earlier pass has packed every"),
    (f"passes=[{RTN}, {RTN}]", r"passes\.1\.rtn: 'Linear': an earlier pass has packed every linear that matches; put"),
    ("passes.0.rtn.targets=foo", r"passes\.0\.rtn: patterns that match no linear of the model: 'foo': nearest"),
    ("passes.rtn.scheme=W4A16_G0", "a group of 0 weights; give a whole number above 0"),
    ("calibration.text=.", "is a folder; name files in it"),
    (
        "calibration.sequence_length=65",
        r"sequence_length: 65 tokens are more than the 64 positions of .*; give at most 64",
    ),
    (  # the text is too short as well, and would allow more than 64
        "calibration.sequence_length=100000",
        r"sequence_length: 100000 tokens are more than the 64 positions of .*; give at most 64",
    ),
    ("gates={accuracy: '>= 0.5'}", r"gates\.accuracy: is not measured on a decoder; what is: perplexity"),
    ("gates={top1_agreement: '>= 150%'}", "'>= 150%' never holds: top1_agreement is at most 100%"),
    ("model=refernce", "'refernce' is neither a folder .* nearest shipped model: reference"),
]
"""Changes of the recipe that only the model shows to be wrong: a plan refuses them like a run."""


@pytest.mark.parametrize(("change", "message"), MODEL_REFUSES)
def test_a_plan_refuses_what_a_run_refuses(change: str, message: str, invoke: Callable[..., Result]) -> None:
    result = invoke("plan", "recipe.yaml", "--set", change)
    assert result.exit_code == 2, result.output
    assert re.search(message, one_message(result)), result.stderr


@pytest.mark.parametrize("gate", ["<= 1kB", "<= 0.1x dense"])
def test_a_gate_that_the_plan_decides_fails_before_any_work(
    gate: str, invoke: Callable[..., Result], tmp_path: Path
) -> None:
    change = ("--set", f"gates={{weight_bytes: {gate}}}")
    result = invoke("run", "recipe.yaml", *change, "-o", tmp_path / "out", "--report", tmp_path / "report.json")
    assert result.exit_code == 3
    assert re.search(
        rf"weight_bytes: expected {re.escape(gate)}, and this recipe gives .*: choose", one_message(result)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 3
    assert invoke("plan", "recipe.yaml", *change).exit_code == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("passes=[{gptx: {scheme: W4A16_G32}}]", "no pass is called 'gptx'; nearest: gptq"),
        ("passes.gptq.scheme=W4A16_G32", "the recipe has no pass 'gptq'; there are: rtn"),
        ("pases=[]", "pases: unknown key; nearest: passes"),
        ("calibratio.samples=3", "--set 'calibratio.samples=3': calibratio: unknown key; nearest: calibration"),
        ("calibration.sample=3", "sample: unknown key; nearest: samples"),
        ("passes.rtn.sceme=W4A16_G32", "rtn has no such option; nearest: scheme"),
        ("passes.rtn.scheme=W9A16", "9 bits; integer formats have 2 to 8 bits"),
        ("passes.rtn.scheme=int4", "format 'int4' is unknown"),
        ("passes.rtn.scheme=W4A16_G36", "group size 36 .* not a multiple of 8.*; use 32"),
        ("passes.rtn.group_size=48", r"group size 48 divides .* none .*\(their inputs: 64\); sizes .*: 64, 32, 16, 8"),
        ("passes.rtn.targets=Linea", "patterns that match no linear of the model: 'Linea': nearest Linear"),
        ("passes.rtn.ignore=[lm_hed]", "patterns that match no linear of the model: 'lm_hed': nearest lm_head"),
        ("passes.rtn.targets=lm_head", "every linear that `targets` matches is ignored as well"),
        ("passes.rtn.targets='re:('", r"rtn: re:\( is not a valid regular expression"),
        ("calibration.text=empty.txt", r"empty\.txt: the text is empty; give one with more to read"),
        ("calibration.text=blank.txt", r"blank\.txt: the text is empty"),
        ("calibration.text=nowhere.txt", r"'nowhere\.txt' is missing; looked at .*/nowhere\.txt"),
        ("calibration=python_doc", "no data set 'python_doc' is shipped; nearest: python_docs"),
        ("calibration=python_docs_heldout", "held out, for evaluation only"),
        ("calibration.samples=100000", "100000 samples are wanted; set samples to [0-9]+ or less"),
        ("evaluation.text=empty.txt", r"empty\.txt: the text is empty"),
        ("target=webgup", "no target is called 'webgup'; nearest: webgpu"),
        ("target={x86: {isa: avx3}}", "'avx3' does not fit"),
        ("gates={perplexty: <= 3}", "unknown metric; nearest: perplexity"),
        ("gates={perplexity: about 3}", "is not a condition; write <=, >=, < or >, a number and a unit"),
        ("gates={weight_bytes: <= 3%}", "unit '%' does not fit weight_bytes"),
        ("tune=fast", "'fast' does not fit"),
        ("model", "=.*missing|KEY=VALUE|dotted"),
        ("evaluation.tokens=63", "63 tokens of .*: a figure of fewer than 64 says nothing; give more text"),
        *MODEL_REFUSES,
    ],
)
def test_bad_recipes(change: str, message: str, invoke: Callable[..., Result], tmp_path: Path) -> None:
    result = invoke("run", "recipe.yaml", "--set", change, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    said = one_message(result)
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_bad_recipe_files_say_where(invoke: Callable[..., Result], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for content, message in (
        ("", r"recipe\.yaml:1: expected `key: value` lines"),
        ("model: [", r"recipe\.yaml:\d+: "),
        ("model: x\n", r"passes: missing; add it"),
        ("model: x\npasses: []\ntune: fast\n", r"recipe\.yaml:3: tune"),
        ("model: x\npasses:\n  - rtn: {scheme: W4A16_G32}\n  - rnt: {}\n", r"recipe\.yaml:4: .*'rnt'; nearest: rtn"),
    ):
        recipe.write_text(content)
        result = invoke("run", recipe, "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert re.search(message, one_message(result)), result.stderr
    for missing in ("quickstar", "nowhere/recipe.yaml"):
        result = invoke("run", missing, "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert "no such file, and no shipped recipe has that name" in one_message(result)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_bad_outputs_are_refused_before_any_work(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.run.prepare.capture", lambda *_args, **_options: pytest.fail("began to work"))
    file = tmp_path / "file"
    file.write_text("precious")
    mine = tmp_path / "mine"
    (mine / "notes").mkdir(parents=True)
    for output, message in (
        (file, "is not a folder; choose another name"),
        (file / "below", "is not a folder that you may write to"),
        (mine, "holds something else than a bundle; choose another name"),
        (".", "name one of its own"),
        ("/", "name one of its own"),
    ):
        result = invoke("run", "recipe.yaml", "-o", output)
        assert result.exit_code == 2
        assert message in one_message(result)
    assert "give one with -o" in one_message(invoke("run", "recipe.yaml"))
    result = invoke("run", "recipe.yaml", "-o", tmp_path / "out", "--dump", file)
    assert result.exit_code == 2 and "choose another" in one_message(result)
    (tmp_path / "out.rejected").write_text("a rejected bundle would have no place")
    result = invoke("run", "recipe.yaml", "-o", tmp_path / "out", "--set", "gates={perplexity: <= 1}")
    assert result.exit_code == 2 and "out.rejected: is not a folder" in one_message(result)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine", "out.rejected"]
    assert file.read_text() == "precious"


def test_an_output_in_a_read_only_folder(invoke: Callable[..., Result], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    result = invoke("run", "recipe.yaml", "-o", locked / "out")
    assert result.exit_code == 2 and "you may write to" in one_message(result)


def test_bad_input_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    done = process("run", folder / "recipe.yaml", "--model", folder / "truncated", "-o", tmp_path / "out", "--json")
    stated = json.loads(done.stdout)["error"]
    assert done.returncode == stated["exit_code"] == 2 and "safetensors" in stated["message"]
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_that_the_hub_does_not_give(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = invoke("run", "recipe.yaml", "--model", "no-such/model", "-o", tmp_path / "out")
    assert result.exit_code == 2
    said = one_message(result)
    assert said.startswith("no-such/model: no such folder here, and the Hugging Face hub does not give it"), said
    assert not list(tmp_path.iterdir())


def shorten(bundle: Path) -> None:
    with (bundle / "weights.safetensors").open("r+b") as file:
        file.truncate(1000)


def flip_a_bit(bundle: Path) -> None:
    content = bytearray((bundle / "weights.safetensors").read_bytes())
    content[-3] ^= 1
    (bundle / "weights.safetensors").write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shorter weights": shorten,
    "one bit of the weights": flip_a_bit,
    "no library": lambda bundle: (bundle / "model.so").unlink(),
    "unreadable manifest": lambda bundle: (bundle / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_bundles(damage: str, bundle: Path, invoke: Callable[..., Result], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    DAMAGES[damage](copy)
    for command in (("generate", "--prompt", "a"), ("bench",), ("eval", "--data", "text.txt"), ("inspect",)):
        result = invoke(command[0], copy, *command[1:], "--json")
        assert result.exit_code == 4, (command, result.output)
        assert "copy the bundle again" in one_message(result)


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("bench",), ("eval",), ("inspect",)])
def test_folders_that_are_no_bundles(command: tuple[str, ...], invoke: Callable[..., Result]) -> None:
    for path, message in (
        ("empty", "no manifest.json"),
        ("nowhere", "nowhere: no such folder"),
        ("text.txt", "text.txt: no such folder"),
    ):
        result = invoke(command[0], path, *command[1:])
        assert result.exit_code == 2
        assert message in one_message(result)
    near = "refernce: no such folder" + ("; nearest shipped model: reference" if command[0] != "generate" else "")
    assert one_message(invoke(command[0], "refernce", *command[1:])).endswith(near)
    if command[0] == "generate":
        assert "no manifest.json" in one_message(invoke("generate", "model", "--prompt", "a"))


def test_bad_requests(bundle: Path, invoke: Callable[..., Result]) -> None:
    for arguments, message in (
        (("generate", bundle, "--prompt", "word " * 100), "the model ends at 64 positions; give fewer tokens"),
        (("generate", bundle, "--prompt", "a", "--temperature", "-1"), "--temperature"),
        (("generate", bundle, "--prompt", "a", "--top-p", "0"), "--top-p"),
        (("generate", bundle), "--prompt"),
        (("bench", bundle, "--prompt-tokens", "60", "--new-tokens", "5"), "65 tokens are more than the model's 64"),
        (("bench", bundle, "--threads", "0"), "--threads"),
        (("eval", bundle, "--data", "empty.txt"), "empty.txt: the text is empty"),
        (("eval", bundle, "--data", "python_doc"), "nearest: python_docs"),
        (("eval", bundle, "--data", "text.txt", "--tokens", "1"), "--tokens"),
        (("eval", "small_vocabulary", "--data", "text.txt"), "the tokenizer does not match the model"),
        (("list", "models"), "is not one of 'passes', 'formats'"),
        (("show", "rtm"), "nearest: rtn"),
        (("show", "W8A16_B1x1@100"), "100% of the weights are zero; give more than 0, below 100"),
        (("show", "W8A16_5:4"), "5:4 keeps 5 of every 4 weights"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in one_message(result)


# --- runs that end badly


def test_a_failed_gate_keeps_the_bundle_apart(
    bundle: Path, invoke: Callable[..., Result], tmp_path: Path, no_timing: None
) -> None:
    earlier = Path(shutil.copytree(bundle, tmp_path / "out"))
    manifest = (earlier / "manifest.json").read_bytes()
    gates = "gates={perplexity_increase: < 100%, bundle_bytes: <= 100B, top1_agreement: '>= 1%'}"
    options = ("--set", gates, "--set", "passes.rtn.scheme=W8A16", "--junit", tmp_path / "junit.xml")
    result = invoke("run", "recipe.yaml", "-o", earlier, *options, "--json")
    assert result.exit_code == 3
    assert "error: bundle_bytes: expected <= 100B, measured " in result.stderr
    assert "perplexity_increase" not in result.stderr  # that one passed
    assert f"the bundle is kept as {earlier}.rejected" in result.stderr
    content = json.loads(result.stdout)
    assert content["gates"] == {"perplexity_increase": True, "bundle_bytes": False, "top1_agreement": True}
    assert Path(content["bundle"]) == tmp_path / "out.rejected"
    assert (earlier / "manifest.json").read_bytes() == manifest  # the good one stays
    assert json.loads(invoke("inspect", tmp_path / "out.rejected", "--json").stdout)["sites"][0]["format"] == "W8A16"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "out", "out.rejected"]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    failed = {case.attrib["name"]: failure.attrib for case in suite for failure in case.iter("failure")}
    assert list(failed) == ["bundle_bytes <= 100B"] and suite.attrib["failures"] == "1"
    assert failed["bundle_bytes <= 100B"]["message"] in result.stderr


def test_a_run_that_never_begins_still_leaves_its_files(invoke: Callable[..., Result], tmp_path: Path) -> None:
    files = ("--junit", tmp_path / "junit.xml", "--report", tmp_path / "report.json")
    done = invoke("run", "recipe.yaml", "-o", tmp_path / "out", "--set", "gates={speed: 3}", *files)
    assert (done.exit_code, done.stdout) == (2, "")
    (case,) = ElementTree.parse(tmp_path / "junit.xml").getroot()
    (found,) = case
    assert (found.tag, found.attrib["type"]) == ("error", "RecipeError")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 2 and report["error"] == found.text
    for name in METRICS:
        assert name in report["error"] and name in done.stderr
    assert not (tmp_path / "out").exists()


def test_reports_that_cannot_be_written_are_refused_before_any_work(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.run.prepare.capture", lambda *_args, **_options: pytest.fail("began to work"))
    for option in ("--junit", "--report"):
        for place, message in ((tmp_path, "is not a file"), (tmp_path / "out" / "x", "lies inside the bundle")):
            result = invoke("run", "recipe.yaml", "-o", tmp_path / "out", option, place)
            assert result.exit_code == 2 and message in one_message(result)
    assert not list(tmp_path.iterdir())


def test_kernels_that_are_wrong_fail_verification(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: dict[str, Any]
) -> None:
    def off_by_a_little(graph: GraphModule) -> dict[str, torch.Tensor]:
        vectors = make_vectors(graph)
        return {**vectors, "output_0": vectors["output_0"] * 1.01}

    monkeypatch.setattr("compressor.run.native.make_vectors", off_by_a_little)
    result = invoke("run", "recipe.yaml", "-o", tmp_path / "out", "--json")
    assert result.exit_code == 4
    assert "the kernels do not compute what the graph does: relative error" in one_message(result)
    assert not list(tmp_path.iterdir())


def test_a_run_without_memory_leaves_nothing(
    invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a signal ends, in end_to_end/test_interrupted.py."""

    def interrupt(*_args: object, **_options: object) -> None:
        assert [path.name.startswith(".out.") for path in tmp_path.iterdir()] == [True]  # the last step but one
        raise MemoryError

    monkeypatch.setattr("compressor.run.job.check_gates", interrupt)
    result = invoke("run", "recipe.yaml", "--target", "null", "-o", tmp_path / "out")
    assert result.exit_code == 5 and result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_no_compiler(invoke: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr("shutil.which", lambda name: None if "+" in name else found(name))
    if importlib.util.find_spec("ziglang"):
        pytest.skip("the package ziglang is installed")
    result = invoke("run", "recipe.yaml", "-o", tmp_path / "out")
    assert result.exit_code == 1
    said = one_message(result)
    assert "no C++ compiler" in said and "g++" in said and "compressor[zig]" in said
    assert not list(tmp_path.iterdir())
