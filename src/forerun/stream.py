"""A call of `generate` under way: rounds to iterate over, and what they made in the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from forerun.engine import Engine, Progress, Stats
from forerun.errors import InvalidArgument
from forerun.keywords import Job
from forerun.result import GenerateResult, sequences, with_seconds


class Stream(Iterator[list[Progress]]):
    """Iterate for what the rows gained, round by round. Nothing is decoded before the first round is asked for."""

    def __init__(self, engine: Engine, job: Job, input_ids: Tensor) -> None:
        self._engine, self._job, self._input_ids = engine, job, input_ids
        self._places = {request.request_id: place for place, request in enumerate(job.requests)}
        self._result: GenerateResult | None = None
        self._rounds = self._run()

    def __next__(self) -> list[Progress]:
        return next(self._rounds)

    def close(self) -> None:
        """End all rows with what they have; theirs is the finish reason `abort`."""
        self._rounds.close()

    @property
    def result(self) -> GenerateResult:
        """Everything the call made, once it has ended."""
        if self._result is None:
            raise InvalidArgument(
                "the stream has not ended: iterate to its end, or close it, before asking for its result"
            )
        return self._result

    def _run(self) -> Generator[list[Progress], None, None]:
        engine, job = self._engine, self._job
        if not engine.is_idle:
            raise InvalidArgument("another call is still running on this decoder; finish or close its stream first")
        engine.tokenizer = job.tokenizer
        started, before = engine.clock(), replace(engine.seconds)
        deadline = None if job.max_time is None else started + job.max_time
        numbers: list[int] = []
        try:
            for request in job.requests:  # one that is refused takes those before it along
                numbers.append(engine.add(replace(request, deadline=deadline)))
            self._put(job.requests[0].prompt)
            while not engine.is_idle:
                progress = engine.step()
                self._put(progress[0].tokens if progress else ())
                yield [replace(entry, row=self._places[entry.request_id]) for entry in progress]
            if job.streamer is not None:
                job.streamer.end()
        finally:
            if not engine.is_idle:
                for number in numbers:
                    engine.abort(number)
            self._collect(engine.clock() - started, before)

    def _put(self, tokens: tuple[int, ...]) -> None:
        if self._job.streamer is not None and tokens:
            self._job.streamer.put(torch.tensor(tokens))

    def _collect(self, seconds: float, before: Stats) -> None:
        ended = {result.request.request_id: result for result in self._engine.take_results()}
        if len(ended) < len(self._places):  # a request was refused: there is nothing to report
            return
        rows = tuple(ended[request.request_id] for request in self._job.requests)
        stats = with_seconds(Stats.total([row.stats for row in rows]), self._engine.seconds, before)
        stats.lossy = self._engine.lossy
        matrix = sequences(rows, self._job.pad_token_id, self._input_ids)
        self._result = GenerateResult(matrix, rows, stats, seconds, self._job.num_return_sequences)
