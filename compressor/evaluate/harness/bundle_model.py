"""A bundle as a model of lm-eval 0.4: what it asks of one, answered by the bundle's kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from compressor.errors import UsageError
from compressor.evaluate.harness.session_scores import SessionScores
from compressor.evaluate.quality import sliding_windows

_UNLIMITED = 2048  # tokens of a window, where a model states no number of positions; as lm-eval's own models have it
_NEW_TOKENS = 256
_SAMPLING = ("temperature", "top_k", "top_p", "seed")


@register_model("compressor")
class BundleModel(TemplateLM):  # type: ignore[misc]
    """A native bundle of a decoder.

    Requests are read one by one: rows are independent, so that batches give the same figures.

    Args:
        bundle: its folder.
        threads: of the kernels; None takes the physical cores.
        max_length: tokens of a window; None takes the model's positions, or 2,048 where it states none.
        stride: tokens between the windows of a long text; None takes ``max_length``, as lm-eval's own models do.  With
            ``max_length`` 512 and ``stride`` 256 a text's perplexity is that of ``compress eval``.
        batch_size, max_batch_size: 1, "auto" or None.
        device: of PyTorch, which lm-eval names to every model; not used, a bundle's kernels are for one device.
    Raises:
        UsageError: not a decoder's bundle, or lengths that it does not have.
    """

    def __init__(
        self,
        bundle: str,
        threads: int | None = None,
        max_length: int | None = None,
        stride: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        from compressor.runtime import load

        super().__init__()
        if {batch_size, max_batch_size} - {None, 1, "1", "auto"}:
            raise UsageError("batch_size: a bundle's requests are read one by one, with equal figures; leave it out")
        self.bundle = load(bundle, threads=threads)
        if self.bundle.kind != "decoder":
            raise UsageError(f"{bundle}: holds a {self.bundle.kind}; lm-eval's tasks are for decoders")
        positions = self.bundle.model["max_positions"]
        self.max_length = max_length or positions or _UNLIMITED
        self.stride = stride or self.max_length
        if not 1 <= self.stride <= self.max_length <= (positions or self.max_length):
            raise UsageError(
                f"max_length {self.max_length}, stride {self.stride}: give 1 <= stride <= max_length"
                + (f" <= {positions}, the model's positions" if positions else "")
            )
        self._scores, self._number = SessionScores(self.bundle), 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text.

        Raises:
            UsageError: the model has none.
        """
        ends: list[int] = self.bundle.model["eos_ids"]
        if not ends:
            raise UsageError(
                f"{self.bundle.path}: the model has no token that begins or ends a text to score one after"
            )
        return ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text that nothing else precedes: of its begin, or of its end without one."""
        begin: int | None = self.bundle.model.get("bos_id")
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's cache of requests."""
        return str(self.bundle.path.absolute()).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's tokens; with special ones as the tokenizer adds them, unless the text begins with one."""
        tokenizer = self.bundle.tokenizer
        if add_special_tokens is None:
            begin = self.bundle.model.get("bos_id")
            add_special_tokens = begin is None or not string.startswith(tokenizer.id_to_token(begin))
        ids: list[int] = tokenizer.encode(string, add_special_tokens=add_special_tokens).ids
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return each whole text's log-likelihood, in nats, window by window."""
        return [self._rolled(request.args) for request in tqdm(requests, "texts", disable=disable_tqdm)]

    def _rolled(self, args: tuple[str]) -> float:
        ids = [self.prefix_token_id, *self.tok_encode(args[0], add_special_tokens=False)]
        windows = sliding_windows(len(ids), self.max_length, self.stride)
        total = sum(self._scores.score(ids[first : last + 1], scored)[0] for first, last, scored in windows)
        self.cache_hook.add_partial("loglikelihood_rolling", args, total)
        return total

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        return [self._scored(*request) for request in tqdm(requests, "continuations", disable=disable_tqdm)]

    def _scored(self, texts: tuple[str, str], context: list[int], continuation: list[int]) -> tuple[float, bool]:
        if not 1 <= len(continuation) <= self.max_length:
            raise UsageError(
                f"continuation {texts[1]!r:.60} has {len(continuation)} tokens; a window has 1 to {self.max_length}"
            )
        found = self._scores.score((context + continuation)[-self.max_length - 1 :], len(continuation))
        self.cache_hook.add_partial("loglikelihood", texts, found)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what each text goes on with, up to one of its stops."""
        return [self._generated(*request.args) for request in tqdm(requests, "generations", disable=disable_tqdm)]

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        asked = normalize_gen_kwargs(options, _NEW_TOKENS)
        count, until, is_sampled = asked.pop("max_gen_toks"), asked.pop("until"), asked.pop("do_sample", False)
        sampling = {name: asked.pop(name) for name in _SAMPLING if name in asked}
        if asked:
            raise UsageError(f"generation: {', '.join(asked)}: not an option of bundles; they have {_SAMPLING}, until")
        if count >= self.max_length:
            raise UsageError(
                f"generation: {count} new tokens leave no room in a window of {self.max_length}; ask fewer"
            )
        if is_sampled:
            sampling.setdefault("seed", self._number)  # repeats of one request differ, runs do not
        self._number += 1
        ids = (self.tok_encode(context) or [self.prefix_token_id])[count - self.max_length :]
        text = "".join(self.bundle.generate(ids, max_tokens=count, stop=[stop for stop in until if stop], **sampling))
        self.cache_hook.add_partial("generate_until", (context, options), text)
        return text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a chat's text by the bundle's template.

        Raises:
            UsageError: the answer's begin is given, which templates of bundles do not write.
            ApiError: the bundle has no template.
        """
        from compressor_runtime.server.chat import ChatTemplate

        if not add_generation_prompt:
            raise UsageError("apply_chat_template: tasks that begin the answer (gen_prefix) are not served with chats")
        return ChatTemplate(self.bundle.path, self.bundle.manifest["files"]).render(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's source, which lm-eval notes; empty where none is used."""
        from compressor_runtime.server.chat import CHAT_TEMPLATE

        if not chat_template or CHAT_TEMPLATE not in self.bundle.manifest["files"]:
            return ""
        return str(json.loads((self.bundle.path / CHAT_TEMPLATE).read_bytes())["template"])
