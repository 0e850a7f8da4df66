"""Serve a bundle, and ask it: speed by requests at once, memory under rude clients, hostile input.

    compress run recipes/quickstart.yaml --set speculate=lookup -o build/served
    python benchmarks/serving.py build/served [--speed 60] [--soak 600] [--fuzz 600]

prints the rows of benchmarks/results/serving.md.  The server is a process of its own, and so are its clients, which are
OpenAI's where they mean well.  Processor time is the server's own, which other processes add little to.  Each part
takes the seconds it is given, whatever happens.  Numbers of requests at once take turns round by round, so that what
disturbs one disturbs all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from openai import APIStatusError, AsyncOpenAI

from compressor.host.resources import resource

AT_ONCE = (1, 2, 4, 8)
PROMPT_CHARACTERS, NEW_TOKENS = 120, 64
GENTLE, RUDE, ATTACKERS = 4, 6, 4  # clients of a soak, and of hostile input
Body = dict[str, Any]


class Served:
    """A server in a process of its own, and its client."""

    def __init__(self, bundle: Path, threads: int | None) -> None:
        command = [sys.executable, "-m", "compressor_runtime.server", str(bundle), "--port", "0"]
        command += [] if threads is None else ["--threads", str(threads)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            sys.exit("the server did not start; `compress serve` says why")
        self.port = int(self.url.rsplit(":", 1)[1].split("/")[0])
        self.model = ""

    def resident_mb(self) -> float:
        """Return the memory that the server's process holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def cpu_s(self) -> float:
        """Return the processor time that the server's process has taken, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=300)

    def end(self) -> int:
        """Stop the server; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def prompts() -> list[str]:
    text = (resource("calibration") / "python_docs_heldout.txt").read_text(encoding="utf-8")
    return [text[i * 997 : i * 997 + PROMPT_CHARACTERS] for i in range(64)]


async def text_of(served: Served, client: AsyncOpenAI, prompt: str, tokens: int = NEW_TOKENS) -> tuple[str, int]:
    found = await client.completions.create(model=served.model, prompt=prompt, temperature=0, max_tokens=tokens)
    assert found.usage is not None
    return found.choices[0].text, found.usage.completion_tokens


async def streamed(served: Served, client: AsyncOpenAI, prompt: str) -> tuple[str, int, float]:
    """Return a streamed text, its tokens, and the seconds to its first part."""
    begin, first, text, tokens = time.perf_counter(), 0.0, "", 0
    async for part in await client.completions.create(
        model=served.model,
        prompt=prompt,
        temperature=0,
        max_tokens=NEW_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    ):
        first = first or time.perf_counter() - begin
        text += "".join(choice.text for choice in part.choices)
        tokens = part.usage.completion_tokens if part.usage is not None else tokens
    return text, tokens, first


async def speed(served: Served, seconds: float) -> None:
    """Print tokens a second and latencies, by requests at once."""
    texts, limit = prompts()[:8], time.monotonic() + seconds
    rates: dict[tuple[bool, int], list[float]] = {}
    latencies: dict[tuple[bool, int], list[float]] = {}
    firsts: dict[int, list[float]] = {}
    costs: dict[tuple[bool, int], list[float]] = {}
    expected: dict[str, str] = {}
    differ = 0
    async with served.client() as client:
        for streams, at_once in itertools.cycle(itertools.product((False, True), AT_ONCE)):
            if time.monotonic() > limit and (True, AT_ONCE[-1]) in rates:  # each has had its turn
                break
            tokens = 0

            async def ask(prompt: str, streams: bool = streams, at_once: int = at_once) -> int:
                nonlocal differ
                begin = time.perf_counter()
                if streams:
                    text, count, first = await streamed(served, client, prompt)
                    firsts.setdefault(at_once, []).append(first)
                else:
                    text, count = await text_of(served, client, prompt)
                latencies.setdefault((streams, at_once), []).append(time.perf_counter() - begin)
                differ += expected.setdefault(prompt, text) != text
                return count

            begin, begin_cpu = time.perf_counter(), served.cpu_s()
            for i in range(0, len(texts), at_once):
                tokens += sum(await asyncio.gather(*map(ask, texts[i : i + at_once])))
            rates.setdefault((streams, at_once), []).append(tokens / (time.perf_counter() - begin))
            costs.setdefault((streams, at_once), []).append((served.cpu_s() - begin_cpu) / tokens)
    columns = "tokens/s | against one | processor time a token | one against it"
    print(f"| at once | {columns} | streamed: {columns} | first token | latency |")
    print("|---" * 11 + "|")
    middle: Callable[[Any], float] = statistics.median
    for at_once in AT_ONCE:
        cells = [str(at_once)]
        for streams in (False, True):
            rate = middle(rates[streams, at_once])
            cells += [f"{rate:.0f}", f"{rate / middle(rates[streams, 1]):.2f}"]
            cost = middle(costs[streams, at_once])
            cells += [f"{1000 * cost:.2f} ms", f"{middle(costs[streams, 1]) / cost:.2f}"]
        cells += [f"{1000 * middle(firsts[at_once]):.0f} ms", f"{1000 * middle(latencies[False, at_once]):.0f} ms"]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{len(rates[False, 1])} rounds of 8 texts; texts that differ from the first round's: {differ}\n")


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", served.port)


def head(length: int, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close"]
    lines.append(f"content-length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def rude(served: Served, rng: random.Random, texts: list[str], counts: Counter[str]) -> None:
    """Do one of the things that servers do not like."""
    body = json.dumps(
        {"model": served.model, "prompt": rng.choice(texts), "max_tokens": 256, "stream": rng.random() < 0.5}
    ).encode()
    kind = rng.choice(("goes at once", "goes while it streams", "goes within its body", "says nothing", "reads slowly"))
    counts[kind] += 1
    reader, writer = await connect(served)
    with contextlib.suppress(OSError):
        sent = {"goes within its body": len(body) // 2, "says nothing": 0}.get(kind, len(body))
        if kind != "says nothing":
            writer.write(head(len(body)) + body[:sent])
            await writer.drain()
        if kind == "goes while it streams":
            await asyncio.wait_for(reader.read(rng.randint(1, 4000)), 20)
        elif kind == "reads slowly":
            for _ in range(20):
                await asyncio.wait_for(reader.read(64), 20)
                await asyncio.sleep(0.05)
        else:
            await asyncio.sleep(rng.random() * 0.1)
    if rng.random() < 0.5:
        writer.transport.abort()  # a reset in place of an end
    else:
        writer.close()


async def soak(served: Served, seconds: float, rng: random.Random) -> None:
    """Print what became of requests among rude clients, and the server's memory."""
    texts, counts, memory = prompts()[:16], Counter[str](), list[float]()
    async with served.client() as client:
        expected = {prompt: await text_of(served, client, prompt, 32) for prompt in texts}
        limit = time.monotonic() + seconds

        async def gentle() -> None:
            while time.monotonic() < limit:
                prompt = rng.choice(texts)
                try:
                    found = await text_of(served, client, prompt, 32)
                except APIStatusError as error:
                    counts[f"refused with {error.status_code}"] += 1
                    await asyncio.sleep(float(error.response.headers.get("retry-after", 0.1)))
                    continue
                counts["answered" if found == expected[prompt] else "ANSWERED WRONGLY"] += 1

        async def ruder() -> None:
            while time.monotonic() < limit:
                await rude(served, rng, texts, counts)

        async def watch() -> None:
            while time.monotonic() < limit:
                memory.append(served.resident_mb())
                await asyncio.sleep(0.5)

        work: list[Coroutine[Any, Any, None]] = [gentle() for _ in range(GENTLE)]
        await asyncio.gather(*work, *(ruder() for _ in range(RUDE)), watch())
        await settled(served)
    parts = [memory[i * len(memory) // 4 : (i + 1) * len(memory) // 4] for i in range(4)]
    print(f"soak, {seconds:g} s: {dict(sorted(counts.items()))}")
    print(f"memory by quarters, mean: {', '.join(f'{statistics.mean(part):.1f}' for part in parts)} MB\n")


async def settled(served: Served) -> None:
    """Wait until no request is left, or exit with a word."""
    for _ in range(100):
        _, text = await raw(served, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        if b"\ncompressor_running 0\n" in text and b"\ncompressor_queue_length 0\n" in text:
            return
        await asyncio.sleep(0.1)
    sys.exit("requests are left in the batch whose clients have gone")


async def raw(served: Served, sent: bytes, seconds: float = 20) -> tuple[int, bytes]:
    """Send bytes; return the status of the answer, 0 for none within some seconds, and all of it."""
    reader, writer = await connect(served)
    answer = b""
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), seconds)
    writer.close()
    words = answer.split(b" ", 2)
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), answer


def hostile_bodies(model: str, rng: random.Random) -> Iterator[bytes]:
    """Yield bodies that are nearly right, for ever."""
    names = ["model", "prompt", "messages", "input", "max_tokens", "n", "seed", "stop", "temperature", "top_p"]
    names += ["top_k", "logprobs", "stream", "echo"]
    values: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        1 << 31,
        1 << 63,
        1 << 200,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        "\x00",
    ]
    values += [
        "\ud800",
        "🙂" * 9,
        [],
        [[]],
        [0],
        [1, "x"],
        [[1], [2]],
        [-1],
        [1 << 40],
        {},
        {"a": {}},
        model,
        [model] * 33,
    ]
    values += [[{"role": "user", "content": "x"}], [{"role": [], "content": {}}], {"include_usage": True}]
    while True:
        body: Body = {"model": model, "prompt": "x", "max_tokens": 2}
        for _ in range(rng.randint(1, 4)):
            body[rng.choice(names)] = rng.choice(values)
        text = json.dumps(body).encode()
        kind = rng.random()
        if kind < 0.2:
            at = rng.randrange(len(text))
            text = text[:at] + rng.randbytes(rng.randint(0, 4)) + text[at + rng.randint(0, 9) :]
        elif kind < 0.25:
            text = b"[" * rng.randint(1, 50_000)
        elif kind < 0.3:
            text = rng.randbytes(rng.randint(0, 2000))
        yield text


async def fuzz(served: Served, seconds: float, rng: random.Random) -> None:
    """Print the answers to hostile input; exit with a word if one is the server's own failure."""
    limit, counts, bodies = time.monotonic() + seconds, Counter[int](), hostile_bodies(served.model, rng)
    begin_mb = served.resident_mb()
    async with served.client() as client:
        expected = await text_of(served, client, "Return the")

        async def attack() -> None:
            while time.monotonic() < limit:
                body = next(bodies)
                path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/embeddings"))
                sent, is_odd = head(len(body), path) + body, rng.random() < 0.1
                if is_odd:  # a head that is not right either: the server may wait for the rest of a body
                    at = rng.randrange(len(sent))
                    sent = sent[:at] + rng.randbytes(3) + sent[at + 3 :]
                status, answer = await raw(served, sent, 1 if is_odd else 60)
                counts[status] += 1
                if status >= 500 or (not status and not is_odd) or served.process.poll() is not None:
                    sys.exit(f"status {status} for {sent!r}: {answer!r}")

        await asyncio.gather(*(attack() for _ in range(ATTACKERS)))
        await settled(served)
        assert await text_of(served, client, "Return the") == expected
    told = {status or "no answer": count for status, count in sorted(counts.items())}
    memory = f"{begin_mb:.1f} MB before, {served.resident_mb():.1f} after"
    print(f"fuzz, {seconds:g} s: answers by status {told}; memory {memory}\n")


async def run(served: Served, options: argparse.Namespace) -> None:
    async with served.client() as client:
        served.model = (await client.models.list()).data[0].id
    rng = random.Random(options.seed)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors\n")
    for name, part in (("speed", speed), ("soak", soak), ("fuzz", fuzz)):
        seconds = getattr(options, name)
        if seconds > 0:
            await (part(served, seconds) if part is speed else part(served, seconds, rng))
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    for name, seconds in (("speed", 60.0), ("soak", 60.0), ("fuzz", 60.0)):
        parser.add_argument(f"--{name}", type=float, default=seconds, metavar="SECONDS", help="0 leaves it out")
    parser.add_argument("--threads", type=int, help="of the server's kernels [default: the physical cores]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    served = Served(options.bundle, options.threads)
    try:
        asyncio.run(run(served, options))
    finally:
        print("the server's exit code:", served.end())


if __name__ == "__main__":
    main()
