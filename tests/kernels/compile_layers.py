"""Compile every kernel for compute capability 9.0, which needs no GPU. A program of its own: nothing is interpreted.

Named another capability, 80 or 89, it compiles what reads rounded weights and keys: an older GPU may lack assembly.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from forerun.kernels import advance, random
from forerun.kernels.attention import cache_write, latent
from forerun.kernels.attention import device as attention_device
from forerun.kernels.linear import device as linear_device
from forerun.kernels.linear import experts, many_rows, norms, project, rounding, routing, widen
from forerun.math.skinny import Activation

MOST_SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes of one multiprocessor that one program may have
HOPPER, WITH_FP8 = 90, 89  # from here on kernels begin early; Triton converts 8-bit floats
INTEGERS = ("slots_ptr", "table_ptr", "lengths_ptr", "starts_ptr")
FLOATS = ("factor", "softcap", "epsilon", "offset", "first_epsilon", "first_offset", "multiplier")


def compiled(
    kernel: Any, constants: dict[str, Any], kinds: dict[str, Any], aligned: tuple[str, ...] = (), **options: Any
) -> Any:
    names, target = kernel.arg_names, driver.active.get_current_target()
    if target.arch < HOPPER:
        constants = {name: _not_early(name, value) for name, value in constants.items()}
    signature = {name: _kind(name, constants, kinds) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    by_sixteen = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=by_sixteen)
    return triton.compile(source, target=target, options=options)


def _not_early(name: str, value: Any) -> Any:
    """Only a Hopper has the instruction that a kernel waits with."""
    if name == "CASE":
        return value._replace(EARLY=False)
    return value if name != "EARLY" else False


def _kind(name: str, constants: dict[str, Any], kinds: dict[str, Any]) -> Any:
    if name in constants:
        return "constexpr"
    if name in kinds:
        return kinds[name]
    if name.endswith("_ptr"):
        return "*bf16"
    return "fp32" if name in FLOATS else "i32"


LATENT = {"SIZE": 512, "VALUE_SIZE": 512, "BLOCK_SIZE": 512, "BLOCK_VALUE_SIZE": 512, "BLOCK_KEYS": 32, "TAIL": 64,
          "BLOCK_TAIL": 64}  # fmt: skip


def attend(group: int, block_queries: int, page: int = 0, stored: str = "*bf16", **flags: Any) -> Any:
    names = (
        "IS_PART", "BALANCED", "PADDED", "WINDOWED", "CAPPED", "HAS_SINKS", "HAS_TREE", "ACROSS", "HAS_BIAS", "UPCAST",
        "EARLY",
    )  # fmt: skip
    constants = {
        "HEADS": 32, "GROUP": group, "SIZE": 80, "VALUE_SIZE": 128, "BLOCK_SIZE": 128, "BLOCK_VALUE_SIZE": 128,
        "BLOCK_QUERIES": block_queries, "BLOCK_KEYS": 64, "BLOCK_ROWS": 32,
        "PAGE": page, "CAPACITY": 0, "FLOATS": False, "FAST": True, **dict.fromkeys(names, False), **flags,
    }  # fmt: skip
    pool, queries = (
        attention_device.Pool(stored, "i32", "i32", "i32"), attention_device.Queries("*bf16", "i32", "i32")
    )  # fmt: skip
    kinds = {
        **dict.fromkeys(INTEGERS, "*i32"), "part_ptr": "*fp32", "mass_ptr": "*fp32", "tree_ptr": "*i1",
        "bias_ptr": "*fp32", "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32",
        "queries": queries, "keys": pool, "values": pool, "tail_queries": queries, "tails": pool,
    }  # fmt: skip
    case = {"CASE": attention_device.AttentionCase(**constants)}
    return compiled(attention_device.attend_kernel, case, kinds, num_warps=4, num_stages=3)


def merge(each: int, pieces: int, warps: int, **flags: bool) -> Any:
    constants = {
        "HEADS": 32, "GROUP": 4, "VALUE_SIZE": 80, "BLOCK_VALUE_SIZE": 128, "BLOCK_QUERIES": 32, "BLOCK_KEYS": 64,
        "BLOCK_ROWS": 32, "BLOCK_PIECES": pieces, "EACH": each, "GRAIN": 1,
        **dict.fromkeys(("BALANCED", "WINDOWED", "CHAIN", "HAS_SINKS", "EARLY"), False), **flags,
    }  # fmt: skip
    kinds = {**dict.fromkeys(INTEGERS, "*i32"), "part_ptr": "*fp32", "mass_ptr": "*fp32"}
    return compiled(attention_device.merge_kernel, constants, kinds, num_warps=warps)


def small_steps() -> list[Any]:
    """What lies between the large steps of a round: whole numbers, all of them."""
    names = {name for kernel in (advance._advance_kernel, advance._layout_kernel) for name in kernel.arg_names}
    whole = {name: "*i64" for name in (*names, *advance._lengths_kernel.arg_names) if name.endswith("_ptr")}
    kinds = {**whole, "finite_ptr": "*i1", "ends_ptr": "*i32", "own_ptr": "*i32", "table_ptr": "*i32"}
    keys = dict.fromkeys(("seed_ptr", "request_ptr", "round_ptr", "position_ptr"), "*i64")
    flags = {"STREAM": 0, "ABSOLUTE": True, "BLOCK": 8}
    made = [compiled(kernel, {"BLOCK": 16}, kinds, num_warps=1) for kernel in (
        advance._advance_kernel, advance._lengths_kernel,
    )]  # fmt: skip
    layouts = ({"BLOCK": 16, "PAGED": is_paged} for is_paged in (False, True))
    made += [compiled(advance._layout_kernel, constants, kinds, num_warps=1) for constants in layouts]
    return [*made, compiled(random._uniforms_kernel, flags, {**keys, "out_ptr": "*fp64"}, num_warps=1)]


def product(
    end: Any,
    rows: int,
    outputs: int = 4096,
    activation: Activation = Activation.SILU,
    turning: int = 128,
    form: Any = widen.WIDE,
    stored: str = "*bf16",
) -> Any:
    """As it is launched: with its own tiles, and everything aligned, so that copies go through shared memory."""
    place = torch.device("cpu")
    plan = project.choose(rows, outputs, end is not linear_device.PLAIN, torch.bfloat16, place, form)
    constants = {
        "FORM": form.value, "GROUP": 128 if form is widen.INT4 else 0, "FAST": True,
        "EARLY": project.may_begin_early(plan, form), "END": end.value, "ACTIVATION": int(activation), "HEADS": 32,
        "KEY_HEADS": 8, "SIZE": 128, "TURNING": turning,
        "INTERLEAVED": turning < 128, "HAS_ORDER": turning < 128, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
        "HAS_BIAS": True, "HAS_RESIDUAL": end is linear_device.PLAIN,
    }  # fmt: skip
    kinds = {
        "part_ptr": "*fp32", "count_ptr": "*i32", "addresses_ptr": "*i64", "order_ptr": "*i32", "w_ptr": stored,
        "row_scale_ptr": "*fp32", "x_ptr": stored if form is widen.ROUNDED else "*bf16",
    }  # fmt: skip
    if not plan.splits:
        kernel, stages = linear_device.vector_kernel, {}
        largest = 0.0 if form is not widen.ROUNDED else 127.0 if stored == "*i8" else 448.0
        constants |= {"STAGES": plan.stages, "HAS_NORM": True, "NORM_WIDE": False, "LARGEST": largest}
        kinds["x_ptr"] = "*bf16"
    else:
        kernel, stages = linear_device.tile_kernel, {"num_stages": plan.stages}
        constants |= {"ROWS": max(16, rows), "SPLITS": plan.splits, "UPCAST": False}
        kinds["w_ptr"] = "*i16" if form is widen.INT8 else stored
    aligned = tuple(n for n in kernel.arg_names if n.endswith("_ptr") or n in ("N", "K", "chunk"))
    case = {"CASE": linear_device.ProductCase(**constants)}
    return compiled(kernel, case, kinds, aligned, num_warps=plan.warps, **stages)


STORED = ((widen.INT8, "*i8"), (widen.ROUNDED, "*i8"), (widen.ROUNDED, "*fp8e4nv"), (widen.INT4, "*u8"))


def narrow_products() -> list[Any]:
    """Weights of 8 and 4 bits, widened by assembly or multiplied as they are."""
    made = [
        product(end, rows, form=form, stored=stored)
        for form, stored in STORED
        for end, rows in ((linear_device.PLAIN, 1), (linear_device.GATED, 1), (linear_device.PLAIN, 16),
                          (linear_device.ROTATED, 16), (linear_device.GATED, 64))
    ]  # fmt: skip
    made += [product(linear_device.GATED, rows, outputs=11008, form=widen.INT8, stored="*i8") for rows in (1, 16)]
    made.append(product(linear_device.ROTATED, 1, form=widen.INT8, stored="*i8"))
    for kind in ("*i8", "*fp8e4nv"):
        kinds = {"out_ptr": kind, "scale_ptr": "*fp32", "largest": "fp32"}
        made.append(compiled(rounding.round_kernel, {"BLOCK": 4096, "FAST": True, "EARLY": True}, kinds, num_warps=16))
        own = {"out_ptr": "*bf16", "rounded_ptr": kind, "row_scale_ptr": "*fp32"}
        made.append(norm(own, LARGEST=127.0, HAS_FIRST=False))
    unpacking = {"BLOCK": 1024, "GROUP": 128, "FAST": True}
    return [
        *made,
        compiled(many_rows.unpack_kernel, unpacking, {"raw_ptr": "*u8"}),
        compiled(many_rows.widen_kernel, {"BLOCK": 1024}, {"raw_ptr": "*i8"}),
        compiled(many_rows.scale_kernel, {"BLOCK": 1024, "HAS_BIAS": True},
                 {"sums_ptr": "*i32", "row_scale_ptr": "*fp32"}),
    ]  # fmt: skip


NORM_NUMBERS = dict.fromkeys(("query_epsilon", "query_offset", "key_epsilon", "key_offset"), "fp32")
PLAIN_KEYS = {"LARGEST": 0.0, "CAPACITY": 1, "FAST": True, "EARLY": True}
PAIRS = {"SIZE": 64, "VALUE_SIZE": 64, "BLOCK_SIZE": 64, "BLOCK_VALUE_SIZE": 64}
ROUNDED_KEYS = {"LARGEST": 127.0, "CAPACITY": 128, "FAST": True, "EARLY": True}


def rounded_keys(*kinds: str) -> list[Any]:
    """Attention over keys of eight bits, and what writes them."""
    made = []
    for kind in kinds:
        flags = {"IS_PART": True, "EARLY": True, "CAPACITY": 128, "FLOATS": kind == "*fp8e4nv", **PAIRS}
        made.append(attend(4, 32, 128, "*i16", BALANCED=True, **flags))
        made.append(attend(1, 16, 128, "*i16", WINDOWED=True, **flags))
        pools = {"key_pool_ptr": kind, "value_pool_ptr": kind, "key_scale_ptr": "*fp32", "value_scale_ptr": "*fp32"}
        made.append(
            compiled(
                cache_write._rotate_and_write_kernel,
                {
                    "HEADS": 8,
                    "KEY_HEADS": 4,
                    "QUERY_BLOCKS": 2,
                    "SIZE": 128,
                    "VALUE_SIZE": 128,
                    "TURNING": 128,
                    "INTERLEAVED": False,
                    "BLOCK_HEADS": 4,
                    "BLOCK_HALF": 64,
                    "BLOCK_VALUE_SIZE": 128,
                    "HAS_ORDER": False,
                    "HAS_NORMS": True,
                    "WIDE": False,
                    **ROUNDED_KEYS,
                },
                {"addresses_ptr": "*i64", **pools, **NORM_NUMBERS},
                enable_fp_fusion=False,
            )
        )
    return made  # fmt: skip


def rotation(has_norms: bool = False) -> Any:
    """With its promise: every step is rounded, as torch's are."""
    made = compiled(
        cache_write._rotate_and_write_kernel,
        {"HEADS": 9, "KEY_HEADS": 3, "QUERY_BLOCKS": 3, "SIZE": 80, "VALUE_SIZE": 48, "TURNING": 80,
         "INTERLEAVED": False, "BLOCK_HEADS": 4, "BLOCK_HALF": 64, "BLOCK_VALUE_SIZE": 64, "HAS_ORDER": True,
         "HAS_NORMS": has_norms, "WIDE": False, **PLAIN_KEYS},
        {"addresses_ptr": "*i64", "order_ptr": "*i32", **NORM_NUMBERS},
        enable_fp_fusion=False,
    )  # fmt: skip
    assert "fma" not in made.asm["ptx"]
    return made


def norm(kinds: dict[str, str] | None = None, **flags: Any) -> Any:
    names = ("ADDS", "HAS_NORM", "CENTRED", "HAS_BIAS", "WIDE", "HAS_FIRST", "FIRST_WIDE")
    constants = {
        "HEADS": 1, "SIZE": 80, "BLOCK": 128, "EARLY": True, "LARGEST": 0.0, "FAST": True,
        **dict.fromkeys(names, True), **flags,
    }  # fmt: skip
    return compiled(norms.norm_kernel, constants, kinds or {})


def gating(activation: Activation = Activation.SILU) -> Any:
    return compiled(norms.gate_kernel, {"ACTIVATION": int(activation), "BLOCK": 1024, "EARLY": True}, {})


def latents() -> list[Any]:
    """DeepSeek-V3's steps around attention."""
    turning = {"TURNING": 64, "BLOCK_HALF": 32, "INTERLEAVED": True, "IN_HALVES": True}
    heads = {"HEADS": 128, "PLAIN": 128, "VALUE": 128, "TOKENS": 64, "UPCAST": False}
    first = {"FIRST": 1536, "BLOCK_FIRST": 2048, "SIZE": 512, "BLOCK_SIZE": 512, "HAS_NORM": True}
    kinds = {"addresses_ptr": "*i64", "query_epsilon": "fp32", "latent_epsilon": "fp32"}
    return [
        compiled(latent.write_kernel, {**turning, **first}, kinds),
        compiled(latent.absorb_kernel, {**turning, **heads, "BLOCK_PLAIN": 128, "BLOCK_N": 128}, {}),
        compiled(latent.expand_kernel, {**heads, "BLOCK_N": 32, "BLOCK_K": 128}, {}),
        attend(128, 16, 128, IS_PART=True, EARLY=True, **LATENT),
    ]


def mixtures() -> list[Any]:
    """A router of 256 experts in groups and its experts."""
    numbers = dict.fromkeys(("pairs_ptr", "ends_ptr", "active_ptr"), "*i32")
    tiles = {"ROWS": 16, "BLOCK_N": 16, "BLOCK_K": 128, "HAS_BIAS": True, "UPCAST": False, "ALONE": True}
    choice = {
        "COUNT": 256, "BLOCK": 256, "ROWS": 64, "MOST": 8, "SCORING": 1, "RENORMALISED": True, "HAS_CORRECTION": True,
        "GROUPS": 8, "TOP_GROUPS": 4, "ROUNDED": False,
    }  # fmt: skip
    wide = {**numbers, "shares_ptr": "*fp32", "logits_ptr": "*fp32", "correction_ptr": "*fp32"}
    return [
        compiled(routing.choose_kernel, choice, wide, num_warps=8),
        compiled(experts.first_kernel, {**tiles, "ACTIVATION": -1, "IN_TURNS": True}, numbers),
        compiled(experts.second_kernel, tiles, {**numbers, "out_ptr": "*fp32", "shares_ptr": "*fp32"}),
        compiled(experts.sum_kernel, {"MOST": 8, "BLOCK": 1024}, {"parts_ptr": "*fp32"}),
    ]


def few() -> list[Any]:
    """A kernel of each sort: seconds, not half a minute."""
    return [
        rotation(), product(linear_device.PLAIN, 1), gating(), attend(1, 16),
    ]  # fmt: skip


def for_older(capability: int) -> list[Any]:
    """Weights and keys that are rounded, in the forms that the host lets through."""
    made = [
        product(linear_device.GATED if rows == 64 else linear_device.PLAIN, rows, form=form, stored=stored)
        for form, stored in STORED if stored != "*fp8e4nv"  # refused while a model is loaded
        for rows in (1, 16, 64)
    ]  # fmt: skip
    for kind in ("*i8", "*fp8e4nv") if capability >= WITH_FP8 else ("*i8",):
        made += rounded_keys(kind)
    return made


def everything() -> list[Any]:
    return [
        *small_steps(),
        *narrow_products(),
        *rounded_keys("*i8", "*fp8e4nv"),
        *(product(end, rows) for end in project.ENDS for rows in (1, 16)),
        product(linear_device.PLAIN, 16, 32000),
        product(linear_device.GATED, 64),
        *(product(linear_device.ROTATED, rows, turning=turning) for rows in (1, 16) for turning in (0, 32)),
        norm(),
        norm(CENTRED=False, HAS_BIAS=False, WIDE=False, HAS_FIRST=False),
        norm(ADDS=False),
        *map(gating, Activation),
        attend(1, 16, PADDED=True, HAS_SINKS=True),
        attend(1, 16, IS_PART=True, EARLY=True, ACROSS=True),
        attend(1, 16, HAS_BIAS=True),
        attend(4, 32, IS_PART=True, EARLY=True, WINDOWED=True, CAPPED=True, HAS_TREE=True),
        attend(4, 32, IS_PART=True, BALANCED=True, EARLY=True),
        attend(4, 32, page=128, IS_PART=True, EARLY=True, WINDOWED=True),
        attend(4, 32, page=128, IS_PART=True, BALANCED=True, EARLY=True),
        merge(2, 16, 1, BALANCED=True, EARLY=True),
        merge(1, 64, 2, EARLY=True, WINDOWED=True, CHAIN=True, HAS_SINKS=True),
        compiled(
            cache_write._write_kernel,
            {"HEADS": 3, "SIZE": 80, "VALUE_SIZE": 48, "BLOCK_HEADS": 4, "BLOCK_SIZE": 128, **PLAIN_KEYS},
            {"addresses_ptr": "*i64"},
        ),
        rotation(),
        rotation(has_norms=True),
        *latents(),
        *mixtures(),
    ]  # fmt: skip


def main() -> None:
    asked = sys.argv[1] if sys.argv[1:] else ""
    capability = int(asked) if asked.isdigit() else HOPPER
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))  # whom kernels ask what they may use
    made = few() if asked == "few" else everything() if capability == HOPPER else for_older(capability)
    assert all(kernel.metadata.shared <= MOST_SHARED[capability] for kernel in made)


if __name__ == "__main__":
    main()
