"""What is measured: cells, each with the cell it is compared with and the most it may take of that one's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.bench.decode.pair import ModelPair
from forerun.config import SamplingParams
from forerun.drafters import (
    Chain,
    DraftModel,
    EarlyExit,
    FeatureHead,
    NgramTable,
    ParallelHeads,
    PromptLookup,
    RandomDraft,
    Tree,
    with_trees,
)
from forerun.drafters.base import Drafter
from forerun.models.draft_head import DraftHead
from forerun.types import Rule

PLAIN, MODEL, TREE = "no drafts", "draft model", "tree of the draft model"
AUTO_MOST = 1.03  # times the time of a token without drafts that any drafter may take where the policy chooses lengths
DRAFTED = 5  # tokens where lengths are fixed
# Times the tokens where a policy chooses lengths, and where nothing is drafted, which those are held against: what a
# policy tries in its first rounds should not count for more than it does in a text.
LONGER = 3
EXIT_LAYERS, NODES = 4, 24
COUNTED = 64, 4096  # texts of an n-gram table, and tokens of each
NEVER = 2**20  # new tokens before which no text ends: longer than all of them

Request = dict[str, Any]
"""Keywords of a `forerun.engine.Request`, its prompt and numbers apart."""


def favour_even(_: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that only Python can run."""
    scores[:, ::2] += 0.5
    return scores


NOTHING: Request = {}
OPTIONS: dict[str, Request] = {
    "repetition penalty": {"params": {"repetition_penalty": 1.1}},
    "presence penalty": {"params": {"presence_penalty": 0.5}},
    "frequency penalty": {"params": {"frequency_penalty": 0.5}},
    "logit bias": {"params": {"logit_bias": dict.fromkeys(range(5, 500, 5), 1.0)}},
    "min_new_tokens": {"min_new_tokens": NEVER, "stop_ids": frozenset({2})},
    "logprobs=5": {"logprobs": 5},
    "top-p": {"params": {"top_p": 0.9}},
    "python processor": {"processors": (favour_even,)},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to decode one batch."""

    name: str
    drafter: str  # of `drafters`
    policy: int | str = DRAFTED
    rule: Rule = Rule.TOKEN
    batch: int = 1
    context: int = 128  # tokens of each prompt
    option: str = ""  # of `OPTIONS`
    odd_rows: int | None = None  # how many rows of the batch have the option; None: all of them
    base: str = ""  # the cell whose time it is held against
    most: float | None = None  # times that time which it may take
    plain: str = ""  # the cell without drafts whose time a token this one may hardly exceed, whatever `base` is
    per_round: bool = False  # rounds are compared, not tokens
    most_milliseconds: float | None = None  # of a round, on an H200 with the pair of 6.7 billion parameters

    def tokens(self, asked: int) -> int:
        """New tokens of each row, where `asked` are decoded with fixed lengths."""
        return asked * LONGER if self.policy in ("auto", 0) else asked

    @property
    def first_timed(self) -> int:
        """The row from which on tokens are counted: those before it have the option that the others should not feel."""
        return self.odd_rows or 0

    def requests(self) -> list[Request]:
        """One a row."""
        odd = self.batch if self.odd_rows is None else self.odd_rows
        return [OPTIONS[self.option] if self.option and row < odd else NOTHING for row in range(self.batch)]


@dataclass(frozen=True, slots=True)
class Makers:
    """Drafters of a pair by the names that cells give them; each is made when it is first asked for."""

    pair: ModelPair
    _made: dict[str, Drafter | None] = field(default_factory=dict)

    def get(self, name: str) -> Drafter | None:
        if name not in self._made:
            self._made[name] = DRAFTERS[name](self.pair)
        return self._made[name]


def _head(pair: ModelPair, blocks: int) -> DraftHead:
    """Untrained: what a head costs does not depend on what it has learnt."""
    head = DraftHead.for_target(pair.target, 1, blocks)
    return head.to(pair.device, pair.target.dtype).eval().requires_grad_(False)


def _table(pair: ModelPair) -> NgramTable:
    """What a table costs depends on its size, not on how often it is right."""
    return NgramTable.count(pair.prompts(*COUNTED, seed=0), vocab_size=pair.target.config.vocab_size)


DRAFTERS: dict[str, Callable[[ModelPair], Drafter | None]] = {
    PLAIN: lambda pair: None,
    MODEL: lambda pair: DraftModel(pair.draft),
    "lookup": lambda pair: PromptLookup(),
    "random": lambda pair: RandomDraft(),
    "n-gram table": _table,
    "lookup, n-gram table": lambda pair: Chain(PromptLookup(), _table(pair)),
    "lookup, draft model": lambda pair: Chain(PromptLookup(), DraftModel(pair.draft)),
    "feature head": lambda pair: FeatureHead(_head(pair, 0)),
    "parallel heads": lambda pair: ParallelHeads(_head(pair, DRAFTED)),
    "early exit": lambda pair: EarlyExit(min(EXIT_LAYERS, pair.target.config.num_hidden_layers - 1)),
    TREE: lambda pair: Tree(DraftModel(pair.draft), nodes=NODES),
    f"lookup, {TREE}": lambda pair: with_trees(Chain(PromptLookup(), DraftModel(pair.draft)), nodes=NODES),
}
LIMITS = {
    "n-gram table": 4.5,
    "feature head": 5.2,
    "parallel heads": 4.5,
    "early exit": 7.5,
    TREE: 9.0,
}
NEVER_SLOWER = (
    "lookup", "random", "feature head", "parallel heads", "early exit", "n-gram table", "lookup, n-gram table", TREE
)  # fmt: skip
OTHERS_OPTION = "repetition penalty"  # that drafters beside the draft model are measured with, too


def cells(batches: Sequence[int] = (1, 8), contexts: Sequence[int] = (128, 3072)) -> list[Cell]:
    """All of them; those that others are held against come first."""
    return [*_drafters(batches), *_options(batches), *_others_options(), *_rules(), *_mixed(), *_contexts(contexts)]


def _drafters(batches: Sequence[int]) -> list[Cell]:
    drafted = []
    for batch in batches:
        plain, model = f"{PLAIN}, {batch}", f"{MODEL}, auto, {batch}"
        drafted.append(Cell(plain, PLAIN, 0, batch=batch))
        drafted.append(Cell(model, MODEL, "auto", batch=batch, base=plain, most=1.0))
        drafted += [
            Cell(f"{name}, auto, {batch}", name, "auto", batch=batch, base=plain, most=AUTO_MOST)
            for name in NEVER_SLOWER
        ]
        drafted += [
            Cell(f"lookup, {name}, auto, {batch}", f"lookup, {name}", "auto", batch=batch,
                 base=f"{name}, auto, {batch}", most=1.05, plain=plain)
            for name in ((MODEL, TREE) if batch == 1 else (MODEL,))
        ]  # fmt: skip
        drafted += [
            Cell(f"{name}, {DRAFTED} drafted, {batch}", name, batch=batch, base=plain, per_round=True,
                 most_milliseconds=limit if batch == 1 else None)
            for name, limit in LIMITS.items()
        ]  # fmt: skip
    return drafted


def _options(batches: Sequence[int]) -> list[Cell]:
    with_options = []
    for batch in batches:
        base = f"{MODEL}, {DRAFTED} drafted, {batch}"
        with_options.append(Cell(base, MODEL, batch=batch))
        with_options += [
            Cell(f"{name}, {batch}", MODEL, batch=batch, option=name, base=base, most=1.10, per_round=True)
            for name in OPTIONS
            if name != "python processor"
        ]
    return with_options


def _others_options() -> list[Cell]:
    """One option beside other drafters, in one row."""
    lookup, option = "lookup, auto", OTHERS_OPTION
    return [
        Cell(f"{lookup}, {option}, 1", "lookup", "auto", option=option, base=f"{lookup}, 1", most=1.10),
        *(
            Cell(f"{name}, {option}, 1", name, option=option, base=f"{name}, {DRAFTED} drafted, 1", most=1.10,
                 per_round=True)
            for name in ("feature head", TREE)
        ),
    ]  # fmt: skip


def _rules() -> list[Cell]:
    base = f"{MODEL}, {DRAFTED} drafted, 1"
    return [
        Cell(f"rule {rule}, 1", MODEL, rule=rule, base=base, most=1.15, per_round=True)
        for rule in (Rule.BLOCK, Rule.COUPLED)
    ]


def _mixed() -> list[Cell]:
    """One row of eight asks for something; the others, whose tokens are timed, should hardly notice."""
    base = f"{MODEL}, {DRAFTED} drafted, 8"
    return [
        Cell(f"one row of 8: {name}", MODEL, batch=8, option=name, odd_rows=1, base=base, most=most)
        for name, most in (("repetition penalty", 1.10), ("python processor", 1.5))
    ]


def _contexts(contexts: Sequence[int]) -> list[Cell]:
    by_context = []
    for context in contexts[1:]:
        plain = f"{PLAIN}, {context} tokens before"
        by_context.append(Cell(plain, PLAIN, 0, context=context))
        by_context += [
            Cell(f"{name}, {context} tokens before", name, "auto", context=context, base=plain, most=most)
            for name, most in ((MODEL, 1.0), ("lookup", 1.03))
        ]
    return by_context


def sampling(request: Request) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **request.get("params", {})})
