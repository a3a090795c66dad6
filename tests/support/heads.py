"""Draft heads that agree with their target often enough to matter, and their laws without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.models.draft_head import DraftHead


@torch.no_grad()
def head_of(target: PreTrainedModel, blocks: int = 0, noise: float = 0.001, seed: int = 1) -> DraftHead:
    """The target's own layers behind a fusion that lets the token through: almost the target, less its first token."""
    config = target.config.get_text_config(decoder=True)
    head = DraftHead.for_target(target, config.num_hidden_layers, blocks).eval().requires_grad_(False)
    embedding = target.get_input_embeddings().weight
    own = {name: w for name, w in target.base_model.state_dict().items() if w.data_ptr() != embedding.data_ptr()}
    missing, unexpected = head.body.load_state_dict(own, strict=False)
    assert not missing and not unexpected
    width = config.hidden_size
    head.fuse.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1))
    generator = torch.Generator().manual_seed(seed)
    linears: list[Any] = [head.fuse, *(block.linear for block in head.blocks)]
    for weight in (linear.weight for linear in linears):
        weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return head


@torch.no_grad()
def head_logits(
    target: Any, head: DraftHead, history: Sequence[int], drafted: Sequence[int], ids: Tensor | None = None
) -> Tensor:
    """Logits [Vd] of the token after `drafted`: every feature recomputed, one forward a guess, nothing kept."""
    table = target.get_input_embeddings().weight
    features = target.base_model(torch.tensor([list(history)]), use_cache=False).last_hidden_state[0, :-1]
    pairs = head.inputs(table[torch.tensor(history[1:])], features)
    made = _last(head, pairs)
    if head.blocks:
        made = head.block(len(drafted), made)
    else:
        for token in drafted:
            pairs = torch.cat([pairs, head.inputs(table[token], made)[None]])
            made = _last(head, pairs)
    weight = target.get_output_embeddings().weight
    logits: Tensor = (weight if ids is None else weight[ids]) @ made
    return logits


def _last(head: DraftHead, pairs: Tensor) -> Tensor:
    hidden: Tensor = head.body(inputs_embeds=pairs[None], use_cache=False).last_hidden_state[0, -1]
    return hidden
