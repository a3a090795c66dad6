"""Target and drafter, and all that is made from the two of them: anew once the models have changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from forerun.cache.base import KeyValueCache
from forerun.drafters.base import Drafter, as_drafter
from forerun.engine.device.choose import draft_passes_of, ends_prompts, runner_for
from forerun.engine.device.runner import Runner
from forerun.engine.drafting import Drafting
from forerun.engine.faults import Faults
from forerun.engine.memory import memory_as_room
from forerun.models.evaluation import Evaluation
from forerun.models.scorer import Scorer
from forerun.policy.base import Policy
from forerun.rules import AnyRule


class Pair:
    """What rounds are run with. The drafter is a clone of the one that was given, see `Drafter.clone`."""

    drafting: Drafting
    runner: Runner | None  # of recorded rounds, where there are any
    first_from_prompt: bool  # whether the pass that ends a prompt gives the first token

    def __init__(
        self, target: Scorer, rule: AnyRule, faults: Faults, clock: Callable[[], float], *, compile: bool
    ) -> None:
        self.target, self.rule, self.faults, self.clock, self.compile = target, rule, faults, clock, compile
        self.is_stale = False  # whether what is made from the models has to be made anew
        self._evaluation: Evaluation | None = None  # while rows are in flight

    def connect(self, drafter: Drafter | None, policy: Policy, tokenizer: Any) -> None:
        """Bring target, drafter and recorded rounds together."""
        original = None if drafter is None else as_drafter(drafter)
        with Evaluation(self._models(original)):
            clone = None if original is None else original.clone()
            self.drafting = Drafting(clone, policy, self.target, self.rule, self.faults)
            if clone is not None:
                clone.bind(self.target, tokenizer)
            self.target.recorded_feed = None  # made from the model as it was
            self.runner = runner_for(self.target, clone, self.rule, self.clock) if self.compile else None
            self.first_from_prompt = ends_prompts(self.target)
            if self.runner is not None:
                self.drafting.passes = draft_passes_of(clone, self.target, self.clock)
                self.runner.record_prompts(with_head=self.first_from_prompt)

    @property
    def caches(self) -> list[KeyValueCache]:
        """The target's, and those of the drafter as it is now."""
        drafter = self.drafting.drafter
        return [self.target.cache, *(() if drafter is None else drafter.caches)]

    @property
    def is_recorded(self) -> bool:
        return self.runner is not None and not self.runner.is_disabled

    @property
    def survives_memory(self) -> bool:
        """Not where other ranks have their part in a pass: one that fails leaves them within a sum."""
        return self.target.counterparts is None and not self.faults.strict

    def memory_as_room(self) -> AbstractContextManager[None]:
        """Memory that runs out within a pass is as keys that find no room, where decoding goes on behind it."""
        return memory_as_room() if self.survives_memory else nullcontext()

    @property
    def has_changed(self) -> bool:
        """Whether target and draft models are other ones than those that everything here is made from."""
        drafter = self.drafting.drafter
        return self.is_stale or self.target.has_changed() or (drafter is not None and drafter.has_changed())

    def renew(self, tokenizer: Any, examine: Callable[[Scorer], object] | None) -> None:
        """Make all of it from the models as they are now; `examine` may refuse the target."""
        self.runner = self.drafting.passes = None  # whose graphs hold memory that the new cache is to have
        with self.evaluation():
            self.target.renew()
            if examine is not None:
                examine(self.target)
            self.connect(self.drafting.drafter, self.drafting.policy, tokenizer)
        self.is_stale = False

    def evaluation(self) -> Evaluation:
        """No dropout, for as long as the caller holds this."""
        return Evaluation(self._models(self.drafting.drafter))

    def evaluate(self) -> None:
        """No dropout during a call. Whoever is in the middle of training finds the model as it was."""
        before, self._evaluation = self._evaluation, self.evaluation()
        if before is not None:  # of rows that an error has sent back to the queue
            before.end()

    def go_on_training(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None

    def _models(self, drafter: Drafter | None) -> tuple[nn.Module, ...]:
        """All that passes are run with."""
        return (self.target.model, *(() if drafter is None else drafter.draft_models))
