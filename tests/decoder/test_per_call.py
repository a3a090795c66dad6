"""`drafter=` and `policy=` for one call, and names that the command line knows, in Python."""

from __future__ import annotations

from threading import Lock
from typing import Any

import pytest

import forerun
from forerun.drafters import Chain, EarlyExit, PromptLookup, RandomDraft
from forerun.errors import InvalidArgument
from forerun.policy import as_policy
from support.tiny import plain_greedy, tiny_model

NEW = 12
PROMPT = [12, 61, 7, 33, 12, 61, 7, 33, 12, 61]


def decoder_of(drafter: Any = "lookup", **settings: Any) -> forerun.SpeculativeDecoder:
    return forerun.SpeculativeDecoder(tiny_model("llama"), drafter, policy=3, kernels="off", **settings)


def wanted() -> list[list[int]]:
    return [plain_greedy(tiny_model("llama"), PROMPT, NEW)]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("off", [None, "off", "none"])
def test_drafting_can_be_off_for_one_call(off: str | None) -> None:
    decoder = decoder_of("random")
    for drafter, drafts in ((off, False), ("decoder's own", True)):
        more: Any = {} if drafts else {"drafter": drafter}
        result = decoder.generate([PROMPT], max_new_tokens=NEW, **more)
        assert result.new_tokens == wanted()
        assert bool(result.stats.num_draft_tokens) is drafts


def test_another_drafter_for_one_call() -> None:
    decoder = decoder_of("off")
    result = decoder.generate([PROMPT], max_new_tokens=NEW, drafter="random")
    assert result.new_tokens == wanted()
    assert result.stats.num_draft_tokens
    assert not decoder.generate([PROMPT], max_new_tokens=NEW).stats.num_draft_tokens


def test_a_call_with_its_own_drafter_leaves_an_open_stream_alone() -> None:
    decoder = decoder_of("random")
    with decoder.stream([PROMPT], max_new_tokens=NEW) as stream:
        next(stream)
        assert decoder.generate([PROMPT], max_new_tokens=NEW, drafter="off").new_tokens == wanted()
        for _ in stream:
            pass
    assert stream.result.new_tokens == wanted()


def test_rows_kept_for_the_next_turn_survive_a_call_with_another_drafter() -> None:
    decoder = decoder_of("lookup", keep_rows=1)
    first = decoder.generate([PROMPT], max_new_tokens=NEW).new_tokens[0]
    decoder.generate([[5, 6, 7]], max_new_tokens=2, drafter="off")
    again = decoder.generate([[*PROMPT, *first]], max_new_tokens=4)
    assert again.new_tokens == [plain_greedy(tiny_model("llama"), [*PROMPT, *first], 4)]


def test_a_policy_for_one_call() -> None:
    decoder = decoder_of("random")
    lengths = {}
    for policy in (0, 1, "2", None):
        stats = decoder.generate([PROMPT], max_new_tokens=NEW, policy=policy).stats  # type: ignore[typeddict-item]
        lengths[policy] = len(stats.num_draft_tokens_per_pos)
    assert lengths == {0: 0, 1: 1, "2": 2, None: 3}
    assert decoder.engine.policy is decoder.policy


@pytest.mark.parametrize("name", ["auto", "hf", "bass", "4"])
def test_policies_by_name(name: str) -> None:
    result = decoder_of("random").generate([PROMPT], max_new_tokens=NEW, policy=name)
    assert result.new_tokens == wanted()
    assert type(forerun.SpeculativeDecoder(tiny_model("llama"), None, policy=name, kernels="off").policy) is type(
        as_policy(name)
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lookup", PromptLookup), ("random", RandomDraft), ("early:1", EarlyExit), ("lookup,random", Chain)],
)
def test_drafters_by_name(name: str, kind: type) -> None:
    decoder = decoder_of(name)
    assert type(decoder.drafter) is kind
    assert decoder.generate([PROMPT], max_new_tokens=NEW).new_tokens == wanted()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "lokup"}, "did you mean 'lookup'"),
        ({"drafter": "early:x"}, "say how many layers"),
        ({"drafter": "off,lookup"}, "stands alone"),
        ({"drafter": ""}, "it is empty"),
        ({"policy": "bas"}, "auto, hf, bass"),
        ({"policy": "9" * 5000}, "policy="),
        ({"policy": -1}, "draft length"),
    ],
)
def test_names_that_stand_for_nothing_are_refused_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(forerun.ForerunError, match=message):
        decoder_of().generate([PROMPT], max_new_tokens=NEW, **settings)


class Clock:
    """Jumps by what a test pretends was spent compiling."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_max_time_does_not_count_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    from forerun import stream
    from forerun.kernels.compiling import CompileTimer

    decoder, clock = decoder_of("off"), Clock()
    decoder.engine.clock = clock
    compiled = []

    @contextmanager
    def first_round_compiles() -> Any:
        timer = CompileTimer()
        yield timer
        if not compiled:
            clock.now, timer.seconds = clock.now + 60, 60.0
            compiled.append(60)

    monkeypatch.setattr(stream, "compile_timer", first_round_compiles)
    result = decoder.generate([PROMPT], max_new_tokens=NEW, max_time=30)
    assert compiled and result.new_tokens == wanted()
    compiled.clear()
    monkeypatch.setattr(decoder.engine, "postpone", lambda seconds: None)
    control = decoder.generate([PROMPT], max_new_tokens=NEW, max_time=30)
    assert control.finish_reasons == [forerun.FinishReason.TIME]


class Guarded(forerun.Constant):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__(2)
        self.guard = Lock()


def test_a_policy_that_cannot_be_copied_is_named() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), "off", policy=Guarded(), kernels="off")
    with pytest.raises(InvalidArgument, match=r"policy=.*cannot be copied.*__deepcopy__"):
        decoder.generate([PROMPT], max_new_tokens=NEW, drafter="random")
    assert decoder.generate([PROMPT], max_new_tokens=NEW).new_tokens == wanted()


@pytest.mark.parametrize("choice", [{"drafter": None}, {"drafter": "off"}, {"policy": 2}, {"max_time": 1.0}], ids=str)
def test_requests_take_no_choice_that_is_a_whole_call_s(choice: Any) -> None:
    decoder = decoder_of("random")
    with pytest.raises(InvalidArgument, match="is for a whole call"):
        decoder.requests([PROMPT], max_new_tokens=NEW, **choice)
    assert len(decoder.requests([PROMPT], max_new_tokens=NEW, policy=None)) == 1  # type: ignore[arg-type]
