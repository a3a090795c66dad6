"""Steps of a few tokens behind a filled cache, by transformers itself, by Forerun's scorer without and with kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from forerun.config import Kernels
from forerun.loading.quantise import SCHEMES
from forerun.models.scorer import Scorer

TRANSFORMERS, MODULES, KERNELS, STORED = "transformers", "modules", "kernels", "stored"
BASELINES = (TRANSFORMERS, MODULES)
NARROW = (STORED, *SCHEMES)
TITLES = {
    TRANSFORMERS: "transformers",
    MODULES: "Forerun, kernels off",
    KERNELS: "Forerun, kernels {use}",
    STORED: "weights as stored",
    **{scheme: f"quantised, {scheme}" for scheme in SCHEMES},
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is timed."""

    name: str
    model: PreTrainedModel
    headless: bool = False  # a draft head's body: embeddings in, hidden states out
    narrow: Mapping[str, PreTrainedModel] = field(default_factory=dict)  # the same with narrow weights, by method


@dataclass(frozen=True, slots=True)
class Grid:
    """Which steps are timed."""

    batches: tuple[int, ...] = (1, 4, 8)
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16)  # new ones of each row
    past: int = 256  # keys each row has in its cache
    repeats: int = 7
    last_only: bool = False  # logits of each row's last token alone, as when a prompt is read


class Method(Protocol):
    """A method to run a model."""

    def step(self, batch: int, tokens: int) -> float:
        """Seconds to score `tokens` new tokens of each of `batch` rows, which are forgotten again afterwards."""
        ...


class Inputs:
    """The same random tokens (or embeddings, for a body without any) for every method."""

    def __init__(self, subject: Subject, grid: Grid) -> None:
        config = subject.model.config.get_text_config(decoder=True)
        random = torch.Generator().manual_seed(0)
        shape = (max(grid.batches), grid.past + max(grid.tokens))
        self.headless, self.past, self.last_only = subject.headless, grid.past, grid.last_only
        self.all = (
            torch.randn(*shape, config.hidden_size, generator=random)
            if subject.headless
            else torch.randint(config.vocab_size, shape, generator=random)
        )

    def old(self, batch: int) -> Tensor:
        return self.all[:batch, : self.past]

    def new(self, batch: int, tokens: int) -> Tensor:
        return self.all[:batch, self.past : self.past + tokens]


class Transformers:
    """The model's own forward, rows of equal length, its own cache."""

    def __init__(self, subject: Subject, inputs: Inputs) -> None:
        self.model, self.inputs = subject.model, inputs
        self._name = "inputs_embeds" if subject.headless else "input_ids"
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def step(self, batch: int, tokens: int) -> float:
        if batch not in self._caches:
            self._caches[batch] = DynamicCache()
            if self.inputs.past:
                self._run(self.inputs.old(batch), self._caches[batch])
        new = self.inputs.new(batch, tokens).contiguous()
        started = time.perf_counter()
        self._run(new, self._caches[batch])
        taken = time.perf_counter() - started
        self._caches[batch].crop(-tokens)
        return taken

    def _run(self, new: Tensor, cache: DynamicCache) -> Any:
        some = {"logits_to_keep": 1} if self.inputs.last_only and not self.inputs.headless else {}
        return self.model(**{self._name: new}, past_key_values=cache, use_cache=True, **some)


class Forerun:
    """The scorer that the decoder uses, rows packed, the ragged cache."""

    def __init__(self, subject: Subject, inputs: Inputs, use: Kernels) -> None:
        self.inputs = inputs
        self.scorer = Scorer(subject.model, headless=subject.headless, use=use)
        rows = range(len(inputs.all))
        for row in rows:
            self.scorer.admit(row)
        old = inputs.old(len(rows))
        if inputs.past:
            (self._call(rows, old) if inputs.headless else partial(self.scorer.feed, rows, old.tolist()))()

    def step(self, batch: int, tokens: int) -> float:
        rows = range(batch)
        call = self._call(rows, self.inputs.new(batch, tokens))
        started = time.perf_counter()
        call()
        taken = time.perf_counter() - started
        self.scorer.rewind(rows, [self.inputs.past] * batch)
        return taken

    def _call(self, rows: Sequence[int], new: Tensor) -> Callable[[], object]:
        if self.inputs.headless:
            return partial(self.scorer.run, rows, [new.shape[1]] * len(rows), new.flatten(0, 1))
        return partial(self.scorer.score_last if self.inputs.last_only else self.scorer.score, rows, new.tolist())


def methods(subject: Subject, grid: Grid, use: Kernels) -> dict[str, Method]:
    """All that take turns, the baseline first."""
    inputs = Inputs(subject, grid)
    by_modules: dict[str, Method] = {
        TRANSFORMERS: Transformers(subject, inputs),
        MODULES: Forerun(subject, inputs, Kernels.OFF),
    }
    if use is Kernels.OFF:
        return by_modules
    narrow = {name: Forerun(replace(subject, model=model), inputs, use) for name, model in subject.narrow.items()}
    return {**by_modules, KERNELS: Forerun(subject, inputs, use), **narrow}


def sweep(methods: dict[str, Method], grid: Grid, keep: Callable[[str, int, int, float], None]) -> None:
    """Every step once by every method. A call before the timed one wakes this method's threads and fills caches."""
    for batch in grid.batches:
        for tokens in grid.tokens:
            for name, method in methods.items():
                method.step(batch, tokens)
                keep(name, batch, tokens, method.step(batch, tokens))
