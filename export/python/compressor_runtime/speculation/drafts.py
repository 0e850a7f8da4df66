"""Make drafts of each kind, and keep what they learn from one text to the next."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor_runtime.errors import RequestError
from compressor_runtime.generation import Sampler
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.engine import Engine, Target
from compressor_runtime.speculation.kinds.kind import VERIFY, Shared
from compressor_runtime.speculation.kinds.registry import SPECULATIONS, members, prior, served
from compressor_runtime.speculation.kinds.sparse import FEW_INPUTS
from compressor_runtime.speculation.pace import Always, Pace
from compressor_runtime.speculation.text import Lenience, Text
from compressor_runtime.speculation.tree import Draft


def speculation(bundle: Any, asked: Any, temperature: float = 0.0) -> Speculation | None:
    """Return the counts of a generation that begins, of the kind of drafts asked for; None without drafts.

    Args:
        bundle: a :class:`compressor_runtime.bundle.Bundle`; what its manifest says holds unless something is asked for.
        asked: a kind, "off", or None.
        temperature: of the text; only greedy ones, of 0, are lossy where the manifest says so.
    Raises:
        RequestError: the kind is unknown, or the bundle cannot serve it.
    """
    wanted = bundle.model.get("speculate", "off") if asked is None else asked
    if not isinstance(wanted, str) or wanted not in ("off", *SPECULATIONS):
        raise RequestError(f"speculate={wanted!r:.100}: give {', '.join(map(repr, SPECULATIONS))} or 'off'")
    if wanted == "off":
        return None
    kinds = served(bundle.entries, bundle.model)
    if wanted in kinds:
        return Speculation(wanted, bundle.model.get("lossy") if wanted == FEW_INPUTS and not temperature else None)
    if bundle.kind != "decoder":
        what = "an encoder-decoder" if bundle.kind == "seq2seq" else "a plain module"
        why = f"holds {what}, and only decoders verify drafted tokens; leave it out"
    elif bundle.model.get("states"):
        why = "has recurrent layers, which keep no state of the token where a draft was last right; leave it out"
    elif kinds:
        why = (
            f"has no kernels that draft so, only for {', '.join(map(repr, kinds))}; make it with `speculate: {wanted}` "
            "in its recipe"
        )
    else:
        why = (
            f"has no kernels that verify drafted tokens; make it with `speculate: {wanted}` in its recipe (target x86)"
        )
    raise RequestError(f"speculate={wanted!r}: {bundle.path} {why}")


class Drafts:
    """Times, estimates and whatever else drafts keep of a model, which its texts share.

    Args:
        vocab_size: tokens of the model.
        pace: decides when drafts pay.
        entries: of the model's library; ``auto`` takes the kinds that these serve.
        facts: that the manifest states about the model.
    """

    def __init__(
        self,
        vocab_size: int,
        pace: Pace | None = None,
        entries: Collection[str] = (VERIFY,),
        facts: Collection[str] = (),
    ) -> None:
        self.pace = pace or Pace()
        self.acceptance = Acceptance(prior)
        self._shared = Shared(vocab_size, self.pace, self.acceptance)
        self._entries, self._facts = entries, facts

    def start(self, kind: str, session: Any, slot: int = 0) -> list[Draft]:
        """Return the drafts of a kind for one text.

        Args:
            session: that the text is a sequence of; drafts that run a model call its entries.
            slot: the sequence's number.
        """
        return [one.make(self._shared, session, slot) for one in members(kind, self._entries, self._facts)]

    def tokens(
        self,
        session: Target,
        first: NDArray[np.int64],
        sampler: Sampler,
        ends: Mapping[int, str],
        count: int,
        counts: Speculation,
        spare: int = 0,
    ) -> Generator[int, None, str]:
        """Yield token after token; the generator's value tells why it ended.

        The tokens are those of :func:`compressor_runtime.generation.next_tokens` with the same stream of random
        numbers, unless the counts say that they are lossy: then each verification has as many drafted tokens, whatever
        it takes, so that the same prompt gives the same text.

        Args:
            session: new, of one sequence.
            first: the prompt, int64 [1, S].
            sampler: chooses tokens.
            ends: tokens that end the text, each with the reason.
            count: at most so many tokens; the model has room for one less.
            counts: what is counted, its kind given, and whether it is lossy.
            spare: further tokens that the model has room for.
        """
        if not count:
            return "length"
        lenience = None if counts.lossy is None else Lenience(counts.lossy["tolerance"], spare)
        text = Text(0, first[0].tolist(), self.start(counts.kind, session), sampler, ends, count, lenience)
        pace = self.pace if lenience is None else Always(self.pace.clock)
        engine = Engine(session, pace, self.acceptance, counts)
        begin = self.pace.clock()
        logits = session.step(first)[0]
        self.pace.wait(self.pace.clock() - begin)
        token = text.choose(logits[-1])
        if token is not None:
            yield token
        yield from engine.alone(text)
        return text.finish_reason or "length"
