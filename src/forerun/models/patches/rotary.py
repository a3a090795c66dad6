"""Rotation and cache write in one launch for the families whose attention is Llama's, for the duration of a pass.

Such a module's forward is replaced by one that says the same with one kernel where transformers has a dozen small ones.
Projections, norms and hooks stay the model's own, and outside a pass the model is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from forerun import ops
from forerun.config import Kernels
from forerun.models.attention import attention
from forerun.models.passes import replacing
from forerun.models.plain import has_compiled, runs_its_class
from forerun.models.ragged_states import RaggedStates

# All rotate halves over the whole head; Qwen3 has norms before it. Subclasses may do anything, so types are exact.
LIKE_LLAMA = (LlamaAttention, MistralAttention, Qwen2Attention, Qwen3Attention)


class RotaryPatches:
    """The attention modules of one model whose rotation and cache write can be one launch."""

    def __init__(self, model: PreTrainedModel, use: Kernels) -> None:
        if ops.why_not_triton(model.device, use) or has_compiled(model):
            self._modules: list[nn.Module] = []
            return
        self._modules = [m for m in model.modules() if type(m) in LIKE_LLAMA and runs_its_class(m)]

    @contextmanager
    def during_pass(self) -> Iterator[None]:
        changed = [module for module in self._modules if "forward" not in module.__dict__]
        with replacing([(module, "forward", partial(_forward, module)) for module in changed]):
            yield


def _forward(
    module: Any,
    hidden_states: Tensor,  # [1, N, H]
    position_embeddings: tuple[Tensor, Tensor] | None = None,  # [1, N, D] cosines and sines
    attention_mask: Tensor | None = None,
    past_key_values: RaggedStates | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What `LlamaAttention.forward` does, on packed rows and with our cache."""
    assert position_embeddings is not None and past_key_values is not None, "a pass of ours always has both"
    cos, sin = position_embeddings
    query, keys, values = (_heads(module, name, hidden_states) for name in ("q", "k", "v"))
    query = past_key_values.rotate_and_write(module.layer_idx, query, keys, values, cos[0], sin[0])
    out, _ = attention(
        module, query.transpose(0, 1)[None], keys, values, attention_mask, scaling=module.scaling, **others
    )
    return module.o_proj(out.flatten(2)), None


def _heads(module: Any, name: str, hidden: Tensor) -> Tensor:
    """[1, N, H] -> queries, keys or values [N, heads, D], not yet rotated."""
    heads: Tensor = getattr(module, f"{name}_proj")(hidden)[0].unflatten(-1, (-1, module.head_dim))
    norm = getattr(module, f"{name}_norm", None)
    return heads if norm is None else norm(heads)
