"""Memory that runs out in the middle: told once, fewer rows run, and every row says what it would have said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from engine.device_engines import CUT, GREEDY, SAMPLED, engine, requests, texts
from engine.device_engines import engine as device_engine
from forerun import AsyncEngine, SpeculativeDecoder
from forerun.cache import ragged
from forerun.cache.base import CacheFull
from forerun.cache.ragged import RaggedCache
from forerun.drafters import DraftModel
from forerun.engine import Request, engine_thread
from forerun.engine.device import runner as runner_module
from forerun.engine.device.recorder import Recorder, Scratch
from forerun.engine.memory import CALM, RowLimit, is_out_of_memory
from forerun.engine.roster import Roster
from forerun.errors import ForerunWarning, OutOfMemory
from forerun.models.scorer import Scorer
from support.batches import padded
from support.finish import finished
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model
from support.warned import forerun_warnings

PROMPTS = ragged_prompts(3, 97, seed=5)
ERRORS = (MemoryError("none left"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
SETTINGS: Any = {"max_new_tokens": 20, "temperature": 1.0, "seed": 1}
LARGE = 96  # a token that only the prompt of a request has that never finds memory


class Short:
    """Passes of a scorer of which some run out of memory once they have written their keys."""

    def __init__(self, scorer: Scorer, fails: Callable[[int, Any], bool], error: Exception = ERRORS[0]) -> None:
        self.run, self.fails, self.error = scorer._by, fails, error
        self.calls = self.failed = 0
        scorer._by = self  # type: ignore[method-assign, assignment]

    def __call__(self, body: Any, call: Any) -> Any:
        self.calls += 1
        out = self.run(body, call)
        if self.fails(self.calls - 1, call):
            self.failed += 1
            raise self.error
        return out


def at(*numbers: int) -> Callable[[int, Any], bool]:
    return lambda number, call: number in numbers


def decoder(drafter: str = "none") -> SpeculativeDecoder:
    model = tiny_model("llama")
    return SpeculativeDecoder(model, DraftModel(draft_of(model)) if drafter == "model" else None, policy=3)


def by_generate(made: SpeculativeDecoder) -> list[list[int]]:
    return made.generate(*padded(PROMPTS), **SETTINGS).new_tokens


def by_stream(made: SpeculativeDecoder) -> list[list[int]]:
    gained: list[list[int]] = [[] for _ in PROMPTS]
    with made.stream(*padded(PROMPTS), **SETTINGS) as stream:
        for progress in stream:
            for entry in progress:
                gained[entry.row].extend(entry.tokens)
    assert gained == stream.result.new_tokens, "what was told round by round is what there is"
    return gained


def by_engine(made: SpeculativeDecoder) -> list[list[int]]:
    asked = made.requests(PROMPTS, **SETTINGS)
    results = {result.request.request_id: result for result in finished(made.engine, asked)}
    return [list(results[request.request_id].tokens) for request in asked]


def by_async_engine(made: SpeculativeDecoder) -> list[list[int]]:
    with AsyncEngine(made.engine) as serving:
        streams = [serving.submit(request) for request in made.requests(PROMPTS, **SETTINGS)]
        gained = [[token for progress in stream for token in progress.tokens] for stream in streams]
        assert gained == [list(stream.result(60).tokens) for stream in streams]
    return gained


FAILING = {"prompts": (0,), "round": (4,), "repeated": (3, 4), "several": (2, 7, 12)}
WAYS = {"generate": by_generate, "stream": by_stream, "engine": by_engine, "async": by_async_engine}


@pytest.mark.quick("prompts-none-generate", "repeated-model-async", "several-model-stream", "round-none-engine")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("drafter", ("none", "model"))
@pytest.mark.parametrize("numbers", FAILING.values(), ids=FAILING)
def test_passes_without_memory_cost_no_token(way: str, drafter: str, numbers: Collection[int]) -> None:
    want, made = by_generate(decoder(drafter)), decoder(drafter)
    short = Short(made.engine.target, at(*numbers), ERRORS[len(numbers) % 2])
    with pytest.warns(ForerunWarning, match="LlamaForCausalLM failed.*newest row waits") as caught:
        assert WAYS[way](made) == want
    assert len(forerun_warnings(caught)) == 1 and short.failed == len(numbers)
    assert type(short.error).__name__ in (made.engine.first_fault or "")
    assert made.engine.is_idle and made.engine.row_limit.most is None
    assert WAYS[way](made) == want


def test_control_a_row_that_forgets_its_round_says_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Roster.preempt_newest

    def forgetting(roster: Roster) -> None:
        preempt(roster)
        roster.waiting[0].round = 0

    monkeypatch.setattr(Roster, "preempt_newest", forgetting)
    want, made = by_generate(decoder()), decoder()
    Short(made.engine.target, at(4))
    with pytest.warns(ForerunWarning, match="newest row waits"):
        assert by_generate(made) != want


def test_the_newest_row_waits_and_comes_again() -> None:
    made = engine(False, drafter="none")
    short = Short(made.target, lambda number, call: len(call.rows.slots) > 2)
    asked = requests(4, new=90)
    want = texts(engine(False, drafter="none"), asked)
    for request in asked:
        made.add(request)
    with pytest.warns(ForerunWarning, match="newest row waits"):
        made.step()
    assert len(made.roster.running) == 2 and made.row_limit.most == 2
    assert [row.request.request_id for row in made.roster.waiting] == [2, 3], "in the order in which they came"
    failed = short.failed
    assert {result.request.request_id: result.tokens for result in finished(made)} == want
    assert failed < short.failed < failed + 4, "a third row was tried again, but not in every step"


def test_one_more_row_is_tried_after_a_while() -> None:
    limit = RowLimit()
    assert not limit.note_step() and limit.most is None
    limit.lower(4)
    limit.lower(3)
    assert [limit.note_step() for _ in range(CALM)] == [False] * (CALM - 1) + [True] and limit.most == 4
    limit.lower(3)  # at the first try
    assert [limit.note_step() for _ in range(2 * CALM)].index(True) == 2 * CALM - 1 and limit.most == 4
    limit.lower(0)
    assert limit.most == 1, "one runs always"


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_row_that_is_alone_and_fails_twice_is_told_what_helps(error: Exception) -> None:
    made = decoder()
    want = made.generate([PROMPTS[0]], **SETTINGS).new_tokens
    short = Short(made.engine.target, at(3), error)
    with pytest.warns(ForerunWarning, match="tried once more"):
        assert made.generate([PROMPTS[0]], **SETTINGS).new_tokens == want
    short.fails = lambda number, call: True
    with pytest.raises(OutOfMemory, match=f"{type(error).__name__}.*shorten its prompt.*cache_tokens") as caught:
        made.generate([PROMPTS[0]], **SETTINGS)
    assert caught.value.__cause__ is error and isinstance(caught.value, MemoryError)
    short.fails = at()
    assert made.generate([PROMPTS[0]], **SETTINGS).new_tokens == want


def test_strict_engines_raise_the_first() -> None:
    made = SpeculativeDecoder(tiny_model("llama"), None, strict=True)
    Short(made.engine.target, at(2), ERRORS[1])
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        by_generate(made)


@pytest.mark.filterwarnings("ignore::forerun.errors.ForerunWarning")
@pytest.mark.quick("0")
@pytest.mark.parametrize("place", range(3))
def test_a_request_that_never_finds_memory_ends_alone(place: int) -> None:
    """Whether it came first, between the others or last: they are sent back until it is alone."""
    made = decoder()
    asked = [Request(prompt=tuple(p), max_new_tokens=9, request_id=i) for i, p in enumerate(PROMPTS[:2])]
    assert not any(LARGE in request.prompt for request in asked)
    Short(made.engine.target, lambda number, call: LARGE in call.new.tolist())
    with AsyncEngine(made.engine) as serving:
        streams = [serving.submit(request) for request in asked]
        large = Request(prompt=(1, LARGE, 2), max_new_tokens=9, request_id=7)
        made_first = serving.between_steps(lambda: None)
        made_first.result(60)
        streams.insert(place, serving.submit(large))
        with pytest.raises(OutOfMemory, match="alone"):
            streams.pop(place).result(60)
        want = [tuple(plain_greedy(tiny_model("llama"), list(request.prompt), 9)) for request in asked]
        assert [stream.result(60).tokens for stream in streams] == want
        assert serving.submit(asked[0]).result(60).tokens == want[0]


def test_a_draft_without_memory_is_left_out_of_its_round() -> None:
    made = decoder("model")
    drafter: Any = made.engine.drafter
    short = Short(drafter.scorer, lambda number, call: number in (1, 5, 6), ERRORS[1])
    with pytest.warns(
        ForerunWarning, match=r"DraftModel failed \(OutOfMemoryError.*such rounds decode plainly"
    ) as told:
        out = made.generate(*padded(PROMPTS), max_new_tokens=24)
    assert len(forerun_warnings(told)) == 1 and short.failed == 3 and made.engine.row_limit.most is None
    assert out.new_tokens == [plain_greedy(made.engine.target.model, prompt, 24) for prompt in PROMPTS]
    assert out.stats.num_accepted_tokens > 0, "later rounds have drafts again"


@pytest.mark.quick("3-none")
@pytest.mark.parametrize("drafter", ("none", "model"))
@pytest.mark.parametrize("number", (0, 1, 3))
def test_keys_that_find_no_memory_as_they_grow_are_made_anew(
    drafter: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle: some layers are longer by then, others are not."""
    made = decoder(drafter)
    want = [plain_greedy(made.engine.target.model, prompt, 24) for prompt in PROMPTS]
    monkeypatch.setattr(ragged, "GRAIN", 4)
    resized, seen, failed = ragged._resized, list[int](), list[int]()

    def failing(pool: torch.Tensor, num_slots: int, capacity: int) -> torch.Tensor:
        if capacity > 20 and not failed:
            seen.append(capacity)
            if len(seen) > number:
                failed.append(capacity)
                raise ERRORS[1]
        return resized(pool, num_slots, capacity)

    monkeypatch.setattr(ragged, "_resized", failing)
    with pytest.warns(ForerunWarning, match="failed"):
        assert made.generate(*padded(PROMPTS), max_new_tokens=24).new_tokens == want
    assert failed


def test_a_cache_whose_growth_fails_has_no_key_left_and_goes_on() -> None:
    cache = RaggedCache()
    for row in (0, 1):
        cache.admit(row)
    places = cache.extend([0, 1], [3, 2])
    keys = torch.randn(5, 2, 4)
    for layer in (0, 1):
        cache.write(layer, cache.addresses(places), keys, keys)
    cache.layers[1].values = torch.empty(0)  # which has no shape to be resized to
    with pytest.raises(IndexError):
        cache.extend([0, 1], [300, 1])
    assert [cache.length(row) for row in (0, 1)] == [0, 0] and not cache.layers
    places = cache.extend([0, 1], [3, 2])
    assert torch.equal(cache.write(0, cache.addresses(places), keys, keys).keys[0, :3], keys[:3])


class ShortRecorder(Recorder):
    """A device without memory for some of its recordings."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(torch.device("cpu"))
        self.numbers, self.asked = numbers, 0

    def record(self, work: Any, state: Any, whole: bool = False) -> Any:
        self.asked += 1
        if self.asked - 1 in self.numbers:
            raise ERRORS[1]
        self.num_recordings += 1
        return work


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ("none", "model"))
@pytest.mark.parametrize("numbers", [(0,), (2,), (1, 2)])
def test_recording_is_tried_again(numbers: Any, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PAUSE", 2)
    asked = requests(3, [SAMPLED, CUT, GREEDY], new=30)
    want = texts(engine(False, drafter=drafter), asked)
    made = device_engine(True, drafter=drafter)
    assert made.runner is not None
    recorder = made.runner.recorder = made.runner.recordings.recorder = ShortRecorder(*numbers)
    with pytest.warns(ForerunWarning, match="could not be recorded.*recording is tried again later") as caught:
        assert texts(made, asked) == want
    assert len(forerun_warnings(caught)) == 1
    assert not made.runner.is_disabled and recorder.asked > max(numbers) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts(made, asked) == want


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ("none", "model"))
@pytest.mark.parametrize("name", ("collect", "sync_lengths"))
def test_a_round_on_the_device_that_ends_without_memory(
    name: str, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows begin again from their texts, half as many at once."""
    asked = requests(4, new=30)
    want = texts(engine(False, drafter=drafter), asked)
    made, calls = device_engine(True, drafter=drafter), list[int]()
    verb = getattr(made.runner, name)

    def failing(*given: Any) -> Any:
        calls.append(len(made.roster.running))
        if len(calls) == 3:
            raise ERRORS[1]
        return verb(*given)

    monkeypatch.setattr(made.runner, name, failing)
    with pytest.warns(ForerunWarning, match="newest row waits"):
        assert texts(made, asked) == want
    assert calls[2:4] == [4, 2]


def test_memory_for_logits_that_is_not_there_makes_older_recordings_useless() -> None:
    class Lacking:
        dtype, shape = torch.float32, (1, 4)

        def new_empty(self, *_: int) -> torch.Tensor:
            raise ERRORS[1]

    scratch = Scratch()
    scratch.reserve(torch.zeros(1, 4), 2)
    version = scratch.version
    with pytest.raises(torch.OutOfMemoryError):
        scratch.reserve(Lacking(), 8)  # type: ignore[arg-type]
    assert scratch.version > version and not len(scratch.rows)


def test_which_errors_say_that_memory_ran_out() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**46, dtype=torch.float64)
    short = (*ERRORS, of_torch.value, RuntimeError("CUDA error: out of memory\nCompile with"))
    assert all(map(is_out_of_memory, short))
    others = (RuntimeError("out of memory"), CacheFull("no room"), ValueError("CUDA error: out of memory"))
    assert not any(map(is_out_of_memory, others)), "a full cache has a way of its own"


def test_a_failed_step_of_a_thread_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(engine_thread.log, "warning", lambda text, *given, exc_info: logged.append(text % given))
    made = decoder()
    want, step, steps = by_engine(made), made.engine._step, iter(range(10**6))

    def failing() -> Any:
        if next(steps) == 2:
            raise RuntimeError("who knows")
        return step()

    monkeypatch.setattr(made.engine, "_step", failing)
    assert by_async_engine(made) == want
    assert logged == ["a step failed (RuntimeError: who knows); it is tried again"]
