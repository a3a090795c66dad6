"""The table of what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.engine import Stats

if TYPE_CHECKING:
    from rich.table import Table

BLOCKS = " ▁▂▃▄▅▆▇█"
MOST_POSITIONS = 16
WORTH_TELLING = 0.1  # seconds


def bars(rates: list[float]) -> str:
    """One little bar a rate in [0, 1]."""
    return "".join(BLOCKS[round(rate * (len(BLOCKS) - 1))] for rate in rates)


def by_position(stats: Stats) -> str:
    """Chance that a draft token is kept once those before it were: bars, then the first numbers."""
    rates = stats.acceptance_by_position[:MOST_POSITIONS]
    numbers = " ".join(f"{rate:.2f}" for rate in rates[:6])
    return f"{bars(rates)}  {numbers}{' ...' if len(rates) > 6 else ''}"


def statistics_table(stats: Stats, seconds: float) -> Table:
    """Counts, rates and times of one run."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    drafted = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens"
    table.add_row("tokens", f"{stats.num_emitted_tokens} in {stats.rounds} rounds")
    table.add_row("tokens per round", f"{stats.tokens_per_round:.2f}")
    table.add_row(
        "accepted", f"{stats.acceptance_rate:.0%}  ({drafted})" if stats.num_draft_tokens else "nothing was drafted"
    )
    if stats.num_draft_tokens:
        table.add_row("by position", by_position(stats))
    table.add_row("seconds", f"{seconds:.2f}")
    table.add_row("of which", times(stats))
    if stats.seconds.capture >= WORTH_TELLING:
        table.add_row("before that, once", f"{stats.seconds.capture:.1f} seconds of compiling and recording kernels")
    table.add_row("tokens per second", f"{rate(stats, seconds):.1f}")
    if stats.lossy:
        table.add_row("[bold red]LOSSY[/]", stats.lossy)
    return table


def times(stats: Stats) -> str:
    """Where the time went."""
    parts = {"prompt": stats.seconds.prefill, "drafting": stats.seconds.draft, "scoring": stats.seconds.score,
             "verifying": stats.seconds.verify}  # fmt: skip
    return ", ".join(f"{name} {spent:.2f}" for name, spent in parts.items())


def rate(stats: Stats, seconds: float) -> float:
    return stats.num_emitted_tokens / seconds if seconds > 0 else 0.0


def one_line(stats: Stats, seconds: float) -> str:
    """The same, short."""
    lossy = "; LOSSY" if stats.lossy else ""
    speed = f"{rate(stats, seconds):.1f} a second"
    return f"{stats.num_emitted_tokens} tokens, {stats.tokens_per_round:.2f} a round, {speed}{lossy}"
