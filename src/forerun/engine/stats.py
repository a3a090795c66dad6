"""What happened, in counts; rates are derived. Names follow vLLM's metrics where one exists."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

COUNTS = (
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_predicted_tokens", "num_accepted_predicted_tokens",
    "rounds", "num_emitted_tokens",
)  # fmt: skip
COUNTS_PER_PLACE = (
    "num_accepted_tokens_per_pos", "num_draft_tokens_per_pos", "num_reached_tokens_per_pos", "acceptance_histogram",
)  # fmt: skip


@dataclass(slots=True)
class Seconds:
    """Where the time of a batch went. It is the batch's time: rows decode together."""

    draft: float = 0.0
    score: float = 0.0
    verify: float = 0.0
    prefill: float = 0.0
    capture: float = 0.0
    """Spent once a shape of round on recording it as CUDA graphs, the compiling of kernels included; by the command
    line also on compiling a CPU's kernels."""

    @property
    def decoding(self) -> float:
        """Of rounds alone."""
        return self.draft + self.score + self.verify

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


@dataclass(slots=True, repr=False)
class Stats:
    """Counts of one row, or of many added up."""

    num_drafts: int = 0
    """Rounds in which something was drafted for the row (vLLM: num_drafts)."""
    num_draft_tokens: int = 0
    """Tokens verified; of a tree, all its nodes. In the counts by position a tree is as long as it is deep."""
    num_accepted_tokens: int = 0
    """Draft tokens that were emitted."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """Entry i: rounds whose draft token i was emitted."""
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    """Entry i: rounds that drafted more than i tokens."""
    num_reached_tokens_per_pos: list[int] = field(default_factory=list)
    """Entry i: rounds that drafted more than i tokens and kept all before token i."""
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry n: drafts of which exactly n tokens were emitted."""
    num_predicted_tokens: int = 0
    """Those of the drafted tokens that the request itself had predicted."""
    num_accepted_predicted_tokens: int = 0
    """Those of them that were emitted."""
    rounds: int = 0
    """Target forwards the row took part in, plain ones included."""
    num_emitted_tokens: int = 0
    seconds: Seconds = field(default_factory=Seconds)
    lossy: str | None = None
    """A warning where the rule does not keep the target's law."""

    def count(
        self, drafted: int, accepted: int, emitted: int, nodes: int | None = None, is_prediction: bool = False
    ) -> None:
        """One round of one row; of a tree, `drafted` is its depth and `nodes` its size."""
        self.rounds += 1
        self.num_emitted_tokens += emitted
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted if nodes is None else nodes
        self.num_accepted_tokens += accepted
        if is_prediction:
            self.num_predicted_tokens += drafted
            self.num_accepted_predicted_tokens += accepted
        _bump(self.num_draft_tokens_per_pos, range(drafted))
        _bump(
            self.num_reached_tokens_per_pos, range(min(drafted, emitted)), at_least=drafted
        )  # after a stop nothing is
        _bump(self.num_accepted_tokens_per_pos, range(accepted), at_least=drafted)
        _bump(self.acceptance_histogram, (accepted,), at_least=drafted + 1)

    @classmethod
    def total(cls, parts: list[Stats]) -> Stats:
        """Counts added up. Seconds are the batch's and not added: the caller sets them."""
        total = cls()
        for part in parts:
            for name in COUNTS:
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for name in COUNTS_PER_PLACE:
                _add(getattr(total, name), getattr(part, name))
            total.lossy = total.lossy or part.lossy
        return total

    def plus(self, other: Stats) -> Stats:
        """Two runs one after the other: counts and seconds added."""
        return replace(Stats.total([self, other]), seconds=self.seconds + other.seconds)

    @property
    def tokens_per_round(self) -> float:
        """Tokens gained per target forward, the correction or bonus included."""
        return self.num_emitted_tokens / self.rounds if self.rounds else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, over rounds that drafted (vLLM's definition)."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, the fraction of proposed tokens that were kept."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_chen(self) -> float:
        """Chen et al. divide by K + 1: the share of a round's possible tokens that the draft supplied."""
        possible = self.num_draft_tokens + self.num_drafts
        return self.num_accepted_tokens / possible if possible else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Leviathan's alpha by position: kept / reached, where a position is reached if all before it were kept."""
        counts = zip(self.num_accepted_tokens_per_pos, self.num_reached_tokens_per_pos, strict=True)
        return [kept / reached if reached else 0.0 for kept, reached in counts]

    def as_dict(self) -> dict[str, Any]:
        """Counts and the rates derived from them, ready for JSON."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "seconds"}
        seconds = {f"{name}_seconds": value for name, value in asdict(self.seconds).items()}
        return (
            counts
            | seconds
            | {
                "tokens_per_round": self.tokens_per_round,
                "mean_acceptance_length": self.mean_acceptance_length,
                "draft_acceptance_rate": self.acceptance_rate,
                "acceptance_by_position": self.acceptance_by_position,
            }
        )

    @property
    def brief(self) -> str:
        """Counts and rates in a few words."""
        accepted = f"{self.acceptance_rate:.0%} of {self.num_draft_tokens} drafted accepted"
        lossy = ", LOSSY" if self.lossy else ""
        return f"{self.num_emitted_tokens} tokens, {self.tokens_per_round:.2f} a round, {accepted}{lossy}"

    def __repr__(self) -> str:
        return f"Stats({self.brief})"

    def __str__(self) -> str:
        by_position = " ".join(f"{rate:.2f}" for rate in self.acceptance_by_position) or "-"
        phases = {"drafting": self.seconds.draft, "scoring": self.seconds.score, "verifying": self.seconds.verify}
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in phases.items())
        return (
            f"{self.num_emitted_tokens} tokens in {self.rounds} rounds ({self.tokens_per_round:.2f} a round), accepted "
            f"{self.num_accepted_tokens} of {self.num_draft_tokens} drafted ({self.acceptance_rate:.0%}), by position "
            f"{by_position}; {seconds}{f'; {self.lossy}' if self.lossy else ''}"
        )


def _bump(counts: list[int], entries: range | tuple[int, ...], at_least: int = 0) -> None:
    need = max([at_least, *(entry + 1 for entry in entries)], default=0)
    counts.extend([0] * (need - len(counts)))
    for entry in entries:
        counts[entry] += 1


def _add(total: list[int], part: list[int]) -> None:
    total.extend([0] * (len(part) - len(total)))
    for i, count in enumerate(part):
        total[i] += count
