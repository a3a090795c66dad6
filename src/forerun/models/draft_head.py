"""A small network that reads the target's last hidden state and guesses what comes next.

f_i is the target's last hidden state after token x_i (what its head reads). Pair i = (f_i, x_{i+1}) is fused into one
vector and goes through a few layers of the target's own kind; what comes out, g_{i+1}, stands for f_{i+1}. The target's
head makes logits of it, so embedding and head are never stored here. Feature heads go on with the pair (g_{i+1},
y_{i+2}); parallel heads apply one residual block a position to the same g.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from forerun.errors import InvalidArgument, UnsupportedModel

# Settings that bend embeddings or logits on their way: a head that reads the plain ones would never agree with them.
BENT = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier", "scale_emb",
    "lm_head_multiplier", "dim_model_base",
)  # fmt: skip


class Block(nn.Module):
    """z + silu(W z). W begins at 0, so that every block begins as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.silu(self.linear(hidden))


class DraftHead(nn.Module):
    """Fusion, body and (for parallel drafts) blocks, in float32 until told otherwise."""

    fuse: nn.Linear  # [H, 2H], reads cat(embedding, feature)
    body: PreTrainedModel  # reads inputs_embeds; it has no token embedding of its own
    blocks: nn.ModuleList  # empty for feature heads; block j - 1 makes the j-th token of a parallel draft

    def __init__(self, config: PreTrainedConfig, num_blocks: int = 0) -> None:
        super().__init__()
        if num_blocks < 0:
            raise InvalidArgument(f"num_blocks={num_blocks}: must be >= 0; 0 makes a feature head")
        config = _without_tokens(config)
        self.body = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
        self.body.set_input_embeddings(nn.Identity())
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        nn.init.normal_(self.fuse.weight, std=getattr(config, "initializer_range", None) or 0.02)
        self.blocks = nn.ModuleList([Block(config.hidden_size) for _ in range(num_blocks)])

    @classmethod
    def for_target(cls, target: PreTrainedModel, num_layers: int, num_blocks: int = 0) -> DraftHead:
        """An untrained head whose layers are like the target's."""
        check_plain(target)
        return cls(shortened(target.config.get_text_config(decoder=True), num_layers), num_blocks)

    @property
    def config(self) -> PreTrainedConfig:
        return self.body.config

    def inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What the body reads of each pair: [.., H], [.., H] -> [.., H]."""
        fused: Tensor = self.fuse(torch.cat((embeddings, features), dim=-1))
        return fused

    @property
    def block_linears(self) -> list[nn.Linear]:
        """The products of all blocks, in order."""
        return [block.linear for block in self.blocks if isinstance(block, Block)]

    def block(self, j: int, hidden: Tensor) -> Tensor:
        """Hidden state [.., H] from which head j = 0 .. num_blocks - 1 draws; see `blocks`."""
        out: Tensor = self.blocks[j](hidden)
        return out


def check_plain(target: PreTrainedModel) -> None:
    """Raise unless logits are head @ hidden state and inputs are rows of the embedding, nothing more."""
    config = target.config.get_text_config(decoder=True)
    bent = [name for name in BENT if getattr(config, name, None) not in (None, 1, 1.0)]
    if str(config.model_type).startswith("gemma"):
        bent.append("embeddings scaled by the family")
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        bent.append(f"an embedding of type {type(embedding).__name__}")
    if type(head) is not nn.Linear or head.bias is not None:
        bent.append("a head that is not one plain matrix")
    elif type(embedding) is nn.Embedding and {embedding.embedding_dim, head.in_features} != {config.hidden_size}:
        bent.append("an embedding or head of another width than the layers")
    if bent:
        raise UnsupportedModel(
            f"{type(target).__name__} has {', '.join(bent)}: heads on its features are not supported; use a "
            "smaller model of its family, or a drafter that needs no training"
        )


def shortened(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """The same configuration with fewer layers; lists with one entry a layer are cut to fit."""
    if num_layers < 1:
        raise InvalidArgument(f"num_layers={num_layers}: a draft head needs at least one layer")
    shorter, before = copy.deepcopy(config), config.num_hidden_layers
    shorter.num_hidden_layers = num_layers
    for name, value in _lists(config).items():
        if len(value) == before:
            setattr(shorter, name, [value[i % before] for i in range(num_layers)])
    return shorter


def _lists(config: PreTrainedConfig) -> dict[str, list[Any]]:
    return {name: value for name, value in vars(config).items() if isinstance(value, list)}


def _without_tokens(config: PreTrainedConfig) -> PreTrainedConfig:
    """The body never sees a token: a vocabulary of one keeps it from making an embedding that is thrown away."""
    config = copy.deepcopy(config)
    config.vocab_size = 1
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(config, name):
            setattr(config, name, None)
    return config
