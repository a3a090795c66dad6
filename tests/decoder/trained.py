"""Folders with untrained drafters of every trained kind, and what plain decoding says beside them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, describe_target, save_drafter
from support.heads import head_of
from support.ties import deviation
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model

NEW = 24
VOCAB = 97


@lru_cache
def oracle(family: str) -> tuple[list[list[int]], list[list[int]], float]:
    model, prompts = tiny_model(family), ragged_prompts(6, VOCAB, seed=len(family))
    wanted = [plain_greedy(model, prompt, NEW) for prompt in prompts]
    return prompts, wanted, deviation(model, [*prompts[1], *wanted[1]])


def said(family: str) -> Tensor:
    """A reduced vocabulary that holds half of what the target says."""
    tokens = sorted({token for text in oracle(family)[1] for token in text})
    return torch.tensor(tokens[::2])


def save(folder: Path, kind: str, family: str, reduced: bool, shares: tuple[str, ...] = ("embedding", "head")) -> Path:
    model = tiny_model(family)
    if kind == "causal":
        draft = draft_of(model)
        config, tensors = draft.config, draft.state_dict()
        parts = {"embedding": draft.get_input_embeddings(), "head": draft.get_output_embeddings()}
        lent = {parts[part].weight.data_ptr() for part in shares}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.data_ptr() not in lent}
    else:
        head = head_of(model, 3 if kind == "parallel" else 0)
        config, tensors = head.config, head.state_dict()
    if reduced:
        tensors = {**tensors, DRAFT_VOCABULARY: said(family).int()}
    manifest = DrafterManifest(kind, 3 if kind == "parallel" else 0, describe_target(model), shares)
    save_drafter(folder, manifest, config, tensors)
    return folder
