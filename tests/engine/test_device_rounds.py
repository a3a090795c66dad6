"""Rounds that the device runs by itself say what rounds step by step say, token for token.

On a CPU nothing is recorded and the same work is called; on a GPU (`test_device_graphs`) it is replayed from graphs.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun import SpeculativeDecoder, ops
from forerun.config import Kernels, SamplingParams
from forerun.drafters import DraftModel, PromptLookup, RandomDraft
from forerun.engine import Engine, Request, RowResult
from forerun.engine.device.choose import describe, runner_of
from forerun.engine.device.habits import Habits
from forerun.engine.device.recorder import Recorder, Work
from forerun.errors import ForerunWarning
from forerun.math import advance
from forerun.models.attention import ragged
from forerun.models.scorer import Scorer
from forerun.models.static_pass import StaticPass, StaticRows, StaticStates
from forerun.policy import Constant, CostModel, HfHeuristic
from forerun.types import Drafter, Policy, Rule
from support.tiny import draft_of, ragged_prompts, tiny_model

Texts = dict[int, tuple[int, ...]]
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams()
CUT = SamplingParams(temperature=0.7, top_k=20, top_p=0.9)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter | None]] = {
    "model": lambda model: DraftModel(draft_of(model)),
    "none": lambda model: None,
    "lookup": lambda model: PromptLookup(max_ngram=1),
    "random": lambda model: RandomDraft(),
    "doubting": lambda model: DraftModel(draft_of(model), stop_below=0.4),
}


def engine(
    on_device: bool, *, family: str = "llama", drafter: str = "model", policy: Policy | int = 4,
    rule: Rule = Rule.TOKEN, keep_rows: int = 0, ahead: bool = True,
) -> Engine:  # fmt: skip
    model = tiny_model(family)
    target = Scorer(model, use=Kernels.OFF)
    guesser = DRAFTERS[drafter](model)
    chosen = Constant(policy) if isinstance(policy, int) else policy
    made = Engine(target, guesser, chosen, rule=rule, keep_rows=keep_rows, ahead=ahead)
    if on_device:
        made.runner = runner_of(target, guesser, rule, made.clock)
    return made


def requests(number: int, params: SamplingParams | Sequence[SamplingParams] = SAMPLED, new: int = 18) -> list[Request]:
    """Rows of different lengths that end at different times."""
    each = [params] * number if isinstance(params, SamplingParams) else params
    return [
        Request(prompt=tuple(prompt), max_new_tokens=new + 5 * (i % 3), params=each[i], seed=3, request_id=i)
        for i, prompt in enumerate(ragged_prompts(number, 97, 0))
    ]


def finish(made: Engine) -> Texts:
    while not made.is_idle:
        made.step()
    return {result.request.request_id: result.tokens for result in made.take_results()}


def texts(made: Engine, asked: Sequence[Request]) -> Texts:
    for request in asked:
        made.add(request)
    found = finish(made)
    assert made.target.cache.rows == () or made.shelf.limit
    return found


def flown(made: Engine) -> list[int]:
    """Rows of each round sent to the device from now on."""
    assert made.runner is not None
    seen, launch = [], made.runner.launch

    def counted(rows: Any, lengths: Any) -> None:
        launch(rows, lengths)
        seen.append(len(rows))

    made.runner.launch = counted  # type: ignore[method-assign]
    return seen


CASES: dict[str, dict[str, Any]] = {
    "token": {},
    "block": {"rule": Rule.BLOCK},
    "long drafts": {"policy": 9},
    "one token": {"policy": 1},
    "plain": {"drafter": "none"},
    "window": {"family": "gemma3"},
    "learned positions": {"family": "gpt2"},
    "not ahead": {"ahead": False},
}


@pytest.mark.parametrize(
    ("case", "params", "number"),
    [
        *[(case, SAMPLED, 3) for case in CASES],
        *[(case, GREEDY, 1) for case in ("token", "plain")],
        *[(case, SAMPLED, 8) for case in ("token", "block")],
    ],
)
def test_same_tokens_as_step_by_step(case: str, params: SamplingParams, number: int) -> None:
    settings = CASES[case]
    want = texts(engine(False, **settings), requests(number, params))
    made = engine(True, **settings)
    rounds = flown(made)
    assert texts(made, requests(number, params)) == want
    assert rounds and max(rounds) == number


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [("lookup", Rule.TOKEN), ("random", Rule.TOKEN), ("doubting", Rule.BLOCK), ("model", Rule.COUPLED)],
)
def test_the_target_alone_is_recorded_where_the_draft_cannot_be(drafter: str, rule: Rule) -> None:
    settings: dict[str, Any] = {"drafter": drafter, "rule": rule, "policy": 3}
    want = texts(engine(False, **settings), requests(3))
    made = engine(True, **settings)
    assert made.runner is not None and not made.runner.may_fly
    scored, score = [], made.runner.score

    def counted(rows: Any, blocks: Any) -> Any:
        scored.append(max(map(len, blocks)))
        return score(rows, blocks)

    made.runner.score = counted  # type: ignore[method-assign]
    assert texts(made, requests(3)) == want
    assert len(scored) > 3 and max(scored) >= 3


def test_same_tokens_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, with several rows: a kernel that read a row's number where another's lies would be seen here."""
    pytest.importorskip("support.triton_cpu")
    asked = [replace(request, prompt=(3, *request.prompt), max_new_tokens=6) for request in requests(2)]
    want = texts(engine(False, policy=2), asked)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor: True)
    assert texts(engine(True, policy=2), asked) == want


class Ear:
    """Hears every position's hidden state."""

    def __init__(self) -> None:
        self.heard: dict[tuple[int, int], Tensor] = {}

    def hear(self, rows: Sequence[int], past: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        places = [(row, p + i) for row, p, count in zip(rows, past, counts, strict=True) for i in range(count)]
        self.heard.update(zip(places, hidden.clone(), strict=True))

    def hear_copy(self, source: int, row: int, length: int) -> None: ...

    def hear_keep(self, row: int, start: int, picks: Sequence[int]) -> None: ...


class Overheard(StaticPass):
    """Has hidden states, as the fused body of a GPU does."""

    has_hidden = True

    def hidden(self, tokens: Tensor, rows: StaticRows) -> Tensor:
        states, model = StaticStates(self.scorer, rows), self.scorer.model
        with ragged(model, states):
            asked = {"input_ids": tokens.flatten()[None], "position_ids": rows.positions[None]}
            made: Tensor = model.base_model(**asked, past_key_values=states, use_cache=True).last_hidden_state[0]
        return made

    def head(self, hidden: Tensor) -> Tensor:
        made: Tensor = self.scorer.model.get_output_embeddings()(hidden)
        return made


def test_who_listens_hears_recorded_passes_too() -> None:
    def heard(on_device: bool) -> tuple[Texts, Ear]:
        made, ear = engine(on_device, drafter="random"), Ear()
        made.target.listeners.append(ear)
        if made.runner is not None:
            assert not made.runner.may_score(), "modules give no hidden states on the way"
            made.runner._pass = Overheard(made.target)
            assert made.runner.may_score()
        return texts(made, requests(3)), ear

    (ours, our_ear), (theirs, their_ear) = heard(True), heard(False)
    assert ours == theirs and our_ear.heard.keys() == their_ear.heard.keys()
    for place, hidden in our_ear.heard.items():
        torch.testing.assert_close(hidden, their_ear.heard[place], rtol=1e-4, atol=1e-4)


def test_parameters_of_all_kinds_in_one_batch() -> None:
    mixed = [SAMPLED, GREEDY, CUT, replace(SAMPLED, min_p=0.05), CUT]
    assert texts(engine(True), requests(5, mixed)) == texts(engine(False), requests(5, mixed))


def test_rows_that_come_later() -> None:
    def found(on_device: bool) -> Texts:
        made, asked = engine(on_device), requests(6)
        for request in asked[:3]:
            made.add(request)
        made.step()
        made.step()
        for request in asked[3:]:
            made.add(request)
        return finish(made)

    assert found(True) == found(False)


def test_rounds_of_both_kinds_take_turns() -> None:
    """A row with a penalty is decoded step by step, and so is everybody while it is there."""

    def found(on_device: bool, seen: list[int]) -> Texts:
        made, asked = engine(on_device), requests(4, new=30)
        rounds = flown(made) if on_device else []
        asked[1] = replace(asked[1], params=replace(SAMPLED, presence_penalty=0.5), max_new_tokens=9)
        made.add(asked[0])
        made.step()
        made.add(asked[1])
        made.add(asked[2])
        for _ in range(6):
            made.step()
        made.add(asked[3])
        got = finish(made)
        seen[:] = rounds
        return got

    seen: list[int] = []
    assert found(True, seen) == found(False, [])
    assert 1 in seen and 3 in seen, "the device had rounds before and after the row with a penalty"


def test_log_probabilities_of_what_was_emitted() -> None:
    """Of the model's own distribution; alternatives are only looked up step by step."""

    def found(on_device: bool) -> list[RowResult]:
        made, (first, second, third) = engine(on_device), requests(3, [SAMPLED, CUT, SAMPLED])
        rounds = flown(made) if on_device else []
        for request in (replace(first, logprobs=0), replace(second, logprobs=0), third):
            made.add(request)
        while not made.is_idle:
            made.step()
        assert rounds or not on_device
        return sorted(made.take_results(), key=lambda result: result.request.request_id)

    for got, want in zip(found(True), found(False), strict=True):
        assert got.tokens == want.tokens and (got.logprobs is None) == (want.logprobs is None)
        for ours, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
            assert ours.token == theirs.token and ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_a_stop_in_the_middle_of_a_round() -> None:
    plain = texts(engine(False), requests(3, new=40))
    stop = plain[0][len(plain[0]) // 2]
    asked = [replace(request, stop_ids=frozenset({stop})) for request in requests(3, new=40)]
    want = texts(engine(False), asked)
    assert len(want[0]) < len(plain[0])
    assert texts(engine(True), asked) == want


@pytest.mark.parametrize("policy", [CostModel, lambda: HfHeuristic(start=2)], ids=["auto", "hf"])
def test_policies_that_learn(policy: Callable[[], Policy]) -> None:
    """Greedy text does not depend on draft lengths; rounds with and without drafts follow each other."""
    want = texts(engine(False, drafter="none"), requests(3, GREEDY, new=60))
    made = engine(True, policy=policy())
    assert texts(made, requests(3, GREEDY, new=60)) == want


def test_abort_while_a_round_is_in_the_air() -> None:
    want = texts(engine(False), requests(3, new=30))
    made = engine(True)
    numbers = [made.add(request) for request in requests(3, new=30)]
    made.step()  # one prompt has a single token, which makes the first round one of the other kind
    made.step()
    assert made.runner is not None and made.runner.is_flying
    made.abort(numbers[1])
    got = finish(made)
    assert got[1] == want[1][: len(got[1])] and len(got[1]) < len(want[1])
    assert {i: got[i] for i in (0, 2)} == {i: want[i] for i in (0, 2)}
    assert made.target.cache.rows == ()


def test_a_row_that_has_finished_keeps_its_seat_and_stays_where_it_is() -> None:
    lengths = zip(requests(2), (5, 90), strict=True)
    short, long = (replace(request, prompt=(9, *request.prompt), max_new_tokens=n) for request, n in lengths)
    want = texts(engine(False), [short, long])
    made = engine(True)
    for request in (short, long):
        made.add(request)
    while len(made._running) == 2:
        made.step()
    for _ in range(3):
        made.step()
    assert made.runner is not None and made.runner._round is not None
    seats = made.runner._round.seats
    assert len(seats.rows) == 2 and len(seats.running) == 1 and len(made.target.cache.rows) == 2
    past = seats.standing.past.tolist()
    made.step()
    gained = [after - before for before, after in zip(past, seats.standing.past.tolist(), strict=True)]
    assert min(gained) == 0 < max(gained)
    assert finish(made) == want
    assert made.target.cache.rows == ()


def test_a_kept_row_goes_on() -> None:
    def found(on_device: bool) -> Texts:
        made = engine(on_device, keep_rows=2)
        first = texts(made, requests(1))
        prompt = (*requests(1)[0].prompt, *first[0], 5, 6)
        return texts(made, [Request(prompt=prompt, max_new_tokens=20, params=SAMPLED, seed=4, request_id=9)])

    assert found(True) == found(False)


def test_lengths_agree_with_the_host_between_rounds() -> None:
    """What `engine.device.runner` promises: with nothing in the air, the device's numbers are the host's."""
    made = engine(True, ahead=False)
    for request in requests(3, new=30):
        made.add(replace(request, prompt=(7, *request.prompt)))
    for _ in range(4):
        made.step()
        assert made.runner is not None and made.runner._round is not None and not made.runner.is_flying
        seats = made.runner._round.seats
        for place, row in enumerate(seats.rows):
            assert made.target.length(row.number) == len(row.history) - 1 == int(seats.standing.past[place])
            assert [*row.history[-2:]] == seats.standing.block[place, :2].tolist()
            assert (row.round, len(row.output)) == (int(seats.keys.round[place]), int(seats.keys.position[place]))
        assert int(seats.standing.past[3]) == 1, "the place without a row stays where it is"


def test_broken_logits_end_their_row_alone() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    poisoned = 11
    model.get_input_embeddings().weight[poisoned] = float("nan")
    target = Scorer(model, use=Kernels.OFF)
    made = Engine(target, None, Constant(0))
    made.runner = runner_of(target, None, Rule.TOKEN, made.clock)
    good, bad = requests(2)
    numbers = [made.add(good), made.add(replace(bad, prompt=(*bad.prompt, poisoned)))]
    while not made.is_idle:
        made.step()
    errors = {result.request.request_id: result.error for result in made.take_results()}
    assert numbers and errors[0] is None and errors[1] is not None


class Refusing(Recorder):
    """A device on which the n-th recording fails."""

    def __init__(self, number: int) -> None:
        super().__init__(torch.device("cpu"))
        self.left = number

    def record(self, work: Work, state: Any) -> Work:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return work


@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_recording_that_fails_costs_a_warning(number: int) -> None:
    want = texts(engine(False), requests(3))
    made = engine(True)
    assert made.runner is not None
    made.runner.recorder = made.runner.recordings.recorder = Refusing(number)
    with pytest.warns(ForerunWarning, match="stream is capturing.*without CUDA graphs"):
        assert texts(made, requests(3)) == want
    assert made.runner.is_grounded
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(made, requests(3)) == want


def test_a_cache_that_grows_has_its_recordings_made_anew() -> None:
    made = engine(True)
    assert made.runner is not None
    texts(made, requests(2, new=10))
    before = made.target.cache.capacity
    long = [replace(request, max_new_tokens=before) for request in requests(2, GREEDY)]
    assert texts(made, long) == texts(engine(False), long)
    assert made.target.cache.capacity > before and made.runner.recordings.num_moved > 0


def test_what_is_recorded_is_said_in_words() -> None:
    for drafter, words in (("model", "whole rounds"), ("lookup", "target's pass: PromptLookup drafts on the host")):
        made = engine(True, drafter=drafter)
        assert words in describe(made.runner, made.target, made.drafter, made.rule)
    assert made.runner is not None
    made.runner.is_grounded = True
    assert "recording failed" in describe(made.runner, made.target, made.drafter, made.rule)
    assert "cpu has no CUDA graphs" in SpeculativeDecoder(tiny_model("llama"), "lookup").recorded


def test_sizes_asked_for_now_and_then_are_stood_in_for() -> None:
    habits = Habits(patience=2)
    assert habits.choose("rows", 8, 8) == 8
    assert [habits.choose("rows", 4, 4) for _ in range(4)] == [8, 8, 4, 4]
    assert [habits.choose("rows", 10, 12) for _ in range(3)] == [12, 12, 10], "nothing larger is there"
    assert habits.choose("drafts", 3, 3) == 3, "another kind"


# Controls: each breaks one promise of a device round, and the comparison above must notice.


def _forgets_round(standing: Any, drafted: Any, verdict: Any, vocab_size: int) -> None:
    _advance(standing, drafted, verdict, vocab_size)
    standing.round.sub_(standing.active)


def _wrong_previous(standing: Any, drafted: Any, verdict: Any, vocab_size: int) -> None:
    _advance(standing, drafted, verdict, vocab_size)
    standing.block[:, 0] = standing.block[:, 1]


def _one_key_too_many(standing: Any, drafted: Any, verdict: Any, vocab_size: int) -> None:
    _advance(standing, drafted, verdict, vocab_size)
    standing.past.add_(standing.active)


_advance = advance.advance


@pytest.mark.parametrize("fault", [_forgets_round, _wrong_previous, _one_key_too_many])
def test_control_a_fault_in_advancing_is_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = texts(engine(False), requests(3))
    monkeypatch.setattr(advance, "advance", fault)
    assert texts(engine(True), requests(3)) != want


def test_control_budgets_shorten_drafts_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the last rounds of a row draw other tokens than plain steps would."""
    asked = requests(8, new=13)
    want = texts(engine(False, policy=7), asked)
    assert texts(engine(True, policy=7), asked) == want
    monkeypatch.setattr(advance, "draft_lengths", lambda asked, budget, position, most: asked.clamp(max=most))
    assert texts(engine(True, policy=7), asked) != want
