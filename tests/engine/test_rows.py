"""Rows at their own pace: parameters, seeds, comings and goings, deadlines, kept prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import forerun
from engine.scripted import PROMPT, VOCAB, Spell, answer, engine_with, finish, prophet
from forerun.config import SamplingParams
from forerun.drafters import DraftModel, EarlyExit, PromptLookup
from forerun.engine import FinishReason, Request
from forerun.errors import InvalidArgument
from forerun.math.attention import Form
from forerun.types import Rule
from support.batches import padded
from support.finish import finished
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

MODEL = "llama"
PROMPTS = [tuple(prompt) for prompt in ragged_prompts(6, VOCAB, seed=21)]


def request(number: int, **fields: Any) -> Request:
    return Request(**{"prompt": PROMPTS[number], "max_new_tokens": 16, "request_id": number, **fields})


def drafters() -> list[Any]:
    return [None, DraftModel(draft_of(tiny_model(MODEL))), EarlyExit(1), PromptLookup()]


@pytest.mark.parametrize("kind", range(4), ids=("none", "model", "exit", "lookup"))
@pytest.mark.parametrize("keep_rows", (0, 2))
@pytest.mark.parametrize("form", (Form.PAD, Form.SPLIT))
@pytest.mark.quick(every=18)
def test_rows_join_and_leave_in_flight(kind: int, keep_rows: int, form: Form) -> None:
    """Budgets differ, rows join every second step, one in the middle is aborted: nobody's answer changes."""
    engine = engine_with(drafters()[kind], 3, keep_rows=keep_rows)
    engine.target.form = form
    budgets = [5, 30, 9, 17, 1, 22]
    numbers = {}
    waiting, step = list(range(6)), 0
    while waiting or not engine.is_idle:
        if waiting and step % 2 == 0:
            number = waiting.pop(0)
            numbers[number] = engine.add(request(number, max_new_tokens=budgets[number]))
        engine.step()
        step += 1
        if step == 8:
            engine.abort(numbers[1])
    results = {row.request.request_id: row for row in engine.take_results()}
    assert set(results) == set(range(6))
    for number, row in results.items():
        wanted = answer(PROMPTS[number])[: budgets[number]]
        if number == 1:
            assert row.finish_reason is FinishReason.ABORT
            assert row.tokens == wanted[: len(row.tokens)] and 0 < len(row.tokens) < 30
        else:
            assert row.tokens == wanted
    assert len(engine.target.cache.rows) <= keep_rows


def test_a_waiting_row_can_be_aborted() -> None:
    engine = engine_with(None)
    number = engine.add(request(0))
    engine.add(request(1))
    engine.abort(number)
    assert engine.take_results()[0].finish_reason is FinishReason.ABORT
    engine.step()
    assert len(engine.target.cache.rows) == 1


def test_a_row_aborted_before_it_joined_claims_no_kept_row() -> None:
    engine = engine_with(DraftModel(draft_of(tiny_model(MODEL))), keep_rows=2)
    finish(engine, request(1))
    engine.abort(engine.add(request(1)))
    assert engine.target.cache.rows == (0,)
    assert [row.tokens for row in finish(engine, request(2), request(1))] == [answer(PROMPTS[i])[:16] for i in (2, 1)]


def test_a_handle_is_never_used_again() -> None:
    """Whoever aborts a request that has ended must not end another one."""
    engine = engine_with(None)
    old = engine.add(request(0, max_new_tokens=1))
    engine.step()
    assert engine.is_idle
    new = engine.add(request(1))
    assert [made.row for made in engine.step()] == [new] != [old]
    engine.abort(old)
    ended = {result.request.request_id: result for result in finished(engine)}
    assert ended[1].finish_reason is FinishReason.LENGTH and ended[1].tokens == answer(PROMPTS[1])[:16]


@pytest.mark.quick("token")
@pytest.mark.parametrize("rule", tuple(Rule))
def test_parameters_and_seeds_are_each_rows_own(rule: Rule) -> None:
    """A batch of unlike rows gives each what it gets alone."""
    kinds = [
        {"params": SamplingParams()},
        {"params": SamplingParams(temperature=0.8), "seed": 5},
        {"params": SamplingParams(temperature=0.8), "seed": 6},
        {"params": SamplingParams(temperature=1.3, top_k=5), "seed": 5},
        {"params": SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.4), "seed": 5},
        {"params": SamplingParams(presence_penalty=1.5, logit_bias={3: 2.0})},
    ]
    requests = [request(1, request_id=i, **kind) for i, kind in enumerate(kinds)]

    def drafter() -> DraftModel:
        return DraftModel(draft_of(tiny_model(MODEL)))

    together = [row.tokens for row in finish(engine_with(drafter(), 3, rule=rule), *requests)]
    alone = [finish(engine_with(drafter(), 3, rule=rule), r)[0].tokens for r in requests]
    assert together == alone
    assert len(set(together)) == len(kinds)


def test_per_row_keywords() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model(MODEL), None)
    ids, mask = padded(PROMPTS[:3])
    out = decoder.generate(ids, mask, max_new_tokens=[3, 5, 4], temperature=[0.0, 0.7, 0.7], seed=[1, 2, 2])
    assert [len(tokens) for tokens in out.new_tokens] == [3, 5, 4]
    assert tuple(out.new_tokens[0]) == answer(PROMPTS[0])[:3]
    assert [p["seed"] for p in out.parameters] == [1, 2, 2]
    assert [p["temperature"] for p in out.parameters] == [0.0, 0.7, 0.7]
    with pytest.raises(InvalidArgument, match="2 entries for 3 prompts"):
        decoder.generate(ids, mask, temperature=[0.1, 0.2])


def test_a_drawn_seed_is_reported_and_repeats() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model(MODEL), None)
    ids, mask = padded(PROMPTS[:2])
    first, other = (decoder.generate(ids, mask, max_new_tokens=12, temperature=1.0) for _ in range(2))
    again = decoder.generate(ids, mask, max_new_tokens=12, temperature=1.0, seed=first.parameters[0]["seed"])
    assert again.new_tokens == first.new_tokens != other.new_tokens


class Clock:
    """Time passes only when somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_what_is_done_in_time_comes_back_whole() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model(MODEL), None)
    decoder.engine.clock = Clock()
    ids, mask = padded(PROMPTS[1:4])
    out = decoder.generate(ids, mask, max_new_tokens=[2, 40, 40], max_time=40.0)
    assert out.finish_reasons == [FinishReason.LENGTH, FinishReason.TIME, FinishReason.TIME]
    assert tuple(out.new_tokens[0]) == answer(PROMPTS[1])[:2]
    for row in (1, 2):
        got = tuple(out.new_tokens[row])
        assert 2 < len(got) < 40
        assert got == answer(PROMPTS[1 + row])[: len(got)]
    assert decoder.generate(ids, mask, max_new_tokens=3, max_time=1e9).finish_reasons == [FinishReason.LENGTH] * 3


def test_no_time_at_all() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model(MODEL), None)
    decoder.engine.clock = Clock()
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=5, max_time=0.0)
    assert out.finish_reasons == [FinishReason.TIME]
    assert out.sequences.tolist() == [list(PROMPT)]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("temperature", (0.0, 0.9))
def test_streaming_is_generating(temperature: float) -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model(MODEL), DraftModel(draft_of(tiny_model(MODEL))), policy=3)
    ids, mask = padded(PROMPTS)
    keywords: Any = {"max_new_tokens": [4, 9, 16, 7, 1, 3], "temperature": temperature, "seed": 4}
    whole = decoder.generate(ids, mask, **keywords)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    reasons: list[FinishReason | None] = [None] * len(PROMPTS)
    for progress in decoder.stream(ids, mask, **keywords):
        for entry in progress:
            assert reasons[entry.row] is None
            assert len(entry.tokens) == len(entry.origins) > 0
            tokens[entry.row] += entry.tokens
            reasons[entry.row] = entry.finish_reason
    assert tokens == whole.new_tokens
    assert reasons == whole.finish_reasons


def test_a_closed_stream_frees_the_decoder() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model(MODEL), None)
    stream = decoder.stream(torch.tensor([PROMPT]), max_new_tokens=9)
    next(stream)
    with pytest.raises(InvalidArgument, match="still running"):
        decoder.generate(torch.tensor([PROMPT]))
    stream.close()  # type: ignore[attr-defined]
    assert decoder.engine.target.cache.rows == ()
    assert tuple(decoder.generate(torch.tensor([PROMPT]), max_new_tokens=9).new_tokens[0]) == answer()[:9]


def fed_tokens(decoder: forerun.SpeculativeDecoder, act: Any) -> tuple[Any, int]:
    """What `act` makes, and the tokens that the target ran meanwhile. A hook on the model would be a change of it."""
    seen: list[int] = []
    body = decoder.engine.target.modules
    real = body.call

    def call(module: Any, states: Any, new: torch.Tensor, *more: Any, **options: Any) -> Any:
        seen.append(new.numel())
        return real(module, states, new, *more, **options)

    body.call = call  # type: ignore[method-assign]
    try:
        return act(), sum(seen)
    finally:
        del body.__dict__["call"]


def test_copies_share_their_prompt_and_are_ranked() -> None:
    model = tiny_model(MODEL)
    decoder = forerun.SpeculativeDecoder(model, None, attention="pad")
    ids, mask = padded([PROMPTS[1], PROMPTS[2]])
    out, fed = fed_tokens(
        decoder,
        lambda: decoder.generate(ids, mask, max_new_tokens=6, temperature=1.2, num_return_sequences=4, seed=3),
    )
    assert fed == len(PROMPTS[1]) - 1 + len(PROMPTS[2]) - 1 + 8 * 6
    assert len({tuple(tokens) for tokens in out.new_tokens}) == 8
    assert out.sequences.shape == (8, max(len(PROMPTS[1]), len(PROMPTS[2])) + 6)
    for prompt, order in zip((PROMPTS[1], PROMPTS[2]), out.ranking, strict=True):
        means = []
        for row in order:
            text = [*prompt, *out.new_tokens[row]]
            laws = model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
            means.append(sum(float(laws[len(prompt) - 1 + i, t]) for i, t in enumerate(out.new_tokens[row])) / 6)
        assert means == sorted(means, reverse=True)
    assert sorted(out.ranking[0]) == [0, 1, 2, 3]
    assert sorted(out.ranking[1]) == [4, 5, 6, 7]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kind", range(4), ids=("none", "model", "exit", "lookup"))
def test_kept_rows_are_continued(kind: int) -> None:
    """The next turn of a chat feeds only what is new, and answers as if nothing had been kept."""
    model = tiny_model(MODEL)
    decoder = forerun.SpeculativeDecoder(model, drafters()[kind], policy=0, keep_rows=1)
    first = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=10)
    turn = [*first.sequences[0].tolist(), 5, 6, 7]
    decoder.policy.n = 0 if kind else 3  # type: ignore[attr-defined]
    second, fed = fed_tokens(decoder, lambda: decoder.generate(torch.tensor([turn]), max_new_tokens=8))
    assert fed == 1 + 3 - 1 + 8  # the answer's last token, the new ones but the last, and eight rounds
    assert second.new_tokens[0] == plain_greedy(model, turn, 8)
    decoder.policy.n = 3  # type: ignore[attr-defined]
    changed = [*turn[:8], 1, 2]
    assert decoder.generate(torch.tensor([changed]), max_new_tokens=20).new_tokens[0] == plain_greedy(
        model, changed, 20
    )
    assert len(decoder.engine.target.cache.rows) == 1


def test_the_oldest_kept_row_leaves() -> None:
    engine = engine_with(None, keep_rows=2)
    for number in range(4):
        finish(engine, request(number, max_new_tokens=2))
    assert len(engine.target.cache.rows) == 2


def test_a_prompt_that_is_known_whole_is_scored_again() -> None:
    engine = engine_with(prophet(), keep_rows=1)
    for _ in range(3):
        assert finish(engine, Request(prompt=PROMPT, max_new_tokens=12))[0].tokens == answer()[:12]


class Aborting(Spell):
    """Aborts a row when it spells for the n-th time, in the middle of a step."""

    def __init__(self, left: int) -> None:
        self.left, self.abort = left, lambda: None

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        self.left -= 1
        if self.left == 0:
            self.abort()
        return super().decode(tokens)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("spelt", (1, 3, 5))
@pytest.mark.parametrize("which", (0, 1, 2))
def test_a_row_aborted_within_a_step_ends_with_that_step(which: int, spelt: int) -> None:
    tokenizer = Aborting(spelt)
    engine = engine_with(PromptLookup(), tokenizer=tokenizer)
    handles = [engine.add(request(number, stop_strings=("<never>",))) for number in range(3)]
    tokenizer.abort = lambda: engine.abort(handles[which])
    gained: dict[int, tuple[int, ...]] = dict.fromkeys(handles, ())
    while not engine.is_idle:
        for entry in engine.step():
            gained[entry.row] += entry.tokens
    results = engine.take_results_by_handle()
    for number, handle in enumerate(handles):
        assert results[handle].tokens == gained[handle] == answer(PROMPTS[number])[: len(gained[handle])]
        assert (results[handle].finish_reason is FinishReason.ABORT) == (number == which)
    assert engine.target.cache.rows == ()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keep_rows": -1}, r"keep_rows=-1: must be at least 0"),
        ({"keep_rows": 1.5}, r"keep_rows=1\.5: must be a whole number"),
        ({"prompt_tokens": 0}, r"prompt_tokens=0: must be at least 1"),
        ({"join_tokens": -3}, r"join_tokens=-3: must be at least 0"),
        ({"max_rows": 0}, r"max_rows=0: must be at least 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        engine_with(None, **settings)
