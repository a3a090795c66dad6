"""Leviathan's alpha of a drafter along a text of the target: the mean of sum min(p, q), without drawing anything.

Both laws are those after standardised sampling, so at temperature 0 alpha is how often the likeliest tokens agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.papers.pairs import Pair
from forerun.config import SamplingParams
from forerun.drafters import DraftModel, EarlyExit, FeatureHead
from forerun.drafters.early_exit import shallow
from forerun.math.theory import acceptance
from forerun.types import DraftContext, Drafter, LawParams


@dataclass(frozen=True, slots=True)
class Text:
    """What the target said to a prompt."""

    tokens: tuple[int, ...]
    prompt_length: int

    @property
    def places(self) -> range:
        """Indices of the tokens that the target chose."""
        return range(self.prompt_length, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Alpha:
    """Over all positions of some texts."""

    mean: float
    error: float  # standard error of the mean, positions taken as independent
    positions: int
    spoke: float  # share of the positions at which the drafter had anything to say; `mean` is over those


def alpha(pair: Pair, drafter: Drafter, texts: Sequence[Text], temperature: float) -> Alpha:
    """Of the first token of a draft, at every position of the texts."""
    overlaps = torch.cat([overlap(pair, drafter, text, temperature) for text in texts])
    heard = overlaps[~overlaps.isnan()].double()
    if not len(heard):
        return Alpha(0.0, 0.0, len(overlaps), 0.0)
    error = float(heard.std()) / len(heard) ** 0.5 if len(heard) > 1 else 0.0
    return Alpha(float(heard.mean()), error, len(overlaps), len(heard) / len(overlaps))


@torch.inference_mode()
def overlap(pair: Pair, drafter: Drafter, text: Text, temperature: float) -> Tensor:
    """[n] sum min(p, q) at each place, NaN where nothing is drafted."""
    ids = torch.tensor([text.tokens], device=pair.device)
    before = slice(text.prompt_length - 1, len(text.tokens) - 1)  # the logits after a token are of the next one
    p = law(pair.target(ids).logits[0, before], temperature)
    if isinstance(drafter, DraftModel):
        return acceptance(p, law(pair.draft_model(ids).logits[0, before, : p.shape[-1]], temperature))
    if isinstance(drafter, EarlyExit):
        return acceptance(p, law(shallow(pair.target, drafter.num_layers)(ids).logits[0, before], temperature))
    if isinstance(drafter, FeatureHead):
        return acceptance(p, head_law(pair.target, drafter, ids, temperature)[before])
    return torch.stack([_asked(drafter, p[i], text.tokens[:place], temperature) for i, place in enumerate(text.places)])


def law(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities [.., V] of standardised sampling."""
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    return (logits.float() / temperature).softmax(dim=-1)


def head_law(target: Any, drafter: FeatureHead, ids: Tensor, temperature: float) -> Tensor:
    """[L, V] entry i is the law of token i + 1, from the target's true features of tokens up to i - 1; entry 0 is 0."""
    head, chosen = drafter.trunk.head, drafter.trunk.ids
    features = target.base_model(ids, use_cache=False).last_hidden_state[:, :-1]
    pairs = head.inputs(target.get_input_embeddings()(ids[:, 1:]), features)
    made = head.body(inputs_embeds=pairs, use_cache=False).last_hidden_state[0]
    weight = target.get_output_embeddings().weight
    said = law(made @ (weight if chosen is None else weight[chosen]).T, temperature)
    whole = said.new_zeros(ids.shape[1], weight.shape[0])
    columns = torch.arange(weight.shape[0], device=ids.device) if chosen is None else chosen
    whole[1:, columns] = said
    return whole


def _asked(drafter: Drafter, p: Tensor, history: Sequence[int], temperature: float) -> Tensor:
    """Of a drafter that answers at once: what it says after `history`, held against p [V]."""
    params = LawParams.stack([SamplingParams(temperature=temperature)], p.device)
    uniforms = torch.zeros(1, 1, dtype=torch.float64, device=p.device)
    context = DraftContext((0,), (list(history),), (1,), params, uniforms, (None,), p.shape[-1], p.device)
    draft = drafter.propose(context)
    if not int(draft.lengths[0]):
        return p.new_tensor(torch.nan)
    q = draft.law.at(torch.zeros(1, dtype=torch.int64, device=p.device))[0]
    return acceptance(p, q.to(p.dtype))
