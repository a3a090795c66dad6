"""The lossy rules written out a second time, with loops and plain numbers: what one round emits, and how often.

Nothing here comes from the package. Laws depend on the position and on the token before it, so a row that is off by one
is another law.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Row = list[float]
Round = tuple[int, ...]
INFINITY = float("inf")


@dataclass(frozen=True)
class Models:
    """Logits of target and draft: position, previous token, next token. -inf is a token that was cut."""

    target: list[list[Row]]
    draft: list[list[Row]]

    @property
    def vocab(self) -> int:
        return len(self.target[0])

    @property
    def width(self) -> int:
        return len(self.draft)

    @classmethod
    def random(cls, vocab: int, width: int, seed: int, cut: int = 0, spread: float = 2.0) -> Models:
        """`cut` of the target's tokens are impossible in every context, others each time."""
        rng = random.Random(seed)

        def row(cuts: int) -> Row:
            logits = [rng.gauss(0, spread) for _ in range(vocab)]
            for token in rng.sample(range(vocab), cuts):
                logits[token] = -INFINITY
            return logits

        def table(positions: int, cuts: int) -> list[list[Row]]:
            return [[row(cuts) for _ in range(vocab)] for _ in range(positions)]

        return cls(table(width + 1, cut), table(width, 0))


def softmax(logits: Sequence[float]) -> Row:
    peak = max(logits)
    weights = [math.exp(z - peak) for z in logits]
    return [w / sum(weights) for w in weights]


def norm(weights: Sequence[float], otherwise: Sequence[float]) -> Row:
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else list(otherwise)


def rest_of(p: Row, q: Row) -> Row:
    return norm([max(0.0, a - b) for a, b in zip(p, q, strict=True)], p)


# What a rule does at one drafted position: (logits of target, of draft, drafted token) -> (token, chance, goes on)
# for every way the position can end, and the law of the token drawn if it is refused.
Step = Callable[[Row, Row, int], tuple[list[tuple[int, float, bool]], Row]]
Bonus = Callable[[Row], Row]


def lenient(factor: float) -> Step:
    def step(zp: Row, zq: Row, x: int) -> tuple[list[tuple[int, float, bool]], Row]:
        p, q = softmax(zp), softmax(zq)
        return [(x, min(1.0, p[x] / (factor * q[x])), True)], rest_of(p, q)

    return step


def ensemble(weight: float) -> Step:
    def step(zp: Row, zq: Row, x: int) -> tuple[list[tuple[int, float, bool]], Row]:
        p, q = softmax(zp), softmax(zq)
        return [(x, min(1.0, 1 - weight + weight * p[x] / q[x]), True)], rest_of(p, q)

    return step


def score(z: float, alpha: float, beta: float) -> float:
    if z < alpha:
        return 0.0
    return 1.0 if z > beta else 1 / (1 + math.exp(-(z - alpha) / (beta - alpha)))


def sigmoid(alpha: float, beta: float, as_published: bool) -> Step:
    def step(zp: Row, zq: Row, x: int) -> tuple[list[tuple[int, float, bool]], Row]:
        p_hat, q_hat = ([score(z, alpha, beta) for z in row] for row in (zp, zq))
        chance = 0.0 if p_hat[x] == 0 else 1.0 if q_hat[x] == 0 else min(1.0, p_hat[x] / q_hat[x])
        left = [max(0.0, a - b) for a, b in zip(p_hat, q_hat, strict=True)]
        if as_published:
            total = 1e-6 + sum(left)
            rest = norm([max(w / total, 1e-5) for w in left], [])
        else:
            rest = norm(left, softmax(zp))
        return [(x, chance, True)], rest

    return step


def raw_logits(logits: Row) -> Row:
    return norm([max(z, 1e-5) for z in logits], [])


def topk_importance(k: int, as_published: bool) -> Step:
    def step(zp: Row, zq: Row, x: int) -> tuple[list[tuple[int, float, bool]], Row]:
        p, q = softmax(zp), softmax(zq)
        candidates = sorted(range(len(q)), key=lambda y: (-q[y], y))[:k]
        w = {y: p[y] / q[y] for y in candidates}
        total = sum(w.values())
        ways = [(y, w[y] / total * min(1.0, w[y]), as_published or y == x) for y in candidates if total > 0]
        return ways, rest_of(p, q)

    return step


def rounds(models: Models, step: Step, bonus: Bonus = softmax, start: int = 0) -> dict[Round, float]:
    """Every sequence of tokens that one round can emit after `start`, with its probability."""
    found: dict[Round, float] = defaultdict(float)
    for path in itertools.product(range(models.vocab), repeat=models.width):
        before = (start, *path)
        drawn = math.prod(softmax(models.draft[i][before[i]])[x] for i, x in enumerate(path))
        for emitted, mass in _walk(models, step, bonus, before, 0):
            found[emitted] += drawn * mass
    return dict(found)


def _walk(models: Models, step: Step, bonus: Bonus, before: Round, i: int) -> Iterator[tuple[Round, float]]:
    if i == models.width:
        yield from (((token,), mass) for token, mass in enumerate(bonus(models.target[i][before[i]])))
        return
    ways, rest = step(models.target[i][before[i]], models.draft[i][before[i]], before[i + 1])
    for token, chance, goes_on in ways:
        if goes_on:
            yield from (((token, *later), chance * mass) for later, mass in _walk(models, step, bonus, before, i + 1))
        else:
            yield (token,), chance
    refused = 1 - sum(chance for _, chance, _ in ways)
    yield from (((token,), refused * mass) for token, mass in enumerate(rest))


def first_tokens(law: dict[Round, float], vocab: int) -> Row:
    return [sum(mass for emitted, mass in law.items() if emitted[0] == token) for token in range(vocab)]
