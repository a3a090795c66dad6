"""The pairs of target and drafters that the tables are made on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.papers.common import Setup
from benchmarks.papers.tasks import Task, corpus, find_task, random_task
from forerun import SpeculativeDecoder, drafts
from forerun.drafters import DraftModel, EarlyExit, NgramTable, PromptLookup, from_folder
from forerun.drafters.base import Drafter
from forerun.errors import InvalidArgument
from forerun.measure.provenance import without_folders

EMBEDDED, SYNTHETIC, TINY, OWN = "embedded", "synthetic", "tiny", "own"
SYNTHETIC_NAMES = {SYNTHETIC: "synthetic:6.7b+0.33b@0.87", TINY: "synthetic:tiny+mini@0.87"}
PAIRS = (EMBEDDED, *SYNTHETIC_NAMES)
CONTINUATIONS = 1024
"""That many continuations of a context: the papers' n-grams have all, Forerun's own tables keep eight."""
EARLY_LAYERS = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and drafters for it; the first one is the main one."""

    name: str
    title: str
    target: Any
    tokenizer: Any  # None where the models speak no language
    drafters: Mapping[str, Callable[[], Drafter]]
    draft_model: Any = None
    about: Mapping[str, Any] = field(default_factory=dict)  # for the record

    @property
    def device(self) -> torch.device:
        device: torch.device = self.target.device
        return device

    @property
    def main(self) -> str:
        return next(iter(self.drafters))

    def task(self, name: str, count: int, seed: int = 0) -> Task:
        if self.tokenizer is None:
            return random_task(name, self.target.config.vocab_size, count, seed=seed)
        return find_task(name, self.tokenizer, count, seed)

    def decoder(self, drafter: str | None, policy: Any = "auto", **options: Any) -> SpeculativeDecoder:
        """A fresh one; None decodes plainly."""
        chosen = None if drafter is None else self.drafters[drafter]()
        decoder = SpeculativeDecoder(self.target, chosen, policy=policy, tokenizer=self.tokenizer, **options)
        if self.device.type == "cuda":  # else drafting would seem free, and verifying would pay for everything
            decoder.engine.clock = lambda: _clock(self.device)
        return decoder


def open_pair(setup: Setup) -> Pair:
    if setup.target is not None:
        return users_pair(setup)
    if setup.pair == EMBEDDED:
        return embedded(setup)
    if setup.pair in SYNTHETIC_NAMES:
        return synthetic(setup)
    raise InvalidArgument(f"pair={setup.pair!r}: choose one of {', '.join(PAIRS)}")


def embedded(setup: Setup) -> Pair:
    """The language model that comes with Forerun, its trained head, and the drafters that need no training."""
    from forerun.loading import load_model

    target, tokenizer = load_model("embedded", device=setup.device or "cpu")
    folder = drafts.for_target(target)
    assert folder is not None
    vocab = target.config.vocab_size
    source, texts = corpus(tokenizer)
    tables = {order: _count(texts, order, vocab) for order in (1, 2)}
    return Pair(
        EMBEDDED,
        "SmolLM2-135M-Instruct",
        target,
        tokenizer,
        {
            "feature head": lambda: from_folder(folder),
            "prompt lookup": PromptLookup,
            "bigram": lambda: tables[2],
            "unigram": lambda: tables[1],
            f"first {EARLY_LAYERS} of 30 layers": lambda: EarlyExit(EARLY_LAYERS),
        },
        about={"model": "SmolLM2-135M-Instruct", "n-grams counted in": source},
    )


def users_pair(setup: Setup) -> Pair:
    """A user's own target, with a draft model where one is named and the drafters that need none."""
    from forerun.loading import load_model

    assert setup.target is not None
    target, tokenizer = load_model(setup.target, device=setup.device)
    source, texts = corpus(tokenizer)
    tables = {order: _count(texts, order, target.config.vocab_size) for order in (1, 2)}
    drafters: dict[str, Callable[[], Drafter]] = {
        "prompt lookup": PromptLookup,
        "bigram": lambda: tables[2],
        "unigram": lambda: tables[1],
    }
    draft = None
    if setup.draft is not None:
        draft, draft_tokenizer = load_model(setup.draft, device=setup.device)
        drafters = {"draft model": lambda: DraftModel(draft, tokenizer=draft_tokenizer), **drafters}
    names = without_folders(setup.target), setup.draft and without_folders(setup.draft)
    about = {"model": names[0], "draft model": names[1], "n-grams counted in": source}
    return Pair(setup.pair, names[0], target, tokenizer, drafters, draft, about)


def synthetic(setup: Setup) -> Pair:
    """Models of full size and cost that say nothing, drafted for with a known acceptance."""
    from forerun.bench.synthetic import build_pair

    name = SYNTHETIC_NAMES[setup.pair]
    pair = build_pair(name, device=setup.device, seed=setup.seed)
    return pair_of_models(setup.pair, name, pair.target, pair.draft, {"model": name, "alpha at T = 1": pair.alpha})


def pair_of_models(name: str, title: str, target: Any, draft: Any, about: Mapping[str, Any]) -> Pair:
    return Pair(name, title, target, None, {"draft model": lambda: DraftModel(draft)}, draft, about)


def _count(texts: Sequence[Sequence[int]], order: int, vocab_size: int) -> NgramTable:
    return NgramTable.count(texts, order, vocab_size=vocab_size, max_continuations=CONTINUATIONS)


def _clock(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()
