"""Decoding with somebody watching: a word about compiling, progress row by row, Ctrl-C as a request to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.cli.pair import LoadedPair
from forerun.decoder import GenerateResult, SpeculativeDecoder
from forerun.engine import Progress
from forerun.kernels.compiling import CompileTimer, compile_timer

if TYPE_CHECKING:
    from rich.console import Console

WAITING = "compiling and timing kernels for this model: a minute, once a machine"
FEW = 8
"""Tokens of the decoding that compiles what the rounds use; enough for a draft or two."""
OnProgress = Callable[[Progress], None]


def run(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    keywords: dict[str, Any],
    on_progress: OnProgress = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> GenerateResult:
    """Decode all prompts. When `stopped()` turns true, rows end after the round with what they have.

    What was compiled or recorded on the way is paid once and is no decoding: it is taken out of the result's seconds
    and told as `stats.seconds.capture`.
    """
    stream = decoder.stream(prompts, **keywords)
    with compile_timer() as compiling:
        for progress in stream:
            for gained in progress:
                on_progress(gained)
            if stopped():
                stream.close()
    done = stream.result
    once = done.stats.seconds.capture + compiling.seconds
    stats = replace(done.stats, seconds=replace(done.stats.seconds, capture=once))
    return replace(done, seconds=max(done.seconds - once, 0.0), stats=stats)


@contextmanager
def told_of_compiling(console: Console) -> Iterator[CompileTimer]:
    """Says, where a kernel has to be compiled, why nothing is to be seen: a line, and on a terminal a spinner."""
    status = console.status(WAITING) if console.is_terminal and not console.quiet else None
    was_announced = False

    def announce() -> None:
        nonlocal was_announced
        if was_announced:
            return
        was_announced = True
        if status is not None:
            status.start()
        else:
            console.print(f"Note: {WAITING}", style="dim")

    try:
        with compile_timer(announce) as timer:
            yield timer
    finally:
        if status is not None:
            status.stop()


def ready_decoder(
    loaded: LoadedPair, console: Console, prompts: Sequence[Sequence[int]], keywords: dict[str, Any], keep_rows: int = 0
) -> SpeculativeDecoder:
    """The decoder. Where making it compiled something, a few tokens are decoded as well, which compiles the rest."""
    with told_of_compiling(console) as timer:
        decoder = loaded.decoder(keep_rows)
        if timer.seconds and prompts:
            few = min(FEW, keywords.get("max_new_tokens", FEW))
            run(loaded.decoder(), prompts[:1], {"max_new_tokens": few, "seed": 0})
    return decoder


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed. Pressed again, it interrupts as usual."""
    pressed = threading.Event()

    def note(signum: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
