"""Passes over prompts as recorded work, after a warm-up.

Launched one by one, the kernels of a pass over 512 tokens of a large model keep a GPU waiting for four fifths of the
time, and every row that decodes waits with it. A prompt is cut into chunks of few sizes; what is missing to a size is
padding, whose keys go where nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.engine.device.capture import Work
from forerun.engine.device.recorder import Recorder, Recordings
from forerun.engine.device.shapes import fingerprint
from forerun.models import static_pass
from forerun.models.scorer import Scorer, Unread
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.models.static_pass import StaticPass

CHUNKS = (64, 128, 256, 384, 512)  # tokens of one row
SHORT, TOGETHER = 32, 16  # tokens of each of so many rows: what shared beginnings leave, or a draft model has missed
FEW = 2  # short rows that are faster one by one
LONG = 2048  # tokens from which on passes that are not recorded keep a device busy, and are larger


def why_not(scorer: Scorer) -> str | None:
    """What keeps a model's prompts from being recorded work; None where nothing does."""
    if scorer.cache.reads_in_place:
        return "padding would overwrite other rows' keys where each row is one piece"
    if isinstance(scorer, Seq2SeqScorer):
        return "prompts of encoder-decoder models are short"
    return static_pass.why_not(scorer)


class PromptPasses:
    """Takes in tokens of rows up to `bound` keys; `Scorer.recorded_feed` is one's `feed`."""

    def __init__(self, scorer: Scorer, recorder: Recorder, bound: int) -> None:
        self.scorer, self.bound = scorer, bound
        self.recordings = Recordings(recorder)
        self._pass = StaticPass(scorer)
        # Of R rows with T tokens each, one behind the other: slots [R], keys that are there [R], tokens [R, T].
        self._numbers: dict[tuple[int, int], Tensor] = {}

    def prepare(self) -> None:
        """Record all there is."""
        for shape in (*((1, chunk) for chunk in reversed(CHUNKS)), (TOGETHER, SHORT)):
            if 1 + shape[1] <= self.scorer.cache.capacity:
                self._send(shape, [])
                self._recorded(*shape)

    def feed(self, new: list[Unread]) -> list[Unread]:
        """All but long prompts, and ends of rows that padding would bring past `bound` or all keys a row can have.

        Those are returned.
        """
        short, rest = list[Unread](), list[Unread]()
        for row, block in new:
            left = block
            while SHORT < len(left) <= LONG and (chunk := self._chunk(row, len(left))):
                self._run((1, chunk), [(row, left[:chunk])])
                left = left[chunk:]
            if left:
                fits = len(left) <= SHORT and self._fits(row, SHORT if len(new) > FEW else CHUNKS[0])
                (short if fits else rest).append((row, left))
        if len(new) <= FEW:
            for one in short:
                self._run((1, CHUNKS[0]), [one])
        else:
            for start in range(0, len(short), TOGETHER):
                self._run((TOGETHER, SHORT), short[start : start + TOGETHER])
        return rest

    def _chunk(self, row: int, unread: int) -> int:
        """What is run next of so many tokens; 0 where there is no room for it."""
        chunk = next((chunk for chunk in CHUNKS if chunk >= unread), CHUNKS[-1])
        return chunk if self._fits(row, chunk) else 0

    def _fits(self, row: int, tokens: int) -> bool:
        """Whether the keys it would have, padding included, are no more than attention was recorded for."""
        return self.scorer.cache.length(row) + tokens <= min(self.scorer.cache.capacity, self.bound)

    def _run(self, shape: tuple[int, int], new: Sequence[Unread]) -> None:
        cache, rows = self.scorer.cache, [row for row, _ in new]
        ends = [cache.length(row) + len(block) for row, block in new]
        cache.reserve(rows, ends)
        self._send(shape, new)
        self._recorded(*shape)()
        for row, end in zip(rows, ends, strict=True):
            cache.set_length(row, end)

    def _send(self, shape: tuple[int, int], new: Sequence[Unread]) -> None:
        """Without waiting. Rows that are missing are dummies, which have one key."""
        (rows, tokens), cache, device = shape, self.scorer.cache, self.scorer.device
        if shape not in self._numbers:
            self._numbers[shape] = torch.zeros(rows * (2 + tokens), dtype=torch.int64, device=device)
        dummies = rows - len(new)
        slots = [*(cache.slot(row) for row, _ in new), *[cache.reserve_slots(True)] * dummies]
        past = [*(cache.length(row) for row, _ in new), *[1] * dummies]
        blocks = [[*block, *[0] * (tokens - len(block))] for _, block in new] + [[0] * tokens] * dummies
        numbers = torch.tensor([*slots, *past, *(token for block in blocks for token in block)])
        self._numbers[shape].copy_(numbers.pin_memory() if device.type == "cuda" else numbers, non_blocking=True)

    def _recorded(self, rows: int, tokens: int) -> Work:
        return self.recordings.get(
            (rows, tokens),
            lambda: (self.scorer.version, fingerprint([self.scorer])),
            partial(self._work, rows, tokens),
            (),
        )

    def _work(self, rows: int, tokens: int) -> None:
        slots, past, ids = self._numbers[rows, tokens].split([rows, rows, rows * tokens])
        self._pass.hidden(ids.view(rows, tokens), self._pass.rows(slots, past, tokens, self.bound))
