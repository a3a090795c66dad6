"""Whisper's rules of what may be said where, for all positions of a draft at once.

transformers states them as logits processors that look at one position of the whole batch. Those are the specification:
`Rules.of` reads what they were made with, and a test holds each position to what they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

DEEPEST = 32  # tokens of a draft, at most: what is further back than that has been decided
MOST_OPEN = 96  # ways that may or may not be taken, before those that were not are forgotten


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Times come in pairs, never go back, begin every window, and are taken where they are likelier than any word."""

    none: int  # the token that says there will be no timestamps
    end: int  # the end of the text; words come before it in the vocabulary
    latest_first: int | None  # how many steps into the window the first one may be
    by_mass: bool  # take a timestamp where all of them together are likelier than the likeliest word

    @property
    def first(self) -> int:
        return self.none + 1

    def forbid(self, row: Tensor, said: Sequence[int]) -> None:
        """Cut what may not follow `said`, the window's tokens so far, from one position's logits [V]."""
        row[self.none] = -torch.inf
        is_time = [token >= self.first for token in said[-2:]]
        if is_time[-1:] == [True]:
            paired = len(said) < 2 or is_time[0]
            row[slice(self.first, None) if paired else slice(0, self.end)] = -torch.inf
        row[self.first : self._earliest(said)] = -torch.inf
        if not said:
            row[: self.first] = -torch.inf
            if self.latest_first is not None:
                row[self.first + self.latest_first + 1 :] = -torch.inf

    def _earliest(self, said: Sequence[int]) -> int:
        last = next((token for token in reversed(said) if token >= self.first), None)
        if last is None:
            return self.first
        closes = said[-1] >= self.first and len(said) > 1 and said[-2] < self.first
        return last if closes else last + 1  # the end of one stretch may be the start of the next

    def prefer(self, logits: Tensor) -> None:
        """[n, V]: words give way where the timestamps together are likelier than any of them."""
        mass, word = logits[:, self.first :].logsumexp(-1), logits[:, : self.first].amax(-1)
        logits[:, : self.first].masked_fill_((mass > word)[:, None], -torch.inf)


@dataclass(frozen=True, slots=True)
class Rules:
    """What one call of `generate` allows; the same for all its rows."""

    never: Tensor  # ids that are not said anywhere
    not_first: Tensor  # ids that do not begin a window
    times: Timestamps | None

    @classmethod
    def of(cls, processors: Iterable[Any], device: torch.device) -> Rules | None:
        """The rules these processors stand for; None where one of them is not known here."""
        listed = list(processors)
        by_kind: dict[type, Any] = {type(processor): processor for processor in listed}
        repeated = len(by_kind) < len(listed)
        never = by_kind.pop(SuppressTokensLogitsProcessor, None)
        not_first = by_kind.pop(SuppressTokensAtBeginLogitsProcessor, None)
        times = by_kind.pop(WhisperTimeStampLogitsProcessor, None)
        if by_kind or repeated:
            return None
        return cls(
            _ids(getattr(never, "suppress_tokens", ()), device),
            _ids(getattr(not_first, "begin_suppress_tokens", ()), device),
            None if times is None else _timestamps(times),
        )

    def apply(self, logits: Tensor, said: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits [n, V] of consecutive positions, changed in place; the first follows `said`, the window so far."""
        logits.index_fill_(1, self.never, -torch.inf)
        if not said:
            logits[:1].index_fill_(1, self.not_first, -torch.inf)
        if self.times is not None:
            for i, row in enumerate(logits):
                self.times.forbid(row, [*said, *drafted[:i]])
            if self.times.by_mass:
                self.times.prefer(logits)
        return logits


def _timestamps(processor: WhisperTimeStampLogitsProcessor) -> Timestamps:
    return Timestamps(
        processor.no_timestamps_token_id,
        processor.eos_token_id,
        processor.max_initial_timestamp_index,
        processor._detect_timestamp_from_logprob,
    )


def _ids(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=device)


class RowRules:
    """A logits processor for one row, which looks at all positions of a draft at once.

    It may be asked about drafts that come to nothing, by the drafter and by the target, in that order: what is kept of
    a position is what was said of it last, on the way the row really went.
    """

    def __init__(
        self, rules: Rules | None, others: Sequence[Any], num_prompt: int, padding: list[int], keeps_scores: bool
    ) -> None:
        self.rules, self.others, self.num_prompt, self.padding = rules, others, num_prompt, padding
        self.first: Tensor | None = None  # [V] the model's own logits where the window begins
        self._scores: dict[tuple[int, ...], Tensor] | None = {} if keeps_scores else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.along(input_ids[0].tolist(), (), scores.clone())

    def along(self, history: Sequence[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [n, V] of consecutive positions, the first of which follows `history`."""
        said = list(history[self.num_prompt :])
        if not said:
            self.first = logits[0].clone()
        if self.rules is not None:
            logits = self.rules.apply(logits, said, drafted)
        else:
            logits = torch.stack([self._called([*history, *drafted[:i]], row) for i, row in enumerate(logits)])
        self._keep(said, drafted, logits)
        return logits

    def scores(self, tokens: Sequence[int]) -> Tensor:
        """[n, V] what each of `tokens`, the row's text, was chosen from."""
        assert self._scores is not None, "nobody asked for scores"
        return torch.stack([self._scores[tuple(tokens[:i])] for i in range(len(tokens))])

    def _called(self, history: list[int], row: Tensor) -> Tensor:
        """Processors of others count positions from the left edge of the padded batch."""
        ids, scores = torch.tensor([[*self.padding, *history]], device=row.device), row[None]
        for processor in self.others:
            scores = processor(ids, scores)
        return scores[0]

    def _keep(self, said: list[int], drafted: Sequence[int], logits: Tensor) -> None:
        if self._scores is None:
            return
        for i, row in enumerate(logits):
            self._scores[(*said, *drafted[:i])] = row
        if len(self._scores) > len(said) + MOST_OPEN:
            decided = len(said) - DEEPEST
            self._scores = {
                text: row
                for text, row in self._scores.items()
                if len(text) > decided or list(text) == said[: len(text)]
            }
