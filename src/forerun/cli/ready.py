"""A decoder that is ready to be timed: kernels are compiled first, with a word to whoever waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.cli.pair import Loaded
from forerun.kernels.compiling import CompileTimer, compile_timer

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.decoder import SpeculativeDecoder

WAITING = "compiling and timing kernels for this model: a minute or so, once on this machine"
FEW = 8
"""Tokens of the decoding that compiles what the rounds use; enough for a draft or two."""


@contextmanager
def told_of_compiling(console: Console) -> Iterator[CompileTimer]:
    """Says, where a kernel has to be compiled, why nothing is to be seen: a line, and on a terminal a spinner."""
    status = console.status(WAITING) if console.is_terminal and not console.quiet else None
    told = False

    def tell() -> None:
        nonlocal told
        if told:
            return
        told = True
        if status is not None:
            status.start()
        else:
            console.print(f"Note: {WAITING}", style="dim")

    try:
        with compile_timer(tell) as timer:
            yield timer
    finally:
        if status is not None:
            status.stop()


def ready_decoder(
    loaded: Loaded, console: Console, prompts: Sequence[Sequence[int]], keywords: dict[str, Any], keep_rows: int = 0
) -> SpeculativeDecoder:
    """The decoder. Where making it compiled something, a few tokens are decoded as well, which compiles the rest."""
    from forerun.cli.run import run

    with told_of_compiling(console) as timer:
        decoder = loaded.decoder(keep_rows)
        if timer.seconds and prompts:
            few = min(FEW, keywords.get("max_new_tokens", FEW))
            run(loaded.decoder(), prompts[:1], {"max_new_tokens": few, "seed": 0})
    return decoder
