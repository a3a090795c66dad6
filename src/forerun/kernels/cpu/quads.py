"""Products of 8-bit integers for many tokens, where an instruction multiplies four bytes by four (VPDPBUSD).

Sixteen rows of a weight are laid side by side first, four numbers of each: then a lane is an output, as in the panels
of `math.panels`, and nothing is added up across lanes. With few tokens that would take longer than it saves. Sums are
whole numbers, the same as those of `integer` whatever their order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from forerun.kernels.cpu import emit
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import F32, I8, I16, I32, I64, Loop, everywhere, floats, load, shuffled, whole
from forerun.kernels.cpu.memory import Floats
from forerun.kernels.cpu.processor import PROCESSOR
from forerun.math.integer import SCALE

IS_HERE = PROCESSOR.is_x86 and PROCESSOR.has("avx512vnni")
OUTPUTS = 16  # of a panel: lanes of a vector
TOKENS = 16  # of a tile, each with a vector of sums
QUAD = 4
GROUP = 32  # inputs of a turn of the loops
_STEP = OUTPUTS * QUAD  # bytes of a panel that four inputs take


@intrinsic
def _lay_weights(typing: Any, w: Any, stride: Any, panel: Any, factors: Any, size: Any) -> Any:
    """`OUTPUTS` rows at address `w`, each a scale and `size` numbers, `stride` bytes apart."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit_weights(build, *arguments)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 5), codegen


def _emit_weights(build: Any, w: Any, stride: Any, panel: Any, factors: Any, size: Any) -> None:
    first, laid = build.inttoptr(w, emit.BYTES), build.inttoptr(panel, emit.BYTES)
    rows = [build.gep(first, [build.mul(stride, whole(i))]) for i in range(OUTPUTS)]
    scales = build.inttoptr(factors, F32.as_pointer())
    for i, row in enumerate(rows):
        build.store(load(build, row, 0, F32), build.gep(scales, [whole(i)]), align=4)
    loop = Loop.begin(build, "lay")
    k = build.phi(I64)
    at = build.add(k, whole(SCALE))
    quads = [load(build, row, at, ir.VectorType(I32, GROUP // QUAD)) for row in rows]
    signs = ir.Constant(ir.VectorType(I32, OUTPUTS), [0x80808080 - (1 << 32)] * OUTPUTS)
    here = build.gep(laid, [build.mul(k, whole(OUTPUTS))])
    for i, column in enumerate(_columns(build, quads, 1)):
        place = build.bitcast(build.gep(here, [whole(i * _STEP)]), column.type.as_pointer())
        build.store(build.xor(column, signs), place, align=4)  # bytes 128 too large have no sign
    loop.end(build, [(k, build.add(k, whole(GROUP)))], size)


def _columns(build: Any, vectors: list[Any], rows: int) -> list[Any]:
    """Of vectors that hold `rows` rows each, column by column: one vector a column, in which all rows lie in order."""
    if len(vectors) == 1:
        return vectors
    count = vectors[0].type.count
    order = [side + start + i for start in range(0, count, rows) for side in (0, count) for i in range(rows)]
    columns = []
    for begin in range(0, len(order), OUTPUTS):
        lanes = order[begin : begin + OUTPUTS]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        columns += _columns(build, [shuffled(build, a, b, lanes) for a, b in pairs], 2 * rows)
    return columns


@intrinsic
def _lay_token(typing: Any, x: Any, laid: Any, offset: Any, size: Any) -> Any:
    """A token's numbers, 16 bits each, as bytes in steps of a tile; and -128 times their sum, for `_lay_weights`."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit_token(build, *arguments)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 4), codegen


def _emit_token(build: Any, x: Any, laid: Any, offset: Any, size: Any) -> None:
    source, target = build.inttoptr(x, emit.BYTES), build.inttoptr(laid, emit.BYTES)
    narrow, wide = ir.VectorType(I8, GROUP), ir.VectorType(I32, GROUP)
    loop = Loop.begin(build, "token")
    k, total = build.phi(I64), build.phi(wide)
    numbers = load(build, source, build.mul(k, whole(2)), ir.VectorType(I16, GROUP))
    place = build.bitcast(build.gep(target, [build.mul(k, whole(TOKENS))]), narrow.as_pointer())
    build.store(build.trunc(numbers, narrow), place, align=1)
    grown = build.add(total, build.sext(numbers, wide))
    loop.end(build, [(k, build.add(k, whole(GROUP))), (total, grown)], size)
    correction = build.mul(emit.reduced(build, "add", grown), ir.Constant(I32, -128))
    build.store(correction, build.inttoptr(offset, I32.as_pointer()), align=4)


@intrinsic
def _tile(
    typing: Any, panel: Any, factors: Any, x: Any, scales: Any, offsets: Any, out: Any, out_stride: Any, size: Any
) -> Any:
    """A panel against `TOKENS` tokens; addresses; `out_stride` in floats."""

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit_tile(build, *arguments)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 8), codegen


def _emit_tile(
    build: Any, panel: Any, factors: Any, x: Any, scales: Any, offsets: Any, out: Any, out_stride: Any, size: Any
) -> None:
    weights, mine = build.inttoptr(panel, emit.BYTES), build.inttoptr(x, emit.BYTES)
    sums_type, vector = ir.VectorType(I32, OUTPUTS), floats(OUTPUTS)
    loop = Loop.begin(build, "quads")
    k = build.phi(I64)
    sums = [build.phi(sums_type) for _ in range(TOKENS)]
    here = build.gep(weights, [build.mul(k, whole(OUTPUTS))])
    tokens_here = build.gep(mine, [build.mul(k, whole(TOKENS))])
    grown = list(sums)
    for quad in range(GROUP // QUAD):
        weight = load(build, here, quad * _STEP, sums_type)
        for t in range(TOKENS):
            four = everywhere(build, load(build, tokens_here, t * GROUP + quad * QUAD, I32), OUTPUTS)
            grown[t] = emit.call(build, "llvm.x86.avx512.vpdpbusd.512", sums_type, grown[t], weight, four)
    loop.end(build, [(k, build.add(k, whole(GROUP)))], size, ([sums], [grown]))

    shares = load(build, build.inttoptr(factors, emit.BYTES), 0, vector)
    their_scales, their_offsets = build.inttoptr(scales, F32.as_pointer()), build.inttoptr(offsets, I32.as_pointer())
    for t, place in enumerate(emit.row_pointers(build, out, out_stride, TOKENS)):
        offset = build.load(build.gep(their_offsets, [whole(t)]), align=4)
        scale = build.load(build.gep(their_scales, [whole(t)]), align=4)
        total = build.sitofp(build.add(grown[t], everywhere(build, offset, OUTPUTS)), vector)
        product = build.fmul(total, build.fmul(everywhere(build, scale, OUTPUTS), shares))
        build.store(product, build.bitcast(place, vector.as_pointer()), align=4)


@njit(nogil=True, cache=True)
def whole_tiles(
    w: int,
    x: Any,  # int16 [tokens, size]: multiples of TOKENS and of GROUP
    scales: Floats,  # [tokens]
    out: int,
    out_stride: int,
    first: int,
    last: int,  # a multiple of OUTPUTS behind `first`
    laid: Any,  # int8 [tokens * size] room for the tokens in another order
    offsets: Any,  # int32 [tokens] room
    panel: Any,  # int8 [OUTPUTS * size] room
    factors: Floats,  # [OUTPUTS] room
) -> None:
    """As `integer._rounded_product`; whoever calls holds the arrays meanwhile."""
    tokens, size = x.shape
    row, source, their = size + SCALE, x.ctypes.data, scales.ctypes.data
    numbers, place, weights, shares = laid.ctypes.data, offsets.ctypes.data, panel.ctypes.data, factors.ctypes.data
    for t in range(tokens):
        tile, within = t // TOKENS, t % TOKENS
        _lay_token(source + t * size * 2, numbers + tile * TOKENS * size + within * GROUP, place + t * 4, size)
    for n in range(first, last, OUTPUTS):
        _lay_weights(w + n * row, row, weights, shares, size)
        for t in range(0, tokens, TOKENS):
            _tile(
                weights, shares, numbers + t * size, their + t * 4, place + t * 4, out + (t * out_stride + n) * 4,
                out_stride, size,
            )  # fmt: skip
