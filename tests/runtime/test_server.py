"""A bundle served by OpenAI's API, asked by the official client, and by clients that mean no good."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from compressor_runtime.batching import worker
from compressor_runtime.batching.request import Piece, Request
from compressor_runtime.batching.rows import CHUNK_TOKENS, Rows
from compressor_runtime.batching.turns import Turns
from compressor_runtime.errors import RequestError
from compressor_runtime.generation import TextStream, checked_sampler
from compressor_runtime.server import command
from tiny_bundle import POSITIONS, TinyLanguageModel, write_tiny_bundle
from tiny_encoder import TinyEncoder, write_tiny_encoder

from compressor.cli.commands import main
from compressor.runtime import Bundle, load

try:
    import openai
    from serving import Running, serving
except ImportError as error:
    if os.environ.get("CI"):
        raise
    pytest.skip(f"{error}: pip install 'compressor[serve]' openai", allow_module_level=True)

LONG = 6000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ bos_token }}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], Path]) -> Path:
    require_tool("g++")
    folder = tmp_path_factory.mktemp("served")
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return write_tiny_bundle(folder, TinyLanguageModel(), verifies=True, positions=LONG)


@pytest.fixture(scope="module")
def served(folder: Path) -> Bundle:
    return load(folder, threads=1)


@pytest.fixture(scope="module")
def running(served: Bundle) -> Iterator[Running]:
    with serving(served, batch=3, queue=9, max_body=1 << 20, head_s=1.0, body_s=0.5, grace_s=1.0) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=20) as found:
        yield found


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 12} | options
    )


def generated(bundle: Bundle, prompt: Any, **options: Any) -> str:
    return "".join(bundle.generate(prompt, **{"max_tokens": 12, "speculate": "off"} | options))


def test_a_completion_is_what_the_bundle_generates(client: openai.OpenAI, served: Bundle) -> None:
    ids = served.tokenizer.encode("the rain").ids
    for prompt in ("the rain", ids):
        found = complete(client, prompt)
        assert found.choices[0].text == generated(served, "the rain")
        assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 12)
    several = complete(client, ["the rain", "ça", ""])
    assert [c.text for c in several.choices] == [generated(served, p) for p in ("the rain", "ça", "")]
    assert [m.id for m in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "compressor"


def test_a_stream_is_the_same_text(client: openai.OpenAI, served: Bundle) -> None:
    chunks = [*complete(client, "한국어", max_tokens=30, stream=True, stream_options={"include_usage": True})]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == generated(served, "한국어", max_tokens=30)
    assert [c.choices[0].finish_reason for c in chunks[-2:-1]] == ["length"] and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30 and all(c.usage is None for c in chunks[:-1])


@pytest.mark.parametrize("streams", [False, True])
def test_logprobs_are_those_of_the_model(client: openai.OpenAI, served: Bundle, streams: bool) -> None:
    model, ids = TinyLanguageModel(), served.tokenizer.encode("and so").ids
    found = complete(client, "and so", logprobs=3, max_tokens=8, stream=streams)
    parts = [c.choices[0].logprobs for c in found if c.choices[0].logprobs] if streams else [found.choices[0].logprobs]
    tokens = [*served.generate_ids(ids, max_tokens=8, speculate="off")]
    assert [t for part in parts for t in part.tokens] == [served.tokenizer.decode([t]) for t in tokens]
    logprobs, tops = ([x for p in parts for x in getattr(p, name)] for name in ("token_logprobs", "top_logprobs"))
    for place, token in enumerate(tokens):
        logits = model.logits([*ids, *tokens[:place]])
        expected = logits - np.log(np.exp(logits).sum())
        assert logprobs[place] == pytest.approx(expected[token], abs=1e-3)
        likeliest = {served.tokenizer.decode([int(i)]): expected[i] for i in np.argsort(-expected)[:3]}
        assert tops[place] == pytest.approx(likeliest, abs=1e-3)


def test_a_chat_goes_through_the_template(client: openai.OpenAI, served: Bundle) -> None:
    written = served.tokenizer.encode("<s>user: so on\na: ", add_special_tokens=False).ids
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "so "}, {"type": "text", "text": "on"}]}]
    found = client.chat.completions.create(
        model="tiny", messages=parts, temperature=0, max_completion_tokens=9, logprobs=True, top_logprobs=2
    )
    choice = found.choices[0]
    assert choice.message.content == generated(served, written, max_tokens=9) and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 9 and {len(t.top_logprobs) for t in choice.logprobs.content} == {2}
    assert found.usage is not None and found.usage.prompt_tokens == len(written)
    stream: Any = client.chat.completions.create(model="tiny", messages=parts, temperature=0, max_tokens=9, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(d.content for d in deltas) == choice.message.content
    assert [d.role for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    with pytest.raises(openai.BadRequestError, match="template refuses them: no tools"):
        client.chat.completions.create(model="tiny", messages=[{"role": "tool", "content": "x", "tool_call_id": None}])  # type: ignore


def test_stops_end_a_text(client: openai.OpenAI, served: Bundle) -> None:
    whole = generated(served, "the rain", max_tokens=40)
    stop = whole[9:12]
    expected = generated(served, "the rain", max_tokens=40, stop=stop)
    assert expected == whole[: whole.index(stop)] and expected
    found = complete(client, "the rain", max_tokens=40, stop=[stop, "never"], logprobs=0).choices[0]
    assert (found.text, found.finish_reason) == (expected, "stop")
    assert all(place < len(expected) for place in found.logprobs.text_offset)
    pieces = [*complete(client, "the rain", max_tokens=40, stop=stop, stream=True)]
    assert "".join(c.choices[0].text for c in pieces) == expected and pieces[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_a_text_and_numbers_its_choices(client: openai.OpenAI, served: Bundle) -> None:
    options = {"temperature": 1.3, "top_p": 0.9}
    found = complete(client, "the", n=3, seed=7, **options)
    texts = [generated(served, "the", seed=7 + n, **options) for n in range(3)]
    assert [choice.text for choice in found.choices] == texts and len({*texts}) == 3
    assert complete(client, "the", seed=-1, **options).choices[0].text == generated(
        served, "the", seed=(1 << 64) - 1, **options
    )


def test_requests_at_once_have_the_texts_of_single_ones(client: openai.OpenAI, served: Bundle) -> None:
    prompts = ["the rain in Spain " * n + mark for n in (1, 3, 60) for mark in ("", "ça", "🙂")]
    lengths = [3 + 11 * i for i in range(9)]
    assert max(len(served.tokenizer.encode(p).ids) for p in prompts) > 2 * CHUNK_TOKENS  # they are read in chunks
    with ThreadPoolExecutor(9) as pool:
        found = pool.map(lambda p, n: complete(client, p, max_tokens=n).choices[0].text, prompts, lengths)
    assert [*found] == [generated(served, p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]


def test_a_client_that_goes_frees_its_row(client: openai.OpenAI, running: Running, served: Bundle) -> None:
    gone = running.metric("compressor_cancelled_total")
    stream = complete(client, "so", max_tokens=LONG, stream=True)
    next(iter(stream))
    assert running.metric("compressor_running") == 1
    begin = time.monotonic()
    stream.close()
    running.wait_for("compressor_running", 0)
    assert running.metric("compressor_generated_tokens_total") < LONG, time.monotonic() - begin
    with socket.create_connection(("127.0.0.1", running.port)) as connection:  # one that waits for a whole answer
        # greedy, as `complete` asks: a sampled text may end before its row is seen
        body = json.dumps({"model": "tiny", "prompt": "so", "max_tokens": LONG, "temperature": 0}).encode()
        connection.sendall(HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        running.wait_for("compressor_running", 1)
    running.wait_for("compressor_running", 0)
    assert running.metric("compressor_cancelled_total") == gone + 2
    assert complete(client, "the rain").choices[0].text == generated(served, "the rain")


def test_a_full_queue_is_said_with_a_time(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.RateLimitError, match="0 requests wait already, of at most 9"):
        complete(client, "x", n=10)

    def wait_in_vain() -> None:
        with contextlib.suppress(openai.APITimeoutError):
            complete(client, "x", n=9, timeout=2)

    stream = complete(client, "so", max_tokens=LONG, n=3, stream=True)
    try:
        next(iter(stream))
        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        running.wait_for("compressor_queue_length", 9)
        status, headers, text = running.ask("POST", "/v1/completions", {"model": "tiny", "prompt": "x"})
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 60 and "try again in" in text
        waiting.join()
        running.wait_for("compressor_queue_length", 0)  # its client went: nothing of it is computed
    finally:
        stream.close()
    running.wait_for("compressor_running", 0)


DEEP = b'{"model": "tiny", "prompt": ' + b"[" * 100_000
COMPLETIONS: list[tuple[Any, str | None]] = [
    ({}, "prompt"),
    ({"prompt": "x"}, "model"),
    ({"model": 3, "prompt": "x"}, "model"),
    *(
        ({"model": "tiny", "prompt": p}, "prompt")
        for p in (3, {}, [], [[]], [1, "x"], [[1], 2], [-1], [300], [1 << 70], [True])
    ),
    ({"model": "tiny", "prompt": [5] * (LONG + 1)}, "prompt"),
    *(({"model": "tiny", "prompt": "x", "max_tokens": n}, "max_tokens") for n in (0, -1, 1 << 80, 1.5, "9", True, [])),
    *(({"model": "tiny", "prompt": "x", "temperature": t}, "temperature") for t in (-1, 2.1, "0", True, 10**400)),
    *(({"model": "tiny", "prompt": "x", "top_p": p}, "top_p") for p in (0, 1.1, [1])),
    *(({"model": "tiny", "prompt": "x", "seed": s}, "seed") for s in (1 << 63, "7", 1.0)),
    *(({"model": "tiny", "prompt": "x", "stop": s}, "stop") for s in ("", [""], 3, ["x"] * 17, {"a": 1})),
    *(({"model": "tiny", "prompt": "x", "n": n}, "n") for n in (0, 33, "2")),
    ({"model": "tiny", "prompt": ["x"] * 5, "n": 7}, "n"),
    ({"model": "tiny", "prompt": "x", "logprobs": True}, "logprobs"),
    ({"model": "tiny", "prompt": "x", "stream": 1}, "stream"),
    ({"model": "tiny", "prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"model": "tiny", "prompt": "x", "echo": True}, "echo"),
    ({"model": "tiny", "prompt": "x", "temprature": 0}, "temprature"),
    ([1], None),
    (b"\xff\xfe", None),
    (b'{"model": "tiny", "prompt": "x"', None),
    (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', None),
    (b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", None),
    (DEEP, None),
]


CHATS: list[Any] = [
    None,
    [],
    ["x"],
    [{"role": "user"}],
    [{"role": 1, "content": "x"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "x", "odd": 1}],
]


def test_wrong_requests_are_answered_in_words(running: Running) -> None:
    for body, param in COMPLETIONS:
        status, _, text = running.ask("POST", "/v1/completions", body)
        told = json.loads(text)["error"]
        assert (status, told["param"], told["type"]) == (400, param, "invalid_request_error"), (body, text)
        assert told["message"] and len(told["message"]) < 300
    for messages in CHATS:
        status, _, text = running.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": messages})
        assert status == 400 and json.loads(text)["error"]["message"], messages
    assert running.metric("compressor_running") == 0


def test_other_addresses_methods_and_types_are_refused(running: Running, client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "x"}
    for status, method, path, headers in (
        (404, "GET", "/v1/nothing", {}),
        (405, "GET", "/v1/completions", {}),
        (415, "POST", "/v1/completions", {"content-type": "text/plain"}),
        (403, "GET", "/v1/models", {"host": "evil.example"}),
        (400, "POST", "/v1/embeddings", {}),
    ):
        found, told, text = running.ask(method, path, asked if method == "POST" else None, headers)
        assert found == status and json.loads(text)["error"]["message"] and told["x-request-id"], path
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        complete(client, "x", model="other")
    assert running.ask("GET", "/health", headers={"x-request-id": "mine-1"})[1]["x-request-id"] == "mine-1"
    assert running.ask("GET", "/health", headers={"x-request-id": "a b"})[1]["x-request-id"] != "a b"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_not_kept(running: Running, declared: bool) -> None:
    before = running.metric("process_resident_memory_bytes")
    headers = {"content-length": str(100 << 20)} if declared else {"transfer-encoding": "chunked"}
    parts = (b" " * (1 << 20) for _ in range(100))
    status, _, text = running.ask("POST", "/v1/completions", parts, headers)
    assert status == 413 and "more than 1048576 bytes" in text
    assert running.metric("process_resident_memory_bytes") < before + (40 << 20)


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comple", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-a: 1\r\n"]
)
def test_heads_that_do_not_come_are_given_up(running: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=15) as connection:
        begin = time.monotonic()
        for byte in sent:
            connection.send(bytes([byte]))
        assert connection.recv(100) == b"" and time.monotonic() - begin > 0.5


def test_a_body_that_does_not_come_is_given_up(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=15) as connection:
        connection.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
        assert b" 408 " in connection.recv(1000)


def test_metrics_are_prometheus_text(running: Running, client: openai.OpenAI) -> None:
    names = (
        "compressor_prompt_tokens_total",
        "compressor_generated_tokens_total",
        "compressor_first_token_seconds_count",
    )
    before = [running.metric(name) for name in names]
    complete(client, [5, 6, 7], max_tokens=4, n=2)
    assert [running.metric(name) - was for name, was in zip(names, before, strict=True)] == [6, 8, 2]
    text = running.ask("GET", "/metrics")[2]
    line = re.compile(r'(# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{([a-z]+="[^"]*",?)+\})? (\d[\d.e+-]*|nan))')
    assert all(line.fullmatch(one) for one in text.splitlines())
    buckets = [float(n) for n in re.findall(r"^compressor_request_seconds_bucket\{.*\} (\S+)$", text, re.MULTILINE)]
    assert buckets == sorted(buckets) and buckets[-1] == running.metric("compressor_request_seconds_count") > 0


def test_a_key_is_asked_for(served: Bundle) -> None:
    with serving(served, batch=1, api_key="secret") as running:
        assert running.ask("GET", "/health")[0] == 200 == running.ask("GET", "/health", headers={"host": "a.b"})[0]
        for path in ("/v1/models", "/metrics"):
            assert (
                running.ask("GET", path)[0]
                == 401
                == running.ask("GET", path, headers={"authorization": "Bearer no"})[0]
            )
        with openai.OpenAI(base_url=running.url, api_key="secret", max_retries=0) as client:
            assert complete(client, "the rain").choices[0].text == generated(served, "the rain")


def test_embeddings_are_pooled_hidden_states(tmp_path: Path, folder: Path) -> None:
    model = TinyEncoder()
    bundle = load(write_tiny_encoder(tmp_path, model, folder), threads=1)
    with pytest.raises(RequestError, match="give --pooling mean or cls or max"), serving(bundle):
        pass
    texts: Any = ["the rain", "so", "in Spain stays", "on"]
    rows = [bundle.tokenizer.encode(text).ids for text in texts]
    expected = np.array([model.embed.detach().numpy()[ids].mean(0) for ids in rows])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    with serving(bundle, pooling="mean") as running, openai.OpenAI(base_url=running.url, api_key="x") as client:
        found = client.embeddings.create(model="encoder", input=texts)  # asks for base64
        assert np.abs(np.array([one.embedding for one in found.data]) - expected).max() < 1e-6
        plain = client.embeddings.create(model="encoder", input=rows[2], encoding_format="float").data[0].embedding
        assert plain == found.data[2].embedding and found.usage.prompt_tokens == sum(map(len, rows))
        raw = json.loads(
            running.ask("POST", "/v1/embeddings", {"model": "encoder", "input": "so", "encoding_format": "base64"})[2]
        )
        assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").tolist() == found.data[1].embedding
        for wrong in ({"input": []}, {"input": "x", "dimensions": 3}, {"input": "x", "encoding_format": "int8"},
                      {"input": [9] * (POSITIONS + 1)}, {"input": ["x"] * 2049}):  # fmt: skip
            assert running.ask("POST", "/v1/embeddings", {"model": "encoder", **wrong})[0] == 400, wrong
        with pytest.raises(openai.BadRequestError, match="is an encoder"):
            complete(client, "x", model="encoder")


def requests_of(bundle: Bundle, prompts: list[str], count: int) -> tuple[list[Request], list[str]]:
    """Return requests, and their texts, which come when they have ended."""
    texts = [""] * len(prompts)

    def request(place: int, prompt: str) -> Request:
        def deliver(piece: Piece) -> None:
            texts[place] += piece.text if piece.error is None else f"error: {piece.error}"

        ids = bundle.tokenizer.encode(prompt).ids
        return Request(
            ids, count, checked_sampler(0, 0, 1, None), TextStream(bundle.tokenizer, ids), {1: "eos_token"}, deliver
        )

    return [request(place, prompt) for place, prompt in enumerate(prompts)], texts


def test_a_session_takes_the_sequence_of_another_of_its_bundle(served: Bundle) -> None:
    session, other = served.session(3, 2), served.session(1)
    other.step([[0, 5, 9]])
    session.take(1, other)
    assert session.lengths == [0, 3, 0]
    assert (session.verify([3, 7], [-1, -1], [0, 1])[1] == other.step([[7]])[0, 0]).all()
    for wrong in (session, None, load(served.path, threads=1).session(1)):
        with pytest.raises(RequestError, match="give a session of one sequence, of the same bundle"):
            session.take(0, wrong)
    with pytest.raises(RequestError, match="sequence=3: give a whole number from 0 to 2"):
        session.take(3, other)


@pytest.mark.parametrize("kind", [Rows, Turns])
def test_requests_join_and_leave_at_any_step(served: Bundle, kind: type[Any]) -> None:
    prompts = ["the rain", "so on and on " * 30, "ça", "Spain", "🙂🙃"]
    requests, texts = requests_of(served, prompts, 20)
    decoder, waiting = kind(served, 2), [*requests]
    dropped = requests[2]
    while waiting or decoder.requests:
        while waiting and decoder.free:
            decoder.add(waiting.pop(0))
        decoder.round()
        if dropped.new_tokens == 3 and dropped in decoder.requests:
            decoder.drop(dropped)
    expected = [generated(served, prompt, max_tokens=20) for prompt in prompts]
    assert [t for i, t in enumerate(texts) if i != 2] == [t for i, t in enumerate(expected) if i != 2]
    assert dropped.new_tokens == 3 and expected[2].startswith(texts[2])


def test_what_shares_no_batch_takes_turns_and_says_why(served: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.why_turns(served) == ""
    monkeypatch.setattr(served, "entries", frozenset({"main"}))
    assert "give `speculate: lookup` in its recipe" in worker.why_turns(served)
    assert isinstance(worker.decoder_of(served, 2), Turns)
    with pytest.raises(RequestError, match="from 1 to 32"):
        worker.decoder_of(served, 33)


def test_a_round_that_fails_ends_its_requests_only(served: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Rows(served, 2)
    ours, step = worker.Worker(decoder, 4), decoder.round
    requests, texts = requests_of(served, ["the rain", "so"], 8)

    def fail() -> None:
        monkeypatch.setattr(decoder, "round", step)
        raise RuntimeError("kernels")

    monkeypatch.setattr(decoder, "round", fail)
    ours.submit(requests[:1])
    while not requests[0].ended:
        time.sleep(0.01)
    ours.submit(requests[1:])
    while not requests[1].ended:
        time.sleep(0.01)
    assert texts == ["error: kernels", generated(served, "so", max_tokens=8)] and ours.failures == 1
    assert ours.close(5) == 0
    with pytest.raises(worker.Busy, match="stopping"):
        ours.submit(requests[:1])


ALONE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'compressor', 'tvm')))\n"


def test_a_bundle_serves_itself_and_ends_at_a_signal(folder: Path, served: Bundle, running: Running) -> None:
    code = ALONE + "sys.path.insert(0, sys.argv[1])\nfrom compressor_runtime.server.command import main\n"
    code += "sys.exit(main([sys.argv[1], '--port', sys.argv[2], '--grace-s', '0', '--threads', '1']))"
    start = [sys.executable, "-B", "-c", code, str(folder)]
    environment = {**os.environ, command.KEY_VARIABLE: "secret"}
    with subprocess.Popen(
        [*start, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().strip()
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=20) as client:
            assert complete(client, "the rain").choices[0].text == generated(served, "the rain")
            stream = iter(complete(client, "so", max_tokens=LONG, stream=True, stop=["never this"]))
            next(stream)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="stopped before this was done"):
                for _ in stream:
                    pass
        log = process.stderr.read()
        assert process.wait(20) == 0, log
    assert re.search(r"INFO \w{16} POST /v1/completions 200 prompt=\d+ new=12 ", log) and "Traceback" not in log
    taken = subprocess.run([*start, str(running.port)], capture_output=True, text=True, timeout=60, check=False)
    assert taken.returncode == 2 and "give another with --port" in taken.stderr and "Traceback" not in taken.stderr


def test_the_command_says_what_is_missing(folder: Path, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = CliRunner().invoke(main, ["serve", str(folder), "--port", str(running.port), "--json"])
    assert (
        taken.exit_code == 2
        and "give another with --port, or 0 for any" in json.loads(taken.stdout)["error"]["message"]
    )
    monkeypatch.setattr(command, "_PACKAGES", ("starlette", "no_such_package"))
    lacking = CliRunner().invoke(main, ["serve", str(folder)])
    assert lacking.exit_code == 2 and "serving takes no_such_package: pip install 'compressor[serve]'" in lacking.stderr
    assert not lacking.stdout
