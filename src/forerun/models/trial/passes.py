"""What decoding does with rows, in as few passes as show it: prompts, drafts, cuts back, copies, single tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from forerun.models.bodies.base import Body
from forerun.models.scorer import Scorer
from forerun.models.trial.texts import SourcedText, Texts, Tokens
from forerun.types import Source


@dataclass(frozen=True, slots=True)
class Scored:
    """Some rows of a pass that say one thing together: what, their logits, and the texts that these belong to."""

    what: str
    logits: list[Tensor]  # [n, V] of each row
    texts: list[SourcedText]  # of each row; the last n tokens were scored


class Rows:
    """The rows of a scorer, and what has become of the text of each."""

    def __init__(self, scorer: Scorer, states: Sequence[Tensor]) -> None:
        self._scorer = scorer
        self._sources = [Source(states=one) for one in states]  # rows that read the same share its keys
        self._texts: dict[int, SourcedText] = {}

    def admit(self, row: int, source: int) -> None:
        self._scorer.admit(row)
        if self._sources:
            self._scorer.read(row, self._sources[source])
        self._texts[row] = source if self._sources else 0, ()

    def feed(self, new: dict[int, Tokens]) -> None:
        self._scorer.feed(list(new), list(new.values()))
        self._append(new)

    def cut(self, lengths: dict[int, int]) -> None:
        self._scorer.rewind(list(lengths), list(lengths.values()))
        for row, length in lengths.items():
            source, text = self._texts[row]
            self._texts[row] = source, text[:length]

    def release(self, row: int) -> None:
        self._scorer.release(row)
        del self._texts[row]

    def score(self, new: dict[int, Tokens]) -> dict[int, Tensor]:
        """[n, V] after each of the new tokens of each row."""
        logits = self._scorer.score(list(new), list(new.values()))
        self._append(new)
        return dict(zip(new, logits.split(list(map(len, new.values()))), strict=True))

    def scored(self, what: str, logits: dict[int, Tensor]) -> Scored:
        """What was just scored of some rows, with their texts as these are now."""
        return Scored(what, list(logits.values()), [self._texts[row] for row in logits])

    def _append(self, new: dict[int, Tokens]) -> None:
        for row, tokens in new.items():
            source, text = self._texts[row]
            self._texts[row] = source, text + tokens


def run(scorer: Scorer, texts: Texts) -> list[Scored]:
    """Three passes, and one more where another body runs long ones.

    The cost of a pass is that of reading the weights, and rows of all kinds go through it side by side. So a prompt
    is scored beside drafts and cut rows, as it is when a row joins others.
    """
    gone, drafted, cut, copied, fresh = range(5)
    rows = Rows(scorer, texts.states)
    for row, source in ((gone, 0), (drafted, 1), (cut, 2), (copied, 1)):
        rows.admit(row, source)
    prompt = texts.draw(4)  # so short that one key of it, missing in a copy, is much of it with 16 bits, too
    # Without a head, as all prompts are read; the last row is given the second one's keys.
    rows.feed({gone: texts.draw(4), drafted: prompt, cut: texts.draw(14), copied: prompt})
    rows.release(gone)  # the last row moves into its place
    rows.admit(fresh, 0)
    rows.cut({cut: 9})
    drafts = texts.draw(5)
    new = {copied: texts.draw(5), fresh: texts.draw(9), drafted: drafts, cut: texts.draw(6)}
    logits = rows.score(new)
    done = [
        rows.scored("a prompt's pass", {fresh: logits[fresh]}),
        rows.scored("a pass of drafts behind ragged rows", {drafted: logits[drafted]}),
        rows.scored("a step after a cut back", {cut: logits[cut]}),
        rows.scored("a pass with rows that were copied or moved", {copied: logits[copied]}),
    ]
    # Cut in the middle of what was scored, and to its beginning, where the row goes on with another's text.
    rows.cut({drafted: len(prompt) + 2, copied: len(prompt)})
    ones = {cut: texts.draw(1), copied: drafts[:1], fresh: texts.draw(1), drafted: texts.draw(1)}
    done.append(rows.scored("a step of one token a row", rows.score(ones)))
    if scorer.body.beyond is not None:
        with _as_if_long(scorer.body):
            long = rows.score({row: texts.draw(4) for row in (fresh, drafted, cut)})
        done.append(rows.scored("a pass as long prompts have it", long))
    return done


@contextmanager
def _as_if_long(body: Body) -> Iterator[None]:
    """Every pass is run by whoever runs long ones."""
    longest, body.longest_pass = body.longest_pass, 0
    try:
        yield
    finally:
        body.longest_pass = longest
