"""What transformers' modules say of their decoder, read into a `Decoder`: one short reader a family or group of them.

A reader takes everything from the modules (scales, windows, weights), not from what its family usually has; what it has
no words for is `NotDescribed`. `bodies.untouched` has made sure before that the modules are exactly those that
transformers wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from forerun.errors import kind_and_line
from forerun.math.attention import Scale
from forerun.math.latent import LatentHeads
from forerun.math.skinny import LayerNorm, Norm
from forerun.models.bodies import untouched
from forerun.models.bodies.description import Attention, Decoder, DecoderLayer, Experts, LatentAttention, Mlp
from forerun.models.bodies.merging import Product
from forerun.models.bodies.parts import (
    NotDescribed,
    angle_tables,
    check_attention,
    decoder_of,
    read_experts_and_identities,
    read_fused_mlp,
    read_gated_mlp,
    read_head_norms,
    read_mlp_or_experts,
    read_norm,
    read_norm_behind,
    read_plain_mlp,
    read_product,
    read_qkv,
)
from forerun.models.families import sees_ahead

# Families whose fused layers the whole test suite is run with: their models need no self-check.
PROVEN = ("llama", "mistral", "qwen2", "qwen3")
SCALED_LOGITS = frozenset({"granite", "granitemoe", "hyperclovax", "minicpm3"})  # by `logits_scaling`
CAPPED_LOGITS = frozenset({"gemma2", "gemma3_text", "vaultgemma"})  # by `final_logit_softcapping`
CAPPED_SCORES = frozenset({"Gemma2Attention", "VaultGemmaAttention"})  # Gemma 3 has the setting and does not use it


def describe(model: PreTrainedModel) -> Decoder:
    """The decoder below (and the scaling behind) a model's head, or `NotDescribed`."""
    config = model.config.get_text_config(decoder=True)
    if sees_ahead(config) is not None:  # which mask builders read, whatever attention's own modules say
        raise NotDescribed("attention in both directions")
    try:
        decoder = FAMILIES[config.model_type](untouched.text_model(model), config)
    except (AttributeError, KeyError, TypeError, ValueError) as odd:
        raise NotDescribed(f"{type(model).__name__} is not built as its family is: {kind_and_line(odd)}") from odd
    _check_shapes(decoder)
    return _with_head(decoder, model, config)


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps a model (or a headless body) from being described; None where nothing does."""
    kind = model.config.get_text_config(decoder=True).model_type
    if kind not in FAMILIES:
        return f"{kind} is none of {', '.join(sorted(FAMILIES))}"
    if reason := untouched.why_not(model):
        return reason
    try:
        describe(model)
    except NotDescribed as error:
        return str(error)
    return None


def _check_shapes(decoder: Decoder) -> None:
    """Whether the products fit each other and the heads."""
    width, shared_key = decoder.norm.weight.shape[-1], decoder.value_size
    if shared_key is not None and any(table(1).shape[-1] != 2 * shared_key for table in decoder.tables):
        raise NotDescribed("shared keys of which a part is rotated")
    for index, layer in enumerate(decoder.layers):
        attention = layer.attention
        fits = _latent_fits if isinstance(attention, LatentAttention) else _heads_fit
        if not (fits(attention, decoder, width) and _fits(layer.mlp, width) and _fits(layer.late_experts, width)):
            raise NotDescribed(f"layer {index} has weights of other shapes than its heads and widths ask for")
        if layer.is_parallel and (layer.after_attention or layer.after_mlp):
            raise NotDescribed("norms behind attention and MLP that stand side by side")


def _heads_fit(attention: Any, decoder: Decoder, width: int) -> bool:
    heads = decoder.num_heads + 2 * decoder.num_key_heads
    return (
        _outputs(attention.qkv) == heads * decoder.head_size
        and _inputs(attention.out) == decoder.num_heads * decoder.head_size
        and _outputs([attention.out]) == width
        and all(_inputs(part) == width for part in attention.qkv)
    )


def _latent_fits(attention: Any, decoder: Decoder, width: int) -> bool:
    heads, latent = attention.heads, decoder.head_size
    queries = heads.num_heads * (heads.plain + heads.turning)
    first = queries if attention.query_up is None else _inputs(attention.query_up)
    return (
        _outputs(attention.down) == first + latent + heads.turning
        and (attention.query_up is None or _outputs([attention.query_up]) == queries)
        and shape_of(attention.up) == (heads.num_heads * (heads.plain + heads.value), latent)
        and shape_of(attention.out) == (width, heads.num_heads * heads.value)
        and all(_inputs(part) == width for part in attention.down)
    )


def _fits(mlp: Mlp | Experts | None, width: int) -> bool:
    if mlp is None:
        return True
    if isinstance(mlp, Experts):
        return _fits(mlp.shared, width)
    inner = _outputs([mlp.second]), _inputs(mlp.second) * (2 if mlp.is_gated else 1)
    return inner == (width, _outputs(mlp.first)) and all(_inputs(part) == width for part in mlp.first)


def _outputs(parts: Iterable[Product]) -> int:
    return sum(shape_of(part)[0] for part in parts)


def _inputs(part: Product) -> int:
    return shape_of(part)[1]


def shape_of(part: Product) -> tuple[int, int]:
    """(outputs, inputs) of a product."""
    rows, columns = part.weight.shape
    return (columns, rows) if isinstance(part, Conv1D) else (rows, columns)


def _with_head(decoder: Decoder, model: Any, config: Any) -> Decoder:
    """What the model's own forward does to the head's logits, by its family: a configuration keeps every key that
    config.json has, those of other families too."""
    multiplier, softcap = float(getattr(model, "logit_scale", 1.0)), None
    if config.model_type in SCALED_LOGITS:
        scaling = float(config.logits_scaling)
        multiplier = scaling if config.model_type == "hyperclovax" else 1 / scaling
    if config.model_type in CAPPED_LOGITS and type(model).__name__ not in untouched.WITH_IMAGES:  # those leave it out
        softcap = config.final_logit_softcapping
    return replace(decoder, logit_multiplier=multiplier, logit_softcap=softcap)


Window = Callable[[Any, int], int]  # (configuration, layer)
ReadMlp = Callable[[Any], Mlp | Experts]


def _typed_window(config: Any, index: int) -> int:
    """Where layers have types, some of them see a window alone."""
    return _window(config.sliding_window) if config.layer_types[index] == "sliding_attention" else 0


def _one_window(config: Any, index: int) -> int:
    return 0 if config.sliding_window is None else _window(config.sliding_window)


def _window(size: int | None) -> int:
    if not size or size < 0:
        raise NotDescribed(f"a window of {size} tokens")
    return int(size)


def _no_window(config: Any, index: int) -> int:
    return 0


def _llama(
    base: Any,
    config: Any,
    *,
    window: Window = _no_window,
    mlp: ReadMlp = read_gated_mlp,
    mlp_name: str = "mlp",
    out: str = "o_proj",
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", ""),
    head_norms: tuple[str, str] | None = None,
    is_parallel: bool = False,
    last_norm: str = "norm",
    doubled: bool = False,
    halved: bool = False,
    is_interleaved: bool = False,
) -> Decoder:
    """Layers of `self_attn` and `mlp` over rotated queries and keys.

    `norms` are the names of those before and after attention, before and after the MLP; `doubled` and `halved`, see
    `parts.angle_tables`.
    """
    by_type = "layer_type" in signature(base.rotary_emb.forward).parameters
    kinds = tuple(dict.fromkeys(config.layer_types)) if by_type else ("",)
    size = base.layers[0].self_attn.head_dim

    def layer(index: int, module: Any) -> DecoderLayer:
        attn, like = module.self_attn, getattr(module.self_attn, out).weight
        if attn.head_dim != size:
            raise NotDescribed(f"heads of {size} numbers in layer 0 and of {attn.head_dim} in layer {index}")
        before, after, before_mlp, after_mlp = (getattr(module, name) if name else None for name in norms)
        attention = Attention(
            read_qkv(attn, index),
            read_product(getattr(attn, out)),
            Scale(float(attn.scaling), _softcap(attn), _sinks(attn)),
            window=window(config, index),
            angles=(kinds.index(config.layer_types[index]) if by_type else 0) if _is_rotated(attn) else None,
            **read_head_norms(attn, head_norms),
        )
        return DecoderLayer(
            attention,
            mlp(getattr(module, mlp_name)),
            before_attention=read_norm(before, like),
            after_attention=read_norm_behind(after),
            before_mlp=read_norm(before_mlp, like),
            after_mlp=read_norm_behind(after_mlp),
            is_parallel=is_parallel,
            multiplier=float(getattr(module, "residual_multiplier", 1.0)),
        )

    return decoder_of(
        config,
        [layer(*pair) for pair in enumerate(base.layers)],
        getattr(base, last_norm),
        size,
        num_key_heads=config.num_key_value_heads,
        tables=angle_tables(base, config, kinds, doubled, halved),
        is_interleaved=is_interleaved,
        embedding_multiplier=float(getattr(base, "embedding_multiplier", 1.0)),
    )


def _softcap(attention: Any) -> float | None:
    softcap: float | None = attention.attn_logit_softcapping if type(attention).__name__ in CAPPED_SCORES else None
    return softcap


def _sinks(attention: Any) -> Tensor | None:
    sinks: Tensor | None = getattr(attention, "sinks", None)
    return None if sinks is None else sinks.detach()


def _is_rotated(attention: Any) -> bool:
    """SmolLM3, Cohere 2 and EXAONE 4 have layers that tell no positions."""
    kind = type(attention).__name__
    if kind == "Cohere2Attention":
        return attention.sliding_window is not None
    if kind == "Exaone4Attention":
        return attention.sliding_window is None or bool(attention.is_sliding)
    return bool(getattr(attention, "use_rope", True))


def _latent(
    base: Any, config: Any, *, mlp: ReadMlp = read_gated_mlp, is_complex: bool = False, in_pairs: bool | None = None
) -> Decoder:
    """DeepSeek and those after it. `is_complex`: pairs turn as complex numbers, and stay where they are; `in_pairs`:
    whether pairs stand side by side, where the configuration does not tell."""
    pairs = config.rope_interleave if in_pairs is None else in_pairs

    def layer(index: int, module: Any) -> DecoderLayer:
        norms = read_norm(module.input_layernorm), read_norm(module.post_attention_layernorm)
        attention = _read_latent(module.self_attn, index, pairs, not is_complex)
        multiplier = float(getattr(module, "residual_scale", 1.0))
        behind = read_norm_behind(getattr(module.mlp, "post_mlp_layernorm", None))  # of A.X-K1's experts
        return DecoderLayer(
            attention, mlp(module.mlp), norms[0], before_mlp=norms[1], after_mlp=behind, multiplier=multiplier
        )

    return decoder_of(
        config,
        [layer(*pair) for pair in enumerate(base.layers)],
        base.norm,
        int(config.kv_lora_rank),
        num_key_heads=1,
        value_size=int(config.qk_rope_head_dim),
        tables=angle_tables(base, config, halved=is_complex),
    )


def _read_latent(attn: Any, index: int, in_pairs: bool, in_halves: bool) -> LatentAttention:
    check_attention(attn, index)
    if not hasattr(attn, "expand_kv"):
        raise NotDescribed("a version of transformers that keeps keys of all heads in the place of latents")
    heads = LatentHeads(
        int(attn.num_heads), attn.qk_nope_head_dim, attn.qk_rope_head_dim, attn.v_head_dim, in_pairs, in_halves,
        float(getattr(attn, "mla_scale_kv_lora", 1.0)),
    )  # fmt: skip
    has_up = attn.q_lora_rank is not None
    latent_norm, query_norm = read_norm(attn.kv_a_layernorm), read_norm(attn.q_a_layernorm) if has_up else None
    if any(isinstance(norm, LayerNorm) or (norm and (norm.wide or norm.offset)) for norm in (latent_norm, query_norm)):
        raise NotDescribed("a latent's norm that is no plain root mean square")
    return LatentAttention(
        (read_product(attn.q_a_proj if has_up else attn.q_proj), read_product(attn.kv_a_proj_with_mqa)),
        cast(Norm, latent_norm),
        read_product(attn.kv_b_proj),
        read_product(attn.o_proj),
        Scale(float(attn.scaling) * float(getattr(attn, "mla_scale_q_lora", 1.0))),  # LongCat's, of whole queries
        heads,
        cast(Norm | None, query_norm),
        read_product(attn.q_b_proj) if has_up else None,
    )


def _longcat(base: Any, config: Any) -> Decoder:
    """Layers of two attentions and two MLPs; experts read what the first MLP reads, and are added behind the second."""

    def half(index: int, module: Any) -> DecoderLayer:
        second = index % 2
        norms = read_norm(module.input_layernorm[second]), read_norm(module.post_attention_layernorm[second])
        return DecoderLayer(
            _read_latent(module.self_attn[second], index, True, True),
            read_gated_mlp(module.mlps[second]),
            norms[0],
            before_mlp=norms[1],
            late_experts=None if second else read_experts_and_identities(module.mlp),
        )

    return decoder_of(
        config,
        [half(2 * index + second, module) for index, module in enumerate(base.layers) for second in range(2)],
        base.norm,
        int(config.kv_lora_rank),
        num_key_heads=1,
        value_size=int(config.qk_rope_head_dim),
        tables=angle_tables(base, config),
    )


def _gpt_neox(base: Any, config: Any) -> Decoder:
    heads, size = config.num_attention_heads, base.layers[0].attention.head_size
    mlp = partial(read_plain_mlp, first="dense_h_to_4h", second="dense_4h_to_h", activation="act")

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.attention
        check_attention(attn, index)
        attention = Attention(
            (read_product(attn.query_key_value),),
            read_product(attn.dense),
            Scale(float(attn.scaling)),
            head_order=_in_groups(heads, heads),
            angles=0,
        )
        norms = read_norm(module.input_layernorm), read_norm(module.post_attention_layernorm)
        return DecoderLayer(attention, mlp(module.mlp), norms[0], before_mlp=norms[1],
                            is_parallel=bool(module.use_parallel_residual))  # fmt: skip

    layers = [layer(*pair) for pair in enumerate(base.layers)]
    return decoder_of(config, layers, base.final_layer_norm, size, tables=angle_tables(base, config))


# Distances that ALiBi tells apart. Its smallest slope is 2 ** -8: so far back a key's share is e ** -128, nothing.
ALIBI_DISTANCES = 1 << 15


def _bloom(base: Any, config: Any) -> Decoder:
    if config.apply_residual_connection_post_layernorm or (config.pretraining_tp > 1 and config.slow_but_exact):
        raise NotDescribed("residuals behind norms, or products in slices")
    # In 16 bits its modules round the bias, and scores at its size with it. That is rounding as any other: distances
    # are taken in float32, which is nearer to the model's text.
    heads = int(config.num_attention_heads)
    slopes = base.build_alibi_tensor(torch.ones(1, 2, device=base.device), heads, torch.float32)[:, 0, 1]
    by_distance = -slopes[:, None] * torch.arange(ALIBI_DISTANCES, device=base.device)
    mlp = partial(read_plain_mlp, first="dense_h_to_4h", second="dense_4h_to_h", activation="gelu_impl")

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.self_attention
        check_attention(attn, index)
        scale = Scale(float(attn.inv_norm_factor), by_distance=by_distance)
        order, qkv = _in_groups(heads, heads), (read_product(attn.query_key_value),)
        norms = read_norm(module.input_layernorm), read_norm(module.post_attention_layernorm)
        attention = Attention(qkv, read_product(attn.dense), scale, head_order=order)
        return DecoderLayer(attention, mlp(module.mlp), norms[0], before_mlp=norms[1])

    layers, norm = [layer(*pair) for pair in enumerate(base.h)], read_norm(base.word_embeddings_layernorm)
    return decoder_of(config, layers, base.ln_f, base.h[0].self_attention.head_dim, embedding_norm=norm)


def _in_groups(heads: int, key_heads: int) -> tuple[int, ...]:
    """Where the queries that read one key lie side by side, then the key, then the value; then the next group."""
    each, groups = heads // key_heads, range(key_heads)
    queries = [group * (each + 2) + head for group in groups for head in range(each)]
    return *queries, *(group * (each + 2) + each + part for part in range(2) for group in groups)


def _falcon(base: Any, config: Any) -> Decoder:
    """The first architecture, with one key head for all or one for each; and the second, with a few, whose layers may
    have a norm before attention and another before the MLP."""
    if config.alibi:
        raise NotDescribed("ALiBi that is rounded to bfloat16 before distances are taken")
    heads, attn, is_second = config.num_attention_heads, base.h[0].self_attention, bool(config.new_decoder_architecture)
    is_parallel, order = is_second or bool(config.parallel_attn), None
    if is_second or not config.multi_query:
        order = _in_groups(heads, attn.num_kv_heads)
    if not is_parallel:
        before, before_mlp = "input_layernorm", "post_attention_layernorm"
    else:
        has_two = is_second and config.num_ln_in_parallel_attn == 2
        before, before_mlp = ("ln_attn", "ln_mlp") if has_two else ("input_layernorm", "")

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.self_attention
        check_attention(attn, index)
        scale = Scale(float(attn.inv_norm_factor))
        qkv = (read_product(attn.query_key_value),)
        return DecoderLayer(
            Attention(qkv, read_product(attn.dense), scale, head_order=order, angles=0),
            read_plain_mlp(module.mlp, "dense_h_to_4h", "dense_4h_to_h", "act"),
            before_attention=read_norm(getattr(module, before)),
            before_mlp=read_norm(getattr(module, before_mlp)) if before_mlp else None,
            is_parallel=is_parallel,
        )

    layers, tables = [layer(*pair) for pair in enumerate(base.h)], angle_tables(base, config)
    return decoder_of(config, layers, base.ln_f, attn.head_dim, num_key_heads=attn.num_kv_heads, tables=tables)


def _opt(base: Any, config: Any) -> Decoder:
    decoder = base.decoder
    if decoder.project_in is not None or decoder.project_out is not None or decoder.final_layer_norm is None:
        raise NotDescribed("embeddings of another width, or no norm behind the last layer")

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.self_attn
        if not module.do_layer_norm_before:
            raise NotDescribed("norms behind the sums")
        attention = Attention(read_qkv(attn, index), read_product(attn.out_proj), Scale(float(attn.scaling)))
        mlp = read_plain_mlp(module, "fc1", "fc2", "activation_fn")
        norms = read_norm(module.self_attn_layer_norm), read_norm(module.final_layer_norm)
        return DecoderLayer(attention, mlp, norms[0], before_mlp=norms[1])

    table = decoder.embed_positions
    return decoder_of(
        config,
        [layer(*pair) for pair in enumerate(decoder.layers)],
        decoder.final_layer_norm,
        decoder.layers[0].self_attn.head_dim,
        positions=table.weight.detach(),
        position_offset=int(table.offset),
    )


def _gpt2(base: Any, config: Any) -> Decoder:
    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.attn
        check_attention(attn, index)
        if hasattr(module, "crossattention") or attn.reorder_and_upcast_attn:
            raise NotDescribed("cross-attention, or attention that is upcast")
        attention = Attention((read_product(attn.c_attn),), read_product(attn.c_proj), Scale(float(attn.scaling)))
        mlp = read_plain_mlp(module.mlp, "c_fc", "c_proj", "act")
        return DecoderLayer(attention, mlp, read_norm(module.ln_1), before_mlp=read_norm(module.ln_2))

    layers = [layer(*pair) for pair in enumerate(base.h)]
    return decoder_of(config, layers, base.ln_f, base.h[0].attn.head_dim, positions=base.wpe.weight.detach())


def _gpt_bigcode(base: Any, config: Any) -> Decoder:
    """StarCoder and SantaCoder: one key head for all, or one for each."""
    order = None if config.multi_query else _in_groups(config.num_attention_heads, config.num_attention_heads)

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.attn
        check_attention(attn, index)
        if hasattr(module, "crossattention"):
            raise NotDescribed("cross-attention")
        qkv, scale = (read_product(attn.c_attn),), Scale(float(attn.scaling))
        attention = Attention(qkv, read_product(attn.c_proj), scale, head_order=order)
        mlp = read_plain_mlp(module.mlp, "c_fc", "c_proj", "act")
        return DecoderLayer(attention, mlp, read_norm(module.ln_1), before_mlp=read_norm(module.ln_2))

    layers, attn = [layer(*pair) for pair in enumerate(base.h)], base.h[0].attn
    table = base.wpe.weight.detach()
    return decoder_of(config, layers, base.ln_f, attn.head_dim, num_key_heads=attn.kv_heads, positions=table)


def _gpt_neo(base: Any, config: Any) -> Decoder:
    """Scores are not scaled; every other layer sees a window."""

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.attn.attention
        if attn.layer_id != index:
            raise NotDescribed(f"layer {index} writes the keys of layer {attn.layer_id}")
        qkv = read_product(attn.q_proj), read_product(attn.k_proj), read_product(attn.v_proj)
        window = int(config.window_size) if attn.attention_type == "local" else 0
        attention = Attention(qkv, read_product(attn.out_proj), Scale(1.0), window=window)
        mlp = read_plain_mlp(module.mlp, "c_fc", "c_proj", "act")
        return DecoderLayer(attention, mlp, read_norm(module.ln_1), before_mlp=read_norm(module.ln_2))

    layers, size = [layer(*pair) for pair in enumerate(base.h)], base.h[0].attn.attention.head_dim
    return decoder_of(config, layers, base.ln_f, size, positions=base.wpe.weight.detach())


def _mpt(base: Any, config: Any) -> Decoder:
    slopes = -base.build_mpt_alibi_tensor(int(config.n_heads), 2, device=base.device)[:, 0, 0]
    by_distance = -slopes[:, None] * torch.arange(ALIBI_DISTANCES, device=base.device)

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.attn
        check_attention(attn, index)
        if attn.clip_qkv:
            raise NotDescribed(f"queries, keys and values that are clipped at {attn.clip_qkv}")
        scale = Scale(float(attn.softmax_scale), by_distance=by_distance)
        attention = Attention((read_product(attn.Wqkv),), read_product(attn.out_proj), scale)
        mlp = read_plain_mlp(module.ffn, "up_proj", "down_proj", "act")
        return DecoderLayer(attention, mlp, read_norm(module.norm_1), before_mlp=read_norm(module.norm_2))

    layers = [layer(*pair) for pair in enumerate(base.blocks)]
    return decoder_of(config, layers, base.norm_f, base.blocks[0].attn.head_dim)


def _hyperclovax(base: Any, config: Any) -> Decoder:
    """Granite's layers, some with norms behind attention and MLP."""
    after, after_mlp = ("post_norm1", "post_norm2") if config.use_post_norm else ("", "")
    return _llama(base, config, norms=("input_layernorm", after, "post_attention_layernorm", after_mlp))


def _cohere(base: Any, config: Any, window: Window = _no_window) -> Decoder:
    has_norms = getattr(base.layers[0].self_attn, "use_qk_norm", False)
    return _llama(
        base, config, window=window, norms=ONE_BEFORE_BOTH, head_norms=HEAD_NORMS if has_norms else None,
        is_parallel=True, doubled=True, is_interleaved=True,
    )  # fmt: skip


def _stablelm(base: Any, config: Any) -> Decoder:
    if config.qk_layernorm:
        raise NotDescribed("a norm of its own for every head")
    is_parallel = bool(config.use_parallel_residual)
    norms = ONE_BEFORE_BOTH if is_parallel else ("input_layernorm", "", "post_attention_layernorm", "")
    return _llama(base, config, norms=norms, is_parallel=is_parallel)


def _phi(base: Any, config: Any) -> Decoder:
    return _llama(
        base, config, mlp=partial(read_plain_mlp, first="fc1", second="fc2", activation="activation_fn"), out="dense",
        norms=ONE_BEFORE_BOTH, head_norms=("q_layernorm", "k_layernorm") if config.qk_layernorm else None,
        is_parallel=True, last_norm="final_layernorm",
    )  # fmt: skip


def _olmo(base: Any, config: Any, **more: Any) -> Decoder:
    """OLMo 1 and OLMoE, which may clip what they project."""
    if config.clip_qkv is not None:
        raise NotDescribed(f"queries, keys and values that are clipped at {config.clip_qkv}")
    return _llama(base, config, **more)


def _glm4_moe(base: Any, config: Any) -> Decoder:
    names = HEAD_NORMS if config.use_qk_norm else None
    return _llama(base, config, mlp=_with_shared_experts, head_norms=names)


def _gptj(base: Any, config: Any) -> Decoder:
    """GPT-J; and CodeGen, whose weights were cut for four processors, each part with its queries, values, keys."""
    heads, size = config.num_attention_heads, base.h[0].attn.head_dim
    if not config.rotary_dim:
        raise NotDescribed("no number of dimensions that are rotated")

    def layer(index: int, module: Any) -> DecoderLayer:
        attn = module.attn
        order = _in_parts(heads, 4) if hasattr(attn, "qkv_proj") else None
        attention = Attention(
            read_qkv(attn, index),
            read_product(attn.out_proj),
            Scale(1 / float(attn.scale_attn)),
            head_order=order,
            angles=0,
        )
        mlp = read_plain_mlp(module.mlp, "fc_in", "fc_out", "act")
        return DecoderLayer(attention, mlp, read_norm(module.ln_1), is_parallel=True)

    first, *others = (module.attn.embed_positions for module in base.h)
    if any(not torch.equal(each.to(first.device), first) for each in others):
        raise NotDescribed("layers that rotate by tables of their own")
    layers = [layer(*pair) for pair in enumerate(base.h)]
    tables = (partial(_stored_angles, base),)
    return decoder_of(config, layers, base.ln_f, size, tables=tables, is_interleaved=True)


def _in_parts(heads: int, parts: int) -> tuple[int, ...]:
    each = heads // parts
    first = [3 * each * part + head for part in range(parts) for head in range(each)]
    return *first, *(head + 2 * each for head in first), *(head + each for head in first)


def _stored_angles(base: Any, count: int) -> Tensor:
    """The sines and cosines that attention keeps for the positions there are; beyond them nothing is ever asked for."""
    kept: Tensor = base.h[0].attn.embed_positions[:count]
    sin, cos = kept.to(base.device, base.dtype).chunk(2, dim=-1)
    return F.pad(torch.cat([cos, cos, sin, sin], dim=-1), (0, 0, 0, count - len(kept)))


SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
ONE_BEFORE_BOTH = ("input_layernorm", "", "", "")
HEAD_NORMS = ("q_norm", "k_norm")
_with_shared_experts = partial(read_mlp_or_experts, shared="shared_experts")
_up_and_down = partial(read_plain_mlp, first="up_proj", second="down_proj", activation="act_fn")

FAMILIES: dict[str, Callable[[Any, Any], Decoder]] = {
    "arcee": partial(_llama, mlp=_up_and_down),
    "axk1": partial(_latent, mlp=_with_shared_experts),
    "bloom": _bloom,
    "codegen": _gptj,
    "cohere": _cohere,
    "cohere2": partial(_cohere, window=_typed_window),
    "cwm": partial(_llama, window=_typed_window),
    "ernie4_5": partial(_llama, is_interleaved=True),
    "ernie4_5_moe": partial(_llama, mlp=_with_shared_experts, is_interleaved=True),
    "deepseek_v2": partial(_latent, mlp=_with_shared_experts, is_complex=True, in_pairs=True),
    "deepseek_v3": partial(_latent, mlp=_with_shared_experts),
    "dots1": partial(_llama, window=_typed_window, mlp=_with_shared_experts, head_norms=HEAD_NORMS),
    "exaone4": partial(_llama, window=_typed_window, norms=BEHIND, head_norms=HEAD_NORMS),
    "falcon": _falcon,
    "flex_olmo": partial(_llama, mlp=read_mlp_or_experts, norms=BEHIND, head_norms=HEAD_NORMS),
    "gemma": _llama,
    "gemma2": partial(_llama, window=_typed_window, norms=SANDWICH),
    "gemma3_text": partial(_llama, window=_typed_window, norms=SANDWICH, head_norms=HEAD_NORMS),
    "glm": partial(_llama, mlp=read_fused_mlp, is_interleaved=True),
    "glm4": partial(
        _llama, mlp=read_fused_mlp, is_interleaved=True,
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
    "gpt2": _gpt2,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": partial(_latent, mlp=_with_shared_experts),
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gpt_oss": partial(_llama, window=_typed_window, mlp=read_mlp_or_experts, halved=True),
    "gptj": _gptj,
    "granite": _llama,
    "granitemoe": partial(_llama, mlp=read_mlp_or_experts, mlp_name="block_sparse_moe"),
    "helium": partial(_llama, is_interleaved=True),
    "hyperclovax": _hyperclovax,
    "jais2": partial(_llama, mlp=_up_and_down),
    "llama": _llama,
    "longcat_flash": _longcat,
    "minicpm3": partial(_latent, in_pairs=False),
    "minimax_m2": partial(_llama, mlp=read_mlp_or_experts, head_norms=HEAD_NORMS),
    "ministral": partial(_llama, window=_typed_window),
    "mistral": partial(_llama, window=_one_window),
    "mixtral": partial(_llama, window=_one_window, mlp=read_mlp_or_experts),
    "mpt": _mpt,
    "nemotron": partial(_llama, mlp=_up_and_down),
    "olmo": _olmo,
    "olmo2": partial(_llama, norms=BEHIND, head_norms=HEAD_NORMS),
    "olmo3": partial(_llama, window=_typed_window, norms=BEHIND, head_norms=HEAD_NORMS),
    "olmoe": partial(_olmo, mlp=read_mlp_or_experts, head_norms=HEAD_NORMS),
    "opt": _opt,
    "phi": _phi,
    "phi3": partial(_llama, window=_one_window, mlp=read_fused_mlp),
    "qwen2": partial(_llama, window=_typed_window),
    "qwen2_moe": partial(
        _llama, window=_typed_window,
        mlp=partial(read_mlp_or_experts, shared="shared_expert", shared_gate="shared_expert_gate"),
    ),
    "qwen3": partial(_llama, window=_typed_window, head_norms=HEAD_NORMS),
    "qwen3_moe": partial(_llama, window=_one_window, mlp=read_mlp_or_experts, head_norms=HEAD_NORMS),
    "seed_oss": _llama,
    "smollm3": partial(_llama, window=_typed_window),
    "solar_open": partial(_llama, mlp=_with_shared_experts),
    "stablelm": _stablelm,
    "starcoder2": partial(
        _llama, window=_one_window, mlp=partial(read_plain_mlp, first="c_fc", second="c_proj", activation="act")
    ),
    "vaultgemma": partial(
        _llama, window=_typed_window, norms=("input_layernorm", "", "pre_feedforward_layernorm", "")
    ),
    "youtu": _latent,
}  # fmt: skip
