"""Products of 8-bit integers with activations in groups of 32; the reference is `forerun.math.panels`.

A panel of 16 outputs meets up to eight tokens, whose numbers were put in the order in which they are read: group by
group, token by token. Sums of a group stay whole numbers in registers, one lane an output; then they become floats,
once for 512 products of a token. The instruction is VPDPBUSD (VNNI) or SDOT where the machine has it, else VPMADDWD or
plain multiplications; all give the same sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forerun.kernels.cpu import emit
from forerun.kernels.cpu.compiled import address_of
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import F32, I8, I16, I32, I64, Loop, everywhere, floats, load, shuffled, whole
from forerun.kernels.cpu.integer import INFINITE, SIGN, TO_ROUND
from forerun.kernels.cpu.memory import Floats
from forerun.kernels.cpu.processor import PROCESSOR, Processor
from forerun.kernels.cpu.tile import AHEAD, LINE
from forerun.kernels.cpu.widen import WIDEST
from forerun.math.integer import NEGLIGIBLE, SCALE, STEPS
from forerun.math.panels import GROUP, PANEL, QUAD

BYTES_OF_FOUR, PAIRS_OF_WORDS, DOT_PRODUCTS = "VPDPBUSD", "VPMADDWD", "SDOT"


def best_way(processor: Processor) -> str:
    if processor.is_x86:
        return BYTES_OF_FOUR if processor.has("avx512vnni") else PAIRS_OF_WORDS
    return DOT_PRODUCTS if processor.has_dot_products() else PAIRS_OF_WORDS


WAY = best_way(PROCESSOR)
# Outputs of a register: VPMADDWD leaves two sums of each.
OUTPUTS = {BYTES_OF_FOUR: 16, DOT_PRODUCTS: 4, PAIRS_OF_WORDS: WIDEST // 2}[WAY]
MOST_TOKENS = {BYTES_OF_FOUR: 8, DOT_PRODUCTS: 3, PAIRS_OF_WORDS: 4 if WIDEST == 16 else 1}[WAY]
ACTIVATION = np.int16 if WAY == PAIRS_OF_WORDS else np.int8
_NUMBER = I16 if WAY == PAIRS_OF_WORDS else I8
_WIDTH = _NUMBER.width // 8
_STEP = PANEL * QUAD  # bytes of a panel that four inputs take


@intrinsic
def _round_group(typing: Any, x: Any, numbers: Any, scale: Any, offset: Any) -> Any:
    """32 floats at an address: their numbers, scale, and -128 times the sum of the numbers (see `_begin`).

    In vectors, because LLVM makes none of a loop of 32 turns.
    """

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit_rounding(build, *arguments)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 4), codegen


def _emit_rounding(build: Any, x: Any, numbers: Any, scale: Any, offset: Any) -> None:
    """See `math.integer.rounded`; integers compare as the floats do whose bits they are, and NaN is the largest."""
    vector, whole_numbers = floats(GROUP), ir.VectorType(I32, GROUP)
    values = build.load(build.inttoptr(x, vector.as_pointer()), align=4)
    sizes = build.and_(build.bitcast(values, whole_numbers), ir.Constant(whole_numbers, [SIGN] * GROUP))
    bits = emit.reduced(build, "smax", sizes)
    is_sound, largest = build.icmp_signed("<", bits, ir.Constant(I32, INFINITE)), build.bitcast(bits, F32)
    counts = build.and_(is_sound, build.fcmp_ordered(">=", largest, ir.Constant(F32, NEGLIGIBLE)))
    steps = ir.Constant(F32, float(STEPS))
    inverse = build.select(counts, build.fdiv(steps, largest), ir.Constant(F32, 0.0))
    sound = build.select(is_sound, values, ir.Constant(vector, [0.0] * GROUP))
    to_round = ir.Constant(vector, [float(TO_ROUND)] * GROUP)
    nearest = build.fadd(build.fmul(sound, everywhere(build, inverse, GROUP)), to_round)
    integers = build.fptosi(build.fsub(nearest, to_round), whole_numbers)
    narrow = ir.VectorType(_NUMBER, GROUP)
    build.store(build.trunc(integers, narrow), build.inttoptr(numbers, narrow.as_pointer()), align=1)
    its_scale = build.select(is_sound, build.fdiv(largest, steps), ir.Constant(F32, float("nan")))
    build.store(its_scale, build.inttoptr(scale, F32.as_pointer()), align=4)
    total = build.mul(emit.reduced(build, "add", integers), ir.Constant(I32, -128))
    build.store(total, build.inttoptr(offset, I32.as_pointer()), align=4)


@njit(nogil=True, cache=True)
def _round(x: int, size: int, numbers: int, scales: int, offsets: int, token: int, width: int) -> None:
    """One token of a tile of `width`, group by group; addresses."""
    for group in range(size // GROUP):
        place = group * width + token
        _round_group(x + group * GROUP * 4, numbers + place * GROUP * _WIDTH, scales + place * 4, offsets + place * 4)


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any, tokens: Any, w: Any, x: Any, scales: Any, offsets: Any, out: Any, out_stride: Any, groups: Any
) -> Any:
    """A panel against `tokens`, a constant; addresses; `out_stride` in floats."""
    if not isinstance(tokens, types.IntegerLiteral):
        return None

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit(build, tokens.literal_value, arguments[1:])
        return context.get_dummy_value()

    return types.void(tokens, *(types.intp,) * 7), codegen


def _emit(build: Any, tokens: int, arguments: Any) -> None:
    w, x, scales, offsets, out, out_stride, groups = arguments
    panel, mine = build.inttoptr(w, emit.BYTES), build.inttoptr(x, emit.BYTES)
    their_scales, their_offsets = build.inttoptr(scales, F32.as_pointer()), build.inttoptr(offsets, I32.as_pointer())
    vector, parts = floats(OUTPUTS), PANEL // OUTPUTS

    loop = Loop.begin(build, "groups")
    group = build.phi(I64)
    totals = [[build.phi(vector) for _ in range(parts)] for _ in range(tokens)]
    numbers = build.gep(panel, [build.add(build.mul(group, whole(_STEP * GROUP // QUAD)), whole(SCALE * PANEL))])
    first = build.mul(group, whole(tokens))
    token_numbers = build.gep(mine, [build.mul(first, whole(GROUP * _WIDTH))])
    for line in range(_STEP * GROUP // QUAD // LINE):
        emit.prefetch(build, build.gep(numbers, [whole(AHEAD + line * LINE)]))
    at = [[build.add(first, whole(t))] for t in range(tokens)]
    begins = [build.load(build.gep(their_offsets, place), align=4) for place in at]
    sums = [[_begin(build, begin) for _ in range(parts)] for begin in begins]
    for quad in range(GROUP // QUAD):
        for part in range(parts):
            weight = _weight(build, numbers, quad * _STEP + part * OUTPUTS * QUAD)
            for t in range(tokens):
                four = _four(build, token_numbers, (t * GROUP + quad * QUAD) * _WIDTH)
                sums[t][part] = _dot(build, sums[t][part], weight, four)
    grown = []
    for t in range(tokens):
        scale = everywhere(build, build.load(build.gep(their_scales, at[t]), align=4), OUTPUTS)
        products = [build.sitofp(_one_an_output(build, each), vector) for each in sums[t]]
        grown.append([build.fadd(old, build.fmul(new, scale)) for old, new in zip(totals[t], products, strict=True)])
    loop.end(build, [(group, build.add(group, whole(1)))], groups, (totals, grown))

    place = build.inttoptr(out, F32.as_pointer())
    for part in range(parts):
        factors = load(build, panel, part * OUTPUTS * SCALE, vector)
        for t in range(tokens):
            target = build.gep(place, [build.add(build.mul(out_stride, whole(t)), whole(part * OUTPUTS))])
            build.store(build.fmul(grown[t][part], factors), build.bitcast(target, vector.as_pointer()), align=4)


def _begin(build: Any, offset: Any) -> Any:
    """Where a group's sums begin: VPDPBUSD's weights are 128 too large."""
    if WAY == BYTES_OF_FOUR:
        return everywhere(build, offset, OUTPUTS)
    count = 2 * OUTPUTS if WAY == PAIRS_OF_WORDS else OUTPUTS
    return ir.Constant(ir.VectorType(I32, count), [0] * count)


def _weight(build: Any, numbers: Any, offset: int) -> Any:
    """Four inputs of each output of a register, as the instruction wants them."""
    count = OUTPUTS * QUAD
    loaded = load(build, numbers, offset, ir.VectorType(I8, count))
    if WAY == BYTES_OF_FOUR:
        return build.xor(loaded, ir.Constant(loaded.type, [-128] * count))
    return loaded if WAY == DOT_PRODUCTS else build.sext(loaded, ir.VectorType(I32, count))


def _four(build: Any, numbers_at: Any, offset: int) -> Any:
    """Four numbers of a token, once for each output of a register."""
    word = ir.IntType(QUAD * _NUMBER.width)
    spread = everywhere(build, load(build, numbers_at, offset, word), OUTPUTS)
    numbers = build.bitcast(spread, ir.VectorType(_NUMBER, OUTPUTS * QUAD))
    return build.sext(numbers, ir.VectorType(I32, OUTPUTS * QUAD)) if WAY == PAIRS_OF_WORDS else numbers


def _dot(build: Any, total: Any, weight: Any, four: Any) -> Any:
    if WAY == PAIRS_OF_WORDS:
        products = build.mul(weight, four)
        even, odd = (shuffled(build, products, None, range(start, OUTPUTS * QUAD, 2)) for start in (0, 1))
        return build.add(total, build.add(even, odd))
    if WAY == BYTES_OF_FOUR:
        name, weight, four = "llvm.x86.avx512.vpdpbusd.512", *(build.bitcast(v, total.type) for v in (weight, four))
    else:
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    return emit.call(build, name, total.type, total, weight, four)


def _one_an_output(build: Any, sums: Any) -> Any:
    if WAY != PAIRS_OF_WORDS:
        return sums
    return build.add(*(shuffled(build, sums, None, range(start, 2 * OUTPUTS, 2)) for start in (0, 1)))


@njit(nogil=True, cache=True)
def _one(width: int, w: int, x: int, scales: int, offsets: int, out: int, out_stride: int, groups: int) -> None:
    """A panel against `width` tokens, at most MOST_TOKENS: wider branches, known to be dead, are not compiled."""
    if width == 1:
        _tile(1, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 2 and width == 2:
        _tile(2, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 3 and width == 3:
        _tile(3, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 4 and width == 4:
        _tile(4, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 5 and width == 5:
        _tile(5, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 6 and width == 6:
        _tile(6, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 7 and width == 7:
        _tile(7, w, x, scales, offsets, out, out_stride, groups)
    elif MOST_TOKENS >= 8:
        _tile(8, w, x, scales, offsets, out, out_stride, groups)


@njit(nogil=True, cache=True)
def _rounded_product(
    w: int, x: int, x_stride: int, numbers: Any, scales: Floats, offsets: Any, out: int, out_stride: int, tokens: int,
    size: int, first: int, last: int,
) -> None:  # fmt: skip
    """Whoever calls holds the arrays meanwhile: Numba frees an array behind the last line that names it."""
    mine, their, more, groups = numbers.ctypes.data, scales.ctypes.data, offsets.ctypes.data, size // GROUP
    tiles = (tokens + MOST_TOKENS - 1) // MOST_TOKENS
    done = 0
    for i in range(tiles):
        width, before = (tokens * (i + 1)) // tiles - done, done * groups
        for t in range(width):
            _round(
                x + (done + t) * x_stride * 4, size, mine + before * GROUP * _WIDTH, their + before * 4,
                more + before * 4, t, width,
            )  # fmt: skip
        done += width
    for n in range(first, last, PANEL):
        done = 0
        for i in range(tiles):
            width, before = (tokens * (i + 1)) // tiles - done, done * groups
            _one(
                width, w + n * (size + SCALE), mine + before * GROUP * _WIDTH, their + before * 4, more + before * 4,
                out + (done * out_stride + n) * 4, out_stride, groups,
            )  # fmt: skip
            done += width


def _product(
    w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """As those of `product`, for whole panels, with inputs rounded for this call."""
    count = tokens * (size // GROUP)
    numbers, scales, offsets = (
        np.empty(tokens * size, ACTIVATION),
        np.empty(count, np.float32),
        np.empty(count, np.int32),
    )
    _rounded_product(w, x, x_stride, numbers, scales, offsets, out, out_stride, tokens, size, first, last)


product_address = partial(address_of, _product)
