"""What of a growing sequence may be sent: whole characters, and nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.engine.row import TokenLogprob
from forerun.serve.backend import Gained
from forerun.text import StreamDecoder
from forerun.types import Origin

PLAIN = Origin.PLAIN.value
PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The text of one token; a character that spans several tokens belongs to the last of them."""

    text: str
    token: int
    origin: str  # accepted, correction, bonus, plain (a round without a draft) or prompt
    logprob: TokenLogprob | None = None
    is_token: bool = True  # False: bytes left over in the end, of tokens that had their pieces
    is_end: bool = False  # a token that ends the sequence and has no text


class AnswerText:
    """Tokens in, pieces out once nothing can change or take them back.

    `hidden` are ids that end the sequence: where one has no text, only its log-probability is told, if it is asked for.
    Where nobody asks for tokens (`by_token` is false), a piece may be the text of several: that costs a fraction.
    Stop strings are looked for where special tokens are written out, though no piece shows them, as the engine does.
    With `context` the text goes on from those tokens, as a prompt's does. The first `num_unstopped` tokens complete no
    stop string, as in the engine.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        hidden: frozenset[int] = frozenset(),
        by_token: bool = True,
        context: Sequence[int] = (),
        num_unstopped: int = 0,
    ) -> None:
        self.stops, self.hidden = tuple(stops), hidden
        self.by_token = by_token or bool(stops)  # of a piece across the beginning of a stop string nothing is sent
        self.has_stopped = False  # at a stop string, which is cut off
        self._text = StreamDecoder(tokenizer, context)
        # As a sequence of its own: behind a special token that opens it, a space is written that is not sent.
        self._written = StreamDecoder(tokenizer, self._text.with_text(), skip_special=False) if stops else None
        self._held: list[tuple[TextPiece, str]] = []  # with what stop strings are looked for in
        self._num_unstopped = num_unstopped
        self._safe = 0  # characters that are held of those tokens: no stop string ends among them

    def push_all(self, gained: Sequence[Gained]) -> list[TextPiece]:
        """What can be sent after rounds, up to a stop string."""
        if not self.by_token:
            tokens = [token for progress in gained for token in progress.tokens]
            text = self._text.push(*tokens)
            return [TextPiece(text, tokens[-1], PLAIN)] if text else []
        pieces: list[TextPiece] = []
        for progress in gained:
            if not self.has_stopped:
                pieces += self.push(progress)
        return pieces

    def push(self, progress: Gained) -> list[TextPiece]:
        """What can be sent after a round, token by token."""
        logprobs = progress.logprobs or (None,) * len(progress.tokens)
        names = [origin.value for origin in progress.origins]
        for token, origin, logprob in zip(progress.tokens, names, logprobs, strict=True):
            text = self._text.push(token)
            written = text if self._written is None else self._written.push(token)
            if len(self._text.tokens) <= self._num_unstopped:
                self._safe += len(written)
            self._held.append(
                (TextPiece(text, token, origin, logprob, is_end=not text and token in self.hidden), written)
            )
        return self._release()

    def finish(self) -> list[TextPiece]:
        """The rest, once nothing more comes."""
        if self.has_stopped:
            return []
        if rest := self._text.finish():  # bytes that never became a character
            written = rest if self._written is None else self._written.finish()
            self._held.append((TextPiece(rest, self._text.tokens[-1], PLAIN, is_token=False), written))
        ready = self._release()
        held, self._held = self._held, []
        return [*ready, *_told(held)]

    def _release(self) -> list[TextPiece]:
        text = "".join(written for _, written in self._held)
        starts = ((stop, max(self._safe - len(stop) + 1, 0)) for stop in self.stops)
        places = [place for stop, start in starts if (place := text.find(stop, start)) >= 0]
        if places:
            self.has_stopped = True
            return self._take(min(places), cut=True)
        return self._take(len(text) - overlap(text, self.stops))

    def _take(self, end: int, cut: bool = False) -> list[TextPiece]:
        """Pieces that lie before `end`; the one across it stays, or is `cut` there and the rest dropped.

        What is sent of a token and what is written of it end alike; a first space may be in one of them alone.
        """
        number, place = 0, 0
        for _, written in self._held:
            if place + len(written) > end:
                break
            place += len(written)
            number += 1
        taken, rest = self._held[:number], self._held[number:]
        if cut and rest:
            piece, written = rest[0]
            text = piece.text[: max(len(piece.text) - len(written) + end - place, 0)]
            if text or place < end:
                taken.append((replace(piece, text=text), written))
        self._held, self._safe = [] if cut else rest, max(self._safe - place, 0)
        return _told(taken)


def _told(held: Sequence[tuple[TextPiece, str]]) -> list[TextPiece]:
    """Without ends that have neither a text nor a log-probability to tell."""
    return [piece for piece, _ in held if not piece.is_end or piece.logprob is not None]


def overlap(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that is the beginning of one of `marks`, and not all of it."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
