"""What was recorded ahead of time is all there is to record, whatever comes; and nothing that is said changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.device_engines import InPython, Rehearsing, rehearsing
from engine.device_engines import engine as make_engine
from forerun.cache.paged import PagedCache
from forerun.config import SamplingParams
from forerun.drafters import DraftModel
from forerun.engine import Engine, Request
from forerun.engine.device.draft_passes import DraftPasses
from forerun.engine.device.warm_up import MOST_READ, bounds_up_to, prompts_up_to, sizes_up_to
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.models.seq2seq import scorer_of
from forerun.policy import Constant, CostModel
from forerun.types import RoundOutcome
from support.tiny import ragged_prompts, tiny_model

ROWS, DRAFT, CONTEXT = 4, 4, 64
CPU = torch.device("cpu")


def warm(drafter: str, policy: object = 2) -> Engine:
    cache = PagedCache(4096, torch.device("cpu"), longest=96, block_size=16)
    made = rehearsing(make_engine(True, drafter=drafter, policy=policy, cache=cache))  # type: ignore[arg-type]
    if type(made.drafter) is DraftModel:
        made.drafting.passes = DraftPasses(made.drafter, made.clock)
        made.drafting.passes.runner.recordings.recorder = Rehearsing(CPU)
        made.drafting.passes.runner.recorder = made.drafting.passes.runner.recordings.recorder
    made.warm_up(ROWS, DRAFT, CONTEXT)
    return made


def requests(seed: int, number: int = 12) -> list[Request]:
    """Of every kind: greedy, sampled, cut, penalised, with a bias, with log-probabilities, with Python of their own."""
    numbers = random.Random(seed)
    prompts = ragged_prompts(number, 97, seed, longest=20)
    kinds: list[dict[str, object]] = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05}, {"temperature": 1.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "frequency_penalty": 0.4, "logit_bias": {5: 1.5}},
    ]  # fmt: skip
    return [
        Request(
            prompt=tuple(prompt), max_new_tokens=numbers.randint(1, 30), seed=seed, request_id=place,
            params=SamplingParams(**numbers.choice(kinds)),  # type: ignore[arg-type]
            logprobs=numbers.choice([None, None, None, 0, 3, 20]),
            processors=(InPython(),) if place % 5 == 4 else (),
        )
        for place, prompt in enumerate(prompts)
    ]  # fmt: skip


def texts(engine: Engine, asked: list[Request], seed: int) -> dict[int, tuple[int, ...]]:
    """Rows come and go, at most `ROWS` at once."""
    numbers, waiting, found = random.Random(seed), list(asked), {}
    while waiting or not engine.is_idle:
        running = len(engine.roster.running) + len(engine.roster.waiting)
        for _ in range(min(numbers.randint(0, 3), len(waiting), ROWS - running)):
            engine.add(waiting.pop(0))
        engine.step()
        found.update({result.request.request_id: result.tokens for result in engine.take_results()})
    return found


@pytest.mark.quick("model")
@pytest.mark.parametrize(
    "drafter",
    (
        "model",
        "none",
        "lookup",
        "chain",
        "exit",
        "feature",
        "parallel",
        "random",
        "doubting",
        "table",
        "chain of a table",
        "tree",
        "top tree",
        "copies before a tree",
    ),
)
def test_nothing_is_recorded_afterwards_and_nothing_changes(drafter: str) -> None:
    engine, asked = warm(drafter), requests(2)
    assert {request.logprobs for request in asked} == {None, 0, 3, 20}
    assert engine.runner is not None
    before = engine.num_recordings
    assert before > 0
    found = texts(engine, asked, 2)
    assert engine.num_recordings == before, "something was recorded that the warm-up should have"
    assert not engine.runner.is_disabled
    host = make_engine(False, drafter=drafter, policy=2)
    assert found == texts(host, asked, 2)


class Watched(CostModel):
    told = 0

    def observe(self, outcome: RoundOutcome) -> None:
        self.told += 1
        super().observe(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ("model", "feature", "lookup", "chain"))
def test_lengths_that_a_policy_chooses_are_recorded(drafter: str) -> None:
    policy = Watched()
    engine = warm(drafter, policy)
    assert engine.policy is policy and not policy.told, "it learns nothing from the warm-up's own requests"
    before = engine.num_recordings
    texts(engine, requests(3), 4)
    assert engine.num_recordings == before
    assert longest_draft(engine) == DRAFT, "a longer draft would be recorded when it comes"


def longest_draft(engine: Engine) -> int:
    """That the policy is offered for a row with room for more."""
    return max(engine._rounds.view([engine._row(Request(prompt=(1, 2), max_new_tokens=40))]).max_lengths)


@pytest.mark.slow
def test_what_is_recorded_bounds_drafts_and_nothing_else_does() -> None:
    host = make_engine(False, drafter="lookup", policy=16)
    host.warm_up(1)
    assert longest_draft(host) == 39, "nothing was recorded"
    device = rehearsing(make_engine(True, drafter="lookup", policy=16, cache=PagedCache(4096, CPU, block_size=16)))
    device.warm_up(1, context=32)
    assert longest_draft(device) == 16, "the length that the policy is fixed to"


def test_control_more_rows_than_were_asked_for_are_recorded_when_they_come() -> None:
    engine = warm("none")
    assert engine.runner is not None
    before = engine.runner.recorder.num_recordings
    for request in requests(5)[: ROWS + 2]:  # one of them is not the device's
        engine.add(request)
    while not engine.is_idle:
        engine.step()
    assert engine.runner.recorder.num_recordings > before


def test_progress_is_told_and_the_plan_is_what_was_asked_for() -> None:
    cache = PagedCache(4096, torch.device("cpu"), longest=96, block_size=16)
    made = rehearsing(make_engine(True, drafter="model", policy=2, cache=cache))
    told: list[tuple[int, int]] = []
    outcome = made.warm_up(ROWS, DRAFT, CONTEXT, report=lambda done, total: told.append((done, total)))
    assert told == [(place + 1, outcome.num_rounds) for place in range(outcome.num_rounds)]
    assert outcome.num_rounds > 0 and outcome.seconds > 0 and not outcome.remark
    assert sizes_up_to(5) == [8, 4, 2, 1] and bounds_up_to(3000) == [4096, 2048, 1024]
    assert max(prompts_up_to(3000)) == 2999
    assert prompts_up_to(1 << 17) == prompts_up_to(MOST_READ), "longer ones have the same kernels"


def test_it_says_why_nothing_is_recorded() -> None:
    outcome = make_engine(False, drafter="lookup").warm_up(2, 2, 32)
    assert outcome.num_rounds == 0 and "nothing" in outcome.remark


def test_a_target_that_reads_a_source_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="recorded as they come"):
        Engine(scorer_of(tiny_model("t5")), None, Constant(0)).warm_up()


def test_not_while_requests_are_under_way() -> None:
    made = make_engine(False)
    made.add(requests(1)[0])
    with pytest.raises(InvalidArgument, match="when idle"):
        made.warm_up()


@pytest.mark.parametrize("odd", [{"rows": 0}, {"rows": "4"}, {"draft": -1}, {"draft": 2.5}, {"context": 0}])
def test_odd_bounds_are_refused(odd: dict[str, Any]) -> None:
    made = make_engine(False)
    with pytest.raises(InvalidArgument, match=next(iter(odd))):
        made.warm_up(**odd)
    assert max(made._rounds.view([made._row(requests(1)[0])]).max_lengths) > 0, "nothing was changed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_one_leaves_no_row_behind(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_engine(False, drafter="lookup")
    monkeypatch.setattr(made.target, "score", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(error):
        made.warm_up(2, 2, 32)
    monkeypatch.undo()
    assert made.is_idle and not made.take_results()
    assert len(texts(made, requests(1)[:3], 2)) == 3


@pytest.mark.slow
def test_copies_shorter_than_those_that_were_recorded_stay_on_the_device() -> None:
    """Tables for short copies are narrower than those of the long ones that the warm-up has recorded."""
    cache = PagedCache(4096, CPU, longest=200, block_size=16)
    made = rehearsing(make_engine(True, drafter="lookup", policy=40, cache=cache))
    made.warm_up(2, 40, 100)
    assert made.runner is not None and (40, 0) in made.runner._warm_copies
    asked = [Request(prompt=(*[3, 4, 5, 6] * 3, 3), max_new_tokens=60)]
    found = texts(made, asked, 1)
    assert not made.runner.is_disabled
    assert found == texts(make_engine(False, drafter="lookup", policy=40), asked, 1)


def test_a_recording_that_fails_costs_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedCache(4096, torch.device("cpu"), longest=96, block_size=16)
    made = rehearsing(make_engine(True, drafter="model", policy=2, cache=cache))
    monkeypatch.setattr(made.runner, "prepare", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.warns(ForerunWarning, match="no memory"):
        outcome = made.warm_up(ROWS, DRAFT, CONTEXT)
    assert outcome.num_rounds == 0 and "no memory" in outcome.remark
    assert len(texts(made, requests(1), 2)) == 12
