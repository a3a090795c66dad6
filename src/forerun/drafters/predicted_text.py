"""Copies from a text that the answer is expected to be: a file to be edited, a form to be filled in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from forerun.arguments import integer
from forerun.drafters.base import Drafter, copied_draft
from forerun.drafters.chain import Chain
from forerun.types import Draft, DraftContext

ORDERS = range(2, 5)  # tokens that must agree where the text meets the prediction again
LONGEST_EVIDENCE = 15  # longer agreement counts as this much


@dataclass(slots=True)
class _Follower:
    """Where one row is in its prediction, as far as the row's text tells."""

    prediction: tuple[int, ...]
    start: int  # tokens before the answer
    place: int | None = 0  # in the prediction: what comes next; None where the text has left it
    agreed: int = 0  # tokens in a row that were the prediction's
    left_at: int = 0  # the place where the text left it last
    answer: list[int] = field(default_factory=list)  # as far as it was followed
    ends: dict[tuple[int, ...], list[int]] | None = None  # n-gram -> where its continuations begin, ascending

    def follow(self, history: Sequence[int]) -> None:
        """Take in what the answer has gained; one that has become shorter is read again from its beginning."""
        if len(history) - self.start < len(self.answer):
            self.place, self.agreed, self.left_at = 0, 0, 0
            self.answer.clear()
        for token in history[self.start + len(self.answer) :]:
            self.answer.append(token)
            self._step(token)

    def _step(self, token: int) -> None:
        """One token more. How tokens were spread over rounds changes nothing."""
        if self.place is not None and self.place < len(self.prediction) and self.prediction[self.place] == token:
            self.place, self.agreed = self.place + 1, self.agreed + 1
            return
        if self.place is not None:
            self.left_at, self.place, self.agreed = self.place, None, 0
        self._meet()

    def _meet(self) -> None:
        """Find the last tokens in the prediction: as many as possible, and behind where it was left if there."""
        if self.ends is None:
            self.ends = _index(self.prediction)
        for n in reversed(ORDERS):
            found = self.ends.get(tuple(self.answer[-n:])) if n <= len(self.answer) else None
            if found:
                behind = bisect_right(found, self.left_at)  # a table may say the same few tokens thousands of times
                self.place, self.agreed = found[min(behind, len(found) - 1)], n
                return

    def guess(self, room: int) -> tuple[list[int], int]:
        """The coming tokens, if the answer stays with its prediction, and how long it has been."""
        if self.place is None:
            return [], 0
        return list(self.prediction[self.place : self.place + room]), min(self.agreed, LONGEST_EVIDENCE)


def _index(tokens: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    """Where each n-gram is continued. Made once a text has left its prediction: most never do."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for end in range(ORDERS[0], len(tokens)):
        for n in ORDERS:
            if n <= end:
                ends.setdefault(tokens[end - n : end], []).append(end)
    return ends


class PredictedText(Drafter):
    """Drafts what a request predicts, from its beginning and for as long as the answer agrees.

    Where the answer departs, nothing is drafted until its last tokens are found in the prediction again: in a chain the
    next drafter takes over meanwhile. Requests without a prediction get no draft.
    """

    copies = True
    takes_predictions = True

    def __init__(self, max_tokens: int = 64) -> None:
        self.max_tokens = integer("max_tokens", max_tokens, 1, remedy="a draft needs room for at least 1 token")
        self._followers: dict[int, _Follower] = {}

    def clone(self) -> Self:
        """The same without rows."""
        return type(self)(self.max_tokens)

    def predict(self, row: int, prediction: Sequence[int], start: int) -> None:
        """Row `row`, whose answer begins behind `start` tokens, is expected to say this; empty: nobody knows."""
        self.release(row)
        if prediction:
            self._followers[row] = _Follower(tuple(prediction), start)

    def is_prediction(self, evidence: int) -> bool:
        return True

    def propose(self, context: DraftContext) -> Draft:
        rooms = context.copy_lengths or context.max_lengths
        found = [
            self._guess(row, history, min(room, self.max_tokens), context.vocab_size)
            for row, history, room in zip(context.rows, context.histories, rooms, strict=True)
        ]
        return copied_draft(found, context)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing: each round reads what the row's text has become."""

    def release(self, row: int) -> None:
        self._followers.pop(row, None)

    def _guess(self, row: int, history: Sequence[int], room: int, vocab_size: int) -> tuple[list[int], int]:
        follower = self._followers.get(row)
        if follower is None or room < 1:
            return [], 0
        follower.follow(history)
        tokens, evidence = follower.guess(room)
        known = next((i for i, token in enumerate(tokens) if token >= vocab_size), len(tokens))
        return tokens[:known], evidence


def with_predictions(drafter: Drafter, on_gpu: bool) -> Drafter:
    """`drafter` behind what requests predict; itself where that would cost requests without a prediction something.

    Recorded rounds take copies that the host finds beside what the device draws. Where nobody copies, the host is not
    waited for, and trees are grown by the device alone.
    """
    if drafter.makes_trees or (on_gpu and drafter.copying_part() is None):
        return drafter
    return Chain(PredictedText(), drafter)
