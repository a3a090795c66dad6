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
from forerun.drafters.base import Drafter
from forerun.drafters.early_exit import shallow
from forerun.math.theory import acceptance
from forerun.types import DraftContext, LawParams


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
class Scored:
    """A text with what the target thought of it; made once and held against every drafter."""

    text: Text
    ids: Tensor  # [1, L]
    features: Tensor  # [1, L, H] the target's last hidden states
    logits: Tensor  # [n, V] at the places it chose

    @property
    def before(self) -> slice:
        """Positions whose logits are of the chosen tokens: each one's are of the token after it."""
        return slice(self.text.prompt_length - 1, len(self.text.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Alpha:
    """Over all positions of some texts."""

    mean: float
    error: float  # standard error of the mean, positions taken as independent
    positions: int
    spoke: float  # share of the positions at which the drafter had anything to say; `mean` is over those


@torch.inference_mode()
def score(pair: Pair, text: Text) -> Scored:
    ids = torch.tensor([text.tokens], device=pair.device)
    features = pair.target.base_model(ids, use_cache=False).last_hidden_state
    chosen = features[0, text.prompt_length - 1 : len(text.tokens) - 1]
    return Scored(text, ids, features, pair.target.get_output_embeddings()(chosen))


def alpha(pair: Pair, drafter: Drafter, scored: Sequence[Scored], temperature: float) -> Alpha:
    """Of the first token of a draft, at every place of the texts that the target chose."""
    overlaps = torch.cat([overlap(pair, drafter, text, temperature) for text in scored])
    known = overlaps[~overlaps.isnan()].double().clamp(max=1.0)  # sums of float32 may round above it
    if not len(known):
        return Alpha(0.0, 0.0, len(overlaps), 0.0)
    error = float(known.std()) / len(known) ** 0.5 if len(known) > 1 else 0.0
    return Alpha(float(known.mean()), error, len(overlaps), len(known) / len(overlaps))


@torch.inference_mode()
def overlap(pair: Pair, drafter: Drafter, scored: Scored, temperature: float) -> Tensor:
    """[n] sum min(p, q) at each place, NaN where nothing is drafted."""
    p = law(scored.logits, temperature)
    if isinstance(drafter, DraftModel):
        return acceptance(p, law(_logits(pair.draft_model, scored)[:, : p.shape[-1]], temperature))
    if isinstance(drafter, EarlyExit):
        return acceptance(p, law(_logits(shallow(pair.target, drafter.num_layers), scored), temperature))
    if isinstance(drafter, FeatureHead):
        return acceptance(p, head_law(pair.target, drafter, scored, temperature))
    tokens = scored.text.tokens
    asked = [_asked(drafter, p[i], tokens[:place], temperature) for i, place in enumerate(scored.text.places)]
    return torch.stack(asked)


def _logits(model: Any, scored: Scored) -> Tensor:
    hidden = model.base_model(scored.ids, use_cache=False).last_hidden_state[0, scored.before]
    logits: Tensor = model.get_output_embeddings()(hidden)
    return logits


def law(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities [.., V] of standardised sampling."""
    if temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    return (logits.float() / temperature).softmax(dim=-1)


def head_law(target: Any, drafter: FeatureHead, scored: Scored, temperature: float) -> Tensor:
    """[n, V] of a first guess: it reads the target's true features up to the token before the last."""
    head, chosen = drafter.trunk.head, drafter.trunk.ids
    pairs = head.inputs(target.get_input_embeddings()(scored.ids[:, 1:]), scored.features[:, :-1])
    features = head.body(inputs_embeds=pairs, use_cache=False).last_hidden_state[0]
    # Entry i stands for the feature of token i + 1.
    features = features[scored.before.start - 1 : scored.before.stop - 1]
    weight = target.get_output_embeddings().weight
    if chosen is None:
        return law(features @ weight.T, temperature)
    said = law(features @ weight[chosen].T, temperature)
    return said.new_zeros(len(said), len(weight)).index_copy_(1, chosen, said)


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
