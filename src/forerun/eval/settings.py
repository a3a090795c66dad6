"""How everything is decoded and scored. What changes an answer is part of a run's identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from forerun.arguments import above, at_least
from forerun.errors import InvalidArgument
from forerun.eval.sandbox.run import ProgramLimits

REPORTING = ("confidence", "k")
"""Fields that change how answers are summed up, not the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """One evaluation, the tasks aside."""

    model: str = "embedded"
    draft: str = "auto"
    policy: str = "auto"
    rule: str = "token"
    temperature: float = 0.0
    """0 is greedy: then texts are compared token for token, too."""
    top_p: float | None = None
    """Only the likeliest tokens up to this mass."""
    top_k: int | None = None
    """Only the K likeliest tokens."""
    seed: int = 0
    """Of sampled answers."""
    limit: int | None = 100
    """Examples of each task, spread evenly over its file."""
    batch_size: int | None = None
    """Sequences decoded together."""
    num_sequences: int = 1
    """Answers to each prompt; more than one gives pass@k and the measures of a service (Pass@First ...)."""
    max_time: float | None = None
    """Time budget of each call in seconds; answers that are not finished then do not count as finished."""
    max_new_tokens: int | None = None
    """Of an answer."""
    window: int = 1024
    """Tokens of a window of WikiText; the first half is context."""
    code_seconds: float = 5.0
    """Seconds for each generated program to run."""
    code_memory_mib: int = 1024
    """Memory of each generated program."""
    k: tuple[int, ...] = ()
    """For pass@k."""
    confidence: float = 0.95
    """Of the intervals."""

    def __post_init__(self) -> None:
        at_least(self, 1, "limit", "batch_size", "num_sequences", "max_new_tokens", "code_memory_mib")
        above(self, 0, "max_time", "code_seconds")
        at_least(self, 0, "seed")
        at_least(self, 0, "temperature", remedy="use 0 for greedy decoding")
        at_least(self, 4, "window")
        if not 0 < self.confidence < 1:
            raise InvalidArgument(f"confidence={self.confidence}: must be between 0 and 1, such as 0.95")
        if self.num_sequences > 1 and self.temperature == 0:
            raise InvalidArgument(
                f"num_sequences={self.num_sequences} at temperature 0 would all be the same; give --temperature 0.8 "
                "or another above 0"
            )
        for name, off in (("top_p", 1), ("top_k", 0)):
            value = getattr(self, name)
            if self.temperature == 0 and value not in (None, off):
                raise InvalidArgument(
                    f"{name}={value} says nothing of greedy text, which temperature 0 asks for; give -t 1 or another "
                    "temperature above 0, or leave it out"
                )
        if any(not 1 <= k <= self.num_sequences for k in self.k):
            raise InvalidArgument(f"k={list(self.k)}: pass@k needs 1 <= k <= num_sequences={self.num_sequences}")

    @property
    def prompts_per_call(self) -> int:
        if self.batch_size is None:
            rows = 8 if self.max_time is None else self.num_sequences
        else:
            rows = self.batch_size
        return max(1, rows // self.num_sequences)

    @property
    def ks(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.k or (1, self.num_sequences))))

    @property
    def code_limits(self) -> ProgramLimits:
        return ProgramLimits(seconds=self.code_seconds, memory_mib=self.code_memory_mib)

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs must share for their answers to belong together; `pair_identity` adds how models are run."""
        return {name: value for name, value in asdict(self).items() if name not in REPORTING}
