"""What measured text is compared with: the target by plain means, through none of the code under test.

Also the one notion of a tie: two greedy texts may part only where the model's own rounding decides.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from forerun.config import SamplingParams
from forerun.math.laws import warp
from forerun.math.penalties import adjust
from forerun.models.sharded import by_all_ranks, is_sharded
from forerun.types import LawParams

# Of a published configuration what says which tokens there are, not how to draw them.
IDS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids",
)  # fmt: skip
GREEDY = SamplingParams()
BLOCK = 8  # positions of the long forward that the deviation is measured with


@contextmanager
def neutral_defaults(*models: PreTrainedModel, kept: Sequence[str] = IDS) -> Iterator[None]:
    """Without the settings that models were published with, which `model.generate` would apply unasked."""
    published = [model.generation_config for model in models]
    for model, config in zip(models, published, strict=True):
        model.generation_config = GenerationConfig(**{name: getattr(config, name, None) for name in kept})
    try:
        yield
    finally:
        for model, config in zip(models, published, strict=True):
            model.generation_config = config


class Reading:
    """An encoder-decoder model in front of one source, called as a causal model is: with its decoder's tokens."""

    def __init__(self, model: PreTrainedModel, source: Sequence[int]) -> None:
        self.model, self.device, self.dtype = model, model.device, model.dtype
        with torch.inference_mode():
            self.states = model.get_encoder()(input_ids=torch.tensor([list(source)], device=model.device))

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        return self.model(encoder_outputs=self.states, decoder_input_ids=input_ids, **options)


def decoder_start(model: PreTrainedModel) -> int:
    """The token an encoder-decoder model's text begins with."""
    config: Any = model.generation_config
    return int(config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id)


def greedy(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """New tokens of `model.generate`, one prompt, no padding."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with neutral_defaults(model):
        keywords: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
        if model.generation_config.pad_token_id is None:
            keywords["pad_token_id"] = 0  # never met: the batch has one row
        out = generate(model, ids, torch.ones_like(ids), **keywords)
    return [int(token) for token in out[0, len(prompt) :]]


@by_all_ranks
@torch.inference_mode()
def logits_after(model: PreTrainedModel | Reading, tokens: Sequence[int]) -> Tensor:
    """Logits [V] float after `tokens`, by one forward without a cache."""
    ids = torch.tensor([list(tokens)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
    return logits.float().cpu()


def law(logits: Tensor, params: SamplingParams) -> Tensor:
    """The law [V] float64 that logits [V] and sampling parameters make."""
    return warp(logits.double()[None], LawParams.stack([params])).softmax(dim=-1)[0]


def edge(logits: Tensor, params: SamplingParams, deviation: float) -> frozenset[int]:
    """Tokens whose place in a top-k truncation is within rounding."""
    if not params.top_k or params.top_k >= len(logits):
        return frozenset()
    last = logits.topk(params.top_k).values[-1]
    near = ((logits - last).abs() <= 2 * deviation).nonzero().flatten().tolist()
    return frozenset(near) if len(near) > 1 else frozenset()


def slack(deviation: float, temperature: float) -> float:
    """Relative error of a probability whose logits are off by `deviation`."""
    return math.expm1(min(2 * deviation / temperature, 5.0))


@by_all_ranks
@torch.inference_mode()
def deviation(model: PreTrainedModel | Reading, tokens: Sequence[int]) -> float:
    """The model's own rounding: how far logits move between reading tokens one at a time and up to eight at once."""
    ids = torch.tensor([list(tokens)], device=model.device)
    cut = max(ids.shape[1] - BLOCK, 1)
    if cut == ids.shape[1]:
        return 0.0
    together = _continued(model, ids[:, :cut], [ids[:, cut:]])
    singly = _continued(model, ids[:, :cut], list(ids[:, cut:].split(1, dim=1)))
    return float((together - singly).abs().max())


def _continued(model: PreTrainedModel | Reading, start: Tensor, steps: list[Tensor]) -> Tensor:
    cache = model(input_ids=start, use_cache=True).past_key_values
    parts = []
    for step in steps:
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits[0].float())
    return torch.cat(parts)


def generate(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    *,
    assistant: Any = None,
    seed: int | None = None,
    **settings: Any,
) -> Tensor:
    """`model.generate`, drawing from `seed`; of a split model on all ranks, each with the defaults of this one.

    Ranks that drew from numbers of their own would go on with tokens of their own, and sum what belongs to no text.
    """
    if seed is None and settings.get("do_sample") and is_sharded(model):
        seed = secrets.randbits(63)
    configs = model.generation_config, None if assistant is None else assistant.generation_config
    return _generate(model, assistant, configs, ids, mask, seed, settings)


@by_all_ranks
def _generate(
    model: PreTrainedModel,
    assistant: Any,
    configs: tuple[GenerationConfig | None, ...],
    ids: Tensor,
    mask: Tensor,
    seed: int | None,
    settings: dict[str, Any],
) -> Tensor:
    model.generation_config = configs[0]
    if assistant is not None:
        assistant.generation_config = configs[1]
        settings = settings | {"assistant_model": assistant}
    if seed is not None:
        torch.manual_seed(seed)
    out: Tensor = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **settings)
    return out


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two greedy continuations of one prompt part."""

    row: int
    position: int  # index among the new tokens
    ours: int | None  # None where the text has ended
    theirs: int | None
    gap: float | None  # from the best logit to the lower of the two tokens', where there are two
    is_tie: bool  # the gap is within twice the model's own rounding

    @property
    def gap_in_words(self) -> str:
        return "where one has ended" if self.gap is None else f"where the logits lie {self.gap:.2g} apart"


def difference(
    model: PreTrainedModel | Reading,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
    rounding: float | None = None,
    row: int = 0,
    params: SamplingParams = GREEDY,
) -> Difference | None:
    """The first difference of two greedy continuations, judged by plain logits; None where there is none.

    A tie is a place where both tokens are the best one within twice the rounding: each text's logits may be off by
    once. Without a `rounding` it is measured there. `params` may hold penalties and a bias, which move the logits.
    """
    if list(ours) == list(theirs):
        return None
    pairs = enumerate(zip(ours, theirs, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    a, b = (tokens[position] if position < len(tokens) else None for tokens in (ours, theirs))
    if a is None or b is None:
        return Difference(row, position, a, b, None, False)
    history = [*prompt, *theirs[:position]]
    logits = logits_after(model, history)
    if rounding is None:
        rounding = rounding_after(model, history, logits)
    logits = adjust(logits[None], prompt, theirs[:position], [], params)[0]
    gap = float(logits.max() - logits[[a, b]].min())
    return Difference(row, position, a, b, gap, gap <= 2 * rounding)


@by_all_ranks
@torch.inference_mode()
def rounding_after(model: PreTrainedModel | Reading, tokens: Sequence[int], logits: Tensor) -> float:
    """How sure logits [V] after `tokens` are: twice their distance from those of a last token read over a cache, for
    ways to compute them that are not tried, and at least one unit in the last place of the largest."""
    singly = logits
    if len(tokens) > 1:
        ids = torch.tensor([list(tokens)], device=model.device)
        singly = _continued(model, ids[:, :-1], [ids[:, -1:]])[-1].cpu()
    resolution = torch.finfo(model.dtype).eps * float(logits.abs().max())
    return max(2 * float((logits - singly).abs().max()), resolution)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many texts are those they were compared with."""

    identical: int
    ties: int
    different: int

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.identical + other.identical, self.ties + other.ties, self.different + other.different)

    def __str__(self) -> str:
        """For tables. Rows that are not identical part at a tie, or differ, which should not happen."""
        parts = [f"{self.identical} of {self.identical + self.ties + self.different}"]
        parts += [f"{self.ties} ties"] if self.ties else []
        parts += [f"{self.different} DIFFERENT"] if self.different else []
        return ", ".join(parts)


Rows = Sequence[Sequence[int]]


def compare_texts(model: PreTrainedModel | Reading, prompts: Rows, theirs: Rows, ours: Rows) -> Agreement:
    """Greedy texts of two methods, row by row."""
    differences = [difference(model, p, b, a) for p, a, b in zip(prompts, theirs, ours, strict=True)]
    ties = sum(one is not None and one.is_tie for one in differences)
    identical = differences.count(None)
    return Agreement(identical, ties, len(differences) - identical - ties)
