"""Models whose weights are split over several processes: a pass of theirs has to run in all of them at once.

One process, rank 0, decodes. Its scorers have counterparts on the other ranks, which repeat the changes of the cache
and then run the same pass. What carries this to the others is `forerun.parallel`; here is what a scorer knows of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from forerun.cache.base import KeyValueCache
from forerun.cache.journal import CacheJournal, Change
from forerun.errors import UnsupportedModel

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class PassCall:
    """One pass of rank 0, as the other ranks need to know it."""

    scorer: int
    changes: list[Change]  # of the cache since the last pass; the last one makes room for the tokens
    tokens: list[int]  # [N] new ones of all rows, one row after the other
    trees: Sequence[Sequence[int]] | None
    keep: list[int] | None  # positions among N whose logits are wanted; None: all
    wants_logits: bool
    wants_hidden: bool
    by_modules: bool  # whether transformers' modules run it although another body could
    digest: str | None = None  # of the cache behind the changes, where it is to be compared


@dataclass(frozen=True, slots=True)
class RecordedPass:
    """A pass of fixed shape: what is written to where its recording reads, before that is run."""

    size: int  # rows, dummies included
    count: int  # new tokens of each, padding included
    bound: int  # on the keys of a row
    slots: list[int]  # of the rows that somebody has
    dummy: int  # the slot of the others
    past: list[int]  # keys that the rows have
    blocks: list[list[int]]  # tokens behind them, `count` at most


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded pass of rank 0. Whether it is recorded now or was before is rank 0's to say: all do the same."""

    follower: int
    changes: list[Change]  # as in `PassCall`
    what: RecordedPass
    is_new: bool  # all ranks record it, whatever they have
    is_run: bool  # by a warm-up it is only recorded
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A function that calls models themselves, by all ranks at once."""

    function: Callable[..., Any]  # travels by its name
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Follower(Protocol):
    """What repeats one recorder's passes on another rank."""

    def repeat(self, call: RecordedCall) -> None: ...


MakeFollower = Callable[[Any], Follower]
"""Of a scorer. It travels by its name, because what records lies above what carries messages."""


class NotRecorded(Exception):
    """A rank could not record a pass, so none has; all of them are in step, and passes can be launched."""


class Ranks(Protocol):
    """The processes that hold a model together, seen from one of them."""

    def open(self, model: nn.Module, options: dict[str, Any]) -> int | None:
        """Let the other ranks make a counterpart of a scorer; its number, or None on a rank that only repeats."""
        ...

    def close(self, scorer: int) -> None:
        """The counterparts may go. Called from anywhere, even by the garbage collector: nothing is sent now."""
        ...

    def run(
        self, call: PassCall | RecordedCall, is_over: Callable[[], bool] | None = None
    ) -> AbstractContextManager[None]:
        """While this rank runs a pass: the others run the same one. Where it is given, `is_over` is waited for."""
        ...

    def make_followers(self, scorer: int, make: MakeFollower) -> int:
        """Let the other ranks make what follows a recorder of this one; its number, which is for `close`, too."""
        ...

    def agree(self, problem: str | None) -> None:
        """Where all ranks record a pass: raise `NotRecorded` on all of them if one tells of a problem.

        Only where no rank can be waiting for another in a sum.
        """
        ...

    def together(self, call: ModelCall) -> AbstractContextManager[None]:
        """While this rank makes the call: the others make the same one."""
        ...

    def wants_digest(self) -> bool:
        """Whether the next pass is to compare the states of the caches."""
        ...

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that the ranks give: all of them ask at the same time."""
        ...


_ranks: WeakKeyDictionary[nn.Module, Ranks] = WeakKeyDictionary()


def is_sharded(model: nn.Module) -> bool:
    """Whether some weights are split over processes: no other process can be left out of a pass."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(weight, DTensor) for weight in model.parameters())


def connect(model: nn.Module, ranks: Ranks) -> None:
    """From now on scorers of `model` run in step with their counterparts on other ranks."""
    _ranks[model] = ranks


def by_all_ranks(function: Callable[P, T]) -> Callable[P, T]:
    """For functions whose first argument is a model that they call themselves: where that is split, every rank runs
    them. What they are given has to be the same to all ranks, and no clock may decide when they end."""

    @wraps(function)
    def on_this_rank(*arguments: P.args, **options: P.kwargs) -> T:
        model = arguments[0]
        ranks = _ranks.get(model) if isinstance(model, nn.Module) else None
        call = ModelCall(on_this_rank, arguments, options)
        with nullcontext() if ranks is None else ranks.together(call):
            return function(*arguments, **options)

    return on_this_rank


@contextmanager
def on_every_rank(model: nn.Module) -> Iterator[None]:
    """While all ranks do the same by themselves: scorers made meanwhile have no counterparts."""
    ranks = _ranks.get(model)
    _ranks[model] = _IndependentRanks()
    try:
        yield
    finally:
        if ranks is None:
            del _ranks[model]
        else:
            _ranks[model] = ranks


def ranks_of(model: nn.Module) -> Ranks | None:
    """Those that hold `model` together; None for a model that is whole. One that nobody has connected is refused."""
    if not is_sharded(model):
        return None
    if model not in _ranks:
        raise UnsupportedModel(
            f"{type(model).__name__} is split over processes that nobody has told to run in step, and would wait for "
            "each other for ever: give it to SpeculativeDecoder on all ranks, as the target or as the draft model of a "
            "target that is split over the same ones"
        )
    return _ranks[model]


def refuse_parts_of_sharded(what: str, model: nn.Module) -> None:
    """For drafters that compute with their target's own weights."""
    if is_sharded(model):
        raise UnsupportedModel(
            f"{what} computes with the weights of its target, and those of this {type(model).__name__} are split over "
            "processes; use a draft model of its own, or lookup"
        )


class Counterparts:
    """Of one scorer of rank 0: what lets the other ranks follow it."""

    def __init__(self, ranks: Ranks, number: int, cache: KeyValueCache) -> None:
        self._ranks, self._number = ranks, number
        self._cache, self._journal = cache, CacheJournal()
        cache.journal = self._journal
        self._closing = weakref.finalize(self, ranks.close, number)

    @classmethod
    def of(cls, ranks: Ranks | None, number: int | None, cache: KeyValueCache) -> Counterparts | None:
        """None for a model that is whole, and on ranks that only repeat."""
        return None if ranks is None or number is None else cls(ranks, number, cache)

    def run(
        self,
        tokens: Tensor,
        trees: Sequence[Sequence[int]] | None,
        keep: Tensor | None,
        *,
        wants_logits: bool,
        wants_hidden: bool,
        by_modules: bool,
    ) -> AbstractContextManager[None]:
        """While this rank runs a pass: the others run the same one, over caches in the same state."""
        call = PassCall(
            self._number,
            self._journal.take(),
            tokens.tolist(),
            None if trees is None else [tuple(parents) for parents in trees],
            None if keep is None else keep.tolist(),
            wants_logits,
            wants_hidden,
            by_modules,
            self._cache.digest() if self._ranks.wants_digest() else None,
        )
        return self._ranks.run(call)

    def make_followers(self, owner: object, make: MakeFollower) -> int:
        """Followers on the other ranks, for as long as `owner` lives here; their number."""
        number = self._ranks.make_followers(self._number, make)
        weakref.finalize(owner, self._ranks.close, number)
        return number

    def run_recorded(
        self, follower: int, what: RecordedPass, *, is_new: bool, is_run: bool, is_over: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        """While this rank records or runs such a pass: the others do the same."""
        state = self._cache.digest() if self._ranks.wants_digest() else None
        return self._ranks.run(RecordedCall(follower, self._journal.take(), what, is_new, is_run, state), is_over)


class WithoutCounterparts:
    """What scorers on a rank that does not lead find of `Ranks`: nobody repeats what they do."""

    def open(self, model: nn.Module, options: dict[str, Any]) -> None:
        return None

    def close(self, scorer: int) -> NoReturn:
        raise AssertionError("no counterparts were made")

    def run(self, call: PassCall | RecordedCall, is_over: Callable[[], bool] | None = None) -> NoReturn:
        raise AssertionError("no counterparts were made")

    def make_followers(self, scorer: int, make: MakeFollower) -> NoReturn:
        raise AssertionError("no counterparts were made")

    def together(self, call: ModelCall) -> AbstractContextManager[None]:
        return nullcontext()  # rank 0 has told the others, or all make the same calls by themselves

    def wants_digest(self) -> bool:
        return False


class _IndependentRanks(WithoutCounterparts):
    """The ranks of a model while all of them do the same by themselves."""

    def agree(self, problem: str | None) -> None:
        if problem is not None:
            raise NotRecorded(problem)

    def smallest(self, number: int) -> int:
        return number
