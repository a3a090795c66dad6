"""The state of one running sequence, and what is reported of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from forerun.engine.bans import Bans
from forerun.engine.request import FinishReason, Request
from forerun.engine.stats import Stats
from forerun.engine.stops import StopRule
from forerun.math.transfer import int64
from forerun.types import Adjuster, Origin, Source


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token under the model's own distribution (before temperature, truncation and penalties)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely alternatives, best first


@dataclass(frozen=True, slots=True)
class Progress:
    """What one row gained in one round."""

    row: int  # its handle
    request_id: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token, where the request asks for them


@dataclass(frozen=True, slots=True)
class RowResult:
    """A finished sequence."""

    request: Request
    tokens: tuple[int, ...]  # new ones only
    origins: tuple[Origin, ...]
    finish_reason: FinishReason
    stats: Stats
    logprobs: tuple[TokenLogprob, ...] | None
    finished_at: float  # by the engine's clock
    error: str | None = None
    waited: float = 0.0  # seconds until there was room for it: nothing of its prompt was read before

    @property
    def was_refused(self) -> bool:
        """Whether it failed before its first round: by what it was to read, not by its logits."""
        return self.error is not None and not self.stats.rounds

    @property
    def mean_logprob(self) -> float | None:
        if not self.logprobs:
            return None
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)


Mark = tuple[int, int, int, FinishReason | None, str | None]


class RowText:
    """All that a row's keys are made of, hashed once: rows that wait for their prompts are compared in every step."""

    __slots__ = ("_hash", "source", "tokens")

    def __init__(self, tokens: tuple[int, ...], source: Source | None) -> None:
        self.tokens, self.source = tokens, source
        self._hash = hash((tokens, source))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, RowText) or self._hash != other._hash or self.source != other.source:
            return False
        return self.tokens is other.tokens or self.tokens == other.tokens


@dataclass(slots=True)
class Row:
    """A sequence in flight. The last token of `history` has been emitted but not yet seen by the target."""

    handle: int  # its own for as long as the engine lives
    request: Request
    history: list[int]
    output: list[int]
    stop: StopRule
    adjuster: Adjuster | None
    bans: Bans | None  # all that processors do; None where they do more
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    added: float = 0.0  # by the engine's clock
    waited: float | None = None  # seconds before it joined the batch for the first time
    number: int = -1  # what target and drafter know it by, once it has joined the batch; others have had it before
    is_reading: bool = False  # its prompt has not been encoded yet, or only in part; or its end is still to be judged
    # [V] behind a prompt that has been read to its end, until a first token is drawn from them.
    first_logits: Tensor | None = field(default=None, compare=False, repr=False)
    begins_plain: bool = False  # whether its first round has no draft, because it is the pass that ends the prompt
    round: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    needs_host: bool = False  # from now on no recorded round can take it
    counts: tuple[int, int, int, int, bool] | None = None  # of the round under way, see `Stats.count`
    # Made once somebody has asked; the first is of the history as it is.
    _text: RowText | None = field(default=None, compare=False, repr=False)
    _prompt_ids: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def prompt_ids(self) -> Tensor:
        """[U] int64: each token of the prompt once, on the host."""
        if self._prompt_ids is None:
            self._prompt_ids = int64(set(self.request.prompt))
        return self._prompt_ids

    @property
    def text(self) -> RowText:
        if self._text is None:
            tokens = tuple(self.history) if self.output else self.request.prompt
            self._text = RowText(tokens, self.request.source)
        return self._text

    @property
    def remaining(self) -> int:
        return self.stop.budget - len(self.output)

    @property
    def ends_by_budget(self) -> bool:
        """Whether nothing but the budget can end it."""
        asked = self.request
        return not asked.stop_ids and not asked.stop_strings and asked.deadline is None

    @property
    def most_drafted(self) -> int:
        """The longest draft that is of use: what the budget leaves beside one more token, or what was asked for."""
        room = self.remaining - 1
        asked = self.request.max_draft_tokens
        return room if asked is None else min(room, asked)

    def gain(self, tokens: list[int], origins: list[Origin]) -> None:
        self._text = None
        self.history.extend(tokens)
        self.output.extend(tokens)
        self.origins.extend(origins)

    def count(self) -> None:
        """Into the statistics, once the round is over."""
        counts, self.counts = self.counts, None
        if counts is not None:
            self.stats.count(*counts)

    def mark(self) -> Mark:
        return len(self.output), len(self.logprobs), self.round, self.finish_reason, self.error

    def go_back(self, mark: Mark) -> None:
        """To where `mark` was made; statistics of the round are not counted."""
        length, logprobs, self.round, self.finish_reason, self.error = mark
        del self.output[length:], self.origins[length:], self.logprobs[logprobs:]
        del self.history[len(self.request.prompt) + length :]
        self._text = None
        self.counts = None

    def result(self, now: float) -> RowResult:
        assert self.finish_reason is not None
        logprobs = None if self.request.logprobs is None else tuple(self.logprobs)
        return RowResult(
            self.request,
            tuple(self.output),
            tuple(self.origins),
            self.finish_reason,
            self.stats,
            logprobs,
            now,
            self.error,
            now - self.added if self.waited is None else self.waited,
        )
