"""SpeculativeDecoder: the face that looks like `model.generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from forerun.drafters import PromptLookup
from forerun.engine import Engine, FinishReason, Progress, RowResult, Stats
from forerun.engine.row import TokenLogprob
from forerun.errors import InvalidArgument, NonFiniteLogits
from forerun.inside_generate import keywords_of
from forerun.keywords import GenerateKeywords, Job, understand
from forerun.math.attention import Form
from forerun.models.scorer import Scorer
from forerun.policy import as_policy
from forerun.types import Drafter, Origin, Policy, Rule


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """What a call of `generate` made, row by row in the order of the prompts; copies of one prompt are side by side."""

    sequences: (
        Tensor  # [R, L] prompt and output; prompts end in the same column, pads left of them and after the output
    )
    rows: tuple[RowResult, ...]
    stats: Stats
    seconds: float
    num_return_sequences: int

    @property
    def new_tokens(self) -> list[list[int]]:
        return [list(row.tokens) for row in self.rows]

    @property
    def origins(self) -> list[list[Origin]]:
        return [list(row.origins) for row in self.rows]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [row.finish_reason for row in self.rows]

    @property
    def logprobs(self) -> list[tuple[TokenLogprob, ...] | None]:
        return [row.logprobs for row in self.rows]

    @property
    def errors(self) -> list[str | None]:
        return [row.error for row in self.rows]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """What each row was really decoded with, the drawn seed included."""
        return [_parameters(row) for row in self.rows]

    @property
    def ranking(self) -> list[list[int]]:
        """For each prompt its rows, the best mean log-probability first; needs logprobs (always there for copies)."""
        groups = range(0, len(self.rows), self.num_return_sequences)
        return [sorted(range(g, g + self.num_return_sequences), key=self._badness) for g in groups]

    def _badness(self, row: int) -> float:
        mean = self.rows[row].mean_logprob
        return float("inf") if mean is None else -mean


class SpeculativeDecoder:
    """Decodes faster with a drafter's help and says exactly what the target would have said.

    `drafter` is any of `DraftModel`, `PromptLookup`, `NgramTable`, `EarlyExit`, `RandomDraft`, `Chain`, one of your
    own, or None for plain decoding; `policy` is "auto", a draft length, or a policy object; `rule` is one of `Rule`,
    all of them lossless.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Drafter | str | None = "lookup",
        *,
        policy: str | int | Policy = "auto",
        rule: Rule | str = Rule.TOKEN,
        tokenizer: Any = None,
        attention: Form | str = Form.AUTO,
        keep_rows: int = 0,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.policy = as_policy(policy)
        self.drafter = _drafter(drafter)
        scorer = Scorer(target, _choice(Form, attention, "attention"))
        chosen: Rule = _choice(Rule, rule, "rule")
        self.engine = Engine(scorer, self.drafter, self.policy, rule=chosen, tokenizer=tokenizer, keep_rows=keep_rows)

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **keywords: Unpack[GenerateKeywords]
    ) -> GenerateResult:
        """Like `model.generate`, for any batch. Prompts may be padded on either side; the mask says where.

        One deliberate difference: nothing is read from a hidden default. Without sampling parameters it is greedy.
        """
        job = self._job(input_ids, attention_mask, keywords)
        started = self.engine.clock()
        before = replace(self.engine.seconds)
        results: dict[int, RowResult] = {}
        for _ in self._run(job, results):
            pass
        rows = tuple(results[request.request_id] for request in job.requests)
        if all(row.error for row in rows):
            raise NonFiniteLogits(rows[0].error)
        stats = _with_seconds(Stats.total([row.stats for row in rows]), self.engine.seconds, before)
        seconds = self.engine.clock() - started
        return GenerateResult(
            _sequences(rows, job.pad_token_id, input_ids), rows, stats, seconds, job.num_return_sequences
        )

    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **keywords: Unpack[GenerateKeywords]
    ) -> Iterator[list[Progress]]:
        """Yields what the rows gained, round by round; `Progress.row` counts the sequences of this call.

        Closing the iterator early ends all rows.
        """
        job = self._job(input_ids, attention_mask, keywords)
        order = {request.request_id: i for i, request in enumerate(job.requests)}
        for progress in self._run(job, {}):
            yield [replace(entry, row=order[entry.request_id]) for entry in progress]

    def as_custom_generate(self) -> Callable[..., Any]:
        """For trying it inside existing code: `model.generate(**inputs, custom_generate=decoder.as_custom_generate())`.

        transformers does not hand a `streamer` to such a function: give it to `SpeculativeDecoder.generate` instead.
        """

        def custom_generate(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: Sequence[Any] = (),
            stopping_criteria: Sequence[Any] = (),
            generation_config: GenerationConfig | None = None,
            **model_kwargs: Any,
        ) -> Any:
            if model is not self.target:
                raise InvalidArgument(
                    "as_custom_generate belongs to another model than the one whose generate was called"
                )
            mask = model_kwargs.get("attention_mask")
            keywords = keywords_of(
                generation_config, logits_processor, stopping_criteria, model_kwargs, input_ids.shape[1]
            )
            result = self.generate(input_ids, mask, **keywords)
            wants_dict = generation_config is not None and generation_config.return_dict_in_generate
            return result if wants_dict else result.sequences

        return custom_generate

    def _job(self, input_ids: Tensor, attention_mask: Tensor | None, keywords: Any) -> Job:
        prompts = _unpadded(input_ids, attention_mask)
        job = understand(prompts, keywords, self.target.generation_config or GenerationConfig(), self.tokenizer)
        if job.streamer is not None and len(job.requests) > 1:
            raise InvalidArgument(
                f"a streamer takes one sequence and there are {len(job.requests)}; use decoder.stream"
            )
        return job

    def _run(self, job: Job, results: dict[int, RowResult]) -> Iterator[list[Progress]]:
        """Rounds until every request of the job has finished; an early end aborts what is left."""
        engine = self.engine
        if not engine.is_idle:
            raise InvalidArgument("another call is still running on this decoder; finish or close its stream first")
        engine.tokenizer = job.tokenizer
        deadline = None if job.max_time is None else engine.clock() + job.max_time
        numbers: list[int] = []
        try:
            for request in job.requests:  # one that is refused takes those before it along
                numbers.append(engine.add(replace(request, deadline=deadline)))
            if job.streamer is not None:
                job.streamer.put(torch.tensor([job.requests[0].prompt]))
            while not engine.is_idle:
                progress = engine.step()
                results.update((result.request.request_id, result) for result in engine.take_results())
                if job.streamer is not None and progress and progress[0].tokens:
                    job.streamer.put(torch.tensor(progress[0].tokens))
                yield progress
            if job.streamer is not None:
                job.streamer.end()
        finally:
            if not engine.is_idle:
                for number in numbers:
                    engine.abort(number)
                engine.take_results()


def _drafter(value: Drafter | str | None) -> Drafter | None:
    if value == "lookup":
        return PromptLookup()
    if value is None or (not isinstance(value, str) and all(hasattr(value, verb) for verb in ("propose", "rewind"))):
        return value
    raise InvalidArgument(f"drafter={value!r}: give an object with the methods propose and rewind, 'lookup', or None")


def _choice(kind: Any, value: Any, name: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgument(f"{name}={value!r}: choose one of {', '.join(kind)}") from None


def _unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's own tokens. Padding may be on either side; a hole in the middle is refused."""
    if not isinstance(input_ids, Tensor):
        raise InvalidArgument(f"input_ids is a {type(input_ids).__name__}: give a tensor [batch, length]")
    if input_ids.ndim != 2:
        raise InvalidArgument(f"input_ids has shape {tuple(input_ids.shape)}: give [batch, length]")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise InvalidArgument(
            f"attention_mask is {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}: make them agree"
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)):
        if "0" in "".join("01"[real] for real in mask).strip("0"):
            raise InvalidArgument(f"attention_mask of row {row} has a hole in the middle; pad on the left or the right")
        prompts.append([token for token, real in zip(ids, mask, strict=True) if real])
        if not prompts[-1]:
            raise InvalidArgument(f"prompt {row} is empty: give at least one token (a begin-of-sequence id will do)")
    return prompts


def _sequences(rows: Sequence[RowResult], pad: int, like: Tensor) -> Tensor:
    """Prompts end in the same column, as in a left-padded batch; outputs are padded on the right."""
    left = max(like.shape[1], *(len(row.request.prompt) for row in rows))
    right = max(len(row.tokens) for row in rows)
    lines = [
        [pad] * (left - len(row.request.prompt))
        + [*row.request.prompt, *row.tokens]
        + [pad] * (right - len(row.tokens))
        for row in rows
    ]
    return torch.tensor(lines, dtype=like.dtype, device=like.device)


def _with_seconds(stats: Stats, now: Stats, before: Stats) -> Stats:
    names = ("draft_seconds", "score_seconds", "verify_seconds", "prefill_seconds")
    return replace(stats, **{name: getattr(now, name) - getattr(before, name) for name in names})


def _parameters(row: RowResult) -> dict[str, Any]:
    params, request = row.request.params, row.request
    shown = {name: getattr(params, name) for name in params.__slots__}
    shown |= {name: getattr(request, name) for name in ("max_new_tokens", "min_new_tokens", "seed", "request_id")}
    return shown | {"stop_ids": sorted(request.stop_ids), "stop_strings": list(request.stop_strings)}
