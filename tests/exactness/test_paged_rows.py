"""The law of the whole loop where keys lie in blocks, beginnings are shared, and rows are preempted again and again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from exactness.sampling import PLAIN, verdict
from forerun.cache.paged import PagedCache
from forerun.config import Kernels
from forerun.drafters import Chain, DraftModel, PromptLookup
from forerun.drafters.base import Drafter
from forerun.engine import Engine, Request
from forerun.engine.device.choose import runner_of
from forerun.engine.roster import Roster
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.markov import joint_law, toy_pair

CPU = torch.device("cpu")
SIZE, TOKENS = 4, 2048  # of a block, and of all rows together
SHARED = (1, 2, 0, 1, 2, 0, 1, 1)  # two full blocks
Prompts = tuple[tuple[int, ...], ...]
PROMPTS: Prompts = ((*SHARED, 2), (*SHARED, 0, 2))
LONGER: Prompts = ((*SHARED, 0, 2, 1), (*SHARED, 0, 2, 0))  # half a block more in common, which its rows go on writing
NUMBER, AT_ONCE, STEPS = 180, 64, 2


def made(drafter: str, rule: Rule, on_device: bool) -> Engine:
    target, draft = map(copy.deepcopy, toy_pair(3))
    chosen: dict[str, Drafter | None] = {
        "model": DraftModel(draft),
        "none": None,
        "chain": Chain(PromptLookup(min_ngram=2), DraftModel(draft)),
    }
    cache = PagedCache(TOKENS, CPU, block_size=SIZE)
    scorer = Scorer(target, cache=cache, use=Kernels.OFF)
    engine = Engine(scorer, chosen[drafter], Constant(1), rule=rule, join_tokens=0, ahead=False)
    if on_device:
        engine.pair.runner = runner_of(scorer, engine.drafter, rule, engine.clock)
    return engine


def run(engine: Engine, prompts: Prompts, number: int) -> dict[int, list[tuple[int, ...]]]:
    """New tokens of `number` rows of each prompt, of which the newest are sent away in every other step."""
    waiting = [(i, prompt) for i in range(number) for prompt in range(2)]
    found: dict[int, list[tuple[int, ...]]] = {0: [], 1: []}
    for step in itertools.count():
        while waiting and len(engine.roster.running) + len(engine.roster.waiting) < AT_ONCE:
            i, prompt = waiting.pop()
            engine.add(Request(prompt=prompts[prompt], max_new_tokens=5, params=PLAIN, seed=prompt, request_id=i))
        engine.step()
        for result in engine.take_results():
            found[result.request.seed].append(result.tokens)
        if engine.is_idle and not waiting:
            return found
        for _ in range(len(engine.roster.running) // 2 if step % 2 == 0 else 0):
            engine.roster.preempt_newest()
    raise AssertionError


def misfits(drafter: str, rule: Rule, on_device: bool, prompts: Prompts = PROMPTS, number: int = NUMBER) -> list[str]:
    engine = made(drafter, rule, on_device)
    cache = engine.target.cache
    assert isinstance(cache, PagedCache)
    begun, begin = list[int](), cache.begin

    def watched(*given: Any) -> int:
        begun.append(begin(*given))
        return begun[-1]

    cache.begin = watched  # type: ignore[method-assign]
    found = run(engine, prompts, number)
    assert engine.num_preempted > number // 2, "rows are preempted"
    assert sum(map(bool, begun)) > number, "beginnings are shared"
    cache.check()
    return [verdict(found[i], joint_law(toy_pair(3)[0], prompt, STEPS)) for i, prompt in enumerate(prompts)]


@pytest.mark.quick("model-token-True")
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(
    ("drafter", "rule"), [("model", "token"), ("model", "block"), ("chain", "token"), ("none", "coupled")]
)
def test_joint_law(drafter: str, rule: str, on_device: bool) -> None:
    assert misfits(drafter, Rule(rule), on_device) == ["", ""]


@pytest.mark.slow
def test_control_a_preempted_row_that_draws_its_numbers_again(monkeypatch: MonkeyPatch) -> None:
    preempt = Roster.preempt_newest

    def from_the_beginning(roster: Roster) -> None:
        preempt(roster)
        roster.waiting[0].round = 0

    monkeypatch.setattr(Roster, "preempt_newest", from_the_beginning)
    assert any(misfits("none", Rule.TOKEN, False, number=600))


def test_control_keys_of_another_beginning(monkeypatch: MonkeyPatch) -> None:
    """Texts whose second blocks are alike are taken for one another: those that come later read the others' keys."""
    from forerun.cache.blocks import BlockPool

    publish, find = BlockPool.publish, BlockPool.find

    def blurred(tokens: Sequence[int]) -> list[int]:
        return [*([0] * len(tokens[:SIZE])), *tokens[SIZE:]]

    def loosely(pool: BlockPool, tokens: Sequence[int], *rest: Any) -> Any:
        return publish(pool, blurred(tokens), *rest)

    prompts = ((0, 0, 0, 0, *SHARED[SIZE:], 2), PROMPTS[1])  # with half of the next two tokens changed by the first
    assert misfits("none", Rule.TOKEN, False, prompts, 96) == ["", ""]
    monkeypatch.setattr(BlockPool, "publish", loosely)
    monkeypatch.setattr(BlockPool, "find", lambda pool, tokens, source: find(pool, blurred(tokens), source))
    assert any(misfits("none", Rule.TOKEN, False, prompts, 96))


def test_joint_law_over_blocks_that_other_rows_write() -> None:
    assert misfits("none", Rule.TOKEN, True, LONGER, 96) == ["", ""]


def test_control_a_block_that_two_rows_write(monkeypatch: MonkeyPatch) -> None:
    """The block that a running row is in the middle of is shared instead of copied."""
    from forerun.cache.blocks import BlockPool

    share = PagedCache._share

    def greedily(cache: PagedCache, row: int, blocks: Sequence[int], partial: int, rest: int) -> None:
        share(cache, row, [*blocks, *([partial] if rest else [])], 0, 0)
        cache._length[row] -= (SIZE - rest) if rest else 0

    monkeypatch.setattr(PagedCache, "_share", greedily)
    monkeypatch.setattr(BlockPool, "is_shared", lambda pool, block, start: False)
    assert any(misfits("none", Rule.TOKEN, False, LONGER, 96))
