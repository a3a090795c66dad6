"""Attention of one row's many new tokens by torch's own kernels: behind nothing, or behind keys that are there already.

torch hands a causal square to the library's fastest kernel (cuDNN's, on recent GPUs), and a mask that is no square to a
slower one. So where that kernel can be had, new tokens attend twice, to the keys before them without a mask and to
their own as a square, and the two results are added by their shares of all weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention.bias import causal_lower_right


def attend_prompt(
    query: Tensor,  # [1, Hq, n, D], of the newest tokens
    keys: Tensor,  # [1, Hk, past + n, D]
    values: Tensor,  # [1, Hk, past + n, Dv]
    past: int,
    factor: float | None,
) -> Tensor:  # [1, Hq, n, Dv]
    """What each new token makes of all keys up to its own."""
    is_shared = query.shape[1] > keys.shape[1]
    if past == 0:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=factor, enable_gqa=is_shared)
    if query.is_cuda and can_use_cudnn_attention(SDPAParams(query, keys, values, None, 0.0, False, is_shared)):
        older = _with_weights(query, keys[:, :, :past], values[:, :, :past], False, factor)
        return joined(*older, *_with_weights(query, keys[:, :, past:], values[:, :, past:], True, factor))
    mask = causal_lower_right(query.shape[2], keys.shape[2])
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=factor, enable_gqa=is_shared)


def joined(older: Tensor, older_weight: Tensor, newer: Tensor, newer_weight: Tensor) -> Tensor:
    """Attention over two sets of keys from attention over each [.., n, D] and the logarithms of their weights' sums."""
    share = torch.sigmoid(older_weight - newer_weight)  # [.., n, 1], of the first set
    # In float32, whatever the states are: a share that is rounded would be off by as much as what it is a share of.
    return torch.addcmul(older * share, newer, 1 - share, out=torch.empty_like(newer))


def _with_weights(
    query: Tensor, keys: Tensor, values: Tensor, is_causal: bool, factor: float | None
) -> tuple[Tensor, Tensor]:
    """Attention by cuDNN, and the logarithm of the sum of each token's weights, [1, Hq, n, 1] float32."""
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, True, 0.0, is_causal, False, scale=factor
    )
    return results[0], results[1].reshape(*query.shape[:3], 1)
