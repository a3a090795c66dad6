"""First tokens that are drawn from the passes which read the prompts are those that a round without a draft draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.device_engines import CUT, GREEDY, SAMPLED, InPython, Texts, engine, finish, flown, requests, texts
from engine.options import OPTIONS
from forerun.cache.base import CacheFull
from forerun.cache.paged import PagedCache
from forerun.config import SamplingParams
from forerun.engine import Engine, FinishReason, Request
from forerun.engine import engine as engine_module
from forerun.types import Rule


def asked_for(number: int, *params: SamplingParams) -> list[Request]:
    """Prompts of two tokens and more: a single one is read by the first round."""
    return requests(number + 1, params[:1] + params or SAMPLED)[1:]


def made(on_device: bool = True, room: int = 4096, **settings: Any) -> Engine:
    cache = PagedCache(room, torch.device("cpu"), block_size=8) if on_device else None
    return engine(on_device, cache=cache, first_from_prompt=True, double=True, **settings)


def first_steps(decoding: Engine, asked: list[Request]) -> tuple[list[int], Texts]:
    """Tokens that each of the first two steps tells, and then all texts."""
    for request in asked:
        decoding.add(request)
    told = [sum(len(entry.tokens) for entry in decoding.step()) for _ in range(2)]
    return told, finish(decoding)


@pytest.mark.quick("model-token")
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("drafter", ["model", "lookup", "chain", "none", "exit"])
def test_a_step_of_their_own(drafter: str, rule: Rule) -> None:
    """The first step tells one token of every row, and the round behind it is on its way."""
    asked = asked_for(5, SAMPLED, GREEDY, CUT, SAMPLED, SAMPLED)
    want = texts(made(False, drafter=drafter, rule=rule), asked)
    decoding = made(drafter=drafter, rule=rule)
    told, found = first_steps(decoding, asked)
    assert told[0] == 5 and told[1] >= 5 and found == want
    rounds = flown(decoding)
    assert texts(decoding, asked) == want, "once more, from prompts that are known but for their last blocks"
    assert rounds and max(rounds) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options_count(name: str) -> None:
    asked = [OPTIONS[name](request) for request in asked_for(3)]
    results = []
    for on_device in (False, True):
        decoding = made(on_device)
        for request in asked:
            decoding.add(request)
        found: dict[int, Any] = {}
        while not decoding.is_idle:
            decoding.step()
            found |= {result.request.request_id: result for result in decoding.take_results()}
        results.append(found)
    for wanted, result in zip(results[0].values(), (results[1][key] for key in results[0]), strict=True):
        assert (result.tokens, result.finish_reason) == (wanted.tokens, wanted.finish_reason)
        if wanted.logprobs is not None:
            pairs = zip(result.logprobs, wanted.logprobs, strict=True)
            assert all(a.token == b.token and abs(a.logprob - b.logprob) < 1e-9 for a, b in pairs)


def test_rows_that_only_python_can_judge() -> None:
    asked = [replace(request, processors=(InPython(),)) for request in asked_for(2)]
    want = texts(made(False), asked)
    assert texts(made(), asked) == want


def test_equal_prompts_draw_from_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draws by numbers of its own."""
    alike = [replace(asked_for(1)[0], request_id=number) for number in range(4)]
    want, decoding, fed = texts(made(False), alike), made(), list[int]()
    feed = decoding.target.feed_to_end

    def counted(rows: Any, blocks: Any, ending: Any) -> Any:
        fed.append(len(rows))
        return feed(rows, blocks, ending)

    monkeypatch.setattr(decoding.target, "feed_to_end", counted)
    told, found = first_steps(decoding, alike)
    assert told[0] == 4 and fed == [1] and found == want and len(set(found.values())) > 1


def test_newcomers_are_read_behind_the_round_under_way() -> None:
    """The others hear of their round before the prompt is read, and newcomers of their token before the next round."""
    old, new = asked_for(4)[:2], asked_for(4)[2:]
    want, decoding = texts(made(False), [*old, *new]), made()
    handles = {decoding.add(request): request.request_id for request in old}
    decoding.step()
    newcomers = {decoding.add(request): request.request_id for request in new}
    told = [{entry.row: entry.tokens for entry in decoding.step()} for _ in range(3)]
    assert set(told[0]) == set(handles) and set(told[2]) == {*handles, *newcomers}
    assert set(told[1]) == set(newcomers) and all(len(tokens) == 1 for tokens in told[1].values())
    assert finish(decoding) == want


@pytest.mark.quick("True")
@pytest.mark.parametrize("ahead", [True, False])
def test_newcomers_in_every_step_keep_nobody_waiting(ahead: bool) -> None:
    decoding = made(ahead=ahead)
    old = decoding.add(asked_for(1)[0])
    decoding.step()
    gained = 0
    for number in range(12):
        decoding.add(replace(asked_for(2)[1], request_id=50 + number))
        gained += sum(len(entry.tokens) for entry in decoding.step() if entry.row == old)
    assert gained >= 6, "a round at least in every other step"


@pytest.mark.slow
def test_prompts_longer_than_a_step_reads() -> None:
    asked = [replace(request, prompt=request.prompt * 6) for request in asked_for(4)]
    want, decoding = texts(made(False), asked), made()
    decoding.prompt_tokens = 10
    assert texts(decoding, asked) == want


def test_rows_that_end_before_their_first_token() -> None:
    """One is aborted between its prompt and its token, one has no time left; the others are unharmed."""
    asked, decoding = asked_for(4), made()
    want = texts(made(False), asked[:2])
    now = [0.0]
    decoding.clock = lambda: now[0]
    for request in asked[:1]:
        decoding.add(request)
    decoding.step()
    decoding.add(asked[1])
    doomed = decoding.add(asked[2])
    decoding.add(replace(asked[3], deadline=5.0))
    decoding.step()
    assert len(decoding.roster.unjudged) == 3
    decoding.abort(doomed)
    now[0] = 9.0
    results = {}
    while not decoding.is_idle:
        decoding.step()
        results |= {result.request.request_id: result for result in decoding.take_results()}
    assert {key: results[key].tokens for key in want} == want
    assert results[3].finish_reason is FinishReason.ABORT and results[4].finish_reason is FinishReason.TIME
    assert not results[3].tokens and not results[4].tokens and not decoding.roster.unjudged


@pytest.mark.quick("KeyboardInterrupt")
@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_a_fault_while_they_are_judged_costs_nothing(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, decoding = asked_for(3), made()
    want = texts(made(False), asked)
    for request in asked:
        decoding.add(request)

    def failing(*_: Any, **__: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "judge_prompts", failing)
        with pytest.raises(fault):
            decoding.step()
    assert finish(decoding) == want


def test_a_fault_that_recurs_is_told_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever steps ends what fails twice: a step in between that does nothing would look like a success."""
    decoding = made()
    decoding.add(asked_for(1)[0])

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine_module, "judge_prompts", failing)
    for _ in range(3):
        with pytest.raises(MemoryError):
            decoding.step()


def test_a_call_behind_one_that_ended_with_its_first_tokens() -> None:
    decoding = made()
    assert [len(tokens) for tokens in texts(decoding, [replace(asked_for(1)[0], max_new_tokens=1)]).values()] == [1]
    decoding.add(asked_for(1)[0])
    assert decoding.step()


@pytest.mark.slow
def test_room_that_runs_out_while_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was read to its end by then, and its last token is not run twice."""
    asked, decoding = asked_for(3), made()
    want = texts(made(False), asked)
    decoding.add(asked[0])
    decoding.step()
    for request in asked[1:]:
        decoding.add(request)
    feed, failed = decoding.target.feed_to_end, list[int]()

    def short(rows: Any, blocks: Any, ending: Any) -> Any:
        if failed:
            return feed(rows, blocks, ending)
        failed.extend(rows)
        feed(rows[:1], blocks[:1], ending[:1])
        raise CacheFull("no room")

    monkeypatch.setattr(decoding.target, "feed_to_end", short)
    assert finish(decoding) == want and len(failed) == 2


def test_a_row_that_goes_on_beside_a_newcomer_with_its_text() -> None:
    """It has the newcomer's keys, and a round with a draft, as it would have had alone."""
    first = asked_for(1)[0]
    want = texts(made(False), [first])[first.request_id]
    decoding = made()
    handle = decoding.add(first)
    decoding.step()
    row = decoding.roster.running[0]
    assert row.handle == handle and row.round == 1
    decoding.roster.start_over()
    twin = replace(first, prompt=tuple(row.history), request_id=77, max_new_tokens=3)
    decoding.add(twin)
    decoding.roster.waiting.reverse()  # the newcomer reads
    assert finish(decoding)[first.request_id] == want


@pytest.mark.slow
def test_rows_that_wait_again_for_room() -> None:
    """The newest is sent away while its first token is on its way, or later; it says what it would have said."""
    asked = [replace(request, prompt=request.prompt[:9], max_new_tokens=40) for request in asked_for(6)]
    want, decoding = texts(made(False), asked), made(room=120)
    assert texts(decoding, asked) == want
    assert decoding.num_preempted


def test_control_first_rounds_with_drafts_draw_something_else() -> None:
    """What is compared above would be seen to differ."""
    asked = requests(5)
    assert texts(engine(False, double=True), asked) != texts(made(False), asked)
