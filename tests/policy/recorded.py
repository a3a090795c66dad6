"""A device that runs recorded rounds: all rows at the length of the longest draft, and the next one sent off early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forerun.engine.device.shapes import SIZES, round_up_draft
from forerun.policy.base import Policy
from forerun.types import BatchView, RoundOutcome
from policy.simulation import World, seconds_on


@dataclass
class RecordedWorld(World):
    """Rounds as the engine sends them off; `left` is what the device knows, `known` what the host has heard."""

    sizes: tuple[int, ...] = SIZES
    always_waits: bool = False  # asks when everything has been heard, whatever the policy allows
    idle: float = 0.0  # seconds the device waits for the host before a round that was not sent off early
    round_number: int = 0
    late: int = 0  # rounds that were asked for before the last one was heard of
    steps: list[int] = field(default_factory=list)  # of every round
    _air: list[RoundOutcome] = field(default_factory=list)
    _waited: float = 0.0  # before the round that is asked for

    def generate(self, policy: Policy, budgets: Sequence[int]) -> None:
        left = {self.next_id + i: budget for i, budget in enumerate(budgets)}
        known = dict(left)
        self.next_id += len(budgets)
        while left:
            lengths = self.asked(policy, known)
            self.hear(policy, known)
            self.fly(lengths, left)
        self.hear(policy, known)

    def asked(self, policy: Policy, known: dict[int, int]) -> dict[int, int]:
        """Ahead where the policy allows it and the drafter will have kept up, which it has not after a plain round."""
        if self._air and not self.always_waits and getattr(policy, "runs_ahead", False):
            lengths = self.ask(policy, known)
            if self._air[-1].steps or not any(lengths.values()):
                self.late += 1
                self._waited = 0.0
                return lengths
        self.hear(policy, known)
        self._waited = self.idle
        return self.ask(policy, known)

    def ask(self, policy: Policy, known: dict[int, int]) -> dict[int, int]:
        self.round_number += 1
        rows, room = tuple(known), tuple(n - 1 for n in known.values())
        view = BatchView(rows, rows, room, sizes=self.sizes, round_number=self.round_number)
        lengths = policy.lengths(view)
        assert all(0 <= n <= most for n, most in zip(lengths, view.max_lengths, strict=True))
        return dict(zip(known, lengths, strict=True))

    def hear(self, policy: Policy, known: dict[int, int]) -> None:
        while self._air:
            outcome = self._air.pop(0)
            policy.observe(outcome)
            policy.forget(tuple(row for row, ended in zip(outcome.rows, outcome.ended, strict=True) if ended))
            for row, accepted, ended in zip(outcome.rows, outcome.accepted, outcome.ended, strict=True):
                known[row] -= accepted + 1
                if ended:
                    del known[row]

    def fly(self, lengths: dict[int, int], left: dict[int, int]) -> None:
        rows, number = tuple(left), round_up_draft(max(lengths.values()))
        drafted = tuple(min(lengths[row], left[row] - 1) for row in rows)
        accepted = tuple(min(self.keep(n, 0), left[row] - 1) for n, row in zip(drafted, rows, strict=True))
        ended = tuple(left[row] <= n + 1 for n, row in zip(accepted, rows, strict=True))
        draft = self.timed(self.draft_seconds * number)
        score = self.timed(seconds_on(self.machine, len(rows), len(rows) * (number + 1)))
        self.tokens += sum(accepted) + len(rows)
        self.seconds += self._waited + draft + score
        self.steps.append(number)
        scored = sum(drafted) + len(rows)
        told = RoundOutcome(rows, rows, drafted, accepted, None, scored, draft, score, 0.0, ended)
        self._air.append(replace(told, steps=number, round_number=self.round_number, idle_seconds=self._waited))
        for row, n, done in zip(rows, accepted, ended, strict=True):
            left[row] -= n + 1
            if done:
                del left[row]
