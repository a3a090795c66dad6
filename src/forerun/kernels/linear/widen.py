"""Device code that widens stored weights in registers; the reference is `math.scaled.whole_numbers`.

Converting bytes to floats is slow where a compiler does it number by number (16 a clock and multiprocessor, against
128 multiplications), so bits are put in the places of a float instead: below a bfloat16's exponent, whose value is then
subtracted, or in the last bits of a float32, which count as they are. Tiles for tensor cores come in pairs of bytes:
shared memory has no way to turn tiles of single ones. `FAST` is off where Triton's interpreter runs the kernels: it
knows no assembly. Differences and products of pairs of bfloat16 are instructions from compute capability 9.0 on; before
that the compiler converts.
"""

import triton
import triton.language as tl

# How the weights of a product are stored; a scale follows the sum, or the group of four bits.
WIDE = tl.constexpr(0)  # in the type of the rows
INT8 = tl.constexpr(1)
ROUNDED = tl.constexpr(2)  # of the rows' own narrow type: both are rounded
INT4 = tl.constexpr(3)


@triton.jit
def lifted(w, FAST: tl.constexpr):
    """int8 -> (w + 128) * 2**-149: the last bits of a float, so that nothing has to be subtracted from each."""
    if FAST:
        number = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 u;
                xor.b32 u, $4, 0x80808080;
                prmt.b32 $0, u, 0, 0x4440;
                prmt.b32 $1, u, 0, 0x4441;
                prmt.b32 $2, u, 0, 0x4442;
                prmt.b32 $3, u, 0, 0x4443;
            }
            """,
            "=r,=r,=r,=r,r", [w], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        number = (w.to(tl.int32) + 128).to(tl.float32, bitcast=True)
    return number


@triton.jit
def lifted_nibbles(raw, FAST: tl.constexpr):
    """uint8 -> the numbers n below 16 in its low and high bits, as n * 2**-149."""
    if FAST:
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 a, b;
                and.b32 a, $8, 0x0f0f0f0f;
                shr.u32 b, $8, 4;
                and.b32 b, b, 0x0f0f0f0f;
                prmt.b32 $0, a, 0, 0x4440;
                prmt.b32 $1, a, 0, 0x4441;
                prmt.b32 $2, a, 0, 0x4442;
                prmt.b32 $3, a, 0, 0x4443;
                prmt.b32 $4, b, 0, 0x4440;
                prmt.b32 $5, b, 0, 0x4441;
                prmt.b32 $6, b, 0, 0x4442;
                prmt.b32 $7, b, 0, 0x4443;
            }
            """,
            "=r,=r,=r,=r,=r,=r,=r,=r,r", [raw], dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        bits = raw.to(tl.int32)
        low = (bits & 15).to(tl.float32, bitcast=True)
        high = (bits >> 4).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def nibbles(raw, KIND: tl.constexpr, FAST: tl.constexpr):
    """uint8 -> the numbers in its low and high bits, less 8, as KIND."""
    if FAST and tl.target_info.cuda_capability_geq(9) and tl.bfloat16 == KIND:
        low = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 a, b, k;
                prmt.b32 a, $2, 0, 0x4140;
                prmt.b32 b, $2, 0, 0x4342;
                lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
                mov.b32 k, 0x43084308;
                sub.bf16x2 $0, a, k;
                sub.bf16x2 $1, b, k;
            }
            """,
            "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 s, a, b, k;
                shr.u32 s, $2, 4;
                prmt.b32 a, s, 0, 0x4140;
                prmt.b32 b, s, 0, 0x4342;
                lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
                lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
                mov.b32 k, 0x43084308;
                sub.bf16x2 $0, a, k;
                sub.bf16x2 $1, b, k;
            }
            """,
            "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        # As float32: 2**23 + n, less 2**23 + 8; of the high bits 16 times that, divided by 16.
        bits = raw.to(tl.int32)
        low = (((bits & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0).to(KIND)
        high = ((((bits & 240) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0) * 0.0625).to(KIND)
    return low, high


@triton.jit
def pairs(raw, KIND: tl.constexpr, FLOATS: tl.constexpr, FAST: tl.constexpr):
    """int16 -> the numbers in its low and high byte as KIND, exactly: int8, or e4m3 where FLOATS."""
    if FAST and tl.target_info.cuda_capability_geq(9) and tl.bfloat16 == KIND and FLOATS:
        # Sign, exponent and mantissa at their places in a bfloat16 are the number times 2**-120.
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 s, a, b, k;
                mov.b32 k, 0x7b807b80;
                shl.b32 s, $2, 8;
                shl.b32 a, $2, 4;
                and.b32 a, a, 0x07f007f0;
                lop3.b32 a, s, 0x80008000, a, 0xea;
                shr.u32 b, $2, 4;
                and.b32 b, b, 0x07f007f0;
                lop3.b32 b, $2, 0x80008000, b, 0xea;
                mul.bf16x2 $0, a, k;
                mul.bf16x2 $1, b, k;
            }
            """,
            "=r,=r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FAST and tl.target_info.cuda_capability_geq(9) and tl.bfloat16 == KIND:
        # 128 + the lower seven bits, less 128 or, where the sign is set, 256.
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 s, a, b;
                lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xea;
                lop3.b32 b, $2, 0x00800080, 0x43004300, 0xea;
                sub.bf16x2 $0, a, b;
                shr.u32 s, $2, 8;
                lop3.b32 a, s, 0x007f007f, 0x43004300, 0xea;
                lop3.b32 b, s, 0x00800080, 0x43004300, 0xea;
                sub.bf16x2 $1, a, b;
            }
            """,
            "=r,=r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FLOATS:
        low = (raw & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(KIND)
        high = ((raw >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32).to(KIND)
    else:
        low = ((raw << 8) >> 8).to(tl.float32).to(KIND)
        high = (raw >> 8).to(tl.float32).to(KIND)
    return low, high
