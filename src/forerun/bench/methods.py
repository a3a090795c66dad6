"""What is compared: each method decodes a batch of prompts greedily or by sampling, and says how long it took."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.decoder import SpeculativeDecoder
from forerun.drafters import DraftModel, RandomDraft
from forerun.drafters.base import Drafter
from forerun.drafters.named import is_draft_model
from forerun.errors import InvalidArgument
from forerun.measure import reference
from forerun.measure.memory import peak_of_script
from forerun.measure.timing import timed
from forerun.models.sharded import is_sharded
from forerun.policy import CostModel

Prompts = Sequence[Sequence[int]]

BASELINE = "generate"
LOOKUP_TOKENS = 10  # transformers' own default for the length of a looked-up draft
LIBRARIES_ALONE = "import forerun.decoder, transformers"
DECODER_ALONE = """
import json, sys, forerun, forerun.loading
loading, drafter, kernels = json.loads(sys.argv[1])
model, tokenizer = forerun.loading.load_model(**loading)
decoder = forerun.SpeculativeDecoder(model, drafter, tokenizer=tokenizer, kernels=kernels)
decoder.generate("A short story: once upon a time", max_new_tokens=32)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one call made."""

    tokens: tuple[tuple[int, ...], ...]  # new ones, row by row
    seconds: float
    rounds: int  # target forwards times the rows they served
    drafted: int | None = None
    accepted: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


class Method(Protocol):
    """A way to decode."""

    name: str
    title: str
    target: Any  # the model whose greedy text it should give; None of another program, which rounds elsewhere

    def refusal(self, batch: int) -> str | None:
        """Why it cannot run that many rows; None where it can."""
        ...

    def run(self, prompts: Prompts, max_new_tokens: int) -> Run:
        """Decode exactly `max_new_tokens` for each prompt."""
        ...

    def memory(self) -> int | None:
        """Bytes that a process of its own takes at most to load the model and decode; None where nobody knows."""
        ...


@dataclass(frozen=True, slots=True)
class Bench:
    """What all methods share."""

    target: Any
    tokenizer: Any
    temperature: float
    seed: int
    draft: Any = None
    draft_tokenizer: Any = None
    kernels: str | None = None  # None: as $FORERUN_KERNELS says
    rule: str = "token"  # of Forerun's methods
    loading: Mapping[str, Any] | None = None  # keywords of `load_model` that another process makes the target with
    drafter: Drafter | None = None  # of forerun-draft, instead of the draft model ...
    drafter_name: str | None = None  # ... and what it is called

    @property
    def pad(self) -> int:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return 0 if pad is None else int(pad)

    def inputs(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """Ids and mask, padded on the left."""
        width = max(map(len, prompts))
        ids = [[self.pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self.target.device), torch.tensor(mask, device=self.target.device)


class WithTransformers:
    """`model.generate`, plain or with one of transformers' own ways to speculate."""

    def __init__(self, name: str, title: str, bench: Bench, *, single: bool = False, **options: Any) -> None:
        self.name, self.title, self.bench, self.target = name, title, bench, bench.target
        self.single, self.options = single, options

    def refusal(self, batch: int) -> str | None:
        if is_sharded(self.target) and not is_sharded(self.options.get("assistant", self.target)):
            return "all ranks run it together, and the draft model is whole on rank 0: --draft-split on splits it"
        return "transformers speculates for one sequence at a time" if self.single and batch > 1 else None

    def run(self, prompts: Prompts, max_new_tokens: int) -> Run:
        ids, mask = self.bench.inputs(prompts)
        with _count_forwards(self.bench.target) as forwards:
            out, seconds = timed(ids.device, lambda: self._generate(ids, mask, max_new_tokens))
        tokens = tuple(tuple(row) for row in out[:, ids.shape[1] :].tolist())
        return Run(tokens, seconds, rounds=forwards[0] * len(prompts))

    def memory(self) -> int | None:
        return None

    def _generate(self, ids: Tensor, mask: Tensor, max_new_tokens: int) -> Tensor:
        settings = {"max_new_tokens": max_new_tokens, "pad_token_id": self.bench.pad, **self.options}
        return reference.generate(self.target, ids, mask, **settings, **self._sampling())

    def _sampling(self) -> dict[str, Any]:
        if self.bench.temperature == 0:
            return {"do_sample": False}
        sampled = {"do_sample": True, "temperature": self.bench.temperature, "top_k": 0, "top_p": 1.0}
        return {"seed": self.bench.seed, **sampled}


class WithForerun:
    """A `SpeculativeDecoder` that lives as long as the comparison, as a user's would: its policy goes on learning."""

    def __init__(self, name: str, title: str, bench: Bench, drafter: Drafter | str | None) -> None:
        self.decoder = SpeculativeDecoder(
            bench.target,
            drafter,
            policy=CostModel(),  # in sampled calls too, which "auto" would measure nothing in: they have a seed
            tokenizer=bench.tokenizer,
            kernels=bench.kernels,
            rule=bench.rule,
        )
        lossy = drafter is not None and self.decoder.engine.lossy is not None
        self.name, self.title, self.bench = name, f"{title}, LOSSY" if lossy else title, bench
        self.target, self.drafter = bench.target, drafter

    def refusal(self, batch: int) -> str | None:
        return None

    def run(self, prompts: Prompts, max_new_tokens: int) -> Run:
        ids, mask = self.bench.inputs(prompts)
        out, seconds = timed(ids.device, lambda: self._generate(ids, mask, max_new_tokens))
        stats = out.stats
        return Run(
            tokens=tuple(tuple(row) for row in out.new_tokens),
            seconds=seconds,
            rounds=stats.rounds,
            drafted=stats.num_draft_tokens,
            accepted=stats.num_accepted_tokens,
            phases={name: getattr(stats.seconds, name) for name in ("prefill", "draft", "score", "verify")},
        )

    def memory(self) -> int | None:
        if self.bench.loading is None or not isinstance(self.drafter, str | None):
            return None
        asked = json.dumps([dict(self.bench.loading), self.drafter, self.bench.kernels])
        return peak_of_script(DECODER_ALONE, asked)

    def _generate(self, ids: Tensor, mask: Tensor, max_new_tokens: int) -> Any:
        bench = self.bench
        return self.decoder.generate(
            ids, mask, max_new_tokens=max_new_tokens, temperature=bench.temperature, seed=bench.seed, eos_token_id=[]
        )


def _with_draft(bench: Bench) -> Method:
    if bench.drafter is not None:
        return WithForerun("forerun-draft", f"Forerun {bench.drafter_name}", bench, bench.drafter)
    draft = DraftModel(bench.draft, tokenizer=bench.draft_tokenizer)
    return WithForerun("forerun-draft", "Forerun draft model", bench, draft)


# In the order they take turns; the baseline leads.
METHODS: dict[str, Callable[[Bench], Method]] = {
    BASELINE: lambda bench: WithTransformers(BASELINE, "model.generate", bench),
    "lookup": lambda bench: WithTransformers(
        "lookup", "transformers prompt lookup", bench, single=True, prompt_lookup_num_tokens=LOOKUP_TOKENS
    ),
    "assisted": lambda bench: WithTransformers(
        "assisted", "transformers assisted", bench, single=True, assistant=bench.draft
    ),
    "forerun-plain": lambda bench: WithForerun("forerun-plain", "Forerun plain", bench, None),
    "forerun": lambda bench: WithForerun("forerun", "Forerun", bench, "auto"),
    "forerun-draft": _with_draft,
    "forerun-random": lambda bench: WithForerun("forerun-random", "Forerun random drafts", bench, RandomDraft()),
}
NEED_DRAFT = frozenset({"assisted", "forerun-draft"})
BESIDE_PEER = ("forerun-plain", "forerun", "forerun-draft")
"""What is compared with another program, unless more is asked for: transformers is far behind it on a CPU."""


def default_methods(draft: str | None, peer: Sequence[str] = ()) -> tuple[str, ...]:
    """`draft` is a drafter's name. `peer` names the methods of another program, which then take the place of
    transformers'."""
    ours = BESIDE_PEER if peer else METHODS
    return (*peer, *(name for name in ours if _lacks(name, draft) is None))


def check_methods(names: Sequence[str], draft: str | None, peer: Sequence[str] = ()) -> tuple[str, ...]:
    """Known ones, in the order they take turns; the baseline is always among them, since ratios need it."""
    known = (*peer, *METHODS)
    for name in names:
        if name not in known:
            raise InvalidArgument(f"no method {name!r}; there are: {', '.join(known)}")
        if (missing := _lacks(name, draft)) is not None:
            raise InvalidArgument(f"method {name!r} needs {missing}")
    return tuple(name for place, name in enumerate(known) if place == 0 or name in names)


def _lacks(name: str, draft: str | None) -> str | None:
    """What a method would need, and what to do; None where it has all."""
    if name not in NEED_DRAFT:
        return None
    if draft is None:
        return f"{'a draft model' if name == 'assisted' else 'a drafter'}: give one with --draft"
    if name == "assisted" and not is_draft_model(draft):
        return f"a draft model, which {draft!r} is not: leave it out, or give a model with --draft"
    return None


def rounded_methods(bench: Bench, scheme: str) -> list[Method]:
    """Forerun with weights that were rounded while they were loaded, without drafts and with its defaults."""
    title = f"Forerun {scheme}"
    return [
        WithForerun(f"forerun-{scheme}-plain", f"{title} plain", bench, None),
        WithForerun(f"forerun-{scheme}", title, bench, "auto"),
    ]


@contextmanager
def same_law(*models: Any) -> Iterator[None]:
    """No end token, and none of the hidden defaults a checkpoint brings: every method has the same task.

    With them transformers would sample from another law than it was asked for, and texts would differ in length.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with reference.neutral_defaults(*(model for model in models if model is not None), kept=()):
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _count_forwards(model: Any) -> Iterator[list[int]]:
    """How often `model` is called; transformers does not say."""
    count = [0]

    def add(*_: Any) -> None:
        count[0] += 1

    handle = model.register_forward_hook(add)
    try:
        yield count
    finally:
        handle.remove()
