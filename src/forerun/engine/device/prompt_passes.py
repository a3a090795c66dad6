"""Passes over prompts as recorded work: all sizes ahead of time by a warm-up, or each when it is first met.

Launched one by one, the kernels of a pass over 512 tokens of a large model keep a GPU waiting for four fifths of the
time, and every row that decodes waits with it. A prompt is cut into chunks of few sizes; what is missing to a size is
padding, whose keys go where nobody reads. Several short ones (what shared beginnings leave, or a draft model has
missed) are cut into small pieces that run together, each as a row of the pass: every layer writes the keys of all
pieces before any of them attends, so a piece finds those of the pieces before it.

Without a warm-up a size is recorded the first time it is met, which takes the host about as long as that pass would
have, and not only when it recurs: the same call twice is then the same work, to the last bit. Prompts that keep a
device busy however they are launched are left to passes of their own length, which hold all of them at once.

Where a row's first token is drawn from the pass that ends its prompt, the head runs in every pass, on the last token of
each chunk or piece: beside some hundred tokens in all layers that costs less than recording each pass twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.engine.device.capture import Work
from forerun.engine.device.recorder import Recorder, Recordings, Scratch
from forerun.engine.device.shapes import fingerprint, key_bound
from forerun.math.transfer import copy_into, int64, to_device
from forerun.models import static_pass
from forerun.models.scorer import PromptEnds, Scorer, Unread
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.models.static_pass import StaticPass

CHUNKS = (32, 64, 128, 256, 384, 512, 1024, 2048)  # tokens of one row
PIECE, PIECES = 16, (8, 32)  # tokens of a piece, and how many of them run together
WEIGHTS = 240  # tokens that a GPU computes in the time in which it reads the weights for them
LONG = 2048  # tokens from which on passes that are not recorded keep a device busy, and are larger
NO_ENDS = PromptEnds()


def why_not(scorer: Scorer) -> str | None:
    """What keeps a model's prompts from being recorded work; None where nothing does."""
    if scorer.cache.reads_in_place:
        return "padding would overwrite other rows' keys where each row is one piece"
    if scorer.ranks is not None:
        return "other ranks follow passes of few tokens alone"
    if isinstance(scorer, Seq2SeqScorer):
        return "prompts of encoder-decoder models are short"
    return static_pass.why_not(scorer)


class Piece(NamedTuple):
    """Tokens of a row behind its first `past` ones."""

    row: int
    past: int
    tokens: Sequence[int]
    is_last: bool = False  # of what the row is given


class PromptPasses:
    """Takes in tokens of rows up to `bound` keys; `Scorer.recorded_feed` is one's `feed`.

    Without a bound passes are recorded for as many keys as they meet. Only `with_head` is there a logit of anything.
    """

    def __init__(
        self, scorer: Scorer, recorder: Recorder, bound: int | None = None, *, with_head: bool = False
    ) -> None:
        self.scorer, self.bound, self.with_head = scorer, bound, with_head
        self.recordings = Recordings(recorder)
        self._pass = StaticPass(scorer)
        self._logits = Scratch()  # after the last token of each row of the last pass
        # Of R rows with T tokens each, one behind the other: slots [R], keys that are there [R], where among all tokens
        # each row's last one is [R], tokens [R, T].
        self._numbers: dict[tuple[int, int], Tensor] = {}

    def prepare(self) -> None:
        """Record all there is for the bound."""
        assert self.bound is not None
        for shape in (*((1, chunk) for chunk in reversed(CHUNKS)), *((pieces, PIECE) for pieces in reversed(PIECES))):
            if 1 + shape[1] <= self.scorer.cache.capacity:
                self._send(shape, [])
                self._recorded(*shape, self.bound)

    @torch.inference_mode()
    def feed(self, new: list[Unread], ends: PromptEnds = NO_ENDS) -> list[Unread]:
        """All but long prompts, and ends of rows that padding would bring past `bound` or all keys a row can have.

        Those are returned, and without a bound all where there are many.
        """
        assert self.with_head or not ends.wanted, "passes without a head have no logits"
        if self.bound is None and sum(len(block) for _, block in new) > LONG:
            return new
        ready = [(row, block) for row, block in new if len(block) <= LONG]
        rest = [(row, block) for row, block in new if len(block) > LONG]
        if len(ready) > 1 and self._are_faster_together(ready):
            self._feed_together(ready, ends)
        else:
            rest += [(row, left) for row, block in ready if (left := self._feed_alone(row, block, ends))]
        return rest

    def _feed_alone(self, row: int, block: Sequence[int], ends: PromptEnds) -> list[int]:
        """Chunk after chunk; what has no room for its padding is returned."""
        left = list(block)
        while left and (chunk := self._chunk(row, len(left))):
            piece = Piece(row, self.scorer.cache.length(row), left[:chunk], is_last=len(left) <= chunk)
            self._run((1, chunk), [piece], ends)
            left = left[chunk:]
        return left

    def _feed_together(self, new: Sequence[Unread], ends: PromptEnds) -> None:
        pieces = []
        for row, block in new:
            past = self.scorer.cache.length(row)
            pieces += [
                Piece(row, past + i, block[i : i + PIECE], is_last=i + PIECE >= len(block))
                for i in range(0, len(block), PIECE)
            ]
        for size in _sizes(len(pieces)):
            self._run((size, PIECE), pieces[:size], ends)
            pieces = pieces[size:]

    def _are_faster_together(self, new: Sequence[Unread]) -> bool:
        """By the tokens that are computed, and those that could be in the time in which weights are read."""
        if not all(self._fits(row, len(block) + PIECE) for row, block in new):
            return False
        alone = sum(_cost(_chunks(len(block))) for _, block in new)
        pieces = sum(-(-len(block) // PIECE) for _, block in new)
        return _cost([size * PIECE for size in _sizes(pieces)]) < alone

    def _chunk(self, row: int, unread: int) -> int:
        """What is run next of so many tokens; 0 where there is no room for it, nor for less without padding."""
        sizes = [_chunks(unread)[0], *(chunk for chunk in reversed(CHUNKS) if chunk <= unread)]
        return next((chunk for chunk in sizes if self._fits(row, chunk)), 0)

    def _fits(self, row: int, tokens: int) -> bool:
        """Whether the keys it would have, padding included, are no more than attention was recorded for."""
        most = self.scorer.cache.capacity if self.bound is None else min(self.scorer.cache.capacity, self.bound)
        return self.scorer.cache.length(row) + tokens <= most

    def _run(self, shape: tuple[int, int], pieces: Sequence[Piece], ends: PromptEnds) -> None:
        """The pieces of a row follow one another."""
        cache, lengths = self.scorer.cache, {piece.row: piece.past + len(piece.tokens) for piece in pieces}
        cache.reserve(list(lengths), list(lengths.values()))
        self._send(shape, pieces)
        self._recorded(*shape, self.bound or key_bound(max(piece.past for piece in pieces) + shape[1]))()
        wanted = [place for place, piece in enumerate(pieces) if piece.is_last and piece.row in ends.wanted]
        if wanted:  # copied: the next pass writes over them
            picked = self._logits.rows[to_device(int64(wanted), self.scorer.device)]
            ends.logits.update(zip((pieces[place].row for place in wanted), picked, strict=True))
        for row, length in lengths.items():
            cache.set_length(row, length)

    def _send(self, shape: tuple[int, int], pieces: Sequence[Piece]) -> None:
        """Without waiting. Rows that are missing are dummies, which have one key."""
        (rows, tokens), cache, device = shape, self.scorer.cache, self.scorer.device
        if shape not in self._numbers:
            self._numbers[shape] = torch.zeros(rows * (3 + tokens), dtype=torch.int64, device=device)
        dummies = rows - len(pieces)
        slots = [*(cache.slot(piece.row) for piece in pieces), *[cache.reserve_slots(True)] * dummies]
        past = [*(piece.past for piece in pieces), *[1] * dummies]
        last = [*(len(piece.tokens) - 1 for piece in pieces), *[0] * dummies]
        places = (row * tokens + place for row, place in enumerate(last))
        blocks = [[*piece.tokens, *[0] * (tokens - len(piece.tokens))] for piece in pieces] + [[0] * tokens] * dummies
        numbers = int64(chain(slots, past, places, *blocks))
        copy_into(self._numbers[shape], numbers)

    def _recorded(self, rows: int, tokens: int, bound: int) -> Work:
        return self.recordings.get(
            (rows, tokens, bound),
            lambda: (self.scorer.version, fingerprint([self.scorer]), self._logits.version),
            partial(self._work, rows, tokens, bound),
            (),
        )

    def _work(self, rows: int, tokens: int, bound: int) -> None:
        slots, past, last, ids = self._numbers[rows, tokens].split([rows, rows, rows, rows * tokens])
        new, laid_out = ids.view(rows, tokens), self._pass.rows(slots, past, tokens, bound)
        if not self.with_head:
            self._pass.hidden(new, laid_out)
            return
        logits = self._pass.logits_at(new, laid_out, last)
        self._logits.reserve(logits, PIECES[-1])  # once for all shapes: one that grows makes recordings useless
        self._logits.rows[:rows].copy_(logits)


def _chunks(tokens: int) -> list[int]:
    """In which one row's tokens are run: as much as possible at once, unless the padding takes longer than a pass."""
    whole, rest = divmod(tokens, CHUNKS[-1])
    if not rest:
        return [CHUNKS[-1]] * whole
    ways = [[next(chunk for chunk in CHUNKS if chunk >= rest)]]
    if smaller := [chunk for chunk in CHUNKS if chunk < rest]:
        ways.append([smaller[-1], *_chunks(rest - smaller[-1])])  # one way only: trying all of them takes for ever
    return [CHUNKS[-1]] * whole + min(ways, key=_cost)


def _cost(chunks: Sequence[int]) -> int:
    """In tokens that a GPU computes meanwhile."""
    return sum(WEIGHTS + chunk for chunk in chunks)


def _sizes(pieces: int) -> list[int]:
    """Of the passes in which so many pieces are run."""
    whole, rest = divmod(pieces, PIECES[-1])
    return [PIECES[-1]] * whole + [next(size for size in PIECES if size >= rest)] * bool(rest)
