"""Requests of every kind that come, go, are given up or fail midway: each says what it would have said alone.

What a row says alone is said by rounds step by step. The engine that is tried runs its rounds on the device (here the
work itself stands in for its recording), with any drafter, rule and options, over any cache, in any order of events.
Prompts are equal, begin alike, or go on where an earlier row has ended, so that keys are shared, kept and taken up
again. In float64: in float32 a draw of a row among others now and then falls on the other side of the border between
two tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from engine.device_engines import CUT, DRAFTERS, GREEDY, SAMPLED, InPython, engine, requests
from engine.options import OPTIONS
from forerun.cache.paged import PagedCache
from forerun.engine import Engine, FinishReason, Request, RowResult
from forerun.types import Rule
from support.finish import finished

FAILING = ("feed", "feed_to_end", "score", "release")  # of the target: what may run out of memory
CUT_SHORT = (FinishReason.ABORT, FinishReason.TIME)
MOST_STEPS = 400
LONGEST = 100  # tokens of a prompt: with what is said and drafted behind it, they fit the smallest cache


@dataclass
class Traffic:
    """A way to serve requests, drawn from a seed."""

    settings: dict[str, Any]
    asked: list[Request]
    rng: random.Random
    room: int | None  # for keys, where they lie in blocks
    fails: bool
    results: dict[int, RowResult] = field(default_factory=dict)  # by handle
    gained: dict[int, list[int]] = field(default_factory=dict)
    now: float = 0.0  # by the engine's clock, which moves with every step

    @classmethod
    def drawn(cls, seed: int) -> Traffic:
        rng = random.Random(seed)
        drafter = rng.choice(sorted(DRAFTERS))
        settings = {
            "rule": Rule.TOKEN if "tree" in drafter else rng.choice(list(Rule)),
            "drafter": drafter,
            "policy": rng.randint(0, 6),
            "ahead": rng.random() < 0.8,
            "keep_rows": rng.choice((0, 0, 2)),
            "first_from_prompt": seed % 2 == 0,
        }
        traffic = cls(settings, [], rng, rng.choice((None, 160, 400)), rng.random() < 0.5)
        for plain in requests(rng.randint(3, 7), new=rng.randint(1, 14)):
            request = replace(plain, params=rng.choice((SAMPLED, GREEDY, CUT)), seed=seed)
            request = replace(request, prompt=traffic.prompt(request.prompt))
            for name in rng.sample(sorted(OPTIONS), rng.choice((0, 0, 1, 3))):
                request = OPTIONS[name](request)
            if rng.random() < 0.1:
                request = replace(request, processors=(*request.processors, InPython()))
            if rng.random() < 0.1:
                request = replace(request, deadline=rng.uniform(0, 30))
            traffic.asked.append(request)
        return traffic

    def prompt(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """One's own, a long one, or one that has something in common with that of an earlier request."""
        ways = [own] * 4 + [own * 4]
        if self.asked:
            other = self.rng.choice(self.asked)
            half = self.rng.randint(1, len(other.prompt))
            ways += [other.prompt, other.prompt[:half] + own, other.prompt + own]
            ways += [other.prompt + self.alone(other).tokens + own] if self.rng.random() < 0.3 else []
        return self.rng.choice(ways)[:LONGEST]

    def alone(self, request: Request) -> RowResult:
        made = engine(False, double=True, **self.settings)
        made.add(replace(request, deadline=None))
        return finished(made)[0]

    def serve(self) -> Iterator[tuple[Request, RowResult, list[int]]]:
        """Every request, its result, and what it was seen to gain."""
        cache = None if self.room is None else PagedCache(self.room, torch.device("cpu"), block_size=8)
        made = engine(True, cache=cache, double=True, **self.settings)
        made.prompt_tokens, made.clock = self.rng.choice((3, 16)), lambda: self.now
        left, handles = list(self.asked), dict[int, Request]()

        def come() -> None:
            request = left.pop(0)
            handles[made.add(request)] = request

        if self.rng.random() < 0.5:  # while the device works on a round
            made.arrivals = lambda: come() if left and self.rng.random() < 0.2 else None
        for _ in range(MOST_STEPS):
            while left and (made.is_idle or self.rng.random() < 0.4):
                come()
            if self.rng.random() < 0.05:
                made.abort(self.rng.choice(sorted(handles)))
            self._step(made)
            self._take(made)
            self.now += 1
            if made.is_idle and not left:
                break
        assert sorted(self.results) == sorted(handles), "each request ends"
        assert len(handles) == len(self.asked)
        assert made.prefixes.limit or made.target.cache.rows == ()
        for handle, request in handles.items():
            yield request, self.results[handle], self.gained.get(handle, [])

    def _take(self, made: Engine) -> None:
        for handle, result in made.take_results_by_handle().items():
            assert handle not in self.results, "and ends once"
            self.results[handle] = result

    def _step(self, made: Engine) -> None:
        """A step, of which something may fail in the middle."""
        name = self.rng.choice(FAILING)
        with pytest.MonkeyPatch.context() as patch:
            if self.fails and self.rng.random() < 0.15:
                patch.setattr(made.target, name, _failing)
            try:
                progress = made.step()
            except MemoryError:
                return
        for entry in progress:
            self.gained.setdefault(entry.row, []).extend(entry.tokens)


def _failing(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory")


@pytest.mark.quick("2")
@pytest.mark.parametrize("seed", range(240))
def test_every_request_says_what_it_says_alone(seed: int) -> None:
    traffic = Traffic.drawn(seed)
    for request, result, gained in traffic.serve():
        wanted = traffic.alone(request)
        # What a failing step had gained is told by the next; a row that is aborted in between has it in its result.
        told = result.tokens[: len(gained)] if result.finish_reason is FinishReason.ABORT else result.tokens
        assert tuple(gained) == told, "what was told round by round is what there is"
        if result.finish_reason in CUT_SHORT:
            assert result.tokens == wanted.tokens[: len(result.tokens)]
        else:
            assert (result.tokens, result.finish_reason) == (wanted.tokens, wanted.finish_reason)
        assert (result.logprobs is None) == (request.logprobs is None)
        assert len(result.logprobs or result.tokens) == len(result.tokens)
        assert [entry.token for entry in result.logprobs or ()] == list(result.tokens[: len(result.logprobs or ())])
        assert result.stats.num_emitted_tokens == len(result.tokens)
