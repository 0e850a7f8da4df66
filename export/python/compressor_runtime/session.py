"""A decoder's keys, values and states, the step that appends tokens to them, and the verification of drafted ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from compressor_runtime.arguments import indices, token_ids, token_paths, token_trees, whole
from compressor_runtime.batching.sequences import kept_rows, lengths_up_to, tokens_ahead
from compressor_runtime.depth.falling import falling_depth
from compressor_runtime.depth.prompts import prompts_of
from compressor_runtime.device.caches import grown_caches
from compressor_runtime.device.gpu import Gpu
from compressor_runtime.device.host import Host
from compressor_runtime.device.recorded import Record, RecordedStep
from compressor_runtime.errors import RequestError
from compressor_runtime.speculation.hidden import HEADS, Hidden
from compressor_runtime.speculation.parts import OF_ROWS, Parts, Rows
from compressor_runtime.tensors import aligned_rows

DEEPEST = 64  # tokens of the longest path through a tree that kernels follow
_HELD = "{} sequences of {} tokens: their keys, values and states"
_NEEDS = "; compress the model with `speculate: auto` in its recipe"


class Session:
    """Keys, values and states of the tokens seen so far; made by :meth:`Bundle.session`.

    Attributes:
        hidden: hidden states of the sequences' last tokens, and the heads that draft from them.
        prompts: predicts keys and values of first tokens; None where the bundle does not.
    """

    def __init__(
        self,
        model: dict[str, Any],
        limit: int,
        call: Callable[..., Any],
        batch: int,
        capacity: int,
        memory: Sequence[Any] = (),  # of an encoder-decoder: what its steps read of the source
        device: Host | Gpu | None = None,
        record: Record | None = None,
        entries: Mapping[str, Callable[..., Any]] | None = None,  # for drafted tokens, where the bundle has any
    ) -> None:
        self._model, self._limit, self._call, self._memory = model, limit, call, tuple(memory)
        self._device, self._record = device or Host(), record
        self._recorded: RecordedStep | None = None
        self._steps_of_one = 0  # tokens that were a step each; the first is not recorded: there may be no second
        self._entries, self._batch, self._capacity = dict(entries or {}), whole("batch", batch, 1), 0
        self._drafts: tuple[list[int], ...] | None = None  # parents, sequences and rows that may be accepted
        self.hidden = Hidden(self._entries.get(HEADS) and self._heads, model["vocab_size"])
        parts, caches = model.get("parts", ()), lambda: self._caches
        self.parts = Parts(parts, self._entries, self._device.put, caches, model.get("skips", ()))
        self.prompts = prompts_of(self._entries, model, self._device.put, caches)
        self.falling = falling_depth(model, self.parts)  # runs steps without the blocks that tokens pass by
        self._caches: list[Any] = []  # keys of every layer, then values: f32 [B, Hkv, T, D], or u8 of a row's bytes
        self._states: list[Any] = []  # of recurrent layers, f32 [B, ...]; kernels write them
        room = max(1, min(whole("capacity", capacity, 0), limit))
        entry_bytes = model.get("state_bytes", 0) + model["cache_bytes_per_token"] * room
        self._device.check_room(entry_bytes * self._batch, _HELD.format(self._batch, room))
        self._lengths, self._stored = (np.zeros(self._batch, np.int64) for _ in range(2))  # of each sequence
        self._forget_states()
        self._resize(room)

    @property
    def batch(self) -> int:
        """Sequences; those of a step have as many tokens each."""
        return self._batch

    @property
    def capacity(self) -> int:
        """Tokens that fit before the memory of keys and values must grow."""
        return self._capacity

    @property
    def position(self) -> int:
        """Tokens that the next step comes after.

        It may be set back, to go on from an earlier token, and forward again as far as keys and values are stored: a
        step forgets those behind its own tokens.  Recurrent layers keep one state, that of the last token: a model that
        has any goes back to 0 only, and forgets all.

        Raises:
            RequestError: not a whole number from 0 to the tokens stored, or between them where there are states; or
                asked of sequences of different lengths, which :attr:`lengths` tells.
        """
        if self._is_ragged:
            raise RequestError(f"position: the sequences have different lengths, {self.lengths}; see `lengths`")
        return int(self._lengths[0])

    @position.setter
    def position(self, value: int) -> None:
        self.lengths = [whole("position", value, 0, int(np.min(self._stored)))] * self._batch

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence that its next one comes after; they may be set as :attr:`position` may.

        Raises:
            RequestError: not a whole number for each sequence, from 0 to its tokens stored; where there are states, not
                the one there is, or 0 for all.
        """
        return [int(length) for length in self._lengths]

    @lengths.setter
    def lengths(self, values: Sequence[int]) -> None:  # kernels write keys and values at these rows, unchecked
        if (wanted := lengths_up_to(self._stored.tolist(), values)) != self.lengths and self._states:
            if any(wanted):
                raise RequestError(
                    f"position={wanted[0]}: the model's recurrent layers keep no state but that of token "
                    f"{self._lengths[0]}; give 0 to begin again"
                )
            self._stored[:] = 0
            self._forget_states()
        self._lengths[:] = wanted
        self._forget_drafts()

    def _forget_drafts(self) -> None:
        self._drafts = None
        self.parts.forget()
        self.hidden.forget()

    @property
    def _is_ragged(self) -> bool:
        return bool((self._lengths != self._lengths[0]).any())

    def step(self, ids: ArrayLike, keep: ArrayLike | None = None) -> NDArray[np.float32]:
        """Append tokens.

        Args:
            ids: whole numbers [B, S].
            keep: indices [R] along S whose logits are wanted; None for the last.
        Returns:
            logits float32 [B, R, V].
        Raises:
            RequestError: ids out of range, another batch, or more tokens than the model has positions; or several
                tokens behind sequences of different lengths, which take one each.
        """
        count = (tokens := token_ids(ids, self._model["vocab_size"])).shape[1]
        rows = kept_rows(keep, tokens.shape, self._batch)
        if self._is_ragged and (count > 1 or "verify" not in self._entries):
            raise RequestError(
                f"ids {list(tokens.shape)}: the sequences have different lengths, {self.lengths}; a step takes one "
                f"token of each, and verify() several{_NEEDS if 'verify' not in self._entries else ''}"
            )
        self.make_room(count)
        self._forget_drafts()
        if self._is_ragged or (self.hidden.is_wanted and count == 1):
            every, places = np.arange(self._batch), self._lengths.copy()
            found = self._verified(tokens[:, 0], places, every, np.full_like(every, -1), every, places)
            logits = found[:, None][:, rows]
            self.hidden.keep([(sequence, sequence) for sequence in range(self._batch)])
        elif self.falling is not None and count == 1:
            logits = self.falling.step(tokens, self._lengths.copy(), self._logits)[:, rows]
        else:
            logits = self._logits(tokens, rows)
        self.advance(count)
        return logits

    def take(self, sequence: int, other: Session) -> None:
        """Put the only sequence of another session in place of one of this session's; keys and values are copied."""
        fits = isinstance(other, Session) and other.batch == 1 and other._model is self._model and not self._states
        if not (fits and isinstance(self._device, Host)):
            raise RequestError("take: give a session of one sequence, of the same bundle, on a CPU, without states")
        own, length = whole("sequence", sequence, 0, self._batch - 1), int(other._lengths[0])
        self._make_room_behind(np.array([own]), *np.full((2, 1), length - 1))
        self._device.copy_rows(other._caches, self._caches, own, length)
        self._lengths[own] = self._stored[own] = length
        self._forget_drafts()

    def advance(self, count: int) -> NDArray[np.int64]:
        """Append tokens whose keys and values the caller writes; return where each sequence ended."""
        self.make_room(count)
        before = self._lengths.copy()
        self._lengths += count
        self._stored[:], self._drafts = self._lengths, None
        self.parts.forget()
        return before

    def verify(
        self, ids: ArrayLike, parent: ArrayLike, slot: ArrayLike | None = None, keep: ArrayLike | None = None
    ) -> NDArray[np.float32]:
        """Compute what comes after each of several drafted tokens, and append none of them; :meth:`accept` does.

        The tokens of a sequence form trees behind what it has stored.  A token sees these, and its own ancestors.

        Args:
            ids: whole numbers [T].
            parent: whole numbers [T]: the index of the token before it, which is smaller, or -1 for the stored ones.
            slot: whole numbers [T]: the sequence of each; None where there is one.
            keep: indices [R] of the tokens whose logits are wanted; None for all.
        Returns:
            logits float32 [R, V].
        Raises:
            RequestError: the bundle has no such entry, the tokens are out of range or no trees, a path is longer than
                64 tokens, or the model has too few positions.
        """
        if isinstance(self._device, Gpu):
            raise RequestError("verify: kernels for GPUs verify no drafted tokens; take the target x86")
        if "verify" not in self._entries:
            raise RequestError(f"verify: the bundle has no entry for drafted tokens{_NEEDS}")
        tokens, parents, slots, depth, order = token_trees(ids, parent, slot, self._model["vocab_size"], self._batch)
        rows = np.arange(len(tokens)) if keep is None else indices("keep", keep, len(tokens))
        if depth.max() >= DEEPEST:
            raise RequestError(f"parent: a path of {depth.max() + 1} tokens; give at most {DEEPEST} at once")
        position, row = self._lengths[slots] + depth, self._lengths[slots] + order
        self._make_room_behind(slots, position, row)
        given = dict(zip(OF_ROWS, (tokens, position, parents, slots, row), strict=True))
        logits = self.parts.verified(given, rows)
        if logits is None:
            logits = self._verified(tokens, position, rows, parents, slots, row)
        self._drafts = (parents.tolist(), slots.tolist(), row.tolist())
        if keep is not None:
            self.hidden.give(None)
        return logits

    def draft(self, entry: str, ids: ArrayLike, ahead: ArrayLike, slot: ArrayLike | None = None) -> NDArray[np.float32]:
        """Compute what comes after drafted tokens by another entry, and append none of them.

        The tokens of a sequence are drafted one behind another, in one call or in several; what is verified or appended
        next writes over their keys and values.

        Args:
            entry: that takes what `verify` does.
            ids: whole numbers [T].
            ahead: whole numbers [T]: how many tokens stand between each and those that its sequence has stored.  They
                were drafted, or are in this call.
            slot: whole numbers [T]: the sequence of each; None where there is one.
        Returns:
            logits float32 [T, V].
        Raises:
            RequestError: the bundle has no such entry, the tokens are out of range, or the model has too few positions.
        """
        if entry not in self._entries:
            raise RequestError(f"draft: the bundle has no entry {entry!r}, only {', '.join(self._entries) or 'none'}")
        tokens, _, slots, places = self._behind(ids, ahead, slot)
        self.parts.forget()
        own = np.full_like(tokens, -1)
        return self._verified(tokens, places, np.arange(len(tokens)), own, slots, places, entry=entry)

    def begin(self, ids: ArrayLike, ahead: ArrayLike, slot: ArrayLike | None = None) -> Rows:
        """Run the first part for drafted tokens, which go on from there if verified; arguments as of :meth:`draft`."""
        tokens, behind, slots, places = self._behind(ids, ahead, slot)
        own = np.full_like(tokens, -1)
        rows = self.parts.begin(dict(zip(OF_ROWS, (tokens, places, own, slots, places), strict=True)))
        self.parts.keep(rows, behind)
        return rows

    def _behind(self, ids: ArrayLike, ahead: ArrayLike, slot: ArrayLike | None) -> tuple[NDArray[Any], ...]:
        """Check drafted tokens and prepare for them; return them, and `ahead`, sequence and row of each."""
        tokens, behind, slots = tokens_ahead(ids, ahead, slot, self._model["vocab_size"], self._batch)
        places = self._lengths[slots] + behind
        self._make_room_behind(slots, places, places)
        return tokens, behind, slots, places

    def _make_room_behind(self, slots: NDArray[Any], position: NDArray[Any], row: NDArray[Any]) -> None:
        """Prepare for keys and values behind those stored, at some rows; others there are forgotten."""
        if position.max() >= self._limit:
            count = int((position - self._lengths[slots]).max()) + 1
            raise RequestError(
                f"{count} tokens after {self.lengths} others: the model ends at {self._limit} positions; "
                "draft fewer tokens"
            )
        if row.max() >= self._capacity:
            self._resize(max(int(row.max()) + 1, 2 * self._capacity), self._capacity)  # drafted rows stay as well
        self._stored[slots] = self._lengths[slots]
        self._drafts = None

    def accept(self, path_by_slot: Mapping[int, Sequence[int]]) -> None:
        """Append drafted tokens of the last :meth:`verify`, and forget the others.

        Args:
            path_by_slot: sequence -> indices of the tokens that it keeps: one without a parent, its child, and so on;
                may be empty.  A sequence that is left out keeps none.
        Raises:
            RequestError: nothing was verified since the last step, or these are not such paths.
        """
        if self._drafts is None:
            raise RequestError("accept: no drafted tokens: nothing was verified since tokens were last appended")
        parents, slots, row = self._drafts
        for sequence, found in token_paths(path_by_slot, parents, slots, self._batch).items():
            length = int(self._lengths[sequence])
            moved = [(row[t], place) for place, t in enumerate(found, length) if row[t] != place]
            assert isinstance(self._device, Host)
            for cache in self._caches if moved else ():
                self._device.move_rows(cache, sequence, *zip(*moved, strict=True))
            self._lengths[sequence] = self._stored[sequence] = length + len(found)
            self.hidden.keep([(sequence, last) for last in found[-1:]])
        self._drafts = None

    def _verified(
        self, ids: NDArray[Any], position: Any, keep: Any, *places: Any, entry: str = "verify"
    ) -> NDArray[np.float32]:
        """Call an entry for drafted tokens; return logits [R, V], and remember the hidden states of `verify`."""
        first, *others = aligned_rows([ids, position, keep, *places])
        found = self._entries[entry](*map(self._device.put, (first[None], *others)), *self._caches)
        logits, *more = found if isinstance(found, list) else [found]
        self.hidden.give(more[0][0] if more else None)
        result: NDArray[np.float32] = logits[0]
        return result

    def _heads(self, *inputs: NDArray[Any]) -> Any:
        return self._entries[HEADS](*map(self._device.put, inputs))

    def _logits(self, tokens: NDArray[np.int64], rows: NDArray[Any]) -> NDArray[np.float32]:
        kept = (*self._caches, *self._states, *self._memory)
        if self._record is not None and tokens.shape[1] == len(rows) == 1 and not self._states:
            if self._steps_of_one and self._recorded is None:
                self._recorded = self._record(tokens, self.position, kept)
            self._steps_of_one += 1
            if self._recorded is not None:
                return self._recorded(tokens, self.position)
        inputs = (tokens, np.arange(self.position, self.position + tokens.shape[1]), rows.astype(np.int64))
        logits: NDArray[np.float32] = self._call(*(self._device.put(x) for x in inputs), *kept)
        return logits

    def make_room(self, count: int) -> None:
        """Make sure that ``count`` more tokens fit.

        Raises:
            RequestError: the model has too few positions, or the machine too little memory.
        """
        count = whole("count", count, 0)
        needed = (longest := int(self._lengths.max())) + count
        if needed > self._limit:
            raise RequestError(
                f"{count} tokens after {longest} others: the model ends at {self._limit} positions; "
                "give fewer tokens, or start a new session"
            )
        if needed > self._capacity:
            self._resize(min(self._limit, max(needed, 2 * self._capacity)))

    def _resize(self, capacity: int, rows: int | None = None) -> None:
        """Make room for so many tokens; that many rows are kept, those of stored tokens unless more are asked for."""
        kept = int(np.max(self._stored)) if rows is None else rows
        size_bytes = self._model["cache_bytes_per_token"] * self._batch * capacity
        self._device.check_room(size_bytes, _HELD.format(self._batch, capacity))
        if self._recorded is not None:
            self._recorded.close()
            self._recorded = None
        self._caches = grown_caches(self._device, self._caches, self._model, self._batch, capacity, kept)
        self._capacity = capacity

    def _forget_states(self) -> None:
        shapes = self._model.get("states", [])
        self._states = [self._device.zeros((self._batch, *shape), np.dtype(np.float32)) for shape in shapes]
