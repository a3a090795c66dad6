"""What a training run shows while it goes: a bar, its acceptance, and whether it is going to pay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.plan.costs import RoundCosts
    from forerun.train.loop import TrainProgress


class TrainingBar:
    """A progress bar on a terminal; elsewhere one line every now and then."""

    def __init__(self, console: Console, costs: RoundCosts | None) -> None:
        from forerun.measure.progress import Bar

        self.console, self.costs = console, costs
        self._bar = Bar(console)
        self._done = 0.0
        self._lines = -1
        self._proxy: Any = None

    def __enter__(self) -> TrainingBar:
        self._bar.__enter__()
        self._bar.start("training", total=1.0)
        if self.costs is not None:
            ratio = self.costs.draft_ratio(max(self.costs.whole))
            self._bar.say(f"a draft step costs {ratio:.2f} of a target step here")
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def report(self, progress: TrainProgress) -> None:
        text = (
            f"step {progress.step}  loss {progress.loss:.4f}  kept "
            + " ".join(f"{rate:.2f}" for rate in progress.acceptance)
            + f"  {progress.tokens_per_second:,.0f} tokens/s"
        )
        self._bar.start(text)
        self._bar.advance(progress.done - self._done)
        self._done = progress.done
        if not self.console.is_terminal and int(20 * progress.done) > self._lines:
            self._lines = int(20 * progress.done)
            self._bar.say(f"{progress.done:4.0%}  {text}")
        if progress.proxy is not None and progress.proxy is not self._proxy:
            self._proxy = progress.proxy
            self._bar.say(held_out(progress.proxy, self.costs))


def held_out(proxy: Any, costs: RoundCosts | None) -> str:
    from forerun.train.evaluate import survival_of, weigh

    rates = " ".join(f"{rate:.3f}" for rate in proxy.acceptance)
    text = (
        f"held out: kept {rates} at T=1, {proxy.tokens_per_round:.2f} tokens a round; "
        f"greedy {proxy.tokens_per_round_greedy:.2f}"
    )
    return text if costs is None else f"{text}; {weigh(survival_of(proxy.acceptance), costs)}"
