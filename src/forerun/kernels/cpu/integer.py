"""Products of 8-bit integers for few tokens; the reference is `forerun.math.integer`.

The same shape of tile as for floats: four weight rows against up to six tokens, sums in registers, the next rows
prefetched. Instructions are plain multiplications and additions of integers in an order that LLVM knows as this
machine's own: SDOT on ARM, VPMADDWD or, with VNNI, VPDPWSSD on x86. Integer sums have no order, so all of them, and
machines that have none of them, give the same bits.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from forerun.kernels.cpu import emit, quads
from forerun.kernels.cpu.compiled import address_of
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import F32, I8, I16, I32, I64, Loop, floats, load, shuffled, whole
from forerun.kernels.cpu.memory import Floats, pointer
from forerun.kernels.cpu.processor import HAS_PARTIAL_SUMS
from forerun.kernels.cpu.tile import LINE, MOST_TOKENS, ROWS, ahead_of
from forerun.kernels.cpu.widen import IS_X86, WIDEST
from forerun.math.integer import NEGLIGIBLE, SCALE, STEPS

# Values that one instruction multiplies, and how many of them are added up in one sum. x86 multiplies pairs of 16 bits,
# so activations are kept at that width; ARM multiplies four bytes at a time.
RUN = 2 * WIDEST if IS_X86 else 16
_TOGETHER = 2 if IS_X86 else 4
_SUMS = RUN // _TOGETHER
_ACTIVATION = I16 if IS_X86 else I8
ACTIVATION = np.int16 if IS_X86 else np.int8
ACTIVATION_BYTES = _ACTIVATION.width // 8

TO_ROUND = np.float32(3 << 22)  # added and taken away again: leaves the nearest whole number, ties to even
INFINITE = 0x7F800000  # the bits of infinity: those of NaN are larger
SIGN = 0x7FFFFFFF  # all bits but the sign


@njit(nogil=True, cache=True, error_model="numpy")
def _round(x: Any, numbers: Any) -> np.float32:
    """See `math.integer.rounded`; integers compare as the floats do whose bits they are, and NaN is the largest."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & np.int32(SIGN))
    if largest >= np.int32(INFINITE):
        numbers[:] = 0
        return np.float32(np.nan)
    size = np.int32(largest).view(np.float32)
    inverse = np.float32(STEPS) / size if size >= np.float32(NEGLIGIBLE) else np.float32(0)
    for i in range(x.shape[0]):
        steps = x[i] * inverse
        numbers[i] = ACTIVATION((steps + TO_ROUND) - TO_ROUND)
    return np.float32(size / np.float32(STEPS))


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any, rows: Any, tokens: Any, w: Any, w_stride: Any, x: Any, scales: Any, out: Any, out_stride: Any,
    size: Any,
) -> Any:  # fmt: skip
    """Addresses; `w_stride` in bytes, `out_stride` in floats. The first two are constants; activations are dense."""
    shape = (rows, tokens)
    if not all(isinstance(number, types.IntegerLiteral) for number in shape):
        return None
    signature = types.void(*shape, *(types.intp,) * 7)

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit(build, rows.literal_value, tokens.literal_value, arguments[2:])
        return context.get_dummy_value()

    return signature, codegen


def _emit(build: Any, rows: int, tokens: int, arguments: Any) -> None:
    w, w_stride, x, scales, out, out_stride, size = arguments
    sums_type, width = ir.VectorType(I32, _SUMS), ACTIVATION_BYTES
    first = build.inttoptr(w, emit.BYTES)
    weights = [build.gep(first, [build.mul(w_stride, whole(i))]) for i in range(rows)]
    row_bytes = build.mul(size, whole(width))
    inputs = [build.gep(build.inttoptr(x, emit.BYTES), [build.mul(row_bytes, whole(t))]) for t in range(tokens)]
    behind = build.gep(first, [ahead_of(build, build.mul(w_stride, whole(rows)))])

    loop = Loop.begin(build, "integers")
    k = build.phi(I64)
    sums = [[build.phi(sums_type) for _ in range(tokens)] for _ in range(rows)]
    for line in range(max(1, rows * RUN // LINE)):
        emit.prefetch(build, build.gep(behind, [build.add(build.mul(k, whole(rows)), whole(line * LINE))]))
    at = build.add(k, whole(SCALE))
    ours = [_widened(build, base, build.mul(k, whole(width)), _ACTIVATION) for base in inputs]
    grown = []
    for base, row in zip(weights, sums, strict=True):
        weight = _widened(build, base, at, I8)
        grown.append([_add_products(build, total, weight, mine) for mine, total in zip(ours, row, strict=True)])
    loop.end(build, [(k, build.add(k, whole(RUN)))], size, (sums, grown))

    factors = _packed(build, [load(build, base, 0, F32) for base in weights])
    place, their_scales = build.inttoptr(out, F32.as_pointer()), build.inttoptr(scales, F32.as_pointer())
    for t in range(tokens):
        scale = build.load(build.gep(their_scales, [whole(t)]), align=4)
        both = build.fmul(_packed(build, [scale] * rows), factors)
        totals = build.sitofp(_added_up(build, [grown[r][t] for r in range(rows)]), floats(rows))
        target = build.gep(place, [build.mul(out_stride, whole(t))])
        build.store(build.fmul(totals, both), build.bitcast(target, floats(rows).as_pointer()), align=4)


def _widened(build: Any, base: Any, offset: Any, kind: Any) -> Any:
    return build.sext(load(build, base, offset, ir.VectorType(kind, RUN)), ir.VectorType(I32, RUN))


def _add_products(build: Any, total: Any, a: Any, b: Any) -> Any:
    """total + sums of `_TOGETHER` neighbours of a * b: in the form that becomes one instruction."""
    products = build.mul(a, b)
    if not IS_X86 and HAS_PARTIAL_SUMS:
        return emit.call(build, f"llvm.vector.partial.reduce.add.v{_SUMS}i32.v{RUN}i32", total.type, total, products)
    parts = [shuffled(build, products, None, range(start, RUN, _TOGETHER)) for start in range(_TOGETHER)]
    return build.add(total, reduce(build.add, parts))


def _added_up(build: Any, vectors: list[Any]) -> Any:
    """The sum of each vector, as one vector: four at once by adding halves that were mixed, or one."""
    if len(vectors) == 1:
        return _packed(build, [emit.reduced(build, "add", vectors[0])])
    a, b, c, d = vectors
    total = _mixed(build, _mixed(build, a, b, 1), _mixed(build, c, d, 1), 2)
    while (count := total.type.count) > ROWS:
        total = build.add(*(shuffled(build, total, None, range(s, s + count // 2)) for s in (0, count // 2)))
    return total


def _mixed(build: Any, a: Any, b: Any, run: int) -> Any:
    """In each four lanes: the first two of a and of b in turns of `run`, plus the last two of each."""
    count = a.type.count
    order = [
        lane for start in range(0, 2, run) for side in (0, count) for lane in range(side + start, side + start + run)
    ]
    low = [group + lane for group in range(0, count, 4) for lane in order]
    return build.add(shuffled(build, a, b, low), shuffled(build, a, b, [lane + 2 for lane in low]))


def _packed(build: Any, scalars: list[Any]) -> Any:
    vector = ir.Constant(ir.VectorType(scalars[0].type, len(scalars)), ir.Undefined)
    for i, scalar in enumerate(scalars):
        vector = build.insert_element(vector, scalar, ir.Constant(I32, i))
    return vector


@njit(nogil=True, cache=True)
def _wide(w: int, row: int, x: int, scales: int, out: int, out_stride: int, tokens: int, size: int) -> None:
    """ROWS weight rows against `tokens` inputs, in as few tiles as will do, of nearly equal width."""
    tiles = (tokens + MOST_TOKENS - 1) // MOST_TOKENS
    done = 0
    for i in range(tiles):
        width = (tokens * (i + 1)) // tiles - done
        mine, their, here = x + done * size * ACTIVATION_BYTES, scales + done * 4, out + done * out_stride * 4
        if width == 1:
            _tile(ROWS, 1, w, row, mine, their, here, out_stride, size)
        elif width == 2:
            _tile(ROWS, 2, w, row, mine, their, here, out_stride, size)
        elif width == 3:
            _tile(ROWS, 3, w, row, mine, their, here, out_stride, size)
        elif width == 4:
            _tile(ROWS, 4, w, row, mine, their, here, out_stride, size)
        elif width == 5:
            _tile(ROWS, 5, w, row, mine, their, here, out_stride, size)
        else:
            _tile(ROWS, 6, w, row, mine, their, here, out_stride, size)
        done += width


@njit(nogil=True, cache=True)
def _rounded_product(w: int, x: Any, scales: Floats, out: int, out_stride: int, first: int, last: int) -> None:
    """Whoever calls holds x and scales meanwhile: Numba frees an array behind the last line that names it."""
    tokens, size = x.shape
    mine, their, row = x.ctypes.data, scales.ctypes.data, size + SCALE
    n = first
    while n + ROWS <= last:
        _wide(w + n * row, row, mine, their, out + n * 4, out_stride, tokens, size)
        n += ROWS
    while n < last:
        for t in range(tokens):
            place = out + (t * out_stride + n) * 4
            _tile(1, 1, w + n * row, row, mine + t * size * ACTIVATION_BYTES, their + t * 4, place, out_stride, size)
        n += 1


def _product(
    w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """As those of `product`, with inputs rounded for this call."""
    numbers, scales = np.empty((tokens, size), ACTIVATION), np.empty(tokens, np.float32)
    for t in range(tokens):
        scales[t] = _round(carray(pointer(x + t * x_stride * 4), (size,), np.float32), numbers[t])
    _rounded_product(w, numbers, scales, out, out_stride, first, last)


def _product_in_quads(
    w: int, x: int, x_stride: int, out: int, out_stride: int, tokens: int, size: int, first: int, last: int
) -> None:
    """The same where the processor has the instruction of `quads`: whole tiles by that, what is left as above."""
    numbers, scales = np.empty((tokens, size), ACTIVATION), np.empty(tokens, np.float32)
    for t in range(tokens):
        scales[t] = _round(carray(pointer(x + t * x_stride * 4), (size,), np.float32), numbers[t])
    done, stop = 0, first
    if tokens >= quads.TOKENS and size % quads.GROUP == 0:
        done, stop = tokens // quads.TOKENS * quads.TOKENS, last - (last - first) % quads.OUTPUTS
        laid, offsets = np.empty(done * size, np.int8), np.empty(done, np.int32)
        panel, factors = np.empty(quads.OUTPUTS * size, np.int8), np.empty(quads.OUTPUTS, np.float32)
        quads.whole_tiles(w, numbers[:done], scales[:done], out, out_stride, first, stop, laid, offsets, panel, factors)
    if done < tokens:
        _rounded_product(w, numbers[done:], scales[done:], out + done * out_stride * 4, out_stride, first, stop)
    _rounded_product(w, numbers, scales, out, out_stride, stop, last)


product_address = partial(address_of, _product_in_quads if quads.IS_HERE and IS_X86 else _product)
