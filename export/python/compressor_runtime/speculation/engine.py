"""Draft, verify, accept: generate the tokens of plain decoding, several in a step where drafts are right.

Acceptance is by *sample and match*: at each node of a draft the model's token is chosen from its logits as in plain
decoding, with one draw of the same random numbers a token; where a drafted token stands behind that node with this
very token, the walk goes on there.  So a seed gives the same text as without drafts, greedy or sampled, whatever was
drafted, and trees need no rule of their own.  A text with a
:class:`~compressor_runtime.speculation.text.Lenience` takes drafted tokens that are nearly as likely too: it needs a
pace that always drafts, so that times decide nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.errors import RequestError
from compressor_runtime.speculation.acceptance import Acceptance
from compressor_runtime.speculation.chain import drafted_together
from compressor_runtime.speculation.counts import Speculation
from compressor_runtime.speculation.pace import Pace
from compressor_runtime.speculation.text import Text, together
from compressor_runtime.speculation.tree import Room, Tree, Walk

MOST_ROWS = 32
"""Rows of a verification, of all sequences together: for so many a row's bits do not depend on the others."""

_REST_STEPS = 16  # while no draft may go on: then they are asked again


class Target(Protocol):
    """A model with what it has read, as :class:`compressor_runtime.session.Session`."""

    @property
    def batch(self) -> int:
        """Sequences."""

    def step(self, ids: ArrayLike, keep: ArrayLike | None = None) -> NDArray[np.float32]:
        """Append tokens [B, S], and return logits [B, R, V], of the last ones unless ``keep`` says which."""

    def verify(self, ids: ArrayLike, parent: ArrayLike, slot: ArrayLike | None = None) -> NDArray[np.float32]:
        """Return logits [T, V] of tokens behind those stored, each after its parent; nothing is appended."""

    def accept(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Append, to each sequence, those of the tokens just verified that its path names."""


@dataclass
class _Round:
    """A text's part of a verification: its draft, the nodes verified, and the row of its pending token."""

    text: Text
    drafted: Tree
    verified: Tree = dataclasses.field(default_factory=Tree)
    start: int = 0


class Engine:
    """Generate texts of one session with drafts.

    Args:
        session: has read all prompts.
        pace: decides how many drafted tokens pay.
        acceptance: estimates of the drafts, which learn here.
        counts: what is counted.
        most_rows: of a verification.
    Raises:
        RequestError: the session has more sequences than a verification may have rows.
    """

    def __init__(
        self, session: Target, pace: Pace, acceptance: Acceptance, counts: Speculation, most_rows: int = MOST_ROWS
    ) -> None:
        self._session, self._pace, self._acceptance, self._counts = session, pace, acceptance, counts
        self._most_rows = most_rows
        self._verified: Mapping[str, int] = {}  # drafts of the round before, with their rows; empty after plain steps

    def rounds(self, texts: Sequence[Text]) -> Iterator[list[tuple[Text, list[int]]]]:
        """Yield, step by step or token by token, what each text has gained, until all have ended.

        Args:
            texts: each with its first token pending.
        """
        if len(texts) > self._most_rows:
            raise RequestError(f"{len(texts)} sequences at once: with drafts, at most {self._most_rows}")
        if self._session.batch == 1:  # a step appends to all sequences alike; of several, each goes its own way
            for token in self.alone(texts[0]):
                yield [(texts[0], [token])]
            return
        while live := [text for text in texts if text.finish_reason is None]:
            for group in together(live, self._most_rows):
                yield self._verify(self._draft(group))

    def alone(self, text: Text) -> Iterator[int]:
        """Yield the tokens of a session's only text, until it has ended; see :meth:`rounds`."""
        while text.finish_reason is None:
            if text.most_nodes > 0 and any(self._pace.may_draft(one.name, 1, len(text.drafts)) for one in text.drafts):
                parts = self._draft([text])
                verifies = bool(parts[0].verified.tokens)
                yield from self._verify(parts)[0][1] if verifies else self._step(text, parts[0].drafted)[1]
            else:
                yield from self._rest(text)

    def _rest(self, text: Text) -> Iterator[int]:
        """Take a few plain steps, with next to nothing around them: on small models every microsecond counts."""
        clock, step, choose, tokens = self._pace.clock, self._session.step, text.choose, text.tokens
        most = min(_REST_STEPS, text.left) if self._pace.knows(1) else 1
        seconds, count, came = 0.0, 0, 0
        try:
            while count < most:
                begin = clock()
                logits = step([tokens[-1:]])
                seconds += clock() - begin
                count += 1
                if count == 1 and self._verified:
                    self._slowed(seconds)
                if choose(logits[0, -1]) is None:
                    break
                came += 1
                yield tokens[-1]
        finally:  # also where nobody asks for more
            self._took(seconds, count, came)

    def _took(self, seconds: float, steps: int, tokens: int) -> None:
        """Book plain steps, and the tokens that came of them."""
        counts = self._counts
        counts.step_s += seconds
        counts.steps += steps
        counts.rows[1] += steps
        counts.tokens += tokens
        if steps:
            self._pace.note(1, seconds / steps, steps)

    def _draft(self, live: Sequence[Text]) -> list[_Round]:
        """Draft for each text, and take the likeliest of all nodes, as many as are expected to pay."""
        room = self._most_rows - len(live)
        begin, before_s = self._pace.clock(), self._counts.draft_s
        parts = [_Round(text, tree) for text, tree in zip(live, self._propose(live, room), strict=True)]
        useful = [part.drafted.without(part.text.ends) for part in parts]  # an end needs no row of its own
        ranked = sorted(
            ((-chance, index, node) for index, tree in enumerate(useful) for node, chance in enumerate(tree.chances))
        )[:room]
        if ranked:
            count = self._pace.choose([-entry[0] for entry in ranked], len(live))
            taken = Counter(index for _, index, _ in ranked[:count])
            for index, part in enumerate(parts):
                part.verified = useful[index].likeliest(taken[index])
        self._share(live, begin, before_s)
        return parts

    def _propose(self, live: Sequence[Text], room: int) -> list[Tree]:
        """Return what the drafts of each text guess: kind by kind, as each leaves its own behind the stored tokens."""
        trees, rooms, count = [Tree() for _ in live], [], len(live)
        for text in live:
            most = min(room, text.most_nodes)
            rooms.append(Room(most, most, self._pace.least_chance(count), text.sampler, text.ends))
            may, several = self._pace.may_draft, len(text.drafts)
            text.awake = [draft for draft in text.drafts if most > 0 and may(draft.name, count, several)]
        for name in dict.fromkeys(draft.name for text in live for draft in text.awake):
            begin, proposals = self._pace.clock(), dict[int, Tree | Walk]()
            for place, text in enumerate(live):
                for draft in (one for one in text.awake if one.name == name):
                    draft.extend(text.tokens[text.told.get(name, 0) :])
                    text.told[name] = len(text.tokens)
                    proposals[place] = draft.propose(rooms[place])
            for place, found in drafted_together(name, proposals, self._pace, count, room).items():
                if len(trees[place]):
                    trees[place].merge(found)
                else:
                    trees[place] = found
            self._charge(name, begin)
        return trees

    def _share(self, texts: Sequence[Text], begin: float, before_s: float) -> None:
        """Book what drafts have cost together since ``begin``, when ``before_s`` were booked."""
        names = [draft.name for text in texts for draft in text.awake]
        seconds = self._pace.clock() - begin - (self._counts.draft_s - before_s)
        for name in names:
            self._pace.charge(name, seconds / len(names))
        self._counts.draft_s += seconds

    def _charge(self, name: str, begin: float) -> None:
        seconds = self._pace.clock() - begin
        self._pace.charge(name, seconds)
        self._counts.draft_s += seconds

    def _step(self, text: Text, drafted: Tree | None = None) -> tuple[Text, list[int]]:
        """Take a plain step; a draft that did not pay is compared with what comes nevertheless."""
        read = text.tokens[-1:]
        begin = self._pace.clock()
        logits = self._session.step([read])[0]
        seconds = self._pace.clock() - begin
        self._slowed(seconds)
        self._pace.note(1, seconds)
        counts = self._counts
        counts.step_s += seconds
        counts.rows[1] += 1
        counts.steps += 1
        token = text.choose(logits[0])
        gained = [] if token is None else [token]
        counts.tokens += len(gained)
        if drafted is not None:
            begin, before_s = self._pace.clock(), counts.draft_s
            self._acceptance.learn(drafted, gained)
            self._observe(text, read, logits)
            self._share([text], begin, before_s)
        return text, gained

    def _slowed(self, seconds: float) -> None:
        """Book a plain step behind a verification, whose code and weights others have taken the caches from."""
        if self._verified:
            self._pace.delay(seconds, self._verified)
            self._verified = {}

    def _verify(self, parts: Sequence[_Round]) -> list[tuple[Text, list[int]]]:
        """Verify the drafts of all texts at once, walk along the model's own tokens, and append what was right."""
        begin = self._pace.clock()
        ids: list[int] = []
        parents: list[int] = []
        slots: list[int] = []
        for part in parts:
            part.start = len(ids)
            ids += [part.text.tokens[-1], *part.verified.tokens]
            parents += [-1, *(part.start + 1 + parent for parent in part.verified.parents)]
            slots += [part.text.slot] * (1 + len(part.verified))
        logits = self._session.verify(ids, parents, slots)
        seconds = self._pace.clock() - begin
        gained, paths, accepted = [], {}, Counter[str]()
        for part in parts:
            end = part.start + 1 + len(part.verified)
            tokens, path = self._walk(part, logits[part.start : end])
            paths[part.text.slot] = [part.start, *(part.start + 1 + node for node in path)]
            accepted.update(_name(part.verified, node) for node in path)
            gained.append((part.text, tokens))
        begin = self._pace.clock()
        self._session.accept(paths)
        seconds += self._pace.clock() - begin
        begin, before_s = self._pace.clock(), self._counts.draft_s
        self._book(parts, seconds, accepted)
        for part, (text, tokens) in zip(parts, gained, strict=True):
            self._acceptance.learn(part.drafted, tokens)
            end = part.start + 1 + len(part.verified)
            self._observe(text, ids[part.start : end], logits[part.start : end])
        self._share([part.text for part in parts], begin, before_s)
        return gained

    def _walk(self, part: _Round, logits: NDArray[np.float32]) -> tuple[list[int], list[int]]:
        """Choose tokens along a draft while they are the drafted ones, or while the text takes those.

        Args:
            logits: [1 + nodes, V].
        Returns:
            the tokens that the text gains, and the nodes that were right.
        """
        text, tree = part.text, part.verified
        tokens: list[int] = []
        path: list[int] = []
        node, lenient = -1, text.lenient
        while (token := text.choose(logits[node + 1], behind := tree.children(node))) is not None:
            tokens.append(token)
            self._counts.tried += bool(behind)
            self._counts.matched += token in behind
            if text.finish_reason is not None or token not in behind:
                break
            node = behind[token]
            path.append(node)
        self._counts.tokens += len(tokens)
        self._counts.drafted += len(tree)
        self._counts.accepted += len(path)
        self._counts.lenient += text.lenient - lenient
        if len(tree):
            self._counts.verifications += 1
        else:
            self._counts.steps += 1
        return tokens, path

    def _book(self, parts: Sequence[_Round], seconds: float, accepted: Mapping[str, int]) -> None:
        drafted = Counter(_name(part.verified, node) for part in parts for node in range(len(part.verified)))
        rows = len(parts) + drafted.total()
        self._pace.note(rows, seconds)
        self._counts.rows[rows] += 1
        self._verified = drafted if len(parts) == 1 else {}
        if drafted:
            self._pace.settle(seconds, len(parts), drafted, accepted)
            self._counts.verify_s += seconds
        else:
            self._counts.step_s += seconds

    def _observe(self, text: Text, read: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Let a text's drafts see what the model computed.

        Args:
            read: tokens [T] that the model read, accepted or not.
            logits: [T, V] of what comes after each.
        """
        for draft in text.awake if text.finish_reason is None else ():
            if draft.reads_logits:
                begin = self._pace.clock()
                draft.observe(np.asarray(read), logits)
                self._charge(draft.name, begin)


def _name(tree: Tree, node: int) -> str:
    """Return the name of the draft that a node is of."""
    source: Any = tree.sources[node]
    return str(source[0])
