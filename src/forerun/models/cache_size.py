"""Which cache a model's keys go to, and how many tokens it has room for where nobody said.

On a GPU, keys lie in blocks of a pool that is allocated once, because recorded work holds addresses. A library is not
alone on its card: it takes a share of what is free when the first row comes, and no more than most calls could use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from transformers import PreTrainedModel

from forerun import ops
from forerun.arguments import refuse
from forerun.cache.base import KeyValueCache
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.errors import InvalidArgument
from forerun.math.scaled import FP8, INT8, Scheme

CACHE_SCHEMES = {"int8": INT8, "fp8": FP8}
FP8_FROM = (8, 9)  # compute capability: Triton converts no 8-bit floats before
SHARE = 0.4  # of the memory that is free when the first row comes
# More is for those who say so: a small model would otherwise hold gigabytes that nobody uses. Twice that where the
# tokens of sources are among them.
MOST_TOKENS = 131072


def new_cache(
    model: PreTrainedModel,
    tokens: int | None,
    use: Kernels,
    longest: int | None,
    agreed: Callable[[int], int] | None = None,
    scheme: Scheme | None = None,
) -> KeyValueCache:
    """A cache for `tokens` keys of all rows together, of which no row has more than `longest`, where that is known.

    Blocks where kernels read them; elsewhere rows in one piece, which torch and a CPU's kernels read where they lie.
    Of a model that is split over processes all caches have the same size, on which they have `agreed`: at once.
    Keys and values are rounded by a `scheme`, if one is given: only blocks are.
    """
    if (
        reason := f"the model is on {model.device.type}"
        if model.device.type != "cuda"
        else ops.why_not_triton(model.device, use)
    ):
        if scheme is not None:
            raise InvalidArgument(f"cache_dtype={scheme.name!r} needs Triton kernels on a GPU: {reason}; leave it out")
        return RaggedCache(tokens)
    if scheme is FP8 and torch.cuda.get_device_capability(model.device) < FP8_FROM:
        name = torch.cuda.get_device_name(model.device)
        raise InvalidArgument(f"cache_dtype='fp8' needs compute capability 8.9, {name} has less; use 'int8'")
    if scheme is not None and keeps_latents(model):
        raise InvalidArgument(
            f"cache_dtype={scheme.name!r}: {type(model).__name__} keeps latents, which no kernel reads rounded; "
            "leave it out"
        )
    asked: int | Callable[[], int] = partial(default_tokens, model, longest, scheme) if tokens is None else tokens
    if agreed is not None and callable(asked):
        asked = agreed(asked())
    return PagedCache(asked, model.device, longest=longest, scheme=scheme)


def cache_scheme(name: str | None) -> Scheme | None:
    """How keys and values are rounded; None: not at all."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in CACHE_SCHEMES:
        refuse("cache_dtype", name, f"there are {' and '.join(map(repr, CACHE_SCHEMES))}, or None")
    return CACHE_SCHEMES[name]


def describe(model: PreTrainedModel, cache: KeyValueCache) -> str:
    """Room and memory of a cache in words."""
    each = bytes_per_token(model, cache.scheme)
    tokens = cache.num_tokens
    if tokens is None:
        return f"as many tokens as rows need, {each / 1024:.0f} KiB each"
    form = "in blocks, allocated once" if cache.table is not None else "in one piece a row"
    return f"{tokens} tokens of {each / 1024:.0f} KiB, {tokens * each / 2**30:.1f} GiB {form}"


def default_tokens(model: PreTrainedModel, longest: int | None, scheme: Scheme | None = None) -> int:
    """As many as fit `SHARE` of the free memory, but no more than `MOST_TOKENS` or one row of the model's context."""
    tokens = int(SHARE * free_device_bytes(model.device)) // bytes_per_token(model, scheme)
    most = MOST_TOKENS * (2 if getattr(model.config, "is_encoder_decoder", False) else 1)
    return min(tokens, max(most, longest or 0))


def free_device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that nobody uses, torch's own reserve included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def keeps_latents(model: PreTrainedModel) -> bool:
    """Whether the cache holds latents, of which heads make their keys and values."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def bytes_per_token(model: PreTrainedModel, scheme: Scheme | None = None) -> int:
    """Of keys and values in all layers, as the configuration tells it.

    Families whose layers share keys are taken for ones that do not. Of a model that is split over processes: in this
    one, which has its share of the heads.
    """
    config = model.config.get_text_config(decoder=True)
    # The decoder's first: T5's num_hidden_layers are the encoder's, whatever part of the configuration is asked for.
    layers = _first(config, "num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer")
    if keeps_latents(model):
        sizes = int(config.kv_lora_rank) + int(config.qk_rope_head_dim)
        return layers * sizes * int(model.dtype.itemsize)
    all_heads = sum(_bytes_of_layer(one, model.dtype, scheme) for one in _per_layer(config) or [config] * layers)
    return all_heads // (getattr(model, "_tp_size", None) or 1)


def _bytes_of_layer(config: Any, dtype: torch.dtype, scheme: Scheme | None) -> int:
    heads = _first(config, "num_attention_heads", "decoder_attention_heads", "num_heads", "n_head")
    size = _first(config, "head_dim", "d_kv") or _first(config, "hidden_size", "d_model", "n_embd") // heads
    each = size * dtype.itemsize if scheme is None else size * scheme.values.itemsize + 4  # and its scale
    return 2 * (key_heads(config) or heads) * each


def _per_layer(config: Any) -> list[Any]:
    """A configuration for each layer where they differ (Gemma 4's have heads of two widths), else none."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else []


def key_heads(config: Any) -> int:
    """0 where each query head has a key of its own. Falcon's first architecture has one key for all of them, and sets
    the number of the second. Where layers differ: what divides the number of each, so that all can be split by it."""
    if layers := _per_layer(config):
        return gcd(*map(key_heads, layers))
    if config.model_type == "falcon" and config.multi_query and not config.new_decoder_architecture:
        return 1
    return _first(config, "num_key_value_heads", "num_kv_heads")


def _first(config: Any, *names: str) -> int:
    """The first of these settings that is a number, 0 where none is."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
