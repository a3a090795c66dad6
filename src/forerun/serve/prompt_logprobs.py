"""Log-probabilities of a prompt's own tokens, for `echo`: a pass over the prompt, some tokens at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from forerun.engine import AsyncEngine
from forerun.engine.row import TokenLogprob
from forerun.errors import EngineClosed
from forerun.models.passes import between_passes

CHUNK = 256  # tokens between two rounds of those that decode: their logits are all that is held at once


async def prompt_logprobs(
    engine: AsyncEngine, model: Any, prompt: Sequence[int], alternatives: int
) -> list[TokenLogprob | None]:
    """One a token; the first has none. Under the model's own distribution, as those of new tokens are."""
    scores: list[TokenLogprob | None] = [None]
    cache = DynamicCache(config=model.config)
    for start in range(0, len(prompt) - 1, CHUNK):
        inputs, targets = list(prompt[start : start + CHUNK]), list(prompt[start + 1 : start + CHUNK + 1])
        future = engine.between_steps(lambda: _score(model, cache, inputs, targets, alternatives))  # noqa: B023
        try:
            scores += await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # nobody waits for it any more
                raise
            raise EngineClosed("the engine was closed before this prompt was read") from None
    return scores


@torch.inference_mode()
def _score(
    model: Any, cache: DynamicCache, inputs: list[int], targets: list[int], alternatives: int
) -> list[TokenLogprob]:
    """Each of `targets` after those of `inputs` before it; the last of `inputs` may have none."""
    with between_passes(model):
        ids = torch.tensor([inputs], device=model.device)
        logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    laws = torch.log_softmax(logits[0, : len(targets)].float(), dim=-1)
    values = laws.gather(1, torch.tensor(targets, device=laws.device)[:, None])[:, 0].tolist()
    best = laws.topk(min(alternatives, laws.shape[1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(token, value, tuple(zip(ids, chances, strict=True)))
        for token, value, (ids, chances) in zip(targets, values, tops, strict=True)
    ]
