"""What the policy `auto` makes of the measured steps: the cost it believes, and the draft lengths it would choose."""

from __future__ import annotations

from benchmarks.cpu_steps.results import CpuResults
from forerun.policy.cost import ScoreCost
from forerun.policy.plan import best_lengths

LONGEST = 16


def costs(results: CpuResults, subject: str, method: str) -> ScoreCost:
    """The policy's own cost model, taught the rounds of this record in the order a decoder would meet them."""
    learnt = ScoreCost()
    steps = (m for m in results.steps if m.subject == subject and m.method == method)
    for step in sorted(steps, key=lambda m: (m.batch, m.tokens)):
        for seconds in step.seconds * 3:  # a short run, too, must be trusted
            learnt.add(step.batch, step.batch * step.tokens, seconds)
    return learnt


def believed(learnt: ScoreCost, batch: int, tokens: int) -> float | None:
    """Seconds it expects of a round with `tokens` positions a row."""
    extra = batch * (tokens - 1)
    table = learnt.table(batch, extra)
    return table[extra] if extra < len(table) else None


def draft_length(learnt: ScoreCost, batch: int, acceptance: float, draft_step: float) -> int:
    """Of every row, where each draft token is kept with chance `acceptance` and costs `draft_step` seconds to make."""
    survival = [[acceptance**i for i in range(1, LONGEST + 1)]] * batch
    score = learnt.table(batch, batch * LONGEST)
    return max(best_lengths(survival, score, [i * draft_step for i in range(LONGEST + 1)]))
