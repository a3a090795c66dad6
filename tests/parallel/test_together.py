"""Calls that all ranks make together, seen from rank 0 with nobody on the other end of its link."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forerun.measure import reference
from forerun.models.sharded import ModelCall
from forerun.parallel import Coordinator
from support.tiny import tiny_model

CALL = ModelCall(print, (), {})


class Silent:
    """A link to ranks that answer that all went well, unless the user loses patience first."""

    def __init__(self, interrupt: bool = False) -> None:
        self.interrupt, self.sent, self.lost = interrupt, list[Any](), list[str]()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, timeout: float | None = None) -> list[None]:
        if self.interrupt:
            raise KeyboardInterrupt
        return [None]

    def close(self, reason: str) -> None:
        self.lost.append(reason)


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


@pytest.mark.usefixtures("one_of_two")
def test_a_second_thread_waits_for_its_turn() -> None:
    """It is not inside because another thread is: its call would be made by rank 0 alone."""
    link = Silent()
    ranks = Coordinator(link, calls_are_shared=False)  # type: ignore[arg-type]
    is_through = threading.Event()

    def call() -> None:
        with ranks.together(CALL):
            is_through.set()

    other = threading.Thread(target=call)
    with ranks.together(CALL):
        other.start()
        with ranks.together(CALL):
            assert len(link.sent) == 1, "a call within a call is told once"
        assert not is_through.wait(0.05)
    other.join()
    assert is_through.is_set() and link.sent == [CALL, CALL]


@pytest.mark.usefixtures("one_of_two")
def test_an_answer_that_nobody_takes_ends_the_group() -> None:
    """It would be taken for that of the next call."""
    link = Silent(interrupt=True)
    ranks = Coordinator(link, calls_are_shared=False)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt), ranks.together(CALL):
        pass
    assert link.lost == ["a call was left on rank 0 (KeyboardInterrupt)"]


def test_ranks_draw_from_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has given a seed, rank 0 draws one for all."""
    model, ids = tiny_model("llama"), torch.tensor([[1, 2]])
    monkeypatch.setattr(reference, "_generate", lambda *given: given[5])

    def seed(**settings: Any) -> Any:
        return reference.generate(model, ids, torch.ones_like(ids), **settings)

    assert seed(do_sample=True) is None, "a whole model draws as it always does"
    monkeypatch.setattr(reference, "is_sharded", lambda model: True)
    assert len({seed(do_sample=True), seed(do_sample=True), None}) == 3
    assert seed(do_sample=True, seed=3) == 3 and seed(do_sample=False) is None
