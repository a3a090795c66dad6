"""Whether an engine gets a runner."""

from __future__ import annotations

from collections.abc import Callable

from forerun import kernels
from forerun.config import Kernels
from forerun.drafters import DraftModel
from forerun.drafters.base import Drafter
from forerun.engine.device import prompt_passes
from forerun.engine.device.draft_passes import DraftPasses
from forerun.engine.device.runner import Runner, why_not_passes
from forerun.models.scorer import Scorer
from forerun.models.sharded import is_sharded
from forerun.rules import AnyRule
from forerun.types import Rule


def why_not(target: Scorer, drafter: Drafter | None, rule: AnyRule) -> str | None:
    """What keeps rounds with a draft from being recorded whole, in words; None where nothing does."""
    if not isinstance(rule, Rule):
        return f"rule {rule.name!r} is judged step by step"
    if is_sharded(target.model):  # other ranks hear of tokens from the host, which a whole round leaves out
        return "the target is split over processes, which rank 0 tells of every pass"
    if drafter is None or drafter.copies:  # what the host finds is given to a recorded round
        return None
    draft = drafter.device_draft()
    return f"{type(drafter.unwrapped).__name__} drafts on the host" if draft is None else draft.why_not(target)


def describe(runner: Runner | None, target: Scorer, drafter: Drafter | None, rule: AnyRule) -> str:
    """What an engine with this runner records, in words."""
    if runner is None:
        return f"nothing: {why_nothing(target) or 'it was turned off'}"
    if runner.is_disabled:
        return "nothing: recording failed"
    reason = why_not(target, drafter, rule)
    if reason is None:
        return "whole rounds"
    without_draft = "rounds without a draft, of others " if runner.whole_rounds else ""
    return f"{without_draft}the target's pass: {reason}"


def runner_for(target: Scorer, drafter: Drafter | None, rule: AnyRule, clock: Callable[[], float]) -> Runner | None:
    """A runner where CUDA graphs can be had: for whole rounds, or for the target's pass alone."""
    return runner_of(target, drafter, rule, clock) if why_nothing(target) is None else None


def why_nothing(target: Scorer) -> str | None:
    """What keeps all of a target's work from being recorded, in words; None where nothing does."""
    if target.device.type != "cuda":
        return f"{target.device.type} has no CUDA graphs"
    if target.kernels is Kernels.OFF:  # torch's own draws and judgements wait for the host
        return "kernels='off' leaves drawing and judging to torch"
    return kernels.why_not_triton(target.device) or why_not_passes(target)


def ends_prompts(target: Scorer) -> bool:
    """Whether rows' first tokens are drawn from the passes that read their prompts.

    Asked of the target alone, so that nobody's draws depend on whether, or for whom, anything is recorded. Recorded
    passes hand hidden states to no one, and logits after some tokens alone must be had from the model.
    """
    if target.device.type != "cuda" or is_sharded(target.model) or target.observers:
        return False
    can_pick = target.is_fused or target.modules.picks_logits
    return can_pick and prompt_passes.why_not(target) is None


def draft_passes_of(drafter: Drafter | None, target: Scorer, clock: Callable[[], float]) -> DraftPasses | None:
    """Recorded passes for rounds that go step by step, where the drafter is a model beside the target."""
    if type(drafter) is not DraftModel or drafter.scorer.device != target.device:
        return None
    return DraftPasses(drafter, clock) if why_not_passes(drafter.scorer) is None else None


def runner_of(target: Scorer, drafter: Drafter | None, rule: AnyRule, clock: Callable[[], float]) -> Runner:
    """The same without asking where it runs: elsewhere the work itself stands in for its recording."""
    if not isinstance(rule, Rule) or is_sharded(target.model):
        return Runner(target, None, Rule.TOKEN, clock, whole_rounds=False)
    draft = None if drafter is None else drafter.device_draft()
    return Runner(target, draft if why_not(target, drafter, rule) is None else None, rule, clock)
