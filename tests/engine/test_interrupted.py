"""An error at any point of a step: nothing is lost or done twice, and nobody's text changes afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import pytest

from engine.device_engines import engine as device_engine
from engine.scripted import Spell, engine_with
from forerun.config import SamplingParams
from forerun.drafters import DraftModel, PromptLookup
from forerun.engine import Engine, Request
from forerun.engine.device import row_table
from forerun.engine.device.row_table import RowTable
from forerun.errors import ForerunWarning
from support.finish import finished, tokens_by_request
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

# What an interruption leaves behind must not keep later rounds from being recorded, either.
pytestmark = pytest.mark.filterwarnings("error::forerun.errors.ForerunWarning")
NEW = 9
PROMPTS = [tuple(prompt) for prompt in ragged_prompts(3, 97, seed=5, longest=7)]
MAKERS: dict[str, Callable[[], Engine]] = {
    "model": lambda: engine_with(DraftModel(draft_of(tiny_model("llama"))), 3, keep_rows=2, tokenizer=Spell()),
    "lookup": lambda: engine_with(PromptLookup(), 3, keep_rows=2, tokenizer=Spell()),
    "device": lambda: device_engine(True, policy=3, keep_rows=2),
}


class Pulled(BaseException):
    """As a Ctrl-C: nobody who catches errors catches it."""


class Cord:
    """Counts the calls made within Forerun, and raises in place of one of them."""

    def __init__(self, pull_at: int = -1) -> None:
        self.pull_at, self.seen = pull_at, list[CodeType]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and ("/forerun/" in path or path.endswith("scripted.py")):
            self.seen.append(frame.f_code)
            if len(self.seen) - 1 == self.pull_at:
                raise Pulled

    def step(self, engine: Engine) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            engine.step()
        except Pulled:
            pass
        finally:
            sys.settrace(before)


def asked(stops: bool) -> list[Request]:
    strings = ("<nothing that is ever said>",) if stops else ()
    return [
        Request(prompt=prompt, max_new_tokens=NEW, request_id=i, stop_strings=strings, seed=3,
                params=SamplingParams(temperature=0.0 if i < 2 else 0.9))
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip


@lru_cache
def wanted(kind: str) -> dict[int, tuple[int, ...]]:
    """What the rows say when nothing goes wrong; of the greedy ones, what the model itself says."""
    engine = MAKERS[kind]()
    texts = finish(engine, kind)
    for i in range(2):
        assert texts[i] == tuple(plain_greedy(tiny_model("llama"), list(PROMPTS[i]), NEW))
    return texts


def finish(engine: Engine, kind: str) -> dict[int, tuple[int, ...]]:
    return tokens_by_request(engine, asked(kind != "device"))


def places(kind: str, steps: int) -> list[int]:
    """The first and the last call of every function in the step after so many: that is where errors are raised."""
    cord = Cord()
    cord.step(_begun(kind, steps)[0])
    first = {code: place for place, code in reversed(list(enumerate(cord.seen)))}
    last = {code: place for place, code in enumerate(cord.seen)}
    return sorted({*first.values(), *last.values()})


def _begun(kind: str, steps: int) -> tuple[Engine, list[int]]:
    engine = MAKERS[kind]()
    handles = [engine.add(request) for request in asked(kind != "device")]
    for _ in range(steps):
        engine.step()
    return engine, handles


def check(kind: str, steps: int, place: int, goes_on: bool) -> None:
    """Go on where it was interrupted; or give up, as a call does, and ask anew: both say what was to be said."""
    engine, handles = _begun(kind, steps)
    Cord(place).step(engine)
    if goes_on:
        assert tokens_by_request(engine) == wanted(kind), f"going on after call {place} of step {steps + 1}"
    else:
        for handle in handles:
            engine.abort(handle)
        engine.take_results()
    assert finish(engine, kind) == wanted(kind), f"asked anew after call {place} of step {steps + 1}"


# Calls at which keys, texts and what the policy knows are apart.
APART = {
    "model": ("commit", "DraftModel.rewind"),
    "lookup": ("commit", "KeyValueCache.rewind", "Drafting.observe"),
    "device": ("Runner.collect", "commit", "Runner.sync_lengths"),
}


@pytest.mark.quick("lookup")
@pytest.mark.parametrize("kind", MAKERS)
def test_an_interrupted_step_changes_no_text(kind: str) -> None:
    """The worst of the points; all of them are below."""
    cord = Cord()
    cord.step(_begun(kind, 1)[0])
    last = {code.co_qualname: place for place, code in enumerate(cord.seen)}
    for number, name in enumerate(APART[kind]):
        check(kind, 1, last[name], goes_on=number % 2 == 0)


def test_lengths_that_an_interrupt_kept_from_the_device_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    want, engine = wanted("device"), _begun("device", 0)[0]
    send, tables, interrupted = row_table.copy_into, list[RowTable](), list[Any]()
    set_lengths = RowTable.set_draft_lengths

    def heard(table: RowTable, lengths: Any) -> None:
        tables.append(table)
        set_lengths(table, lengths)

    def interrupt_once(place: Any, numbers: Any) -> None:
        if any(place is table.asked for table in tables) and not interrupted:
            interrupted.append(place)
            raise Pulled
        send(place, numbers)

    monkeypatch.setattr(RowTable, "set_draft_lengths", heard)
    monkeypatch.setattr(row_table, "copy_into", interrupt_once)
    with pytest.raises(Pulled):
        engine.step()
    assert interrupted and tokens_by_request(engine) == want


@pytest.mark.slow
@pytest.mark.parametrize("steps", (0, 1, 2, 3))
@pytest.mark.parametrize("kind", MAKERS)
def test_no_point_of_a_step_is_a_bad_one(kind: str, steps: int) -> None:
    """Every fourth, others in every step: functions are the same ones in all of them."""
    found = places(kind, steps)
    assert len(found) > 50
    for place in found[steps::4]:
        check(kind, steps, place, goes_on=place % 2 == 0)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("kind", ["model", "device"])
def test_a_round_that_the_policy_has_seen_stands(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done again it would meet the same random numbers with lengths chosen by someone who knows what they come to."""
    engine, handles = _begun(kind, 1)
    observe, seen = engine.drafting.observe, list[Any]()

    def pulled_after_the_first(outcome: Any) -> None:
        observe(outcome)
        seen.append(outcome)
        if len(seen) == 1:
            raise Pulled

    monkeypatch.setattr(engine.drafting, "observe", pulled_after_the_first)
    with pytest.raises(Pulled):
        engine.step()
    gained = {entry.row: len(entry.tokens) for entry in engine.step()}
    assert len(seen) == 1, "the step after it told what was gained, and did nothing again"
    assert sorted(gained) == sorted(handles) and all(gained.values())
    results = finished(engine)
    assert {result.request.request_id: result.tokens for result in results} == wanted(kind)
    rounds = {result.request.request_id: result.stats.rounds for result in results}
    told = {i: 1 + sum(i in outcome.request_ids for outcome in seen) for i in rounds}  # one before this began
    assert rounds == told


def test_nothing_is_left_of_a_call_that_was_interrupted_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, handles = _begun("model", 1)
    monkeypatch.setattr(engine._launching, "send_off_behind", lambda done: (_ for _ in ()).throw(Pulled))
    with pytest.raises(Pulled):
        engine.step()
    monkeypatch.undo()
    assert not engine.is_idle
    for handle in handles:
        engine.abort(handle)
    assert engine.is_idle, "what was gained is in the results"
    results = engine.take_results()
    assert len(results) == len(handles)
    assert all(result.stats.num_emitted_tokens == len(result.tokens) > 0 for result in results)


class Mute(Spell):
    """Fails at the n-th word."""

    def __init__(self, left: int) -> None:
        self.left = left

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        self.left -= 1
        if self.left == 0:
            raise ValueError("no words")
        return super().decode(tokens)


def test_a_tokenizer_that_raises_leaves_no_wrong_keys_behind() -> None:
    """The row is given up with its draft's keys still in the cache; the next request with that beginning reuses it."""
    engine = engine_with(DraftModel(draft_of(tiny_model("llama"))), 3, keep_rows=2, tokenizer=Mute(5))
    handles = [engine.add(request) for request in asked(stops=True)]
    with pytest.raises(ValueError, match="no words"):
        tokens_by_request(engine)
    for handle in handles:
        engine.abort(handle)
    longer = [
        Request(prompt=(*request.prompt, *result.tokens, 7), max_new_tokens=NEW, request_id=request.request_id)
        for result in engine.take_results() for request in (result.request,)
    ]  # fmt: skip
    assert len(longer) == len(handles)
    for request in longer:
        engine.add(request)
    want = {r.request_id: tuple(plain_greedy(tiny_model("llama"), list(r.prompt), NEW)) for r in longer}
    assert tokens_by_request(engine) == want


def test_a_step_that_fails_is_not_counted() -> None:
    """The second row's words fail when the first row has been given its token: it is given and counted once."""
    engine = engine_with(None, tokenizer=Mute(4))
    for request in asked(stops=True)[:2]:
        engine.add(request)
    engine.step()
    with pytest.raises(ValueError, match="no words"):
        engine.step()
    while not engine.is_idle:
        assert [len(made.tokens) for made in engine.step()] == [1, 1]
    results = engine.take_results()
    assert len(results) == 2
    for result in results:
        assert result.stats.rounds == result.stats.num_emitted_tokens == len(result.tokens) == NEW


def test_keys_that_cannot_be_given_back_cost_nobody_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round was over: its tokens have been given, and each row ends once."""
    engine, handles = _begun("lookup", 0)
    release, calls = engine.target.release, list[int]()

    def fail_once(number: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        release(number)

    monkeypatch.setattr(engine.target, "release", fail_once)
    engine.prefixes.limit = 0
    gained: dict[int, tuple[int, ...]] = dict.fromkeys(handles, ())
    ended = dict[int, tuple[int, ...]]()
    with pytest.warns(ForerunWarning, match=r"RaggedCache failed \(RuntimeError: no memory\)"):
        while not engine.is_idle:
            for entry in engine.step():
                gained[entry.row] += entry.tokens
            for handle, result in engine.take_results_by_handle().items():
                assert handle not in ended
                ended[handle] = result.tokens
    assert calls and ended == gained
    assert "in fail_once" in (engine.first_fault or "")
    assert [ended[handle] for handle in handles] == [wanted("lookup")[i] for i in range(3)]
