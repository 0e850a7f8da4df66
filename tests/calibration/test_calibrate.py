"""Reading text, and streaming samples through a graph, against running the whole graph at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from compressor.calibration.calibrate import CalibrationOptions, CalibrationRun
from compressor.calibration.statistics import Hessian
from compressor.capture.capture import capture
from compressor.data.text import load_evaluation, load_samples, longest_window
from compressor.errors import UsageError
from compressor.formats.format import Format
from compressor.graph.model import clone_graph
from compressor.graph.rewrite import replace_linear
from compressor.graph.sites import linear_sites, match_sites
from compressor.numerics.nearest import rtn_quantize
from compressor.recipe.data_spec import EvaluationSpec, TextSpec

transformers = pytest.importorskip("transformers")

TEXT = "".join(f"line {i} of the text, with the number {i * i}\n" for i in range(200))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def spec(**options: Any) -> TextSpec:
    return TextSpec(**{"samples": 8, "sequence_length": 16, "seed": 3, **options})


def test_windows_and_rest_are_the_text(tokenizer: Path, file: Path) -> None:
    samples = load_samples(spec(text=str(file)), tokenizer, 300)
    whole = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(TEXT.strip()).ids
    assert samples.ids.shape == (8, 16)
    windows = {tuple(whole[i : i + 16]): i for i in range(0, len(whole) - 15, 16)}
    starts = [windows[tuple(row)] for row in samples.ids.tolist()]
    assert starts == sorted(set(starts))
    drawn = {i for start in starts for i in range(start, start + 16)}
    assert samples.rest.tolist() == [token for i, token in enumerate(whole) if i not in drawn]
    assert samples.source == str(file)


def test_the_seed_decides_and_the_hash_tells(tokenizer: Path, file: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (load_samples(spec(text=str(file), seed=seed), tokenizer) for seed in (0, 0, 1))
    assert first.sha256 == again.sha256 != other.sha256
    assert torch.equal(first.ids, again.ids)
    assert torch.equal(torch.get_rng_state(), state)


def test_json_and_parquet_rows_give_the_same_windows(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{"id": i, "story": f"story number {i} " * 5} for i in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = load_samples(spec(json=str(tmp_path / "a.jsonl"), field="story"), tokenizer)
    table = load_samples(spec(parquet=str(tmp_path / "a.parquet"), field="story"), tokenizer)
    assert torch.equal(lines.ids, table.ids)
    with pytest.raises(UsageError, match=r"no text in field 'text'.*id, story"):
        load_samples(spec(json=str(tmp_path / "a.jsonl")), tokenizer)


LAST = " ".join(["the last, which is long enough for a figure that says something"] * 4)


def test_each_document_gets_its_special_tokens(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    path.write_text(f"one story\n<|endoftext|>\n\nanother one\nof two lines\n<|endoftext|>\n{LAST}", encoding="utf-8")
    tokens, _ = load_evaluation(EvaluationSpec(text=str(path)), None, tokenizer)
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    documents = ("one story", "another one\nof two lines", LAST)
    assert tokens.tolist() == [token for document in documents for token in encode(document).ids]


def test_evaluation_takes_its_own_text_or_what_is_left(tokenizer: Path, file: Path) -> None:
    samples = load_samples(spec(text=str(file)), tokenizer)
    tokens, source = load_evaluation(EvaluationSpec(tokens=100), samples, tokenizer)
    assert torch.equal(tokens, samples.rest[:100])
    assert "did not sample" in source
    tokens, source = load_evaluation(EvaluationSpec(text=str(file), tokens=70), samples, tokenizer)
    assert len(tokens) == 70
    assert source == str(file)
    with pytest.raises(UsageError, match="no text"):
        load_evaluation(EvaluationSpec(), None, tokenizer)


def test_text_that_cannot_be_used_is_refused(tokenizer: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        load_samples(spec(text=str(tmp_path / "none.txt")), tokenizer)
    (tmp_path / "empty.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(UsageError, match="empty"):
        load_samples(spec(text=str(tmp_path / "empty.txt")), tokenizer)
    with pytest.raises(UsageError, match=r"9999 samples are wanted; set samples to \d+ or less"):
        load_samples(spec(text=str(file), samples=9999), tokenizer)
    with pytest.raises(UsageError, match="held out"):
        load_samples(spec(text=str(file), held_out=True), tokenizer)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00\x81" * 99)
    with pytest.raises(UsageError, match="cannot be read as text"):
        load_samples(spec(text=str(tmp_path / "bad.txt")), tokenizer)


@pytest.mark.parametrize(("samples", "spare"), [(1, 0), (7, 64), (400, 64), (9999, 0)])
def test_settings_that_a_refusal_names_work(samples: int, spare: int, tokenizer: Path, file: Path) -> None:
    with pytest.raises(UsageError, match="samples are wanted") as refused:
        load_samples(spec(text=str(file), samples=samples, sequence_length=100_000), tokenizer, 0, spare)
    named = dict(re.findall(r"(samples|sequence_length) to (\d+) or less", str(refused.value)))
    assert bool(named) == (samples < 9999)
    for key, value in named.items():
        asked = {"samples": samples, "sequence_length": 100_000, key: int(value)}
        drawn = load_samples(spec(text=str(file), **asked), tokenizer, 0, spare)
        assert drawn.ids.shape == (asked["samples"], asked["sequence_length"]) and len(drawn.rest) >= spare
        with pytest.raises(UsageError, match="samples are wanted"):
            load_samples(spec(text=str(file), **{**asked, key: int(value) + 1}), tokenizer, 0, spare)


@pytest.mark.parametrize(("samples", "at_most"), [(2, 30), (2, 100_000), (7, 100_000)])
def test_the_longest_window_works_and_no_longer_one(samples: int, at_most: int, tokenizer: Path, file: Path) -> None:
    given = spec(text=str(file), samples=samples, sequence_length=1_000_000)
    longest = longest_window(given, tokenizer, 0, 5, at_most)
    drawn = load_samples(spec(text=str(file), samples=samples, sequence_length=longest), tokenizer, 0, 5)
    assert drawn.ids.shape == (samples, longest) and longest <= at_most
    if longest < at_most:
        with pytest.raises(UsageError, match="samples are wanted"):
            load_samples(spec(text=str(file), samples=samples, sequence_length=longest + 1), tokenizer, 0, 5)


def test_a_text_too_short_for_any_window_is_refused_as_such(tokenizer: Path, file: Path) -> None:
    with pytest.raises(UsageError, match=r"9999 samples are wanted.*give more text"):
        longest_window(spec(text=str(file), samples=9999), tokenizer, 0, 0, 64)


def test_a_foreign_tokenizer_is_refused(tokenizer: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not match the model.*vocabulary has 50"):
        load_samples(spec(text=str(file)), tokenizer, 50)
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        load_samples(spec(text=str(file)), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="not a tokenizer"):
        load_samples(spec(text=str(file)), tmp_path)


def model(kind: str = "llama") -> GraphModule:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32}
    configs = {
        "llama": lambda: transformers.LlamaConfig(
            **sizes, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2
        ),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=32),
        "bert": lambda: transformers.BertConfig(**sizes, intermediate_size=48, num_hidden_layers=2),
    }
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = auto.from_config(configs[kind](), attn_implementation="eager").eval()
        for parameter in built.parameters():
            parameter.data.normal_(0, 0.3)
    return capture(built)


def whole(graph: GraphModule, ids: Tensor) -> dict[str, Tensor]:
    """Compute the Hessian of every site, from one run of the whole graph over all samples."""
    seen: dict[str, Tensor] = {}
    inputs = {site.node: site for site in linear_sites(graph)}

    class Watch(Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            if n in inputs:
                x = self.env[n.args[0]].reshape(-1, inputs[n].in_features)
                seen[inputs[n].name] = 2 / len(x) * x.T @ x
            return super().run_node(n)

    info, position = graph.meta["model"], torch.arange(ids.shape[1])
    caches = [torch.zeros(len(ids), info.kv_heads, 1, info.head_dim)] * (2 * info.layers)
    arguments = [ids, torch.ones(ids.shape)] if info.kind == "encoder" else [ids, position, position, *caches]
    with torch.no_grad():
        Watch(graph).run(*arguments, enable_io_processing=False)
    return seen


IDS = torch.randint(0, 60, (7, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("true_sequential", [True, False])
def test_statistics_are_those_of_the_whole_graph(kind: str, true_sequential: bool) -> None:
    graph = model(kind)
    expected, sites = whole(graph, IDS), linear_sites(graph)
    found = {}
    for group, hessian in CalibrationRun(
        graph, IDS, sites, Hessian, CalibrationOptions(true_sequential=true_sequential, micro_batch_tokens=36)
    ).groups():
        assert hessian.tokens == IDS.numel()
        found.update({site.name: hessian.value for site in group})
    assert list(found) == [site.name for site in sites]
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_rows_count_as_often_as_their_weights_say() -> None:
    graph = model()
    sites, generator = linear_sites(graph)[:4], torch.Generator().manual_seed(1)
    # As often as a sample is repeated, which whole numbers can say without weights.
    counts = torch.randint(1, 4, (len(IDS),), generator=generator)
    weights = {site.name: counts.repeat_interleave(IDS.shape[1]).float() for site in sites}
    repeated = IDS.repeat_interleave(counts, dim=0)
    options = {"with_dense": clone_graph(graph), "micro_batch_tokens": 36}
    replace_linear(graph, sites[0], rtn_quantize(graph.get_parameter(sites[0].weight_name), Format.parse("W2A16_G32")))
    sites = linear_sites(graph)[:3]
    weighted = CalibrationRun(graph, IDS, sites, Hessian, CalibrationOptions(row_weights=weights, **options)).groups()  # type: ignore[arg-type]
    plain = CalibrationRun(graph, repeated, sites, Hessian, CalibrationOptions(**options)).groups()  # type: ignore[arg-type]
    for (group, one), (_, other) in zip(weighted, plain, strict=True):
        scale = int(counts.sum()) / len(IDS)
        assert one.cross is not None and other.cross is not None
        torch.testing.assert_close(one.value, other.value * scale, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.cross, other.cross * scale, rtol=1e-4, atol=1e-4)
        assert group[0].name.endswith("k_proj") or float(one.cross.abs().max()) > 0


def test_equal_weights_change_no_bit() -> None:
    graph = model()
    sites = linear_sites(graph)
    ones = {site.name: torch.ones(IDS.numel()) for site in sites}
    for (_, one), (_, other) in zip(
        CalibrationRun(graph, IDS, sites, Hessian, CalibrationOptions(row_weights=ones)).groups(),
        CalibrationRun(graph, IDS, sites, Hessian).groups(),
        strict=True,
    ):
        assert torch.equal(one.value, other.value)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_later_groups_see_earlier_linears_replaced(kind: str) -> None:
    graph, mirror, fmt = model(kind), model(kind), Format.parse("W3A16_G32")
    dense = whole(graph, IDS)
    for group, hessian in CalibrationRun(
        graph, IDS, linear_sites(graph), Hessian, CalibrationOptions(with_dense=True)
    ).groups():
        expected = whole(mirror, IDS)
        for site in group:
            torch.testing.assert_close(hessian.value, expected[site.name], rtol=1e-4, atol=1e-4)
            packed = rtn_quantize(graph.get_parameter(site.weight_name).detach(), fmt)
            replace_linear(graph, site, packed)
            mirrored = next(s for s in linear_sites(mirror) if s.name == site.name)
            replace_linear(mirror, mirrored, packed)
        # X_dense = X + D, so that X_dense^T X_dense = X^T X + D^T X + X^T D + D^T D; the last term is positive.
        assert hessian.cross is not None
        rest = dense[group[0].name] - hessian.value - hessian.cross - hessian.cross.T
        assert torch.linalg.eigvalsh(rest.double())[0] > -1e-3
    assert not linear_sites(graph)


class Shortcut(torch.nn.Module):
    """A shortcut that stands in front of the first linear of its block, and is not read before the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.linears[0](x))
        beside = h * 2
        return self.linears[3](self.linears[2](torch.relu(self.linears[1](h))) + beside)


def test_what_a_block_reads_late_stays_until_then() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Shortcut().eval().requires_grad_(False)
    x, seen = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)), {}
    for name, linear in module.linears.named_children():
        linear.register_forward_hook(lambda _, given, __, name=name: seen.update({f"linears.{name}": given[0]}))
    module(x)
    expected = {name: 2 / 6 * rows.T @ rows for name, rows in seen.items()}  # before capture calls the hooks
    graph = capture(module, (x[:2],))
    found = {
        group[0].name: hessian.value
        for group, hessian in CalibrationRun(graph, x, linear_sites(graph), Hessian).groups()
    }
    assert list(found) == list(expected)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


def test_only_what_the_sites_need_is_run() -> None:
    graph = model()
    sites, _ = match_sites(linear_sites(graph), "model.layers.0.self_attn")
    groups = [[site.name for site in group] for group, _ in CalibrationRun(graph, IDS, sites, Hessian).groups()]
    prefix = "model.layers.0.self_attn"
    assert groups == [[f"{prefix}.{leaf}_proj" for leaf in "qkv"], [f"{prefix}.o_proj"]]


def test_samples_that_the_model_cannot_read_are_refused() -> None:
    graph = model()
    with pytest.raises(UsageError, match="40 tokens exceed the model's 32 positions"):
        next(CalibrationRun(graph, torch.zeros(1, 40, dtype=torch.int64), linear_sites(graph), Hessian).groups())
    plain = capture(torch.nn.Sequential(torch.nn.Linear(4, 4)), (torch.zeros(2, 4),))
    with pytest.raises(UsageError, match="which reads no tokens"):
        next(CalibrationRun(plain, IDS, linear_sites(plain), Hessian).groups())
