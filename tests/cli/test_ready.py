"""Kernels that have to be compiled: said to whoever waits, and not counted as decoding."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from forerun.cli.pair import LoadedPair
from forerun.cli.run import WAITING, ready_decoder, run
from forerun.cli.statistics import statistics_table
from forerun.decoder import SpeculativeDecoder
from forerun.engine import Engine
from forerun.kernels.compiling import compile_timer
from support.folders import VOCAB, byte_tokenizer
from support.tiny import tiny_model

numba = pytest.importorskip("numba")


def compile_something() -> None:
    """A function that calls another: two compilations, one inside the other."""

    @numba.njit
    def inner(x: float) -> float:
        return x * 2

    @numba.njit
    def outer(x: float) -> float:
        return inner(x) + 1

    assert outer(1.0) == 3.0


def loaded() -> LoadedPair:
    return LoadedPair(tiny_model("llama", vocab=VOCAB), byte_tokenizer(), None)


def heard(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def test_compilations_are_timed_once_each() -> None:
    starts: list[int] = []
    with compile_timer(lambda: starts.append(1)) as timer:
        assert timer.seconds == 0
        compile_something()
    assert len(starts) == 1
    before = timer.seconds
    assert before > 0
    compile_something()  # nobody listens any more
    assert timer.seconds == before


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("terminal", [False, True])
def test_whoever_waits_is_told(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    decoder = LoadedPair.decoder

    def slowly(self: LoadedPair, keep_rows: int = 0) -> SpeculativeDecoder:
        if not made:
            compile_something()
        made.append(decoder(self, keep_rows))
        return made[-1]

    monkeypatch.setattr(LoadedPair, "decoder", slowly)
    steps: list[Engine] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self: (steps.append(self), step(self))[1])
    console, out = heard(terminal)
    ready = ready_decoder(loaded(), console, [[5, 6, 7]], {"max_new_tokens": 4})
    assert WAITING in out.getvalue()
    assert steps, "what rounds compile is compiled before anything is timed"
    assert all(engine is not ready.engine for engine in steps), "the decoder's policy must not learn from compiling"


def test_nothing_is_said_where_nothing_is_compiled() -> None:
    console, out = heard(True)
    ready_decoder(loaded(), console, [[5, 6, 7]], {})
    assert WAITING not in out.getvalue()


def test_compiling_is_not_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = loaded().decoder()
    step = Engine.step
    rounds: list[int] = []

    def first_compiles(self: Engine) -> Any:
        rounds.append(1)
        if len(rounds) == 1:
            compile_something()
        return step(self)

    monkeypatch.setattr(Engine, "step", first_compiles)
    started = time.perf_counter()
    with compile_timer() as timer:
        done = run(decoder, [[5, 6, 7]], {"max_new_tokens": 3})
    assert done.stats.seconds.capture == pytest.approx(timer.seconds, rel=0.05)
    assert done.seconds < time.perf_counter() - started - 0.9 * timer.seconds
    console, out = heard(False)
    console.print(statistics_table(done.stats, done.seconds))
    assert ("compiling" in out.getvalue()) == (timer.seconds >= 0.1)
