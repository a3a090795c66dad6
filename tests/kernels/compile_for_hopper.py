"""Compile every kernel for compute capability 9.0, which needs no GPU. A program of its own: nothing is interpreted."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forerun.kernels import attention, cache_write

MOST_SHARED = 227 << 10  # bytes of one multiprocessor that one program may have
INTEGERS = ("slots_ptr", "lengths_ptr", "starts_ptr")
FLOATS = ("factor", "softcap")


def compiled(kernel: Any, constants: dict[str, Any], kinds: dict[str, str], **options: Any) -> Any:
    names = kernel.arg_names
    signature = {name: _kind(name, constants, kinds) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def _kind(name: str, constants: dict[str, Any], kinds: dict[str, str]) -> str:
    if name in constants:
        return "constexpr"
    if name in kinds:
        return kinds[name]
    if name.endswith("_ptr"):
        return "*bf16"
    return "fp32" if name in FLOATS else "i32"


def attend(group: int, block_queries: int, **flags: bool) -> Any:
    features = dict.fromkeys(("IS_PART", "PADDED", "WINDOWED", "CAPPED", "HAS_SINKS", "HAS_TREE", "UPCAST"), False)
    constants = {
        "HEADS": 32, "GROUP": group, "SIZE": 80, "VALUE_SIZE": 128, "BLOCK_SIZE": 128, "BLOCK_VALUE_SIZE": 128,
        "BLOCK_QUERIES": block_queries, "BLOCK_KEYS": 64, **features, **flags,
    }  # fmt: skip
    kinds = {**dict.fromkeys(INTEGERS, "*i32"), "part_ptr": "*fp32", "mass_ptr": "*fp32", "tree_ptr": "*i1"}
    return compiled(attention._attend_kernel, constants, kinds, num_warps=4, num_stages=3)


def main() -> None:
    made = [
        attend(1, 16, PADDED=True, HAS_SINKS=True),
        attend(4, 32, IS_PART=True, WINDOWED=True, CAPPED=True, HAS_TREE=True),
        compiled(
            attention._merge_kernel,
            {"HEADS": 32, "VALUE_SIZE": 128, "BLOCK_VALUE_SIZE": 128, "BLOCK_SPLITS": 16, "WINDOWED": True,
             "HAS_SINKS": True},
            {**dict.fromkeys(INTEGERS, "*i32"), "part_ptr": "*fp32", "mass_ptr": "*fp32"},
        ),
        compiled(
            cache_write._write_kernel,
            {"HEADS": 3, "SIZE": 80, "VALUE_SIZE": 48, "BLOCK_HEADS": 4, "BLOCK_SIZE": 128},
            {"addresses_ptr": "*i64"},
        ),
        compiled(
            cache_write._rotate_and_write_kernel,
            {"HEADS": 9, "KEY_HEADS": 3, "QUERY_BLOCKS": 3, "SIZE": 80, "VALUE_SIZE": 48, "BLOCK_HEADS": 4,
             "BLOCK_HALF": 64, "BLOCK_VALUE_SIZE": 64},
            {"addresses_ptr": "*i64"},
            enable_fp_fusion=False,
        ),
    ]  # fmt: skip
    assert all(kernel.metadata.shared <= MOST_SHARED for kernel in made)
    assert "fma" not in made[-1].asm["ptx"], "the rotation rounds after every step"


if __name__ == "__main__":
    main()
