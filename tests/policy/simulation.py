"""A machine and a drafter made of numbers: what a policy costs on them, without a model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.policy.base import Policy
from forerun.types import BatchView, RoundOutcome
from policy.rounds import as_draft

CPU = {  # rows -> positions -> seconds
    1: {1: 0.047, 2: 0.098, 4: 0.106, 8: 0.115, 17: 0.150},
    4: {4: 0.106, 8: 0.150, 16: 0.235, 32: 0.300, 68: 0.450},
    8: {8: 0.129, 16: 0.239, 32: 0.302, 64: 0.438, 136: 0.750},
}
ARM = {  # two Neoverse-N1 cores: arithmetic is the limit from four positions on, whoever has them
    1: {1: 0.0230, 2: 0.0278, 4: 0.0290, 8: 0.0538},
    2: {2: 0.0226, 4: 0.0273, 8: 0.0500, 16: 0.0950},
    4: {4: 0.0290, 8: 0.0538, 16: 0.0987, 32: 0.1900},
}
H200 = {  # a 6.7 B target whose rounds are recorded, as benchmarks/results/decode-h200.json had them first
    1: {1: 0.00369, 2: 0.00395, 9: 0.00400, 17: 0.00430},
    4: {4: 0.00411, 8: 0.00450, 36: 0.00470, 68: 0.00510},
    8: {8: 0.00438, 16: 0.00490, 72: 0.00519, 104: 0.00580, 136: 0.00660},
}
GPU = {1: {1: 0.0200, 17: 0.0203}, 4: {4: 0.0201, 68: 0.0210}, 8: {8: 0.0203, 136: 0.0225}}


def seconds_on(machine: dict[int, dict[int, float]], rows: int, positions: int) -> float:
    """Straight lines between the measured points of the nearest table."""
    table = machine[min(machine, key=lambda known: (abs(known - rows), known))]
    points = sorted(table.items())
    if positions <= points[0][0]:
        return points[0][1] * (0.5 + 0.5 * positions / points[0][0])
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if positions <= x1:
            return y0 + (y1 - y0) * (positions - x0) / (x1 - x0)
    return points[-1][1] * positions / points[-1][0]


@dataclass
class World:
    """`alpha(tokens so far, evidence)` is the chance that a token is kept; `say` draws a row's evidence and supply."""

    machine: dict[int, dict[int, float]]
    alpha: Callable[[int, int], float]
    draft_seconds: float = 0.0  # per token of the longest draft
    ask_seconds: float = 0.0  # per call of the drafter
    prompt: int = 0  # tokens of each row that the drafter has not read when the row begins
    read_seconds: float = 0.0  # per unread token
    tells_left: bool = False  # whether it is certain when rows end
    compile_seconds: float = 0.0  # before the first draft of all
    judged: bool = False  # deterministic drafts, shown to `trim`
    say: Callable[[random.Random], tuple[int, int]] = lambda rng: (0, 99)
    noise: float = 0.05
    spike: float = 1.0  # how much slower the first round of a shape is
    hiccup: float = 0.0  # chance of a round 5 times too slow
    seed: int = 0
    rng: random.Random = field(init=False)
    seen: set[tuple[int, int]] = field(default_factory=set)
    tokens: int = 0
    seconds: float = 0.0
    next_id: int = 0
    unread: dict[int, int] = field(default_factory=dict)  # by request
    verified: list[tuple[int, int]] = field(default_factory=list)  # (evidence, length) of every draft that was scored

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def generate(self, policy: Policy, budgets: Sequence[int]) -> None:
        """One batch with `budgets` tokens to make; rows leave when they are done."""
        left = {self.next_id + i: budget for i, budget in enumerate(budgets)}
        self.next_id += len(budgets)
        while left:
            self.round(policy, left)

    def round(self, policy: Policy, left: dict[int, int]) -> None:
        ids = tuple(left)
        view = self.view(ids, left)
        asked = policy.lengths(view)
        assert all(0 <= a <= m for a, m in zip(asked, view.max_lengths, strict=True))
        said = [self.say(self.rng) for _ in ids]
        evidence = tuple(kind for kind, _ in said)
        drafted = tuple(min(a, supply) for a, (_, supply) in zip(asked, said, strict=True))
        draft_seconds = self.timed(self.ask_seconds + self.draft_seconds * max(drafted)) if any(asked) else 0.0
        draft_seconds += sum(self.read(i) for i, n in zip(ids, drafted, strict=True) if n)
        if any(drafted):
            draft_seconds, self.compile_seconds = draft_seconds + self.compile_seconds, 0.0
        if self.judged and any(asked):
            kept = policy.trim(view, as_draft(drafted, evidence))
            assert all(0 <= k <= d for k, d in zip(kept, drafted, strict=True))
            drafted = kept
        accepted = tuple(self.keep(n, kind) for n, kind in zip(drafted, evidence, strict=True))
        scored = sum(drafted) + len(ids)
        score_seconds = self.timed(seconds_on(self.machine, len(ids), scored)) * self.warm_up(len(ids), scored)
        self.tokens += sum(accepted) + len(ids)
        self.seconds += draft_seconds + score_seconds
        self.verified += [(kind, n) for kind, n in zip(evidence, drafted, strict=True) if n]
        ended = tuple(left[i] <= a + 1 for i, a in zip(ids, accepted, strict=True))
        policy.observe(
            RoundOutcome(view.rows, ids, drafted, accepted, evidence, scored, draft_seconds, score_seconds, 0.0, ended)
        )
        for i, a, done in zip(ids, accepted, ended, strict=True):
            left[i] -= a + 1
            if done:
                del left[i]
        policy.forget(tuple(i for i, done in zip(ids, ended, strict=True) if done))

    def view(self, ids: tuple[int, ...], left: dict[int, int]) -> BatchView:
        unread = tuple(self.unread.setdefault(i, self.prompt) for i in ids)
        return BatchView(
            tuple(range(len(ids))),
            ids,
            tuple(left[i] - 1 for i in ids),
            tokens_left=tuple(left.values()) if self.tells_left else (),
            unread=unread if any(unread) else (),
        )

    def read(self, request: int) -> float:
        """Seconds until the drafter has read all of a row."""
        unread, self.unread[request] = self.unread[request], 0
        return self.timed(unread * self.read_seconds) if unread else 0.0  # no random number for nothing

    def keep(self, drafted: int, evidence: int) -> int:
        alpha = self.alpha(self.tokens, evidence)
        return next((n for n in range(drafted) if self.rng.random() >= alpha), drafted)

    def timed(self, seconds: float) -> float:
        slow = 5.0 if self.rng.random() < self.hiccup else 1.0
        return seconds * slow * max(0.5, self.rng.gauss(1.0, self.noise))

    def warm_up(self, rows: int, positions: int) -> float:
        new = (rows, positions) not in self.seen
        self.seen.add((rows, positions))
        return self.spike if new else 1.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds
