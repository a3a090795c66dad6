"""One sequence, one screen: the algorithm as the papers print it.

Leviathan et al. (arXiv:2211.17192, Algorithm 1) and Chen et al. (arXiv:2302.01318, Algorithm 2). Short and slow
on purpose: this is the specification, and the engine must agree with it token for token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from forerun.config import SamplingParams
from forerun.drafters.base import Drafter, as_drafter
from forerun.errors import InvalidArgument
from forerun.math.laws import LogitLaw
from forerun.math.random import draft_uniforms
from forerun.math.verify import verify
from forerun.models.scorer import Scorer
from forerun.types import Draft, DraftContext, Keys, LawParams, Rule, Source

ROW = 0


@torch.inference_mode()
def speculative_decode(
    target: Scorer,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    draft_length: int,
    max_new_tokens: int,
    params: SamplingParams,
    rule: Rule = Rule.TOKEN,
    seed: int = 0,
    request_id: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    source: Source | None = None,
) -> Iterator[list[int]]:
    """Yield the tokens of each round. `target` and `drafter` must be fresh: they hold this sequence as row 0.

    An encoder-decoder target reads `source`, and what is decoded begins with `prompt`; nothing else is different.
    """
    drafter = as_drafter(drafter)
    history, law_params = list(prompt), LawParams.stack([params], target.device)
    target.admit(ROW)
    drafter.admit(ROW, prompt)
    if source is not None:
        target.read(ROW, source)
        drafter.read(ROW, source)
    target.feed([ROW], [history[:-1]])
    round_ = 0
    while (emitted := len(history) - len(prompt)) < max_new_tokens:
        keys = Keys(*torch.tensor([seed, request_id, round_, emitted], device=target.device)[:, None])
        length = min(draft_length, max_new_tokens - emitted - 1)  # the target always adds one of its own

        draft = _propose(drafter, history, length, law_params, draft_uniforms(keys, length, rule), target)
        drafted = draft.tokens[0, : int(draft.lengths)].tolist()
        logits = target.score([ROW], [[history[-1], *drafted]])
        index = torch.arange(len(drafted) + 1, device=target.device)[None]
        p = LogitLaw(logits, index, law_params, torch.zeros_like(index[0]))
        verdict = verify(p, draft, rule, keys)

        gained = [*drafted[: int(verdict.num_accepted)], int(verdict.next_token)]
        ends = [i for i, token in enumerate(gained) if token in stop_ids]
        gained = gained[: ends[0] + 1] if ends else gained
        history += gained
        target.rewind([ROW], [min(len(history) - 1, target.length(ROW))])
        drafter.rewind([ROW], [len(history) - 1])
        yield gained
        if ends:
            return
        round_ += 1


def _propose(
    drafter: Drafter, history: list[int], length: int, params: LawParams, uniforms: torch.Tensor, target: Scorer
) -> Draft:
    context = DraftContext(
        (ROW,), (history,), (length,), params, uniforms, (None,), target.vocab_size, target.device
    )  # fmt: skip
    draft = drafter.propose(context)
    if draft.tree is not None:
        raise InvalidArgument("this page is about chains; decode trees with SpeculativeDecoder or Engine")
    return draft
