"""A rank other than 0 of a group of processes that hold a target together: it repeats the passes of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from forerun.config import rank_timeout
from forerun.errors import RankLost, UnsupportedModel, kind_and_line
from forerun.loading import load_shard
from forerun.models import sharded
from forerun.models.scorer import Scorer
from forerun.models.sharded import Follower, ModelCall, NotRecorded, PassCall, RecordedCall
from forerun.parallel.link import MEETING, Link
from forerun.parallel.messages import CallResult, Close, Follow, Load, Meet, Open, Stop, Unload
from forerun.parallel.together import Models, limited_waiting, outline

T = TypeVar("T")


class Worker(sharded.WithoutCounterparts):
    """Counterparts of rank 0's scorers, with caches in the same state."""

    def __init__(self, link: Link) -> None:
        self.link, self.rank, self.size = link, dist.get_rank(), dist.get_world_size()
        self._models = Models()
        self._loaded: dict[int, nn.Module] = {}  # by order of rank 0, which nobody else holds
        self._scorers: dict[int, Scorer] = {}
        self._followers: dict[int, tuple[int, Follower]] = {}  # and the number of the scorer that each was made for

    def connect(self, model: nn.Module) -> None:
        self._models.add(model)
        sharded.connect(model, self)

    def compare(self, model: nn.Module) -> None:
        if model in self._models:
            return
        self.link.send(outline(model))
        if (refusal := self.link.receive(MEETING)[0]) is not None:
            raise UnsupportedModel(refusal)

    def agree(self, problem: str | None) -> None:
        self.link.send(problem and f"rank {self.rank}: {problem}")
        if (found := self.link.receive()[0]) is not None:
            raise NotRecorded(found)

    def smallest(self, number: int) -> int:
        self.link.send(number)
        agreed: int = self.link.receive(rank_timeout())[0]
        return agreed

    def call(self, function: Callable[[], T], shared: Callable[[T], Any] = lambda value: value) -> T:
        """What the same call gives on rank 0; `function` is not run here."""
        outcome = self.serve()
        if outcome is None:
            raise RankLost("rank 0 has ended its calls while this rank is still calling: make the same calls on all")
        if outcome.error is not None:
            raise outcome.error
        value: T = outcome.value
        return value

    def serve(self, until_stop: bool = False) -> CallResult | None:
        """Repeat passes until a call of rank 0 has ended, or with `until_stop` all of them; None: there are no more."""
        while True:
            message = self.link.receive()[0]
            match message:
                case PassCall():
                    with limited_waiting(self._models.all()):
                        self._scorers[message.scorer].repeat(message)
                case RecordedCall():
                    with limited_waiting(self._models.all()), suppress(NotRecorded):  # rank 0 goes on without it
                        self._followers[message.follower][1].repeat(message)
                case Follow():
                    self.link.send(self._make_follower(message))
                case Open():
                    model = self._models.model(message.model)
                    self._scorers[message.scorer] = Scorer(model, **message.options)
                case Close():
                    self._drop(message.numbers)
                case Meet():
                    self.link.send(None)
                case Load():
                    model = load_shard(message.name, **message.options)
                    self.connect(model)
                    self._loaded[self._models.number(model)] = model
                case Unload():
                    self._loaded.pop(message.model)
                case ModelCall():
                    self.link.send(self._take_part(self._models.own(message)))
                case CallResult() if not until_stop:
                    return message
                case CallResult():
                    pass
                case Stop():
                    return None
                case _:
                    raise AssertionError(f"rank 0 said {message!r}")

    def _take_part(self, call: ModelCall) -> str | None:
        """The error that it has ended with here, in words."""
        try:
            with limited_waiting(self._models.all()):
                call.function(*call.arguments, **call.options)
        except Exception as error:
            return kind_and_line(error)
        return None

    def _make_follower(self, message: Follow) -> str | None:
        """Why this rank cannot record."""
        try:
            made = message.make(self._scorers[message.scorer])
        except Exception as error:
            return f"rank {self.rank}: {kind_and_line(error)}"
        self._followers[message.follower] = message.scorer, made
        return None

    def _drop(self, gone: Sequence[int]) -> None:
        """Scorers and followers; also those followers whose scorers have gone, or they would keep their caches."""
        for number in gone:
            self._scorers.pop(number, None)
        kept = {number: own for number, own in self._followers.items() if not {number, own[0]} & set(gone)}
        self._followers = kept
