"""The two ways that are compared: the same target, plainly and with drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forerun.decoder import SpeculativeDecoder
from forerun.drafters.base import Drafter
from forerun.engine import FinishReason, RowResult
from forerun.eval.tasks import Answer
from forerun.measure.timing import timed
from forerun.policy.base import Policy

PLAIN, SPECULATIVE = "plain", "speculative"
METHODS = (PLAIN, SPECULATIVE)
UNFINISHED = (FinishReason.TIME, FinishReason.ABORT, FinishReason.ERROR)


@dataclass(frozen=True, slots=True)
class IndexedPrompt:
    """A prompt; its index keys the random numbers, so that batches do not matter."""

    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """What came of one call: for each prompt its sequences, not yet scored."""

    seconds: float
    prompts: tuple[tuple[Answer, ...], ...]


class AnsweringMethod(Protocol):
    """A way to decode."""

    name: str

    def answer(self, asked: Sequence[IndexedPrompt], keywords: dict[str, Any]) -> AnsweredCall:
        """Decode all prompts in one call. `keywords` are those of `SpeculativeDecoder.generate`."""
        ...


class DecoderMethod:
    """A decoder that lives as long as the evaluation, as a user's would: its policy goes on learning."""

    def __init__(self, name: str, decoder: SpeculativeDecoder) -> None:
        self.name, self.decoder = name, decoder

    def answer(self, asked: Sequence[IndexedPrompt], keywords: dict[str, Any]) -> AnsweredCall:
        copies = keywords.get("num_return_sequences", 1)
        prompts = [list(prompt.tokens) for prompt in asked]
        numbers = [prompt.index * copies + copy for prompt in asked for copy in range(copies)]
        begun = self.decoder.engine.clock()
        result, seconds = timed(
            self.decoder.target.device, lambda: self.decoder.generate(prompts, request_ids=numbers, **keywords)
        )
        rows = [_answer(row, text, begun) for row, text in zip(result.rows, result.texts, strict=True)]
        groups = range(0, len(rows), copies)
        return AnsweredCall(seconds, tuple(tuple(rows[start : start + copies]) for start in groups))


def both(
    target: Any,
    drafter: Drafter | None,
    *,
    tokenizer: Any,
    policy: str | int | Policy = "auto",
    rule: str = "token",
    **options: Any,
) -> tuple[DecoderMethod, DecoderMethod]:
    """Plain decoding is the target itself, whatever the rule; under `coupled` both draw the same tokens."""
    plain_rule = rule if rule == "coupled" else "token"
    plain = SpeculativeDecoder(target, None, rule=plain_rule, tokenizer=tokenizer, **options)
    drafted = SpeculativeDecoder(target, drafter, policy=policy, rule=rule, tokenizer=tokenizer, **options)
    return DecoderMethod(PLAIN, plain), DecoderMethod(SPECULATIVE, drafted)


def _answer(row: RowResult, text: str, begun: float) -> Answer:
    return Answer(
        text=text,
        tokens=row.tokens,
        finish=str(row.finish_reason),
        seconds=row.finished_at - begun,
        mean_logprob=row.mean_logprob,
        rounds=row.stats.rounds,
        drafted=row.stats.num_draft_tokens,
        accepted=row.stats.num_accepted_tokens,
    )
