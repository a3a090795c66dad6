"""What a plan is asked to find out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forerun.arguments import at_least
from forerun.errors import InvalidArgument

SHORTEST = 4  # tokens of a text: the prompt's pass and the round before the first that is timed bring up to three
LADDER = (1, 2, 4, 8, 16, 32)  # lengths whose acceptance is counted; those between follow from their neighbours


class CheckedLengths(StrEnum):
    """Which draft lengths are run to check the prediction."""

    NEAR = "near"  # plain decoding, and those around the predicted best
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How much is measured."""

    max_length: int = 8
    """The longest draft that is considered."""
    batch_sizes: tuple[int, ...] = (1,)
    """Sequences decoded at once."""
    temperatures: tuple[float, ...] = (0.0,)
    """Acceptance differs between them."""
    contexts: tuple[int, ...] = ()
    """Also time rounds behind so many tokens of context."""
    max_new_tokens: int = 40
    """Tokens decoded from each prompt; end tokens are ignored."""
    repeats: int = 6
    """Rounds of each draft length that are timed."""
    check: CheckedLengths = CheckedLengths.NEAR
    """Run draft lengths near the predicted best, all of them, or none, to see whether the prediction holds."""
    check_prompts: int | None = None
    """Check with the first N prompts only, to save time; few of them add their own peculiarities to the error."""
    seed: int = 0
    """For sampling."""

    def __post_init__(self) -> None:
        at_least(self, 1, "max_length", "repeats", "batch_sizes")
        at_least(self, 0, "temperatures", remedy="0 is greedy")
        at_least(self, 0, "seed")
        if self.max_length > LADDER[-1]:
            raise InvalidArgument(f"max_length={self.max_length}: drafts beyond {LADDER[-1]} tokens are not planned")
        shortest = max(SHORTEST, 2 * self.max_length)
        if self.max_new_tokens < shortest:
            raise InvalidArgument(
                f"max_new_tokens={self.max_new_tokens}: drafts of {self.max_length} need texts of at least "
                f"{shortest} tokens to be counted in"
            )
        if self.check_prompts is not None and self.check_prompts < max(self.batch_sizes, default=1):
            raise InvalidArgument(f"check_prompts={self.check_prompts}: must fill a batch of {max(self.batch_sizes)}")
        if self.contexts and min(self.contexts) < 2:
            raise InvalidArgument(f"contexts={self.contexts}: each must be at least 2 tokens")

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(range(1, self.max_length + 1))

    @property
    def counted(self) -> tuple[int, ...]:
        """The rungs up to the longest draft, and that one."""
        return (*(rung for rung in LADDER if rung < self.max_length), self.max_length)
