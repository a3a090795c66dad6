"""Requests with random lengths at random times, the same for everyone who is measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.config import SamplingParams
from forerun.engine import Request

PENALTY = 1.1  # repetition penalty of those who have one


@dataclass(frozen=True, slots=True)
class Load:
    """A Poisson stream of requests, of those that have as many as are expected.

    Then a rate is what its name says: the number in 20 seconds at 32 a second varies by 4 %, and an engine that keeps
    up with all of it makes no more tokens than arrive.
    """

    rate: float  # requests a second
    seconds: float  # during which they arrive
    prompt: tuple[int, int] = (32, 512)  # tokens, from and to
    output: tuple[int, int] = (32, 256)
    penalised: float = 0.0  # share of requests with a penalty
    shared: int = 0  # tokens with which all prompts begin
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float  # seconds after the beginning
    request: Request


def arrivals(load: Load, vocabulary: int, texts: Sequence[tuple[int, ...]] = ()) -> list[Arrival]:
    """In the order of their times. Texts end by their length alone.

    Prompts are random tokens; where there are `texts`, the ends of those, as long as asked for or as they are.
    """
    numbers = random.Random(load.seed)
    beginning = _tokens(numbers, load.shared, vocabulary)
    requests: list[Arrival] = []
    # Given their number, a Poisson stream's times are independent and uniform.
    for at in sorted(numbers.uniform(0, load.seconds) for _ in range(round(load.rate * load.seconds))):
        settings: dict[str, Any] = {"temperature": load.temperature}
        if numbers.random() < load.penalised:
            settings["repetition_penalty"] = PENALTY
        length = numbers.randint(*load.prompt)
        prompt = beginning + (numbers.choice(texts)[-length:] if texts else _tokens(numbers, length, vocabulary))
        request = Request(
            prompt=prompt, max_new_tokens=numbers.randint(*load.output), params=SamplingParams(**settings),
            seed=load.seed, request_id=len(requests),
        )  # fmt: skip
        requests.append(Arrival(at, request))
    return requests


def _tokens(numbers: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(1, vocabulary) for _ in range(count))
