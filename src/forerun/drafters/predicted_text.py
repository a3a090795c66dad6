"""Copies from a text that the answer is expected to be: a file to be edited, a form to be filled in."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from forerun.arguments import integer
from forerun.drafters.base import Drafter, copied_draft
from forerun.drafters.chain import Chain
from forerun.types import Draft, DraftContext

ORDERS = range(2, 5)  # tokens that must agree where the text meets the prediction again
UNICODE = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"  # four bytes a letter, as numbers of an array
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
    letters: str | None = None  # the prediction, made to be searched once the text has left it: most never do

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
        if self.letters is None:
            self.letters = _letters(self.prediction)
        last = _letters(self.answer[-ORDERS[-1] :])
        end = len(self.letters) - 1  # something follows
        if self.letters.find(last[-ORDERS[0] :], 0, end) < 0:  # as most often: one look, and not one for each order
            return
        for n in reversed(range(ORDERS[0], len(last) + 1)):
            place = self.letters.find(last[-n:], max(self.left_at - n + 1, 0), end)
            if place < 0:
                place = self.letters.rfind(last[-n:], 0, end)
            if place >= 0:
                self.place, self.agreed = place + n, n
                return

    def guess(self, room: int) -> tuple[list[int], int]:
        """The coming tokens, if the answer stays with its prediction, and how long it has been."""
        if self.place is None:
            return [], 0
        return list(self.prediction[self.place : self.place + room]), min(self.agreed, LONGEST_EVIDENCE)


def _letters(tokens: Sequence[int]) -> str:
    """One for each token. A string of 100,000 is made in a millisecond or two and searched in a fraction of one, for
    each token off the prediction, each row; a table of all that may be looked for took the engine a second, in which no
    row gained a token."""
    try:
        return array("I", tokens).tobytes().decode(UNICODE, "surrogatepass")
    except (OverflowError, UnicodeDecodeError):  # ids beyond Unicode, which share its last letter: drafts may be wrong
        return "".join(chr(min(token, sys.maxunicode)) for token in tokens)


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
        guesses = [
            self._guess(row, history, min(room, self.max_tokens), context.vocab_size)
            for row, history, room in zip(context.rows, context.histories, rooms, strict=True)
        ]
        return copied_draft(guesses, context)

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
    waited for. Predictions beside trees have not been tried.
    """
    if drafter.makes_trees or (on_gpu and drafter.copying_part() is None):
        return drafter
    return Chain(PredictedText(), drafter)
