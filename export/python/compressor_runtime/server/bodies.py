"""Read the bodies of requests into what the server is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compressor_runtime.server.errors import ApiError
from compressor_runtime.server.fields import Fields, wrong

MOST_CHOICES = 32  # of one request: prompts times `n`
_MOST_STOPS = 16
_MOST_TOKENS = (1 << 31) - 1
_SEEDS = 1 << 63
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}


@dataclass(frozen=True)
class Asked:
    """State how to continue prompts.

    Attributes:
        model: its name.
        prompts: texts or token ids, for completions; of a chat none.
        messages: of a chat.
        max_tokens: None for as many as fit.
        n: texts for each prompt.
        temperature, top_k, top_p, seed: as of :meth:`compressor_runtime.bundle.Bundle.generate`.
        stop: texts that end it.
        alternatives: likeliest tokens told with each; None for no scores.
        streams: pieces are sent as they come.
        tells_usage: the stream's last piece counts tokens.
    """

    model: str
    prompts: tuple[str | list[int], ...]
    messages: tuple[dict[str, Any], ...]
    max_tokens: int | None
    n: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    alternatives: int | None
    streams: bool
    tells_usage: bool


def read_completion(body: dict[str, Any]) -> Asked:
    """Read a body of /v1/completions.

    Raises:
        ApiError: a field is missing, unknown or wrong.
    """
    fields = Fields(body)
    prompts = _prompts("prompt", fields.take("prompt"))
    alternatives = fields.whole("logprobs", None, 0, 5)
    common = _common(fields, len(prompts), fields.whole("max_tokens", 16, 1, _MOST_TOKENS))
    fields.end(_NEUTRAL | {"best_of": 1, "echo": False, "suffix": ""}, _IGNORED)
    return Asked(prompts=prompts, messages=(), alternatives=alternatives, **common)


def read_chat(body: dict[str, Any]) -> Asked:
    """Read a body of /v1/chat/completions.

    Raises:
        ApiError: a field is missing, unknown or wrong.
    """
    fields = Fields(body)
    messages = _messages(fields.take("messages"))
    most = fields.whole("max_completion_tokens", None, 1, _MOST_TOKENS)
    older = fields.whole("max_tokens", None, 1, _MOST_TOKENS)
    tells = fields.flag("logprobs")
    alternatives = fields.whole("top_logprobs", None, 0, 20)
    if alternatives is not None and not tells:
        raise ApiError(400, "top_logprobs: give `logprobs: true` as well", "top_logprobs", "invalid_value")
    common = _common(fields, 1, most if most is not None else older)
    neutral = {"tools": [], "functions": [], "tool_choice": "none", "response_format": {"type": "text"}}
    fields.end(_NEUTRAL | neutral | {"modalities": ["text"]}, _IGNORED)
    return Asked(prompts=(), messages=messages, alternatives=(alternatives or 0) if tells else None, **common)


def _common(fields: Fields, prompts: int, max_tokens: int | None) -> dict[str, Any]:
    n, streams = fields.whole("n", 1, 1, MOST_CHOICES), fields.flag("stream")
    if n * prompts > MOST_CHOICES:
        raise ApiError(
            400, f"n: {prompts} prompts, {n} times each; give at most {MOST_CHOICES} in all", "n", "invalid_value"
        )
    options = fields.take("stream_options", {})
    if not isinstance(options, dict) or (options and not streams):
        raise wrong("stream_options", options, "an object, with `stream: true`")
    inner = Fields(options)
    tells_usage = inner.flag("include_usage")
    inner.end({"include_obfuscation": False})
    return {
        "model": model_name(fields),
        "max_tokens": max_tokens,
        "n": n,
        "temperature": fields.number("temperature", 1.0, 0, 2),
        "top_k": fields.whole("top_k", 0, 0, _MOST_TOKENS),
        "top_p": fields.number("top_p", 1.0, 0, 1, above=True),
        "seed": fields.whole("seed", None, -_SEEDS, _SEEDS - 1),
        "stop": tuple(fields.texts("stop", _MOST_STOPS)),
        "streams": streams,
        "tells_usage": tells_usage,
    }


def model_name(fields: Fields) -> str:
    """Return the model that is asked for."""
    name = fields.take("model")
    if not isinstance(name, str):
        raise wrong("model", name, "a text")
    return name


def _prompts(name: str, value: Any) -> tuple[str | list[int], ...]:
    """Return texts and rows of token ids: one, or a list of them."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a text, token ids in a list, or a list of such")
    if all(type(x) is int for x in value):
        return (_tokens(name, value),)
    return tuple(x if isinstance(x, str) else _tokens(name, x) for x in value)


def _tokens(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(x) is int and 0 <= x < 1 << 31 for x in value):
        raise wrong(name, value, "texts, or token ids in lists that are not empty")
    return value


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    """Return messages whose content is a text."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "a list of messages that is not empty")
    found = []
    for index, message in enumerate(value):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(place, message, "an object with `role` and `content`")
        fields = Fields(message)
        role, content = fields.take("role", None), fields.take("content", None)
        if not isinstance(role, str):
            raise wrong(f"{place}.role", role, "a text, such as user")
        if isinstance(content, list):
            content = _joined(f"{place}.content", content)
        if not isinstance(content, str):
            raise wrong(f"{place}.content", content, "a text, or a list of parts of type text")
        name = fields.take("name", None)
        if name is not None and not isinstance(name, str):
            raise wrong(f"{place}.name", name, "a text")
        fields.end({"refusal": "", "tool_calls": [], "annotations": []})
        found.append({"role": role, "content": content} | ({} if name is None else {"name": name}))
    return tuple(found)


def _joined(name: str, parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong(name, part, "parts of type text only: the model reads nothing else")
    return "".join(part["text"] for part in parts)


@dataclass(frozen=True)
class AskedEmbeddings:
    """State what to embed.

    Attributes:
        model: its name.
        inputs: texts or token ids.
        is_base64: numbers are told as base64 of float32, least significant byte first.
        dimensions: that the client expects; None for any.
    """

    model: str
    inputs: tuple[str | list[int], ...]
    is_base64: bool
    dimensions: int | None


def read_embeddings(body: dict[str, Any], most_inputs: int) -> AskedEmbeddings:
    """Read a body of /v1/embeddings.

    Raises:
        ApiError: a field is missing, unknown or wrong.
    """
    fields = Fields(body)
    inputs = _prompts("input", fields.take("input"))
    if len(inputs) > most_inputs:
        raise ApiError(400, f"input: {len(inputs)} texts; give at most {most_inputs} at once", "input", "invalid_value")
    form = fields.take("encoding_format", "float")
    if form not in ("float", "base64"):
        raise wrong("encoding_format", form, "float or base64")
    asked = AskedEmbeddings(model_name(fields), inputs, form == "base64", fields.whole("dimensions", None, 1, 1 << 31))
    fields.end({}, _IGNORED)
    return asked
