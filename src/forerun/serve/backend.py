"""The engine behind a service, as the service sees it: a thread of this process here, another process in `remote`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from forerun.decoder import SpeculativeDecoder
from forerun.engine import AsyncEngine, FinishReason, Request, Stats
from forerun.engine.async_engine import RequestStream
from forerun.engine.row import TokenLogprob
from forerun.errors import EngineClosed
from forerun.parallel import Coordinator
from forerun.serve.prompt_logprobs import prompt_logprobs
from forerun.types import Origin

SWITCH_SECONDS = 1e-4
"""How long the loop that writes answers may keep the engine's thread waiting, and the other way round: Python's own
5 ms are a round of the model."""


class Gained(Protocol):
    """What a sequence gained in one round."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def origins(self) -> Sequence[Origin]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob]: ...


class SequenceEnding(Protocol):
    """How a sequence ended."""

    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def error(self) -> str | None: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def mean_logprob(self) -> float | None: ...
    @property
    def waited(self) -> float: ...


OnGained = Callable[[Sequence[Gained]], bool]
"""Is told what has come, of one round or of several; False: that is enough."""


class TokenStream(Protocol):
    """A sequence that is being decoded; used by one event loop."""

    async def listen(self, on_gained: OnGained) -> None:
        """Call `on_gained` with all that comes, as it comes, until that is enough or nothing more will."""

    async def finished(self) -> SequenceEnding:
        """Once it has ended."""

    def close(self) -> None:
        """End it with what it has, if it has not ended."""


@dataclass(frozen=True, slots=True)
class State:
    """What an engine tells of itself when it is asked."""

    is_alive: bool
    num_preempted: int = 0
    cache_usage: float | None = None  # 1 is all; None where nothing bounds it
    num_prefix_queries: int = 0  # tokens of prompts that keys were looked for, and for how many they were there
    num_prefix_hits: int = 0
    num_waiting: int = 0  # sequences that it was given and that find no room yet


class Backend(ABC):
    """What a service asks for."""

    is_split = False  # over several processes, which do not tell log-probabilities of prompts

    async def open(self) -> None:  # noqa: B027 (most need not be)
        """In the event loop that is going to use it."""

    @property
    @abstractmethod
    def state(self) -> State:
        """As it was seen last."""

    async def look(self) -> State:
        """As it is now."""
        return self.state

    @abstractmethod
    async def wait_for_round_end(self) -> None:
        """Until no pass of the model is under way; at once where the engine has ended. `state` is then as new."""

    @abstractmethod
    def submit(self, request: Request) -> TokenStream:
        """Begin to decode."""

    @abstractmethod
    async def prompt_logprobs(self, prompt: Sequence[int], alternatives: int) -> list[TokenLogprob | None]:
        """Of a prompt's own tokens; the first has none."""

    @abstractmethod
    def close(self, drain: bool = True) -> None:
        """Take no more. With `drain`, what is under way is decoded first."""


class LocalStream:
    """A sequence of an engine in this process."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream

    async def listen(self, on_gained: OnGained) -> None:
        while (gained := await self._stream.gathered()) and on_gained(gained):
            pass

    async def finished(self) -> SequenceEnding:
        return await self._stream.finished()

    def close(self) -> None:
        self._stream.close()


class LocalBackend(Backend):
    """The engine of a decoder, in a thread of this process, which is given `patience` where nothing is drained."""

    def __init__(self, decoder: SpeculativeDecoder, patience: float | None = None) -> None:
        self.decoder, self.engine, self._patience = decoder, AsyncEngine(decoder.engine), patience
        self.on_lost: Callable[[], None] = lambda: None
        """Called by a thread of its own once a process that the model is split over was lost."""
        if self.ranks is not None:
            self.ranks.watch(self._tell_lost)

    def _tell_lost(self) -> None:
        self.on_lost()  # as it is by then

    @property
    def is_split(self) -> bool:  # type: ignore[override]
        return self.ranks is not None

    @property
    def ranks(self) -> Coordinator | None:
        """The processes that hold the model together, where it is split over several."""
        ranks = self.decoder.ranks
        return ranks if isinstance(ranks, Coordinator) else None

    @property
    def state(self) -> State:
        engine, usage = self.engine.engine, None
        with suppress(RuntimeError):  # a row has come or left meanwhile
            usage = engine.target.cache.usage
        return State(
            self.engine.is_alive and (self.ranks is None or self.ranks.link.lost is None),
            engine.num_preempted,
            usage,
            engine.num_prefix_queries,
            engine.num_prefix_hits,
            engine.num_waiting,
        )

    async def wait_for_round_end(self) -> None:
        with suppress(EngineClosed):
            await asyncio.wait([asyncio.wrap_future(self.engine.between_steps(_nothing))])  # cancelled where it ends

    def submit(self, request: Request) -> TokenStream:
        return LocalStream(self.engine.submit(request))

    async def prompt_logprobs(self, prompt: Sequence[int], alternatives: int) -> list[TokenLogprob | None]:
        return await prompt_logprobs(self.engine, self.decoder.target, prompt, alternatives)

    def close(self, drain: bool = True) -> None:
        self.engine.close(drain, timeout=None if drain else self._patience)


def _nothing() -> None:
    pass
