"""Verification in Triton, from logits to tokens. The reference is `math.verify`; the same keys give the same tokens.

Launches for the token rule: the pass over the target's rows (`summary`, and thresholds where something is cut), then
`sum_kernel`, in which every program works out how much of the draft is kept and sums a part of what the next token is
drawn from, and the last to finish draws. q is read at the refused position only, if the drafter kept its summaries.
The block rule needs what is left at *every* position, so it reads all rows of both; the coupled rule draws at every
position and never reads q (`coupled`). Nothing waits for the host, and keys are read from device memory: a captured
graph draws anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.kernels.tuning import TUNING, Tuning
from forerun.kernels.verify.acceptance import BLOCK_RULE, GREEDY_RULE, LOGITS, NO_DRAFT, SIGMOID, TOKEN
from forerun.kernels.verify.coupled import verify_coupled
from forerun.kernels.verify.draft_law import Proposal, logits_of, proposal_of, why_not_logits
from forerun.kernels.verify.draw import HEAD
from forerun.kernels.verify.job import Job
from forerun.math.laws import LogitLaw
from forerun.math.sigmoid import Sigmoid
from forerun.types import Draft, Keys, Law, Rule, Verdict

RULES = {Rule.TOKEN: TOKEN, Rule.BLOCK: BLOCK_RULE}


def why_not(target: Law, draft: Draft, rule: Any, all_greedy: bool = False) -> str | None:
    """What these kernels do not cover, in words; None where they cover everything, as the reference does."""
    if not isinstance(target, LogitLaw):
        return f"a target law of type {type(target).__name__}"
    if reason := why_not_logits(target.logits):
        return reason
    proposal = proposal_of(draft.law) if draft.width else Proposal(NO_DRAFT.value)
    if proposal is None:
        return f"a draft law of type {type(draft.law).__name__}, or its numbers"
    if not len(draft.lengths):
        return "no rows"
    if all_greedy or rule in RULES or rule is Rule.COUPLED:
        return None
    if not isinstance(rule, Sigmoid) or rule.as_published:
        return f"the rule {rule}"
    if proposal.kind not in (NO_DRAFT.value, LOGITS.value) or _any_greedy(target, proposal):
        return "the sigmoid rule with greedy rows, or with a draft that is not logits"
    return None


def _any_greedy(target: LogitLaw, proposal: Proposal) -> bool:
    return target.params.any_greedy or (proposal.logits is not None and proposal.logits.params.any_greedy)


def verify(
    target: LogitLaw, draft: Draft, rule: Any, keys: Keys, all_greedy: bool = False, tuning: Tuning = TUNING
) -> Verdict:
    """`math.verify.verify` where `why_not` has no objection. All fields are views of one small tensor."""
    packed = verify_packed(target, draft, rule, keys, all_greedy, tuning)
    return Verdict(
        packed[:, 0],
        packed[:, 1],
        packed.view(torch.bool)[:, 2 * packed.element_size()],
        logprobs=packed.view(torch.float64)[:, HEAD.value :],
    )


def verify_packed(
    target: LogitLaw, draft: Draft, rule: Any, keys: Keys, all_greedy: bool = False, tuning: Tuning = TUNING
) -> Tensor:
    """[B, 3 + K + 1] int64: kept tokens, next token, whether finite, and log-probabilities (the bits of float64).

    The sigmoid rule reads no row it need not: without truncation it knows no log-probability but the bonus's (the
    others are NaN), and finds broken logits only where it draws.
    """
    if rule is Rule.COUPLED and not all_greedy:
        return verify_coupled(target, draft, keys, tuning)
    proposal = proposal_of(draft.law) if draft.width else Proposal(NO_DRAFT.value)
    assert proposal is not None, "ask `why_not` first"
    code = GREEDY_RULE if all_greedy else RULES.get(rule, SIGMOID)
    bounds = (rule.alpha, rule.beta) if isinstance(rule, Sigmoid) else (0.0, 1.0)
    job = Job(logits_of(target), draft, proposal, code.value, keys, tuning, bounds=bounds)
    return job.run()
