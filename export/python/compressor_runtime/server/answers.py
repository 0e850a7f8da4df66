"""Write answers as OpenAI's API has them: whole, and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from compressor_runtime.batching.request import Piece, Score

_REASONS = {"length": "length"}
"""Finish reasons of the run-time -> those of the API, where they are not "stop"."""


class Answer:
    """The fields that all parts of one answer share, and how its texts are told.

    Args:
        number: of the request.
        model: its name.
        is_chat: the answer is a message.
        decode: token ids -> text.
    """

    def __init__(self, number: str, model: str, is_chat: bool, decode: Any) -> None:
        self._is_chat, self._decode = is_chat, decode
        kind = "chat.completion" if is_chat else "text_completion"
        self._shared = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": model,
        }
        self._kind = kind
        self._begun: set[int] = set()  # choices whose role was told

    def whole(self, pieces: Sequence[Piece], usage: dict[str, int]) -> dict[str, Any]:
        """Return an answer of texts that came in one piece each."""
        choices = [self._choice(index, piece, "message") for index, piece in enumerate(pieces)]
        return {**self._shared, "object": self._kind, "choices": choices, "usage": usage}

    def chunk(self, index: int, piece: Piece, tells_usage: bool) -> dict[str, Any]:
        """Return a part of one text.

        Args:
            tells_usage: usage comes at the end, and is null before.
        """
        choice = self._choice(index, piece, "delta")
        return self._part([choice]) | ({"usage": None} if tells_usage else {})

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the part of a stream that counts tokens."""
        return self._part([]) | {"usage": usage}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._shared, "object": self._kind + ".chunk" * self._is_chat, "choices": choices}

    def _choice(self, index: int, piece: Piece, field: str) -> dict[str, Any]:
        reason = piece.finish_reason and _REASONS.get(piece.finish_reason, "stop")
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if not self._is_chat:
            return choice | {"text": piece.text, "logprobs": self._table(piece.scores) if piece.scores else None}
        message = {"content": piece.text}
        if field == "message" or index not in self._begun:
            message["role"] = "assistant"
            self._begun.add(index)
        scores = {"content": [self._entry(one) for one in piece.scores], "refusal": None} if piece.scores else None
        return choice | {field: message, "logprobs": scores}

    def _table(self, scores: Sequence[Score]) -> dict[str, Any]:
        likeliest = [{self._decode([t]): logprob for t, logprob in one.likeliest} for one in scores]
        return {
            "tokens": [self._decode([one.token]) for one in scores],
            "token_logprobs": [one.logprob for one in scores],
            "top_logprobs": likeliest if any(likeliest) else None,
            "text_offset": [one.place for one in scores],
        }

    def _entry(self, one: Score) -> dict[str, Any]:
        likeliest = [self._told(token, logprob) for token, logprob in one.likeliest]
        return self._told(one.token, one.logprob) | {"top_logprobs": likeliest}

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text: str = self._decode([token])
        # A token that is a part of a character has no text of its own.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else [*text.encode()]}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Return counts of tokens as answers have them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }
