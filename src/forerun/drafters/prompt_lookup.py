"""Copies what followed the last time the row said the same thing: free drafts wherever a text repeats its source."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from forerun.arguments import flag, integer
from forerun.drafters.base import Drafter, copied_draft
from forerun.errors import InvalidArgument
from forerun.types import Draft, DraftContext, Source

# Longer matches all count as one class: by then the copy is nearly always right, and a policy needs full classes.
LONGEST_EVIDENCE = 8
# Tokens compared to notice that a row now holds another text. A miss costs acceptance, never correctness: the index
# holds positions only, and the tokens are read from the history at hand.
FINGERPRINT = 8


@dataclass(slots=True)
class _Index:
    """Where each n-gram of one history ended last (or first). Only n-grams that something follows are in it."""

    orders: range
    newest: bool
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # n-gram -> where its continuation begins
    indexed: int = 0  # ends below this are in the index
    tail: tuple[int, ...] = ()  # the tokens just before `indexed`

    def extend(self, history: Sequence[int]) -> None:
        """Take in the tokens that are new since the last call."""
        for end in range(max(self.indexed, 1), len(history)):
            for n in self.orders:
                if n > end:
                    break
                ngram = tuple(history[end - n : end])
                if self.newest or ngram not in self.ends:
                    self.ends[ngram] = end
        self.indexed = len(history)
        self.tail = tuple(history[-FINGERPRINT:])

    def is_prefix_of(self, history: Sequence[int]) -> bool:
        """Whether `history` still begins with what was indexed, as far as the fingerprint tells."""
        start = self.indexed - len(self.tail)
        return len(history) >= self.indexed and tuple(history[start : self.indexed]) == self.tail

    def find(self, history: Sequence[int]) -> int | None:
        """Where the continuation of the longest known suffix of `history` begins."""
        for n in reversed(self.orders):
            if n < len(history):
                end = self.ends.get(tuple(history[-n:]))
                if end is not None:
                    return end
        return None


class PromptLookup(Drafter):
    """Drafts by looking up the end of each row's text in the row itself.

    The longest suffix of `max_ngram` down to `min_ngram` tokens that occurred before is continued as it was continued
    the last time, or the first time if not `newest`. On eight kinds of text the last time was the better guess for
    five, equal for one; summaries of news, which repeat the first lines of an article, gain 3 % from the first time.
    Behind an encoder-decoder model the text that the encoder reads is looked up too, as if it came first, unless
    `source` is False: summaries and translations copy names and numbers from it.
    Costs nothing but dictionary look-ups for the new tokens of a round.
    """

    copies = True  # every draft is deterministic

    def __init__(
        self,
        max_ngram: int = 3,
        min_ngram: int = 1,
        max_tokens: int = 16,
        *,
        newest: bool = True,
        source: bool = True,
    ) -> None:
        min_ngram, max_ngram = integer("min_ngram", min_ngram), integer("max_ngram", max_ngram)
        if not 1 <= min_ngram <= max_ngram:
            raise InvalidArgument(
                f"min_ngram={min_ngram}, max_ngram={max_ngram}: matches need 1 <= min_ngram <= max_ngram tokens"
            )
        self.orders = range(min_ngram, max_ngram + 1)
        self.max_tokens = integer("max_tokens", max_tokens, 1, remedy="a draft needs room for at least 1 token")
        self.newest, self.source = flag("newest", newest), flag("source", source)
        self._forget()

    def clone(self) -> Self:
        """The same with texts of its own."""
        twin = copy.copy(self)
        twin._forget()
        return twin

    def propose(self, context: DraftContext) -> Draft:
        """Continue each row as it was continued the last time it ended this way."""
        matches = [
            self._look_up(row, history, room, context.vocab_size)
            for row, history, room in zip(
                context.rows, context.histories, context.copy_lengths or context.max_lengths, strict=True
            )
        ]
        return copied_draft(matches, context)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Drop the index of a row that was cut below what was indexed; committed text never is, so this is rare."""
        for row, length in zip(rows, lengths, strict=True):
            before = len(self._sources.get(row, ()))
            if row in self._indexes and before + length < self._indexes[row].indexed:
                del self._indexes[row]

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        """`row` holds a new text from now on."""
        self.release(row)

    def read(self, row: int, source: Source) -> None:
        """`row` may copy from `source`."""
        if self.source:
            self._sources[row] = source.ids

    def release(self, row: int) -> None:
        """Forget `row`."""
        self._indexes.pop(row, None)
        self._sources.pop(row, None)

    def prepare(self, rows: Sequence[int], histories: Sequence[Sequence[int]]) -> None:
        """Index what the rows have gained; of a long prompt that takes as long as several rounds."""
        for row, history in zip(rows, histories, strict=True):
            self._extended(row, history)

    def _forget(self) -> None:
        self._indexes: dict[int, _Index] = {}
        self._sources: dict[int, tuple[int, ...]] = {}

    def _look_up(self, row: int, history: Sequence[int], room: int, vocab_size: int) -> tuple[list[int], int]:
        """The copied continuation and the length of the match behind it."""
        if room < 1:
            return [], 0
        index, history = self._extended(row, history)
        begin = index.find(history)
        if begin is None:
            return [], 0
        copied = _copy(history, begin, min(room, self.max_tokens))
        known = next(
            (i for i, token in enumerate(copied) if token >= vocab_size), len(copied)
        )  # an encoder's own words
        return copied[:known], _match_length(history, begin)

    def _extended(self, row: int, history: Sequence[int]) -> tuple[_Index, Sequence[int]]:
        """The row's index with all of its text in it, and that text with the source before it."""
        if source := self._sources.get(row):
            history = [*source, *history]
        index = self._indexes.get(row)
        if index is None or not index.is_prefix_of(history):
            index = self._indexes[row] = _Index(self.orders, self.newest)
        index.extend(history)
        return index, history


def _copy(history: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from `begin` on; past the end of the history the copy goes on with its own tokens."""
    period = len(history) - begin
    return [history[begin + i % period] for i in range(count)]


def _match_length(history: Sequence[int], end: int) -> int:
    """How many tokens before `end` agree with the end of the history, up to `LONGEST_EVIDENCE`."""
    length = 0
    while length < min(LONGEST_EVIDENCE, end) and history[end - 1 - length] == history[-1 - length]:
        length += 1
    return length
