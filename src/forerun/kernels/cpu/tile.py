"""The inner loop of every product: a tile of dot products, written in vector instructions.

`tile(4 weight rows, t tokens)` keeps 4 x t sums in registers and reads each weight once, in whatever format it is
stored (`widen`). Left to itself a core waits for memory here: hardware prefetchers follow one stream and a tile reads
four, so the tile asks for the lines of the *next* rows, which lie right behind, while it works on its own (on a
Neoverse N1: 20 -> 34 GB/s on two cores).

Each sum runs over k in the same order whatever t and the format are: `lanes` partial sums, then a fixed tree. So a
token's numbers have the same bits alone and beside others, which no library's matrix product promises, and the same
bits from narrow weights as from their float32 copy. How many lanes is a matter of the size alone (`product`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import literally, types
from numba.extending import intrinsic

from forerun.kernels.cpu import emit
from forerun.kernels.cpu.disk_cache import njit
from forerun.kernels.cpu.emit import F32, I32, I64, Loop, floats, load, row_pointers, shuffled, whole
from forerun.kernels.cpu.widen import FORMATS, MANY_REGISTERS, Stored

ROWS = 4  # weight rows of a tile; four rows of sixteen bytes are one cache line to prefetch an iteration
MOST_TOKENS = 6 if MANY_REGISTERS else 3  # tokens of one tile: ROWS * MOST_TOKENS sums must stay in registers
LINE = 64  # bytes of a cache line
AHEAD = 8192  # bytes to ask for ahead at least: a tile of narrow rows is done before memory answers


@intrinsic(prefer_literal=True)
def _tile(
    typing: Any, stored: Any, lanes: Any, rows: Any, tokens: Any, w: Any, w_stride: Any, x: Any, x_stride: Any,
    out: Any, out_stride: Any, size: Any,
) -> Any:  # fmt: skip
    """Addresses; `w_stride` in bytes, the other strides and `size` in floats. The first four are constants."""
    shape = (stored, lanes, rows, tokens)
    if not all(isinstance(number, types.IntegerLiteral) for number in shape):
        return None
    signature = types.void(*shape, *(types.intp,) * 7)

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        kind, length, height, width = (number.literal_value for number in shape)
        _emit(build, FORMATS[kind], length, height, width, arguments[4:])
        return context.get_dummy_value()

    return signature, codegen


def _emit(build: Any, stored: Stored, lanes: int, rows: int, tokens: int, arguments: Any) -> None:
    """The loop over k, one run of stored values at a time, and the sums behind it."""
    w, w_stride, x, x_stride, out, out_stride, size = arguments
    vector, (values, length) = floats(lanes), stored.run(lanes)
    first = build.inttoptr(w, emit.BYTES)
    weights = [build.gep(first, [build.mul(w_stride, whole(i))]) for i in range(rows)]
    inputs = row_pointers(build, x, x_stride, tokens)
    behind = build.gep(first, [ahead_of(build, build.mul(w_stride, whole(rows)))])

    loop = Loop.begin(build, "tile")
    k, at = build.phi(I64), build.phi(I64)  # values done; their bytes
    sums = [[build.phi(vector) for _ in range(tokens)] for _ in range(rows)]
    for line in range(max(1, -(-rows * length // LINE))):
        emit.prefetch(build, build.gep(behind, [build.add(build.mul(at, whole(rows)), whole(line * LINE))]))
    opened = [stored.open(build, build.gep(pointer, [at]), lanes) for pointer in weights]
    grown: list[list[Any]] = [list(row) for row in sums]
    for index in range(values // lanes):
        place = build.add(k, whole(index * lanes))
        ours = [load(build, pointer, place, vector, align=4) for pointer in inputs]
        for run, row in zip(opened, grown, strict=True):
            weight = stored.vector(build, run, index, lanes)
            row[:] = [emit.fma(build, weight, mine, total) for mine, total in zip(ours, row, strict=True)]
    step, bytes_done = build.add(k, whole(values)), build.add(at, whole(length))
    loop.end(build, [(k, step), (at, bytes_done)], size, (sums, grown))

    places = row_pointers(build, out, out_stride, tokens)
    if rows == ROWS:
        _store_quads(build, grown, places)
        return
    for r, row in enumerate(grown):
        for place, total in zip(places, row, strict=True):
            build.store(_added_up(build, total), build.gep(place, [whole(r)]), align=4)


def _store_quads(build: Any, sums: list[list[Any]], places: list[Any]) -> None:
    """Add up the lanes of four rows of sums, several at once, and store each token's four numbers together.

    The tree is that of `_added_up`. One sum at a time, a tile over a few hundred inputs takes as long for its sums as
    for its products.
    """
    most, first = sums[0][0].type.count // ROWS, 0  # tokens whose numbers fill a vector
    while first < len(places):
        count = 1 << (min(most, len(places) - first).bit_length() - 1)
        a, b, c, d = (_to_four_lanes(build, row[first : first + count]) for row in sums)
        done = _folded(build, _folded(build, a, b, 4), _folded(build, c, d, 4), 2)
        for i in range(count):
            four = shuffled(build, done, done, range(i * ROWS, (i + 1) * ROWS))
            build.store(four, build.bitcast(places[first + i], four.type.as_pointer()), align=4)
        first += count


def _to_four_lanes(build: Any, vectors: list[Any]) -> Any:
    """The partial sums of each of 1, 2 or 4 vectors, added up to four, side by side in one vector."""
    part = vectors[0].type.count
    while part > 4:
        pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
        vectors = [_folded(build, pair[0], pair[1] if len(pair) == 2 else None, part) for pair in pairs]
        part //= 2
    assert len(vectors) == 1
    return vectors[0]


def _folded(build: Any, left: Any, right: Any, part: int) -> Any:
    """Of vectors that hold sums in parts of so many lanes: the lower half of every part plus its upper half.

    Parts of `left` come before those of `right`; small ones within each four lanes, where shuffles are cheap.
    """
    count = left.type.count
    block, both = (4 if part <= 4 else count), (0,) if right is None else (0, count)
    low = [
        side + start + i
        for first in range(0, count, block)
        for side in both
        for start in range(first, first + block, part)
        for i in range(part // 2)
    ]
    other = left if right is None else right
    return build.fadd(shuffled(build, left, other, low), shuffled(build, left, other, [i + part // 2 for i in low]))


def ahead_of(build: Any, bytes_of_tile: Any) -> Any:
    """How far ahead of a tile to prefetch; no whole number of tiles is needed, because all rows lie side by side."""
    return build.select(build.icmp_signed("<", bytes_of_tile, whole(AHEAD)), whole(AHEAD), bytes_of_tile)


@intrinsic(prefer_literal=True)
def widen_row(typing: Any, stored: Any, lanes: Any, w: Any, out: Any, size: Any) -> Any:
    """`size` stored values at address `w` as float32 at address `out`; the first two are constants."""
    if not all(isinstance(number, types.IntegerLiteral) for number in (stored, lanes)):
        return None

    def codegen(context: Any, build: Any, signature: Any, arguments: Any) -> Any:
        _emit_widen(build, FORMATS[stored.literal_value], lanes.literal_value, *arguments[2:])
        return context.get_dummy_value()

    return types.void(stored, lanes, *(types.intp,) * 3), codegen


def _emit_widen(build: Any, stored: Stored, lanes: int, w: Any, out: Any, size: Any) -> None:
    vector, (values, length) = floats(lanes), stored.run(lanes)
    source, places = build.inttoptr(w, emit.BYTES), build.inttoptr(out, F32.as_pointer())
    loop = Loop.begin(build, "widen")
    k, at = build.phi(I64), build.phi(I64)  # values done; their bytes
    opened = stored.open(build, build.gep(source, [at]), lanes)
    for index in range(values // lanes):
        place = build.gep(places, [build.add(k, whole(index * lanes))])
        build.store(stored.vector(build, opened, index, lanes), build.bitcast(place, vector.as_pointer()), align=4)
    step, bytes_done = build.add(k, whole(values)), build.add(at, whole(length))
    loop.end(build, [(k, step), (at, bytes_done)], size)


def _added_up(build: Any, vector: Any) -> Any:
    parts = [build.extract_element(vector, ir.Constant(I32, i)) for i in range(vector.type.count)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [build.fadd(parts[i], parts[i + half]) for i in range(half)]
    return parts[0]


@njit(nogil=True, cache=True)
def one(
    stored: int,
    lanes: int,
    width: int,  # tokens, at most MOST_TOKENS
    w: int,
    w_stride: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    size: int,
) -> None:
    """ROWS weight rows against `width` inputs."""
    kind, long = literally(stored), literally(lanes)
    if width == 1:
        _tile(kind, long, ROWS, 1, w, w_stride, x, x_stride, out, out_stride, size)
    elif width == 2:
        _tile(kind, long, ROWS, 2, w, w_stride, x, x_stride, out, out_stride, size)
    elif width == 3:
        _tile(kind, long, ROWS, 3, w, w_stride, x, x_stride, out, out_stride, size)
    elif width == 4:
        _tile(kind, long, ROWS, 4, w, w_stride, x, x_stride, out, out_stride, size)
    elif width == 5:
        _tile(kind, long, ROWS, 5, w, w_stride, x, x_stride, out, out_stride, size)
    else:
        _tile(kind, long, ROWS, 6, w, w_stride, x, x_stride, out, out_stride, size)


@njit(nogil=True, cache=True)
def wide(
    stored: int,
    lanes: int,
    w: int,
    w_stride: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    tokens: int,
    size: int,
    rows: int = ROWS,  # a multiple of it
    most: int = MOST_TOKENS,  # tokens of a tile
) -> None:
    """`rows` weight rows against `tokens` inputs, in as few tiles as will do, of nearly equal width.

    The inputs of a tile stay in the nearest cache while all rows go by: give no more rows than the next one holds.
    """
    kind, long = literally(stored), literally(lanes)
    tiles = (tokens + most - 1) // most
    done = 0
    for i in range(tiles):
        width = (tokens * (i + 1)) // tiles - done
        for n in range(0, rows, ROWS):
            here_x, here_out = x + done * x_stride * 4, out + (done * out_stride + n) * 4
            one(kind, long, width, w + n * w_stride, w_stride, here_x, x_stride, here_out, out_stride, size)
        done += width


@njit(nogil=True, cache=True)
def thin(
    stored: int,
    lanes: int,
    w: int,
    w_stride: int,
    x: int,
    x_stride: int,
    out: int,
    out_stride: int,
    tokens: int,
    size: int,
) -> None:
    """One weight row against `tokens` inputs: what is left when the rows are no multiple of ROWS."""
    kind, long = literally(stored), literally(lanes)
    for t in range(tokens):
        _tile(kind, long, 1, 1, w, w_stride, x + t * x_stride * 4, x_stride, out + t * out_stride * 4, out_stride, size)
