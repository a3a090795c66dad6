"""An engine in a thread: everybody gets what they would have got alone, whoever fails, leaves or comes late."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import forerun
from forerun import AsyncEngine, DraftModel, EarlyExit, Engine, PromptLookup, SpeculativeDecoder
from forerun.config import SamplingParams
from forerun.engine import FinishReason, Progress, Request, engine_thread
from forerun.engine.mailbox import Mailbox, Receiver, Waiter, wake
from forerun.errors import EngineClosed, InvalidArgument
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy.heuristics import Constant
from forerun.types import Origin, Source
from support.finish import finished
from support.seq2seq import rows_of, source_of
from support.tiny import draft_of, ragged_prompts, tiny_model

PROMPTS = ragged_prompts(6, 97, seed=3, longest=12)


def make_engine() -> Engine:
    return Engine(Scorer(tiny_model("llama")), PromptLookup(), Constant(2))


def request(number: int, tokens: int = 10) -> Request:
    prompt = tuple(PROMPTS[number % len(PROMPTS)])
    return Request(
        prompt=prompt, max_new_tokens=tokens, request_id=number, seed=1, params=SamplingParams(temperature=0.7)
    )


@cache
def alone(number: int, tokens: int = 10) -> tuple[int, ...]:
    engine = make_engine()
    engine.add(request(number, tokens))
    return finished(engine)[0].tokens


@pytest.fixture
def serving() -> Iterator[AsyncEngine]:
    with AsyncEngine(make_engine()) as engine:
        yield engine


def test_tokens_arrive_in_a_thread(serving: AsyncEngine) -> None:
    stream = serving.submit(request(1))
    gained = [token for progress in stream for token in progress.tokens]
    assert tuple(gained) == alone(1) == stream.result().tokens
    assert stream.has_ended and list(stream) == []


def test_tokens_arrive_in_an_event_loop(serving: AsyncEngine) -> None:
    async def read(number: int) -> tuple[int, ...]:
        stream = serving.submit(request(number))
        gained = [token async for progress in stream for token in progress.tokens]
        assert tuple(gained) == (await stream.finished()).tokens
        return tuple(gained)

    async def all_at_once() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(read(number) for number in range(6)))

    assert asyncio.run(all_at_once()) == [alone(number) for number in range(6)]


def test_requests_from_many_threads(serving: AsyncEngine) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: serving.submit(request(number)).result(60).tokens, range(16)))
    assert found == [alone(number) for number in range(16)]
    assert serving.engine.is_idle and not serving.engine.target.cache.rows


def test_nobody_else_adds_or_steps(serving: AsyncEngine) -> None:
    for forbidden in (lambda: serving.engine.add(request(0)), serving.engine.step, lambda: AsyncEngine(serving.engine)):
        with pytest.raises(InvalidArgument, match=r"AsyncEngine"):
            forbidden()
    assert serving.submit(request(1)).result(60).tokens == alone(1)
    serving.close()
    assert serving.engine.add(request(1)) >= 0, "afterwards it is anybody's"


def test_a_decoder_whose_engine_it_runs_refuses_calls_and_changes_nothing() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), PromptLookup(), policy=2)
    tokenizer = decoder.engine.tokenizer = object()
    with AsyncEngine(decoder.engine) as serving:
        serving.submit(request(0)).result()
        kept = serving.engine.roster.results[-1] = object()  # type: ignore[assignment]  # one that is not delivered yet
        with pytest.raises(InvalidArgument, match="submit"):
            decoder.generate([[1, 2, 3]], max_new_tokens=2)
        assert serving.engine.tokenizer is tokenizer and serving.engine.roster.results.pop(-1) is kept


def test_rows_that_others_have_left_behind_are_refused() -> None:
    engine = make_engine()
    engine.add(request(0))
    with pytest.raises(InvalidArgument, match="without requests under way"):
        AsyncEngine(engine)


def test_it_sleeps_while_there_is_nothing_to_do(serving: AsyncEngine) -> None:
    serving.submit(request(0)).result(60)
    before = time.thread_time_ns(), time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before[1] < 0.1
    assert serving.submit(request(2)).result(60).tokens == alone(2), "it wakes for a late request"


class Broken(Receiver):
    """Fails when it is told of what has come so far, or of an end."""

    def __init__(self, at: str) -> None:
        self.at, self.told = at, threading.Event()

    def put(self, gained: Any = None, result: Any = None, error: Any = None) -> list[Waiter]:
        if (gained is not None) == (self.at == "gained"):
            self.told.set()
            raise RuntimeError("nobody there")
        return []


@pytest.mark.parametrize("at", ("gained", "ended"))
def test_a_receiver_that_fails_harms_itself_alone(
    serving: AsyncEngine, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, logged = Broken(at), list[str]()
    monkeypatch.setattr(engine_thread.log, "exception", lambda text, *names: logged.append(text % names))
    serving.send(request(2), broken)
    good = serving.submit(request(1))
    assert broken.told.wait(60) and good.result(60).tokens == alone(1)
    assert serving.is_alive and logged == ["Broken failed; its request ends"]
    assert not serving._thread._receivers and not serving._thread._handles


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_that_fails_keeps_nobody_from_hearing_of_the_end() -> None:
    engine = AsyncEngine(make_engine())
    engine.send(Request(prompt=(1, 2), max_new_tokens=100_000), Broken("ended"))
    waiting = engine.submit(Request(prompt=(1, 2), max_new_tokens=100_000))
    next(waiting)

    def step() -> list[Progress]:
        raise SystemExit

    engine.engine.step = step  # type: ignore[method-assign]
    with pytest.raises(EngineClosed):
        waiting.result(60)
    engine.close()  # its thread's last words belong to this test


def test_a_call_between_steps_may_ask_to_leave(serving: AsyncEngine) -> None:
    """It is told to whoever waits for the call; the thread is everybody's."""
    with pytest.raises(SystemExit):
        serving.between_steps(lambda: sys.exit(3)).result(60)
    assert serving.submit(request(1)).result(60).tokens == alone(1)


@pytest.mark.parametrize("thing", (None, "text", (1, 2)), ids=str)
def test_what_is_no_request_is_refused_at_once(serving: AsyncEngine, thing: Any) -> None:
    """None among the orders means that a request is to end: whoever waited for an answer waited for ever."""
    with pytest.raises(InvalidArgument, match=r"request=.*must be a forerun\.Request"):
        serving.submit(thing)
    assert serving.submit(request(1)).result(60).tokens == alone(1)


def test_a_request_that_is_refused_says_so_and_harms_nobody(serving: AsyncEngine) -> None:
    good = serving.submit(request(1))
    bad = serving.submit(Request(prompt=(1, 5000), max_new_tokens=3))
    with pytest.raises(InvalidArgument, match="outside the target's vocabulary"):
        bad.result(60)
    with pytest.raises(InvalidArgument, match="outside the target's vocabulary"):
        next(bad)
    assert good.result(60).tokens == alone(1)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("how", ("close", "with", "dropped"))
def test_whoever_leaves_ends_the_request(serving: AsyncEngine, how: str) -> None:
    stream = serving.submit(request(0, tokens=200))
    next(stream)
    mailbox = stream._mailbox
    if how == "with":
        with stream:
            pass
    elif how == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    assert mailbox.wait(lambda: mailbox.has_ended, 60)
    assert mailbox.result is not None and mailbox.result.finish_reason is FinishReason.ABORT
    assert len(mailbox.result.tokens) < 200
    assert serving.submit(request(3)).result(60).tokens == alone(3)


def test_a_task_that_is_cancelled_leaves_the_engine_whole(serving: AsyncEngine) -> None:
    async def cancelled() -> None:
        async def read() -> None:
            async with serving.submit(request(0, tokens=300)) as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert serving.submit(request(4)).result(60).tokens == alone(4)


def test_one_failing_step_is_tried_again(serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _failing_at(serving.engine, monkeypatch, {1})
    assert serving.submit(request(1)).result(60).tokens == alone(1)
    assert next(steps) > 1


def test_an_error_that_stays_reaches_those_under_way_and_nobody_later(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_at(serving.engine, monkeypatch, {1, 2})
    stream = serving.submit(request(1, tokens=50))
    with pytest.raises(RuntimeError, match="no memory"):
        stream.result(60)
    assert serving.submit(request(2)).result(60).tokens == alone(2)


def _failing_at(engine: Engine, monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> Iterator[int]:
    counter = iter(range(10**6))
    step = engine._step

    def failing() -> list[forerun.Progress]:
        if next(counter) in numbers:
            engine.roster.start_over()
            raise RuntimeError("no memory")
        return step()

    monkeypatch.setattr(engine, "_step", failing)
    return counter


def test_closing_decodes_what_is_under_way_or_ends_it() -> None:
    drained, ended = AsyncEngine(make_engine()), AsyncEngine(make_engine())
    late = ended.submit(request(1, tokens=400))
    ended.close(drain=False)
    assert late.result(60).finish_reason is FinishReason.ABORT
    whole = drained.submit(request(1, tokens=30))
    drained.close()
    assert whole.result(60).tokens == alone(1, 30)
    with pytest.raises(EngineClosed, match="make a new one"):
        drained.submit(request(1))


def test_one_that_is_let_go_decodes_what_it_has_and_ends_its_thread() -> None:
    engine = make_engine()
    serving = AsyncEngine(engine)
    thread, stream = engine.run_by, serving.submit(request(1, tokens=30))
    assert thread is not None
    del serving
    gc.collect()
    assert stream.result(60).tokens == alone(1, 30)
    thread.join(60)
    assert not thread.is_alive() and engine.run_by is None
    with AsyncEngine(engine) as again:
        assert again.submit(request(2)).result(60).tokens == alone(2), "the engine is free for another"


def test_an_order_to_end_at_once_stays_one() -> None:
    serving = AsyncEngine(make_engine())
    late = serving.submit(request(1, tokens=100_000))
    next(late)
    with serving._thread._arrived:  # before the thread looks
        serving._thread.end(drain=False)
        serving._thread.end(drain=True)
    assert late.result(60).finish_reason is FinishReason.ABORT


def test_a_context_that_ends_with_an_error_waits_for_nobody() -> None:
    with pytest.raises(KeyError), AsyncEngine(make_engine()) as engine:
        stream = engine.submit(request(0, tokens=400))
        next(stream)
        raise KeyError
    assert stream.result(60).finish_reason is FinishReason.ABORT


def test_it_wants_an_engine() -> None:
    with pytest.raises(InvalidArgument, match=r"give decoder\.engine"):
        AsyncEngine(SpeculativeDecoder(tiny_model("llama"), None))  # type: ignore[arg-type]


def test_a_decoder_makes_requests() -> None:
    decoder = SpeculativeDecoder(tiny_model("llama"), PromptLookup(), policy=2)
    keywords = {"max_new_tokens": 7, "temperature": 0.7, "seed": 4}
    with AsyncEngine(decoder.engine) as engine:
        streams = [engine.submit(each) for each in decoder.requests([PROMPTS[1], PROMPTS[2]], **keywords)]
        tokens = [stream.result(60).tokens for stream in streams]
    assert tokens == [row.tokens for row in decoder.generate([PROMPTS[1], PROMPTS[2]], **keywords).rows]
    with pytest.raises(InvalidArgument, match="for a whole call"):
        decoder.requests([PROMPTS[1]], max_new_tokens=4, max_time=1.0)


def test_an_engine_without_a_thread_of_its_own_takes_requests_from_others() -> None:
    """One thread steps, four add and abort; nobody waits for long, and every text is its own."""
    engine, ends = make_engine(), threading.Event()
    waits: list[float] = []

    def step() -> None:
        while not ends.is_set() or not engine.is_idle:
            engine.step()

    def add(number: int) -> int:
        started = time.perf_counter()
        handle = engine.add(request(number))
        if number % 4 == 3:
            engine.abort(handle)
        waits.append(time.perf_counter() - started)
        return handle

    stepping = threading.Thread(target=step)
    stepping.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))
    ends.set()
    stepping.join(120)
    found = {result.request.request_id: result for result in engine.take_results()}
    assert sorted(found) == list(range(12)) and max(waits) < 30
    assert all(found[number].tokens == alone(number) for number in range(12) if number % 4 != 3)


def test_an_abort_that_fails_ends_its_request_and_harms_nobody(
    serving: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = serving.submit(request(0, tokens=2000))
    next(first)
    release, calls = serving.engine.target.release, list[int]()

    def fail_once(number: int) -> None:
        calls.append(number)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        release(number)

    monkeypatch.setattr(serving.engine.target, "release", fail_once)
    with serving._thread._arrived:  # both orders are carried out in one go
        first.close()
        second = serving.submit(request(1))
    assert first.result(60).finish_reason is FinishReason.ABORT
    assert second.result(60).tokens == alone(1) and calls
    assert serving.submit(request(2)).result(60).tokens == alone(2)


def test_readers_of_one_stream_share_it(serving: AsyncEngine) -> None:
    stream, gained, ends = serving.submit(request(0, tokens=60)), list[int](), list[bool]()

    def read() -> None:
        for progress in stream:
            gained.extend(progress.tokens)
        ends.append(stream.has_ended)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(read) for _ in range(4)]:
            future.result(60)
    assert sorted(gained) == sorted(stream.result(60).tokens)
    assert ends == [True] * 4, "nobody takes a pause for the end"


def test_a_call_between_steps_runs_in_the_engines_thread(serving: AsyncEngine) -> None:
    stream = serving.submit(request(0, tokens=30))
    assert serving.between_steps(lambda: threading.current_thread().name).result(60) == "forerun-engine"
    with pytest.raises(ZeroDivisionError):
        serving.between_steps(lambda: 1 // 0).result(60)
    assert stream.result(60).tokens == alone(0, 30)
    serving.close()
    with pytest.raises(EngineClosed, match="make a new one"):
        serving.between_steps(lambda: None)


def test_progress_carries_log_probabilities_where_they_are_asked_for(serving: AsyncEngine) -> None:
    stream = serving.submit(replace(request(1), logprobs=2))
    gained = [entry for progress in stream for entry in progress.logprobs]
    assert tuple(gained) == stream.result().logprobs and len(gained) == 10
    assert all(len(entry.top) == 2 for entry in gained)
    assert not any(progress.logprobs for progress in serving.submit(request(1)))


def test_a_row_bounds_its_own_drafts(serving: AsyncEngine) -> None:
    """Greedy, so that lengths change no token; the neighbours draft as before."""
    bounds = (None, 0, 1)
    streams = [
        serving.submit(replace(request(1, 20), params=SamplingParams(), request_id=i, max_draft_tokens=bound))
        for i, bound in enumerate(bounds)
    ]
    free, plain, short = (stream.result(60) for stream in streams)
    assert free.tokens == plain.tokens == short.tokens
    assert plain.stats.num_draft_tokens == 0 and plain.stats.rounds == 20
    assert [len(row.stats.num_draft_tokens_per_pos) for row in (free, short)] == [2, 1]
    with pytest.raises(InvalidArgument, match="max_draft_tokens"):
        replace(request(1), max_draft_tokens=-1)


def test_readers_in_an_event_loop_are_not_woken_for_every_round() -> None:
    """The first gain wakes at once, those soon after it wait for each other, and the end waits for nobody."""
    gained = Progress(0, 0, (1,), (Origin.BONUS,), None)

    async def read() -> None:
        mailbox, taken = Mailbox(), list[int]()

        async def reader() -> None:
            while True:
                await mailbox.wait_in_loop(lambda: bool(mailbox.gained) or mailbox.has_ended)
                taken.append(len(mailbox.take_all()))
                if mailbox.has_ended:
                    return

        async def after(waiters: list[Waiter]) -> list[int]:
            wake(waiters)
            await asyncio.sleep(0.01)
            return taken

        reading = asyncio.create_task(reader())
        await asyncio.sleep(0)
        assert mailbox.due(5.0, 1.0) == [], "nothing has come"
        assert mailbox.put(gained) == [] and await after(mailbox.due(5.0, 1.0)) == [1]
        for now in (5.5, 5.9):
            mailbox.put(gained)
            assert mailbox.due(now, 1.0) == []
        assert await after(mailbox.due(6.0, 1.0)) == [1, 2]
        mailbox.put(gained)
        assert await after(mailbox.put(error=EngineClosed("over"))) == [1, 2, 1]
        await reading

    asyncio.run(read())


def read_by(source: Source) -> Request:
    return Request(prompt=(2, 30), max_new_tokens=6, source=source)


@cache
def read_alone(family: str) -> list[tuple[int, ...]]:
    """What the family's first three sources become, each in an engine of its own."""
    found = []
    for row in rows_of(family)[:3]:
        engine = Engine(Seq2SeqScorer(tiny_model(family)), None, Constant(0))
        engine.add(read_by(source_of(row)))
        found.append(finished(engine)[0].tokens)
    return found


GUESSERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: None,
    "own": lambda model: DraftModel(draft_of(model)),
    "shared": lambda model: DraftModel(draft_of(model), shares_encoder=True),
    "exit": lambda model: EarlyExit(1),
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ("whisper", "bart"))
@pytest.mark.parametrize("drafter", GUESSERS)
def test_a_source_that_cannot_be_read_costs_nobody_else_anything(drafter: str, family: str) -> None:
    """One is refused at once, since Whisper's windows have one shape; the other fails in the encoder's pass."""
    model, odd = tiny_model(family), torch.zeros(8, 30) if family == "whisper" else torch.full((2000,), 5)
    good = [read_by(source_of(row)) for row in rows_of(family)[:3]]
    target = Seq2SeqScorer(model)
    target.encoder.most_tokens = None  # as if the table of positions were not known
    with AsyncEngine(Engine(target, GUESSERS[drafter](model), Constant(2), strict=True)) as serving:
        early = [serving.submit(request) for request in good[:2]]
        bad = serving.submit(read_by(source_of(odd)))
        assert [stream.result(60).tokens for stream in (*early, serving.submit(good[2]))] == read_alone(family)
        if family == "whisper":
            with pytest.raises(InvalidArgument, match=r"reads \(8, 48\)"):
                bad.result(60)
        else:
            ended = bad.result(60)
            assert ended.finish_reason is FinishReason.ERROR and ended.was_refused and not ended.tokens
            assert "cannot read input_ids" in str(ended.error)
    assert serving.engine.is_idle and not serving.engine.target.cache.rows


def test_a_call_whose_source_cannot_be_read_is_refused() -> None:
    decoder = SpeculativeDecoder(tiny_model("bart"), None)
    with pytest.raises(InvalidArgument, match=r"2000 tokens, this model's encoder .* positions: shorten it"):
        decoder.generate(torch.full((1, 2000), 5), max_new_tokens=3)
    scorer = decoder.engine.target
    assert isinstance(scorer, Seq2SeqScorer)
    scorer.encoder.most_tokens = None  # as if the table of positions were not known
    with pytest.raises(InvalidArgument, match="cannot read input_ids"):
        decoder.generate(torch.full((1, 2000), 5), max_new_tokens=3)
