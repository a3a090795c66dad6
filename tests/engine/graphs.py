"""What tests of replayed graphs ask for, and the law they are held to."""

from __future__ import annotations

from functools import lru_cache

import torch

from exactness.sampling import PLAIN, PROMPT
from forerun.config import SamplingParams
from forerun.engine import Engine, Request
from support.finish import finished, tokens_by_request
from support.markov import joint_law, toy_pair
from support.tiny import ragged_prompts

SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams()
# Each row its own, in every round.
MIXED = (SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams(temperature=1.2, min_p=0.05), GREEDY)
NUMBER, ROWS, STEPS, VOCAB = 6000, 256, 3, 5


def requests(number: int, *params: SamplingParams) -> list[Request]:
    some = params or (SAMPLED,)
    return [
        Request(prompt=(5, *prompt), max_new_tokens=24 + 5 * (i % 3), params=some[i % len(some)], seed=3, request_id=i)
        for i, prompt in enumerate(ragged_prompts(number, 97, 0))
    ]


def texts(made: Engine, asked: list[Request]) -> dict[int, tuple[int, ...]]:
    found = tokens_by_request(made, asked)
    assert made.runner is None or not made.runner.is_disabled
    return found


def samples_of(made: Engine) -> list[tuple[int, ...]]:
    """Many texts of a toy pair, to be held against `law`."""
    assert made.runner is not None
    found: list[tuple[int, ...]] = []
    for start in range(0, NUMBER, ROWS):
        numbers = range(start, start + ROWS)
        asked = (Request(prompt=PROMPT, max_new_tokens=6, params=PLAIN, seed=1, request_id=i) for i in numbers)
        found += [result.tokens for result in finished(made, asked)]
    assert made.runner.recorder.num_recordings and not made.runner.is_disabled
    return found


@lru_cache
def law() -> torch.Tensor:
    return joint_law(toy_pair(VOCAB)[0], PROMPT, STEPS)
