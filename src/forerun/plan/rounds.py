"""Rounds as they really happen: an engine whose draft length is set from outside, timed from before to after a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from forerun.config import Kernels, SamplingParams
from forerun.drafters import Chain, DraftModel, FeatureHead, ParallelHeads
from forerun.drafters.base import Drafter
from forerun.drafters.within_target import WithinTarget
from forerun.engine import Engine
from forerun.engine.request import Request
from forerun.errors import ForerunError
from forerun.loading.routers import EXPERTS, share_of_experts
from forerun.measure.timing import synchronize
from forerun.models.scorer import Scorer
from forerun.policy.base import Policy
from forerun.types import BatchView, RoundOutcome

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts that are decoded as one batch until every row has `new_tokens` or more; end tokens do not count."""

    prompts: tuple[Prompt, ...]
    ids: tuple[int, ...]  # of the prompts among all: they key the random numbers
    new_tokens: int
    room: int  # tokens a row may go beyond them, so that no draft is cut short by the end
    temperature: float
    seed: int

    @property
    def size(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, slots=True)
class TimedRound:
    """One round of a batch. Every row gains what it accepted and one token."""

    rows: tuple[int, ...]  # ids of the prompts
    before: tuple[int, ...]  # tokens each row had until then
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    copied: tuple[bool, ...]  # rows whose draft was copied rather than drawn
    seconds: float  # all of it, the host's part included
    draft_seconds: float  # of these

    @property
    def tokens(self) -> int:
        return len(self.rows) + sum(self.accepted)

    @property
    def total_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def longest_drawn(self) -> int:
        return max((n for n, copied in zip(self.drafted, self.copied, strict=True) if not copied), default=0)


class RoundRunner(Protocol):
    """A way to decode that can be watched."""

    name: str
    operations_ratio: float  # Leviathan's c-hat: the arithmetic of a draft step over that of a target step

    def rounds(self, batch: PromptBatch, choose: Callable[[], int]) -> Generator[TimedRound, None, None]:
        """Every round after the first, which reads the prompts, until all rows have their tokens.

        `choose` gives the draft length of the next round. Closing it ends the rows.
        """
        ...


class SettableLength(Policy):
    """A policy that drafts as much as was last set, and keeps what came of it."""

    def __init__(self) -> None:
        self.length = 0
        self.outcome: RoundOutcome | None = None

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(self.length, room) for room in view.max_lengths)

    def observe(self, outcome: RoundOutcome) -> None:
        self.outcome = outcome


class EngineRunner:
    """An engine of its own around the model; without a drafter it decodes plainly."""

    def __init__(self, name: str, model: Any, drafter: Drafter | None, use: Kernels | None = None) -> None:
        self.name = name
        self.policy = SettableLength()
        # Not ahead: the length is set between steps.
        self.engine = Engine(Scorer(model, use=use), drafter, self.policy, ahead=False)
        self.engine.begins_together = True
        self.operations_ratio = operations_ratio(self.engine.drafter, model)

    def rounds(self, batch: PromptBatch, choose: Callable[[], int]) -> Generator[TimedRound, None, None]:
        decoded = dict.fromkeys(batch.ids, 0)
        prompts = {self.engine.add(request): request.request_id for request in _requests(batch)}
        try:
            if self.engine.first_from_prompt:  # without a draft, and where rounds are recorded no policy hears of it
                for gained in self.engine.step():
                    decoded[prompts[gained.row]] += len(gained.tokens)
            while self._step(1, decoded, prompts) is None and not self.engine.is_idle:
                pass  # a draft model reads the prompts when it is first asked
            while not self.engine.is_idle and min(decoded.values()) < batch.new_tokens:
                if (timed := self._step(choose(), decoded, prompts)) is not None:
                    yield timed
        finally:
            self.engine.abort(*prompts)
            self._refuse_errors()

    def _step(self, length: int, decoded: dict[int, int], prompts: Mapping[int, int]) -> TimedRound | None:
        """One round; `decoded`, tokens by prompt, is brought up to date. `prompts` are known by rows' handles.

        None where the step was none: first tokens of rows that had to wait for room come from their prompts.
        """
        self.policy.length, self.policy.outcome = length, None
        synchronize(self.engine.target.device)
        started, recording = self.engine.clock(), self.engine.seconds.capture
        progress = self.engine.step()
        synchronize(self.engine.target.device)
        recording -= self.engine.seconds.capture  # paid once a shape, not once a round
        seconds = self.engine.clock() - started + recording
        outcome: RoundOutcome | None = self.policy.outcome
        if outcome is None:
            for gained in progress:
                decoded[prompts[gained.row]] += len(gained.tokens)
            return None
        rows = tuple(prompts[handle] for handle in outcome.request_ids)
        before = tuple(decoded[row] for row in rows)
        for row, accepted in zip(rows, outcome.accepted, strict=True):
            decoded[row] += accepted + 1
        return TimedRound(
            rows=rows,
            before=before,
            drafted=outcome.drafted,
            accepted=outcome.accepted,
            copied=outcome.copied or (False,) * len(outcome.rows),
            seconds=seconds,
            draft_seconds=outcome.draft_seconds,
        )

    def _refuse_errors(self) -> None:
        """A row that broke off would count as a fast one."""
        for result in self.engine.take_results():
            if result.error is not None:
                raise ForerunError(f"{self.name}: {result.error}; nothing can be planned on it")


def operations_ratio(drafter: Drafter | None, target: Any) -> float:
    """Leviathan's c-hat: multiplications of one draft step over one target step; copies and tables take none."""
    return _products_of(drafter, target) / _products(target)


def prompt_batches(
    prompts: Sequence[Prompt], batch: int, new_tokens: int, room: int, temperature: float, seed: int
) -> list[PromptBatch]:
    """Full batches, in order; what is left over is left out."""
    starts = range(0, len(prompts) - batch + 1, batch)
    return [
        PromptBatch(tuple(prompts[i : i + batch]), tuple(range(i, i + batch)), new_tokens, room, temperature, seed)
        for i in starts
    ]


def full_rounds(
    runner: RoundRunner, batch: PromptBatch, choose: Callable[[], int]
) -> Generator[TimedRound, None, None]:
    """Rounds until the first row has its tokens: then a batch of generate would be a smaller one."""
    rounds = runner.rounds(batch, choose)
    try:
        for timed in rounds:
            if max(timed.before) >= batch.new_tokens:
                return
            yield timed
    finally:
        rounds.close()


def _requests(batch: PromptBatch) -> list[Request]:
    params = SamplingParams(temperature=batch.temperature)
    return [
        Request(
            prompt=prompt,
            max_new_tokens=batch.new_tokens + batch.room,
            params=params,
            seed=batch.seed,
            request_id=number,
        )
        for prompt, number in zip(batch.prompts, batch.ids, strict=True)
    ]


def _products(module: nn.Module) -> float:
    """Multiplications per token by weights; attention's own, which grow with the context, are left out.

    Every matrix counts, whatever its layer is called, but for tables of embeddings, which are looked up; where a head
    shares such a table, it counts as the head's.
    """
    share = share_of_experts(module)
    return sum(
        weight.numel() * (share if weight.ndim == EXPERTS else 1.0)
        for layer in module.modules()
        if not isinstance(layer, nn.Embedding)
        for weight in layer.parameters(recurse=False)
        if weight.ndim > 1
    )


def _products_of(drafter: Drafter | None, target: Any) -> float:
    """Of a bound drafter."""
    if isinstance(drafter, Chain):  # in a draft that is drawn only the dearest of them takes part, most of the time
        return max(_products_of(part, target) for part in drafter.parts)
    if isinstance(drafter, DraftModel | WithinTarget):
        assert drafter.scorer is not None
        return _products(drafter.scorer.model)
    if isinstance(drafter, FeatureHead | ParallelHeads):
        head = target.get_output_embeddings().weight
        words = len(head) if drafter.trunk.ids is None else len(drafter.trunk.ids)
        return _products(drafter.trunk.head) + words * int(head.shape[1])
    return 0
