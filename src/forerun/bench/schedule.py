"""Which prompts are measured together and in what order, and how long that will take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Prompt = tuple[int, ...]
Pools = Mapping[str, Sequence[Prompt]]

MOST_PROMPTS = 10
"""A fast machine need not fill its quarter of an hour: ten prompts a category are enough for a ratio."""


@dataclass(frozen=True, slots=True)
class Group:
    """Prompts that every method decodes as one batch."""

    category: str
    index: int  # among the groups of its category and batch size
    prompts: tuple[Prompt, ...]

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def padded_tokens(self) -> int:
        return self.batch * max(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class BaselineSpeed:
    """The baseline at one batch size, in seconds."""

    prefill: float  # a token of the padded prompts
    step: float  # one more token for every row

    def call(self, group: Group, new_tokens: int) -> float:
        return self.prefill * group.padded_tokens + self.step * new_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """What will be measured."""

    groups: tuple[Group, ...]
    prompts_per_category: int
    seconds: Mapping[int, float]  # of one call of the baseline, by place in `groups`
    total_seconds: float  # all methods, all repeats
    notes: tuple[str, ...]
    pools: Pools  # what the groups were taken from


def make_schedule(
    pools: Pools,
    batch_sizes: Sequence[int],
    per_category: int | None,
    cost: Callable[[Group], float],
    turns: Callable[[Group], int],
    budget: float,
) -> Schedule:
    """With `per_category` prompts, or as many as fit `budget` seconds (one at least).

    `cost` is a call's expected seconds, `turns` how many calls a group takes.
    """
    if per_category is None:
        fitting = [
            n for n in range(1, MOST_PROMPTS + 1) if total(groups_of(pools, batch_sizes, n), cost, turns) <= budget
        ]
        per_category = max(fitting, default=1)
    groups = groups_of(pools, batch_sizes, per_category)
    seconds = {place: cost(group) for place, group in enumerate(groups)}
    return Schedule(
        tuple(groups), per_category, seconds, total(groups, cost, turns), shortages(pools, batch_sizes, per_category),
        pools,
    )  # fmt: skip


def total(groups: Sequence[Group], cost: Callable[[Group], float], turns: Callable[[Group], int]) -> float:
    return sum(turns(group) * cost(group) for group in groups)


def groups_of(pools: Pools, batch_sizes: Sequence[int], per_category: int) -> list[Group]:
    """Batch size by batch size; within one the categories take turns, so that an early end leaves some of each."""
    return [
        Group(category, index, tuple(prompts[index * batch : (index + 1) * batch]))
        for batch in batch_sizes
        for index in range(wanted(per_category, batch))
        for category, prompts in pools.items()
        if len(prompts) >= (index + 1) * batch
    ]


def wanted(per_category: int, batch: int) -> int:
    """Groups a category should have: its prompts dealt out once, and one full batch at least."""
    return max(1, per_category // batch)


def shortages(pools: Pools, batch_sizes: Sequence[int], per_category: int) -> tuple[str, ...]:
    """No prompt is used twice in a batch size: equal rows would share work that different ones cannot."""
    return tuple(
        f"{category} has {len(prompts)} prompts that fit the model and {need} are needed at batch {batch}: "
        + ("measured with fewer groups" if len(prompts) >= batch else "left out there")
        for category, prompts in pools.items()
        for batch in batch_sizes
        if len(prompts) < (need := batch * wanted(per_category, batch))
    )
