"""Many samples of the whole loop, and the verdict on them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from exactness.recall import RecallingScorer
from forerun.config import SamplingParams
from forerun.drafters import Chain, DraftModel, EarlyExit, NgramTable, PromptLookup, RandomDraft
from forerun.drafters.base import Drafter
from forerun.drafters.early_exit import shallow
from forerun.engine import Engine, Request, RowResult
from forerun.models.scorer import Scorer
from forerun.policy import BassHeuristic, Constant, CostModel, HfHeuristic
from forerun.policy.base import Policy
from forerun.types import BatchView, Draft, RoundOutcome, Rule
from support.finish import finished
from support.markov import count_joint, misfit, toy_pair

ROWS = 256  # rows at once: the fastest shape of a batch of tiny rows
LIMIT = 6.0  # standard deviations of Pearson's statistic
PLAIN = SamplingParams(temperature=1.0)
PROMPT = (1, 2, 0, 1, 2)
RULES = tuple(Rule)


class Clock:
    """Time for policies that measure. It passes when the target scores, unevenly, and hardly at all otherwise."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 0.001
        return self._now

    def spend(self, positions: int) -> None:
        self._now += (1 + positions / ROWS / 8) * self._random.choice((0.5, 1.0, 1.0, 3.0))


class Watched:
    """A policy, and the lengths it asked for."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.asked: set[int] = set()

    def lengths(self, view: BatchView) -> tuple[int, ...]:
        lengths = self.policy.lengths(view)
        self.asked.update(lengths)
        return lengths

    def trim(self, view: BatchView, draft: Draft) -> tuple[int, ...]:
        return self.policy.trim(view, draft)

    def observe(self, outcome: RoundOutcome) -> None:
        self.policy.observe(outcome)


class RecallingDraft(DraftModel):
    """Its scorer remembers, and what it remembers is for every engine."""

    def clone(self) -> Self:
        return self


def draft_model(model: PreTrainedModel, stop_below: float | None = None) -> DraftModel:
    """A draft model behind a scorer that remembers."""
    drafter = RecallingDraft(model, stop_below=stop_below)
    drafter.scorer = RecallingScorer(model)
    return drafter


class RecallingEarlyExit(EarlyExit):
    """An early exit over the remembering target: it writes behind the target's own rows, as the real one does."""

    def bind(self, target: Any, tokenizer: Any = None) -> None:
        self.scorer = RecallingScorer(shallow(target.model, self.num_layers), target.kept)


def random_text(vocab: int, length: int = 400, seed: int = 7) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def counted(vocab: int) -> NgramTable:
    return NgramTable.count([random_text(vocab)], 3, vocab_size=vocab)


DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "model": draft_model,
    "lookup": lambda model: PromptLookup(),
    "ngram": lambda model: counted(model.config.vocab_size),
    "random": lambda model: RandomDraft(),
    "exit": lambda model: RecallingEarlyExit(1),
    "chain": lambda model: Chain(PromptLookup(min_ngram=2), draft_model(model)),
    "doubting": lambda model: draft_model(model, stop_below=0.4),
}
POLICIES: dict[str, Callable[[], Policy]] = {
    "1": lambda: Constant(1),
    "3": lambda: Constant(3),
    "5": lambda: Constant(5),
    "hf": lambda: HfHeuristic(start=2),
    "bass": lambda: BassHeuristic(l0=3),
    "auto": CostModel,
}


@dataclass
class Loop:
    """An engine over a toy pair, ready to be sampled from."""

    drafter: str | Drafter = "model"
    policy: str | Policy = "3"
    rule: Rule = Rule.TOKEN
    vocab: int = 3
    seed: int = 1
    target: Any = None  # a scorer
    compile: bool = True
    engine: Engine = field(init=False)
    watched: Watched = field(init=False)

    def __post_init__(self) -> None:
        target, draft = toy_pair(self.vocab)
        drafter = DRAFTERS[self.drafter](draft) if isinstance(self.drafter, str) else self.drafter
        self.watched = Watched(POLICIES[self.policy]() if isinstance(self.policy, str) else self.policy)
        scorer = self.target or RecallingScorer(target)
        clock = Clock()
        scorer.spend = clock.spend
        # strict: a drafter that fails would leave plain decoding, whose law is right
        self.engine = Engine(
            scorer, drafter, self.watched, rule=self.rule, clock=clock, compile=self.compile, strict=True
        )

    def requests(self, number: int, **asked: Any) -> list[Request]:
        """The same request under `number` ids."""
        first = Request(**{"prompt": PROMPT, "max_new_tokens": 6, "params": PLAIN, "seed": self.seed, **asked})
        return [replace(first, request_id=i) for i in range(number)]

    def run(self, requests: Sequence[Request], rows: int = ROWS) -> list[RowResult]:
        """Results in the order of the requests, `rows` of them in the batch at once."""
        results: list[RowResult] = []
        for start in range(0, len(requests), rows):
            results += finished(self.engine, requests[start : start + rows])
        place = {(r.seed, r.request_id): i for i, r in enumerate(requests)}
        return sorted(results, key=lambda result: place[result.request.seed, result.request.request_id])

    def sample(self, number: int, **asked: Any) -> list[tuple[int, ...]]:
        """New tokens of `number` rows."""
        return [result.tokens for result in self.run(self.requests(number, **asked))]


def loop_on(device: str, drafter: str, policy: str, rule: Rule) -> Loop:
    """A loop over real forward passes, whose kernels are those of the device. Graphs have tests of their own."""
    target, draft = (copy.deepcopy(model).to(device) for model in toy_pair(3))
    made = {"model": lambda: DraftModel(draft), "chain": lambda: Chain(PromptLookup(min_ngram=2), DraftModel(draft))}
    return Loop(made[drafter](), policy, rule, target=Scorer(target), compile=False)


def verdict(samples: Iterable[Sequence[int]], law: Tensor) -> str:
    """Empty where the samples may come from the joint law of their first tokens, else what is wrong."""
    steps, vocab = law.dim(), law.shape[0]
    counts = count_joint(samples, vocab, steps)
    deviation = misfit(counts, law)
    distance = float((counts / counts.sum() - law).abs().sum()) / 2
    allowed = 4 * (law.numel() / float(counts.sum())) ** 0.5
    good = deviation < LIMIT and distance < allowed
    return "" if good else f"misfit {deviation:.1f} (below {LIMIT}), distance {distance:.4f} (below {allowed:.4f})"


def padded(samples: Iterable[Sequence[int]], steps: int, end: int) -> list[list[int]]:
    """Samples that ended early go on with their end token, as an absorbing state of the chain would."""
    return [[*sample, *[end] * (steps - len(sample))] for sample in samples]
