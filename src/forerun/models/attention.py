"""Our attention and our mask, registered with transformers under the name `forerun`.

While a pass is under way (`ragged(...)`), the model's layers call `attention` with what `RaggedStates.update`
returned, and the model's mask builder calls `_mask`, which evaluates the model's own mask rule (causal, sliding window,
chunked ...) at each row's own positions. So a window is right at and past its edge for every row.

Packed rows show the model its new keys alone and read the others from the cache; a layer that makes anything of them on
the way to `attention` is not served by that, and says so by `KeysChanged`. Padded rows show it whole rows, and whatever
it makes of them is what it attends to.
Outside a pass the model is as it was: the name is only set for the duration of a pass, and who calls the model
meanwhile from another thread is passed on to the attention and mask that it had (`models.passes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from forerun import ops
from forerun.cache.base import CacheLayer
from forerun.errors import UnsupportedModel
from forerun.math.attention import Scale, attend_whole
from forerun.math.banded_attention import attend_bands
from forerun.models import masks
from forerun.models.passes import NAME, alone, own_attention
from forerun.models.ragged_states import KeysChanged, RaggedStates, current_states

# Keywords that layers pass along and that change nothing for one forward without training: the mask already says what a
# window or causality would, positions are in the keys.
HARMLESS = frozenset({
    "sliding_window", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "position_embeddings", "past_key_values", "head_mask", "logits_to_keep",
    "output_router_logits", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "layer_idx", "deterministic",
})  # fmt: skip


@contextmanager
def ragged(model: PreTrainedModel, states: RaggedStates) -> Iterator[None]:
    """Let `model` run one pass over ragged rows; its own attention setting comes back afterwards."""
    token = current_states.set(states)
    try:
        with alone(model, _configs(model)):
            yield
    finally:
        current_states.reset(token)


def _configs(model: PreTrainedModel) -> list[Any]:
    configs = getattr(model, "_forerun_configs", None)
    if configs is None:
        configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        model._forerun_configs = configs
    return configs


def forget_configs(model: PreTrainedModel) -> None:
    """Look for them again: modules may have come that have another."""
    model.__dict__.pop("_forerun_configs", None)


def attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, N, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # [1, 1, N, S] bool
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,  # [1, Hq, N, S] or, by distance, [1, Hq, 1, L]: see `models.patches.positions`
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer's attention: keys and values come from the cache, where `RaggedStates.update` has just put them."""
    states = current_states.get()
    if states is None:  # another thread has the model in a pass, this one does not
        more = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        keywords = others | {name: value for name, value in more.items() if value is not None}
        theirs: tuple[Tensor, None] = own_attention(module)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **keywords
        )
        return theirs
    if not others.keys() <= HARMLESS:
        _refuse_unknown(module, others)
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    if attention_mask is states.bidirectional:
        raise UnsupportedModel(
            f"the tokens of {type(module).__name__} see those that follow them, so this is no decoder; if it can be "
            "one, load it with is_decoder=True"
        )
    if states.padded is not None:
        scale = Scale(factor, softcap, s_aux)
        return _attend_rows(module, query, key, value, attention_mask, position_bias, scale), None
    if states.returned is None or key is not states.returned[0] or value is not states.returned[1]:
        if not states.return_to(key, value):
            _refuse_changed(module, states.returned, key, value)
    elif states.shares_keys:
        states.return_to(key, value)
    assert states.current is not None
    states.is_unread, layer = False, states.current
    padding = query.shape[-1] - layer.keys.shape[-1]  # Moonshine pads its heads behind the cache's back
    packed = query[0, ..., : layer.keys.shape[-1]].transpose(0, 1)
    if states.is_cross_attention:
        out = _attend_to_source(states, packed, layer, Scale(factor, softcap, s_aux))
    else:
        if not states.is_known_mask(attention_mask):
            raise KeysChanged(
                f"{type(module).__name__} changes its attention mask, which packed rows cannot follow; use "
                "model.generate for this model"
            )
        table = position_bias[0, :, 0] if position_bias is not None and states.is_static else None
        bias = position_bias if table is None else None
        out = _attend(states, packed, layer, attention_mask, Scale(factor, softcap, s_aux, table), bias)
    # Some layers call `view` on it, which transformers' own functions allow.
    return (F.pad(out, (0, padding)) if padding else out).unsqueeze(0).contiguous(), None


def _attend_to_source(states: RaggedStates, query: Tensor, layer: CacheLayer, scale: Scale) -> Tensor:
    """[N, Hq, D] -> [N, Hq, Dv] over all keys of each row's source."""
    assert states.cross is not None
    in_blocks = not states.cross.cache.reads_in_place
    if states.is_static or (in_blocks and ops.why_not_ragged(query, *layer.by_head, states.use) is None):
        return ops.attend_ragged(query, *layer.by_head, states.cross.reach, scale, states.asked_form, states.use)
    how = states.cross.plan(query.shape[1] // layer.keys.shape[2], states.asked_form, states.device)
    return ops.attend_across(query, *states.cross.read.of(layer), how, scale, states.use)


def _attend(
    states: RaggedStates, query: Tensor, layer: CacheLayer, mask: Tensor | None, scale: Scale, bias: Tensor | None
) -> Tensor:
    """[N, Hq, D] -> [N, Hq, Dv]: by a kernel where one knows the mask's rule and the layer's shapes."""
    rule = states.rule_of(mask)
    if rule is not None:
        if bias is not None:
            how = states.plan(masks.dense_mask_of(states, rule), query.shape[1] // layer.keys.shape[2], bias)
            return ops.attend(query, *states.rows_read.of(layer), how, scale)  # no kernel takes a bias of each head
        if states.in_blocks:
            return attend_bands(query, *states.rows_read.of(layer), states.bands(rule, query), scale)
        if states.is_static or ops.why_not_ragged(query, *layer.by_head, states.use) is None:
            return ops.attend_ragged(query, *layer.by_head, rule.reach, scale, states.asked_form, states.use)
        mask = masks.dense_mask_of(states, rule)
    how = states.plan(mask, query.shape[1] // layer.keys.shape[2], bias)
    return ops.attend(query, *states.rows_read.of(layer), how, scale)


def _refuse_unknown(module: nn.Module, asked: dict[str, Any]) -> None:
    unknown = [name for name, value in asked.items() if name not in HARMLESS and value is not None]
    if unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which Forerun does not honour; "
            "use model.generate for this model"
        )


def _attend_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, scale: Scale
) -> Tensor:
    """Padded rows [B, H, T, D] over the keys and values the model made of whole rows [B, Hk, S, D]: [B, T, H, Dv]."""
    if mask is None:
        raise UnsupportedModel(
            f"{type(module).__name__} attends without a mask, so its rows cannot differ in length; use model.generate "
            "for this model"
        )
    if bias is not None:
        mask = bias + mask
    return attend_whole(query, key, value, mask, scale).transpose(1, 2).contiguous()


def _refuse_changed(module: nn.Module, returned: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor) -> None:
    """Raise unless a layer's keys and values are the cache's, or those with zeros behind every head (Moonshine)."""
    name = type(module).__name__
    if returned is None:
        raise KeysChanged(f"{name} attends to keys that it has not put into the cache; use model.generate")
    zeros = getattr(module, "head_dim_padding", 0)
    wanted = [(*ours.shape[:-1], ours.shape[-1] + zeros) for ours in returned]
    if zeros and [tuple(t.shape) for t in (key, value)] == wanted:
        return
    changed = [n for n, t, ours in zip(("keys", "values"), (key, value), returned, strict=True) if t is not ours]
    raise KeysChanged(
        f"{name} changes its {' and '.join(changed)} after they went into the cache, which packed rows cannot follow; "
        "use model.generate for this model"
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masks.mask)
