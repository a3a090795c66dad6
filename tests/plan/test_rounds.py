"""Rounds of the real engine, and the curves that are drawn through their times."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from forerun.drafters import DraftModel, PromptLookup, SelfDraft
from forerun.engine.device.choose import runner_of
from forerun.errors import InvalidArgument
from forerun.plan.acceptance import measure_acceptance
from forerun.plan.costs import Curve, measure_costs, steady
from forerun.plan.rounds import EngineRunner, full_rounds, operations_ratio, prompt_batches
from forerun.plan.settings import SHORTEST
from forerun.types import RoundOutcome
from plan.simulation import Simulated, even, plain, prompts
from support.tiny import draft_of, ragged_prompts, tiny_model

PROMPTS = [tuple(prompt) for prompt in ragged_prompts(4, 97, seed=3, longest=12)]


def drafting() -> EngineRunner:
    return EngineRunner("draft", tiny_model("llama"), DraftModel(draft_of(tiny_model("llama"), noise=0.05)))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_the_engines_own(temperature: float) -> None:
    """No draft is cut short by the end of a text; rows are gone when the rounds are over."""
    runner = drafting()
    (batch,) = prompt_batches(PROMPTS, 4, 20, 5, temperature, seed=0)
    found = list(runner.rounds(batch, lambda: 4))
    assert all(n == 4 for entry in found for n, before in zip(entry.drafted, entry.before, strict=True) if before < 20)
    assert all(entry.seconds > entry.draft_seconds > 0 for entry in found)
    made = dict.fromkeys(batch.ids, 0)
    for entry in found:
        for row, before, accepted in zip(entry.rows, entry.before, entry.accepted, strict=True):
            assert made[row] in (0, before)
            made[row] = before + accepted + 1
    assert min(made.values()) >= 20
    assert runner.engine.is_idle
    assert any(entry.longest_drawn == 4 and entry.total_drafted == 4 * len(entry.rows) for entry in found)


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_recorded", [True, False])
def test_rounds_behind_first_tokens_that_come_from_prompts(is_recorded: bool) -> None:
    """As on a GPU: no policy hears of them. They are nobody's rounds, and count as tokens."""
    runner = drafting()
    engine = runner.engine
    engine.pair.first_from_prompt = True
    if is_recorded:
        engine.pair.runner = runner_of(engine.target, engine.drafter, engine.rule, engine.clock)
    for _ in range(2):
        (batch,) = prompt_batches(PROMPTS[1:], 3, 20, 5, 0.0, seed=0)
        found = list(full_rounds(runner, batch, lambda: 4))
        assert found and min(found[0].before) >= 2 and all(entry.drafted == (4, 4, 4) for entry in found)


def test_first_tokens_of_rows_that_waited_for_room_are_no_rounds() -> None:
    """No policy hears of them, and the round before them does not count twice."""
    runner = drafting()
    engine = runner.engine
    engine.pair.first_from_prompt = True
    engine.target.cache._num_tokens = 70  # keys of two rows, of which each has up to 12 + 25
    engine.pair.runner = runner_of(engine.target, engine.drafter, engine.rule, engine.clock)
    told: list[RoundOutcome] = []
    observe = runner.policy.observe
    runner.policy.observe = lambda outcome: (told.append(outcome), observe(outcome))[1]  # type: ignore[method-assign]
    (batch,) = prompt_batches(PROMPTS, 4, 20, 5, 0.0, seed=0)
    found = list(runner.rounds(batch, lambda: 4))
    assert any(len(entry.rows) < 4 for entry in found), "all of them had room"
    assert [entry.accepted for entry in found] == [outcome.accepted for outcome in told][-len(found) :]
    assert len(told) == len(found) + 1, "the first is for the draft model to read the prompts"


def test_a_batch_is_over_when_its_first_row_is() -> None:
    runner = drafting()
    (batch,) = prompt_batches(PROMPTS, 4, 20, 5, 0.0, seed=0)
    found = list(full_rounds(runner, batch, lambda: 4))
    assert found and all(len(entry.rows) == 4 and max(entry.before) < 20 for entry in found)
    assert runner.engine.is_idle


def test_rounds_left_early_leave_nothing_behind() -> None:
    runner = drafting()
    (batch,) = prompt_batches(PROMPTS[:2], 2, 20, 5, 0.0, seed=0)
    rounds = runner.rounds(batch, lambda: 2)
    next(rounds)
    rounds.close()
    assert runner.engine.is_idle


@pytest.mark.slow
def test_acceptance_of_greedy_text_does_not_depend_on_the_batch() -> None:
    """Traces are counted in one batch and put together into others."""
    alone, together = (
        measure_acceptance(drafting(), prompt_batches(PROMPTS, batch, 16, 5, 0.0, 0), (2, 4)) for batch in (1, 4)
    )
    assert alone == together
    kept, reached = alone.longest.by_position()[0]
    assert 0 < kept < reached
    assert 0 < alone.alpha < 1


def test_copies_are_told_from_what_is_drawn() -> None:
    runner = EngineRunner("lookup", tiny_model("llama"), PromptLookup())
    repeated = [prompt * 3 for prompt in PROMPTS[1:]]
    batches = prompt_batches(repeated, 3, 16, 5, 0.0, 0)
    found = [entry for batch in batches for entry in runner.rounds(batch, lambda: 4)]
    assert any(entry.total_drafted for entry in found)
    assert all(entry.longest_drawn == 0 for entry in found)


def test_operations_count_products() -> None:
    target = tiny_model("llama")
    model = DraftModel(draft_of(target))
    assert operations_ratio(model, target) == 1.0
    assert operations_ratio(PromptLookup(), target) == 0.0


@pytest.mark.parametrize("bits", [8, 4])
def test_a_copy_of_the_target_multiplies_as_often_as_the_target(bits: int) -> None:
    assert EngineRunner("self", tiny_model("llama"), SelfDraft(bits)).operations_ratio == 1.0


def test_operations_of_layers_that_are_no_linear_ones() -> None:
    """GPT-2's are Conv1D: 12 h^2 a layer; its head is its embedding's, and positions are looked up."""
    little, large = (GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=n, n_head=4)).eval() for n in (1, 3))
    layer, head = 12 * 32**2, 97 * 32
    found = EngineRunner("draft", large, DraftModel(little)).operations_ratio
    assert found == pytest.approx((layer + head) / (3 * layer + head), rel=1e-12)


def test_operations_of_experts_are_those_of_the_chosen_ones() -> None:
    """Two of them work on a token, however many there are: a larger number only makes the router wider."""
    few, many = (tiny_model("qwen2_moe", num_experts=experts) for experts in (4, 8))
    attention, shared, chosen = 32 * (32 + 16 + 16 + 32), 3 * 32 * 16 + 32, 2 * 3 * 32 * 16
    head = 97 * 32
    four, eight = (2 * (attention + shared + chosen + experts * 32) + head for experts in (4, 8))
    found = EngineRunner("draft", many, DraftModel(few)).operations_ratio
    assert found == pytest.approx(four / eight, rel=1e-12)


class TestCurve:
    def test_straight_between_and_beyond(self) -> None:
        curve = Curve.through([(0, 1.0), (2, 2.0), (4, 6.0)])
        assert [curve(x) for x in (0, 1, 2, 3, 4, 5)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]

    def test_a_dip_is_noise(self) -> None:
        curve = Curve.through([(1, 3.0), (2, 1.0), (2, 1.0), (3, 5.0)])
        assert [curve(x) for x in (1, 2, 3)] == pytest.approx([5 / 3, 5 / 3, 5.0])

    def test_many_sizes_become_a_few_points(self) -> None:
        curve = Curve.through([(x, 2 + x / 10) for x in range(60)])
        assert len(curve.points) <= 13
        assert [curve(x) for x in (0, 30, 59)] == pytest.approx([2.0, 5.0, 7.9], abs=0.15)

    def test_alone_or_empty(self) -> None:
        assert Curve.through([(3, 2.0)])(7) == 2.0
        assert Curve.through([])(7) == 0.0


def test_the_middle_half() -> None:
    assert steady([1.0, 2.0, 2.0, 90.0]) == 2.0
    assert steady([5.0]) == 5.0


def test_costs_are_found_and_turns_are_taken() -> None:
    diary: list[str] = []

    class Noted(Simulated):
        def one(self, *arguments: Any) -> Any:
            diary.append(self.name)
            return super().one(*arguments)

    batches = prompt_batches(prompts(4), 2, 100, 9, 0.0, 0)
    drafters = [Noted("a", even(0.8), per_draft=0.004, noise=0.0), Noted("b", even(0.5), noise=0.0)]
    costs = measure_costs(Noted("plain", per_draft=0.0, noise=0.0), drafters, batches, range(1, 9), 3)
    for length in range(1, 9):
        assert costs["a"].draft_ratio(length) == pytest.approx(0.2)
        assert costs["a"].score_ratio(length) == pytest.approx(1 + length * 2 * 0.0005 / 0.020)
        assert costs["a"].whole[length] == pytest.approx(0.020 + 0.004 * length + 0.001 * length)
    turns = [name for name, _ in itertools.groupby(diary)]
    assert turns[:6] == ["plain", "a", "b"] * 2


def test_texts_too_short_to_time_anything_in_are_an_error() -> None:
    batches = prompt_batches(prompts(4), 2, 1, 2, 0.0, seed=0)
    with pytest.raises(InvalidArgument, match=r"texts of 1 tokens .*max_new_tokens"):
        measure_costs(plain(), [Simulated("d")], batches, (1,), 1)


@pytest.mark.parametrize("first_from_prompt", [False, True])
def test_the_shortest_text_that_settings_allow_has_a_round(first_from_prompt: bool) -> None:
    """Even where the draft is the target itself, so that the rounds before keep all of theirs."""
    runner = EngineRunner("draft", tiny_model("llama"), DraftModel(tiny_model("llama")))
    runner.engine.pair.first_from_prompt = first_from_prompt
    batches = prompt_batches(PROMPTS, 1, SHORTEST, 2, 0.0, seed=0)
    assert all(list(full_rounds(runner, batch, lambda: 1)) for batch in batches)
    shorter = replace(batches[1], new_tokens=SHORTEST - 1)
    assert not first_from_prompt or not list(full_rounds(runner, shorter, lambda: 1))


def test_a_machine_that_slows_down_slows_all_alike() -> None:
    """0.2 % a round: half as fast at the end as at the beginning, and c is the same."""
    batches = prompt_batches(prompts(4), 1, 200, 9, 0.0, 0)
    drifting = Simulated("d", even(0.8), per_draft=0.004, drift=0.002)
    baseline = Simulated("plain", per_draft=0.0, drift=0.002)
    costs = measure_costs(baseline, [drifting], batches, range(1, 9), 40)["d"]
    assert [costs.draft_ratio(n) for n in (1, 4, 8)] == pytest.approx([0.2] * 3, rel=0.06)
    steady_costs = measure_costs(plain(), [Simulated("d", per_draft=0.004)], batches, range(1, 9), 40)["d"]
    assert steady_costs.plain < 0.8 * costs.plain
