"""The three kinds of draft as training sees them: one call gives every estimate of every position.

Estimate s at position t stands for what the target's head reads after token t, made as the s-th token of a draft would
be: by feature heads from estimate s - 1, by parallel heads from the features s positions back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from forerun.models.draft_head import DraftHead


class Student(nn.Module, ABC):
    """What is trained, and the frozen embedding it reads through."""

    kind: str  # as in the manifest of a drafter folder
    depth: int  # estimates of each position
    reads_features: bool  # whether `features` are needed to make them
    num_blocks: int = 0  # of parallel heads

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the target's weights are not taken for ours

    def embed(self, tokens: Tensor) -> Tensor:
        vectors: Tensor = self._embedding[0](tokens)
        return vectors

    @property
    @abstractmethod
    def network(self) -> DraftHead | PreTrainedModel:
        """What is saved: layers with a configuration."""

    @abstractmethod
    def forward(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        """[B, L] and [B, L, H] -> [S, B, L, H]; estimate s is garbage before position `first(s)`."""

    @abstractmethod
    def once(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        """The first estimate alone: [B, L, H]."""

    def first(self, s: int) -> int:
        """The first position of which estimate s = 1 .. depth means something."""
        return s


class HeadStudent(Student):
    """Layers that read the target's hidden states."""

    reads_features = True

    def __init__(self, head: DraftHead, embedding: nn.Module) -> None:
        super().__init__(embedding)
        self.head = head

    @property
    def network(self) -> DraftHead:
        return self.head


class FeatureStudent(HeadStudent):
    """Pass 1 reads true features; pass s reads the states of pass s - 1, with keys as a real draft would find them."""

    kind = "feature"

    def __init__(self, head: DraftHead, embedding: nn.Module, unroll: int) -> None:
        super().__init__(head, embedding)
        self.depth = unroll

    def forward(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        assert features is not None
        embeddings = self.embed(_following(tokens))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cache = DynamicCache()
        passes = []
        for s in range(1, self.depth + 1):
            mask = None if s == 1 else as_mask(unrolled_mask(s, positions), self.head.body, features.dtype)
            inputs = self.head.inputs(embeddings, features.to(embeddings.dtype))
            hidden = _run(self.head.body, inputs, positions, mask, cache if self.depth > 1 else None)
            passes.append(_shifted(hidden, 1))
            features = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)  # pair i goes on from the estimate of f_i
        return torch.stack(passes)

    def once(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        return _trunk(self.head, self.embed(_following(tokens)), features)


class ParallelStudent(HeadStudent):
    """One pass; block j makes of it the estimate j - 1 positions further on."""

    kind = "parallel"

    def __init__(self, head: DraftHead, embedding: nn.Module) -> None:
        super().__init__(head, embedding)
        self.depth = self.num_blocks = len(head.blocks)

    def forward(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        hidden = _trunk(self.head, self.embed(_following(tokens)), features)  # position t comes from pair t - 1
        return torch.stack([_shifted(self.head.block(j, hidden), j) for j in range(self.depth)])

    def once(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        return self.forward(tokens, features)[0]


class CausalStudent(Student):
    """An ordinary small model; where it shares the target's embedding, its own is never touched."""

    kind = "causal"
    reads_features = False
    depth = 1

    def __init__(self, model: PreTrainedModel, embedding: nn.Module | None) -> None:
        super().__init__(model.get_input_embeddings() if embedding is None else embedding)
        self.model = model

    @property
    def network(self) -> PreTrainedModel:
        return self.model

    def forward(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        return self.once(tokens, features)[None]

    def once(self, tokens: Tensor, features: Tensor | None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return _run(self.model.base_model, self.embed(tokens), positions, None, None)

    def first(self, s: int) -> int:
        return 0


def unrolled_mask(s: int, positions: Tensor) -> Tensor:
    """Which keys pass s may see, [L, s * L] bool: the keys of pass 1, then of pass 2, ... then its own.

    Query t of pass s is the s-th token of a draft that began s - 1 positions before: true pairs up to there, then one
    key a pass.
    """
    query, key = positions[:, None], positions[None, :]
    parts = [key <= query - (s - 1), *(key == query - (s - r) for r in range(2, s + 1))]
    return torch.cat(parts, dim=1)


def as_mask(allowed: Tensor, model: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """[1, 1, L, S] as the model's attention wants it: booleans for SDPA, numbers to add for the others."""
    if model.config._attn_implementation == "sdpa":
        return allowed[None, None]
    added = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return added.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]


def _following(tokens: Tensor) -> Tensor:
    """Token i + 1 at place i. The last pair has none: it is made up and nobody reads what becomes of it.

    The number of pairs stays that of the tokens, a multiple of 32: masked attention is slow on a GPU for odd ones.
    """
    return F.pad(tokens[:, 1:], (0, 1))


def _trunk(head: DraftHead, embeddings: Tensor, features: Tensor | None) -> Tensor:
    assert features is not None
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)
    inputs = head.inputs(embeddings, features.to(embeddings.dtype))
    return _shifted(_run(head.body, inputs, positions, None, None), 1)


def _run(body: Any, inputs: Tensor, positions: Tensor, mask: Tensor | None, cache: DynamicCache | None) -> Tensor:
    """Rows are padded on the right, so causality alone keeps pads out of sight and no mask is needed."""
    hidden: Tensor = body(
        inputs_embeds=inputs,
        attention_mask=mask,
        position_ids=positions[None],
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return hidden


def _shifted(hidden: Tensor, by: int) -> Tensor:
    """[B, L, H]: entry i moves to position i + by; what comes before is zero."""
    return F.pad(hidden[:, : hidden.shape[1] - by], (0, 0, by, 0))
