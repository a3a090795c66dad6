"""A call of `generate` under way: rounds to iterate over, and what they made in the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock
from typing import Self
from weakref import ref

import torch
from torch import Tensor

from forerun.engine import Engine, Progress, Stats
from forerun.errors import InvalidArgument
from forerun.kernels.compiling import compile_timer
from forerun.keywords import GenerateCall
from forerun.result import GenerateResult, sequences

_claims = Lock()  # of engines' `call`: two threads may begin at once


class Stream(Iterator[list[Progress]]):
    """Iterate for what the rows gained, round by round. Nothing is decoded before the first round is asked for.

    A decoder runs one call at a time, from its first round until it has ended or `close()` is called, which
    `with decoder.stream(...) as stream:` does at the end of the block. A stream that nobody holds any more is closed:
    nothing in it refers back to it, so it goes at once and does not wait for the garbage collector.
    """

    def __init__(
        self,
        engine: Engine,
        call: GenerateCall,
        input_ids: Tensor,
        *,
        streams_prompt: bool = True,  # whether the job's streamer has yet to be given the prompt
    ) -> None:
        self._engine, self._call, self._input_ids = engine, call, input_ids
        self._streams_prompt = streams_prompt
        self._result: GenerateResult | None = None
        self._places: dict[int, int] = {}  # of the rows, by the engine's handles: requests may share a request_id
        self._has_begun = self._has_ended = self._in_round = self._is_closing = False

    def __next__(self) -> list[Progress]:
        if self._in_round:
            raise InvalidArgument("a round of this stream is under way; ask for the next one when it has ended")
        if self._has_ended:
            raise StopIteration
        self._in_round = True
        try:
            progress = self._round()
        except BaseException:
            self._abort()
            raise
        finally:
            self._in_round = False
        if self._is_closing:
            self.close()
        return progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_has_begun", False) and not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """End all rows with what they have; theirs is the finish reason `abort`. During a round: when it is over."""
        if self._in_round:
            self._is_closing = True
        elif not self._has_ended:
            self._abort()

    @property
    def result(self) -> GenerateResult:
        """Everything the call made, once it has ended."""
        if self._result is not None:
            return self._result
        if self._has_ended:
            raise InvalidArgument("the stream was closed, or refused, before its first round: it has no result")
        raise InvalidArgument("the stream has not ended: iterate to its end, or close it, before asking for its result")

    def _round(self) -> list[Progress]:
        if not self._has_begun:
            self._begin()
        with self._compiling_not_counted():
            progress = self._engine.step()
        self._put(progress[0].tokens if progress else ())
        if self._engine.is_idle:
            self._end()
            if self._call.streamer is not None:
                self._call.streamer.end()
        return [replace(entry, row=self._places[entry.row]) for entry in progress]

    @contextmanager
    def _compiling_not_counted(self) -> Iterator[None]:
        """Kernels are compiled and rounds recorded once a machine or shape: `max_time` does not run meanwhile."""
        if self._call.max_time is None:
            yield
            return
        before = self._engine.seconds.capture
        with compile_timer() as compiling:
            yield
        if once := compiling.seconds + self._engine.seconds.capture - before:
            self._engine.postpone(once)

    def _begin(self) -> None:
        engine, call = self._engine, self._call
        self._claim()
        self._started, self._seconds_before = engine.clock(), replace(engine.seconds)
        self._decoder_policy = engine.policy
        self._has_begun = True
        engine.tokenizer = call.tokenizer
        if call.policy is not None:
            engine.policy = call.policy
        if self._wants_the_same_again:
            engine.policy = engine.drafting.policy_for_seed()
        requests = call.requests
        if call.max_time is not None:
            requests = tuple(replace(one, deadline=self._started + call.max_time) for one in requests)
        for place, request in enumerate(requests):  # one that is refused takes those before it along
            self._places[engine.add(request)] = place
        if self._streams_prompt:
            self._put(call.requests[0].prompt)

    @property
    def _wants_the_same_again(self) -> bool:
        """Greedy rows say the same whatever the seed and the lengths of drafts."""
        return self._call.is_seeded and not all(request.params.is_greedy for request in self._call.requests)

    def _claim(self) -> None:
        self._engine.check_caller()  # before anything of the engine is changed: it may have requests of others
        with _claims:
            other = self._engine.call
            if (other is not None and other() is not None) or not self._engine.is_idle:
                raise InvalidArgument(
                    "another call is still running on this decoder: iterate over its stream to the end, close() it, or "
                    "open it by `with decoder.stream(...) as stream`, which closes it"
                )
            self._engine.call = ref(self)

    def _abort(self) -> None:
        """End early. Whatever made it end is what the caller hears of; who listens to the streamer must not wait."""
        if self._has_begun and not self._has_ended:
            self._engine.abort(*self._places)
            self._end()
        self._has_ended = True
        if self._call.streamer is not None:
            with suppress(Exception):
                self._call.streamer.end()

    def _end(self) -> None:
        self._has_ended = True
        try:
            self._collect(self._engine.clock() - self._started)
        finally:
            self._engine.policy = self._decoder_policy
            self._engine.call = None

    def _put(self, tokens: tuple[int, ...]) -> None:
        if self._call.streamer is not None and tokens:
            self._call.streamer.put(torch.tensor(tokens))

    def _collect(self, seconds: float) -> None:
        ended = self._engine.take_results_by_handle()
        if len(ended.keys() & self._places.keys()) < len(self._call.requests):  # one was refused: nothing to report
            return
        rows = tuple(ended[handle] for handle in self._places)
        stats = replace(Stats.total([row.stats for row in rows]), seconds=self._engine.seconds - self._seconds_before)
        stats.lossy = self._engine.lossy
        matrix = sequences(rows, self._call.pad_token_id, self._input_ids)
        self._result = GenerateResult(
            matrix, rows, stats, seconds, self._call.num_return_sequences, self._call.tokenizer
        )
