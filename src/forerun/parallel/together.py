"""What all ranks do at the same time: wait for each other, but not for ever, and try a model before it is trusted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from forerun.config import rank_timeout
from forerun.models.self_check import SelfCheck, self_check
from forerun.models.seq2seq import scorer_of
from forerun.models.sharded import ModelCall, by_all_ranks, on_every_rank
from forerun.parallel.messages import Split


class Models:
    """Models that are split over the ranks, numbered in the order in which they came, which is the same everywhere."""

    def __init__(self) -> None:
        self._models: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = itertools.count()

    def __contains__(self, model: Any) -> bool:
        return any(model is known for known in self._models.values())

    def add(self, model: Any) -> None:
        """Once."""
        if model not in self:
            self._models[next(self._numbers)] = model

    def number(self, model: Any) -> int:
        return next(number for number, known in self._models.items() if known is model)

    def model(self, number: int) -> Any:
        return self._models[number]

    def all(self) -> list[Any]:
        return list(self._models.values())

    def numbered(self, call: ModelCall) -> ModelCall:
        """The call as it is sent: without the models among its arguments, and from no device."""

        def sent(value: Any) -> Any:
            if isinstance(value, nn.Module):
                return Split(self.number(value))
            return value.cpu() if isinstance(value, Tensor) else value

        return _with_each(call, sent)

    def own(self, call: ModelCall) -> ModelCall:
        """The call as this rank makes it, on its parts of the models."""
        return _with_each(call, lambda value: self.model(value.model) if isinstance(value, Split) else value)


def _with_each(call: ModelCall, changed: Callable[[Any], Any]) -> ModelCall:
    options = {name: changed(value) for name, value in call.options.items()}
    return replace(call, arguments=tuple(map(changed, call.arguments)), options=options)


@contextmanager
def limited_waiting(models: Sequence[Any]) -> Iterator[None]:
    """Let no collective of a pass wait for ever for a rank that hangs: ranks are apart by less than a pass.

    The group is the user's, who may have reasons to wait longer between our calls.
    """
    groups = _groups(models)
    before = {group: group._get_backend(device).options._timeout for group, device in groups.items()}
    for group in groups:
        _set_pg_timeout(timedelta(seconds=rank_timeout()), group)
    try:
        yield
    finally:
        for group, timeout in before.items():
            _set_pg_timeout(timeout, group)


def abort(models: Sequence[Any]) -> None:
    """End whatever waits on the device for a rank that has gone, where the backend can: nothing runs after this."""
    for group in _groups(models):
        with suppress(Exception):
            group.abort()


def _groups(models: Sequence[Any]) -> dict[Any, Any]:
    """The process groups of split models, and the device of each."""
    shards = [next(w for w in model.parameters() if isinstance(w, DTensor)) for model in models]
    return {shard.device_mesh.get_group(): shard.device for shard in shards}


def outline(model: Any) -> dict[str, str]:
    """The weights of a split model by name: type, size and how they are split, which is the same on all ranks."""
    return {
        name: f"{weight.dtype} {tuple(weight.shape)} {getattr(weight, 'placements', 'whole')}".removeprefix("torch.")
        for name, weight in model.named_parameters()
    }


def why_not_alike(outlines: Sequence[dict[str, str]]) -> str | None:
    """In words, where the ranks have loaded different models: their sums would not belong together."""
    first = outlines[0]
    for rank, other in enumerate(outlines):
        for name in {**first, **other}:
            if (ours := first.get(name)) != (theirs := other.get(name)):
                return (
                    f"rank 0 and rank {rank} have loaded different models: {name} is {ours or 'not there'} on rank 0 "
                    f"and {theirs or 'not there'} on rank {rank}; load the same one on all, with one dtype and plan"
                )
    return None


@by_all_ranks
def examine_split(model: Any, options: dict[str, Any], wanted: bool) -> SelfCheck:
    """Find out whether a scorer of `model` scores as the model itself does."""
    with on_every_rank(model), limited_waiting([model]):
        return self_check(scorer_of(model, **options), wanted)
