"""transformers' own plain and assisted generation of the same pair, in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.decode.calls import Prompt
from forerun.bench.methods import Bench, assisted, plain_generate, same_law

WARM = 3  # tokens


@dataclass(frozen=True, slots=True)
class Peer:
    """One call, reading the prompt included."""

    title: str
    batch: int
    tokens: int  # new ones of each row
    seconds: float
    target_passes: int

    @property
    def seconds_a_token(self) -> float:
        """Of a row: not divided by the batch."""
        return self.seconds / self.tokens


def measure_peers(
    target: Any, draft: Any, batches: Sequence[Sequence[Prompt]], tokens: int, seed: int
) -> Iterator[Peer]:
    """Plainly for every batch, assisted where there is one row: transformers takes no more."""
    bench = Bench(target, None, 1.0, seed, draft=draft)
    with same_law(target, draft):
        for prompts in batches:
            for method in (plain_generate(bench), assisted(bench)):
                if method.refusal(len(prompts)) is None:
                    method.run(prompts, WARM)
                    made = method.run(prompts, tokens)
                    yield Peer(method.title, len(prompts), tokens, made.seconds, made.rounds // len(prompts))
