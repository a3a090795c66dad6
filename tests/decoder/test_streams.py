"""A stream that is left, closed or broken frees its decoder at once. None of these tests waits for the collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch

import forerun
from forerun.engine import FinishReason
from forerun.errors import InvalidArgument
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

PROMPTS = ragged_prompts(3, 97, seed=61)
NEW = 9
TEXT = plain_greedy(tiny_model("llama"), PROMPTS[0], NEW)
ONE = torch.tensor([PROMPTS[0]])


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def decoder(**settings: Any) -> forerun.SpeculativeDecoder:
    model = tiny_model("llama")
    return forerun.SpeculativeDecoder(model, forerun.DraftModel(draft_of(model)), policy=2, **settings)


def is_free(ours: forerun.SpeculativeDecoder) -> bool:
    no_rows = ours.engine.target.cache.rows == ()
    return no_rows and ours.generate(ONE, max_new_tokens=NEW).new_tokens == [TEXT]


def test_a_loop_that_is_left_frees_the_decoder() -> None:
    ours = decoder()
    for _ in ours.stream(ONE, max_new_tokens=NEW):
        break
    assert is_free(ours)


def test_a_loop_that_raises_frees_the_decoder() -> None:
    ours = decoder()
    with pytest.raises(ZeroDivisionError):
        for _ in ours.stream(ONE, max_new_tokens=NEW):
            raise ZeroDivisionError
    assert is_free(ours)


def test_a_block_closes_its_stream() -> None:
    ours = decoder()
    with ours.stream(ONE, max_new_tokens=NEW) as stream:
        first = next(stream)[0].tokens
    assert stream.result.finish_reasons == [FinishReason.ABORT]
    assert stream.result.new_tokens == [list(first)]
    with pytest.raises(StopIteration):
        next(stream)
    assert is_free(ours)


def test_who_holds_a_stream_is_told_to_close_it() -> None:
    ours = decoder()
    stream = ours.stream(ONE, max_new_tokens=NEW)
    next(stream)
    with pytest.raises(InvalidArgument, match=r"close\(\) it, or open it by `with"):
        ours.generate(ONE)
    assert not ours.engine.is_idle, "the refused call ended the other one"
    stream.close()
    stream.close()
    assert is_free(ours)


def test_a_stream_goes_on_when_another_was_refused() -> None:
    ours = decoder()
    stream = ours.stream(ONE, max_new_tokens=NEW)
    got = list(next(stream)[0].tokens)
    with pytest.raises(InvalidArgument, match="still running"):
        next(ours.stream(ONE))
    got += [token for progress in stream for token in progress[0].tokens]
    assert got == TEXT
    assert stream.result.new_tokens == [TEXT]


def test_the_result_is_there_with_the_last_round() -> None:
    stream = decoder().stream(ONE, max_new_tokens=NEW)
    with pytest.raises(InvalidArgument, match="has not ended"):
        _ = stream.result
    while next(stream)[0].finish_reason is None:
        pass
    assert stream.result.new_tokens == [TEXT]


def test_a_stream_that_never_began_has_no_result() -> None:
    ours = decoder()
    stream = ours.stream(ONE)
    stream.close()
    with pytest.raises(InvalidArgument, match="before its first round"):
        _ = stream.result
    assert list(stream) == []
    assert is_free(ours)


@pytest.mark.parametrize("moment", range(1, 6))
def test_an_interrupt_in_a_round_frees_the_decoder(moment: int) -> None:
    """Ctrl-C may come in any pass, of the drafter or of the target."""
    model, passes = tiny_model("llama"), 0
    draft = draft_of(model)
    ours = forerun.SpeculativeDecoder(model, forerun.DraftModel(draft), policy=2, kernels="off")

    def interrupt(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == moment:
            raise KeyboardInterrupt

    handles = [one.model.layers[-1].register_forward_pre_hook(interrupt) for one in (model, draft)]
    stream = ours.stream(ONE, max_new_tokens=NEW)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    finally:
        for handle in handles:
            handle.remove()
    assert stream.result.finish_reasons == [FinishReason.ABORT]
    assert is_free(ours)


class Closer:
    """A streamer that wants no more than it has heard."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.heard: list[int] = []
        self.ended = 0

    def put(self, tokens: torch.Tensor) -> None:
        self.heard += tokens.tolist()
        if self.stream is not None and len(self.heard) > len(PROMPTS[0]):
            self.stream.close()

    def end(self) -> None:
        self.ended += 1


def test_a_stream_closed_from_within_a_round_ends_with_it() -> None:
    ours, streamer = decoder(), Closer()
    streamer.stream = ours.stream(ONE, max_new_tokens=NEW, streamer=streamer)
    assert len(list(streamer.stream)) == 1
    assert streamer.stream.result.new_tokens == [streamer.heard[len(PROMPTS[0]) :]]
    assert streamer.ended == 1
    assert is_free(ours)


def test_a_streamer_hears_the_end_of_a_stream_that_was_left() -> None:
    ours, streamer = decoder(), Closer()
    for _ in ours.stream(ONE, max_new_tokens=NEW, streamer=streamer):
        break
    assert streamer.ended == 1


def test_two_threads_do_not_share_a_decoder() -> None:
    """One of them decodes, the other is told so; a stream has one round at a time."""
    ours, inside, go_on = decoder(), Event(), Event()

    class Slow(Closer):
        def put(self, tokens: torch.Tensor) -> None:
            inside.set()
            go_on.wait(30)

    stream = ours.stream(ONE, max_new_tokens=NEW, streamer=Slow())
    thread = Thread(target=lambda: list(stream))
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(InvalidArgument, match="still running"):
            ours.generate(ONE)
        with pytest.raises(InvalidArgument, match="under way"):
            next(stream)
    finally:
        go_on.set()
        thread.join()
    assert stream.result.new_tokens == [TEXT]
    assert is_free(ours)
