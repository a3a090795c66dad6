"""Rank 0 of a group of processes that hold a target together: it decodes, and tells the others what to repeat.

It alone drafts, draws, verifies and schedules, so no random number has to be agreed upon and no near tie can make
ranks disagree. The others are told what changed in the key/value cache and which pass comes next.
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from forerun.config import rank_timeout
from forerun.errors import ForerunError, RankLost, UnsupportedModel, first_line, kind_and_line
from forerun.loading import load_shard
from forerun.models import sharded
from forerun.models.sharded import MakeFollower, ModelCall, NotRecorded, PassCall, RecordedCall
from forerun.parallel.link import MEETING, Link
from forerun.parallel.messages import CallResult, Close, Follow, Load, Meet, Open, Stop, Unload
from forerun.parallel.together import Models, abort, limited_waiting, outline, why_not_alike

T = TypeVar("T")
PING_SECONDS = 5.0  # between two looks at ranks that wait for work
POLL_SECONDS = 2e-5  # between two looks at a device: a recorded pass takes some hundred times as long
LOOK_SECONDS = 0.5  # between two looks at the other ranks meanwhile


class Coordinator:
    """Rank 0. With `calls_are_shared`, all ranks run the same script, and make and call decoders at the same time."""

    def __init__(self, link: Link, *, calls_are_shared: bool) -> None:
        self.link, self.calls_are_shared = link, calls_are_shared
        self.size = dist.get_world_size()
        self.draft_placement: str | None = None  # in words, where a draft model was loaded for the target
        self.check_every = 0  # passes after which the caches' states are compared; 0 for never
        self._models = Models()
        self._numbers, self._passes = itertools.count(), itertools.count(1)
        self._gone: list[int] = []  # scorers and recorders whose counterparts can go
        self._lock = threading.Lock()  # of a message with its answers, or of a whole pass
        self._inside: int | None = None  # the thread in which all ranks are in the same forward of the model
        atexit.register(self.stop)

    def connect(self, model: nn.Module) -> None:
        self._models.add(model)
        sharded.connect(model, self)

    def compare(self, model: nn.Module) -> None:
        """Where all ranks have loaded a model by themselves: refuse it unless it is the same one everywhere."""
        if not self.calls_are_shared or model in self._models:
            return
        with self._lock:
            refusal = why_not_alike([outline(model), *self.link.receive(MEETING)])
            self.link.send(refusal)
        if refusal is not None:
            raise UnsupportedModel(refusal)

    def open(self, model: nn.Module, options: dict[str, Any]) -> int:
        number = next(self._numbers)
        with self._lock:
            self._send(Open(number, self._models.number(model), options))
        return number

    def close(self, scorer: int) -> None:
        self._gone.append(scorer)

    def wants_digest(self) -> bool:
        return self.check_every > 0 and next(self._passes) % self.check_every == 0

    def make_followers(self, scorer: int, make: MakeFollower) -> int:
        number = next(self._numbers)
        with self._lock:
            self._send(Follow(number, scorer, make))
            if refusal := next(filter(None, self.link.receive(rank_timeout())), None):
                self.close(number)
                raise NotRecorded(refusal)
        return number

    def agree(self, problem: str | None) -> None:
        """Within `run`, whose lock this needs."""
        obstacle = next(filter(None, (problem, *self.link.receive(rank_timeout()))), None)
        self.link.send(obstacle)
        if obstacle is not None:
            raise NotRecorded(obstacle)

    @contextmanager
    def run(self, call: PassCall | RecordedCall, is_over: Callable[[], bool] | None = None) -> Iterator[None]:
        """An error in the middle of a pass leaves other ranks in a collective: they cannot be brought back in step."""
        held: KeyboardInterrupt | None = None
        with self._lock:
            self._send(call)
            self._inside = threading.get_ident()
            try:
                with limited_waiting(self._models.all()):
                    yield
                    if is_over is not None:
                        held = self._wait(is_over)
            except NotRecorded:  # which all of them have heard
                raise
            except BaseException as error:
                ended = self.link.ended_peers()
                reason = f"rank {ended[0]} has ended" if ended else f"a pass failed on rank 0 ({first_line(error)})"
                self.link.close(reason)
                if isinstance(error, Exception) and not isinstance(error, ForerunError):
                    raise self.link.error() from error
                raise
            finally:
                self._inside = None
        if held is not None:
            raise held

    def _wait(self, is_over: Callable[[], bool]) -> KeyboardInterrupt | None:
        """Until the device has run a recorded pass. A Ctrl-C meanwhile is returned: all ranks have the whole pass, and
        are in step behind it. A second one is raised."""
        try:
            self._watch(is_over)
        except KeyboardInterrupt as interrupt:
            self._watch(is_over)
            return interrupt
        return None

    def _watch(self, is_over: Callable[[], bool]) -> None:
        """torch does not watch sums of a graph: one whose other side has gone would be waited for without an end, by
        whoever reads the result."""
        begun = looked = time.monotonic()
        while not is_over():
            time.sleep(POLL_SECONDS)
            if (now := time.monotonic()) - looked < LOOK_SECONDS:
                continue
            looked = now
            if now - begun > rank_timeout() or self.link.ended_peers(0):
                abort(self._models.all())
                raise TimeoutError(f"a recorded pass has not ended after {now - begun:.1f} s")

    def smallest(self, number: int) -> int:
        with self._lock:
            agreed: int = min([number, *self.link.receive(rank_timeout())])
            self.link.send(agreed)
        return agreed

    @contextmanager
    def together(self, call: ModelCall) -> Iterator[None]:
        if self.calls_are_shared or self._is_inside:
            yield
            return
        with self._lock:
            self._send(self._models.numbered(call))
            self._inside = threading.get_ident()
            try:
                with limited_waiting(self._models.all()):
                    yield
                problems = list(filter(None, self.link.receive(rank_timeout())))
            except Exception as error:
                self._check_all_failed(error)
                raise
            except BaseException as error:  # Ctrl-C: the others are somewhere inside, or have answers that nobody takes
                self.link.close(f"a call was left on rank 0 ({kind_and_line(error)})")
                raise
            finally:
                self._inside = None
            if problems:
                self.link.fail(f"a call failed on other ranks ({'; '.join(problems)})")

    @property
    def _is_inside(self) -> bool:
        """Whether this thread is: others wait for their turn."""
        return self._inside == threading.get_ident()

    def _check_all_failed(self, error: Exception) -> None:
        """Ranks that have failed alike are in step. Others may be anywhere in the call, and are lost to each other."""
        with suppress(RankLost):  # the link tells why, then
            problems = self.link.receive(rank_timeout())
            if all(problem is not None and problem.startswith(type(error).__name__) for problem in problems):
                return
            self.link.close(f"a call failed ({'; '.join([kind_and_line(error), *filter(None, problems)])})")
        if not isinstance(error, ForerunError):
            raise self.link.error() from error

    def load(self, name: str, options: dict[str, Any]) -> Any:
        """A model that all ranks load together."""
        with self._lock:
            self._send(Load(name, options))
            model = load_shard(name, **options)
            self._send(Meet())
            self.link.receive(MEETING)
        self.connect(model)
        model.register_forward_pre_hook(self._refuse_others)
        return model

    def unload(self, model: nn.Module) -> None:
        """Of those that were loaded together: the others need not keep their parts."""
        with self._lock:
            self._send(Unload(self._models.number(model)))

    def _refuse_others(self, model: nn.Module, inputs: Any) -> None:
        """Whoever calls the model itself would wait for ranks that do not know of it."""
        if not self._is_inside:
            raise UnsupportedModel(
                f"{type(model).__name__} is split over processes that only run Forerun's own passes; what calls the "
                "model directly needs it whole: run this without torchrun and --tensor-parallel"
            )

    def call(self, function: Callable[[], T], shared: Callable[[T], Any] = lambda value: value) -> T:
        """Run `function`; the same call on the other ranks returns `shared` of what it gives, or raises its error."""
        if not self.calls_are_shared:
            return function()
        with self._lock:
            self._meet()
        try:
            value = function()
        except Exception as error:
            with suppress(RankLost), self._lock:
                self._send(CallResult(error=_portable(error)))
            raise
        with self._lock:
            self._send(CallResult(shared(value)))
        return value

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Look after ranks that wait, and call `on_lost` once one of them does not answer or something else failed."""

        def work() -> None:
            while not self.link.has_ended.wait(PING_SECONDS):
                with suppress(RankLost), self._lock:
                    self._meet()
            on_lost()

        threading.Thread(target=work, name="forerun-ranks", daemon=True).start()

    def stop(self) -> None:
        """The others need not listen any more."""
        has_lock = self._lock.acquire(timeout=1.0)  # whoever holds it is in a pass that does not end
        with suppress(RankLost):
            self.link.send(Stop())
        self.link.close("the group was closed")
        if has_lock:
            self._lock.release()

    def _meet(self) -> None:
        """Until all ranks are listening, which they do unless the script of one is late, or one of them hangs."""
        self._send(Meet())
        self.link.receive(rank_timeout())

    def _send(self, message: Any) -> None:
        if self._gone:
            gone, self._gone = self._gone, []
            self.link.send(Close(tuple(gone)))
        self.link.send(message)


def _portable(error: Exception) -> Exception:
    """An error that another process can raise: itself, or its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ForerunError(f"rank 0 failed: {type(error).__name__}: {first_line(error)}")
    return error
