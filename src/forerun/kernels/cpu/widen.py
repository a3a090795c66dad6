"""Stored weights as float32 vectors, made in registers: what a tile multiplies, from what lies in memory.

Each format says how a run of values is stored and emits the instructions that widen it. Every value is exactly what
`forerun.math.blocks` decodes: products of a half-precision scale and a small integer fit float32, and an offset is
added by one fused operation whose product is exact, so it rounds once as multiply-then-add does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from forerun.kernels.cpu.emit import I8, I16, I32, floats, fma, load, shuffled
from forerun.kernels.cpu.processor import PROCESSOR

IS_X86 = PROCESSOR.is_x86
MANY_REGISTERS = not IS_X86 or PROCESSOR.has("avx512f")
LANES = 8 if PROCESSOR.has("avx2") else 4  # floats of a vector that every size of ours is a multiple of
HAS_HALVES = not IS_X86 or PROCESSOR.has("f16c")  # an instruction that widens them
WIDEST = 16 if PROCESSOR.has("avx512f") else LANES  # floats of the longest vector register

UNIT = -1  # of a format without blocks: a run is one vector


class Stored(ABC):
    """One way to store the values of a weight's row."""

    name: str
    values: int  # of a block, or UNIT
    size: int  # bytes of a block; of one value where there are no blocks

    def run(self, lanes: int) -> tuple[int, int]:
        """Values and bytes that one turn of a tile's loop takes: a block, or a vector of `lanes`."""
        return (lanes, lanes * self.size) if self.values == UNIT else (self.values, self.size)

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        """What the vectors of the run at this byte pointer have in common."""
        return run

    @abstractmethod
    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        """Values `index * lanes` to `(index + 1) * lanes` of the run, as float32."""


class Float32(Stored):
    name, values, size = "F32", UNIT, 4

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        return load(build, opened, 0, floats(lanes))


class BFloat16(Stored):
    """The upper half of a float32: widening is a shift."""

    name, values, size = "BF16", UNIT, 2

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        bits = build.zext(load(build, opened, 0, ir.VectorType(I16, lanes)), _whole(lanes))
        return build.bitcast(build.shl(bits, _all(16, lanes)), floats(lanes))


class Float16(Stored):
    name, values, size = "F16", UNIT, 2

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        return halves(build, opened, 0, lanes)


class EightBits(Stored):
    """A half-precision scale, then 32 signed bytes."""

    name, values, size = "Q8_0", 32, 34

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        return spread(build, halves(build, run), 0, lanes), run

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        scale, run = opened
        numbers = build.sext(load(build, run, 2 + index * lanes, ir.VectorType(I8, lanes)), _whole(lanes))
        return build.fmul(scale, build.sitofp(numbers, floats(lanes)))


class FourBits(Stored):
    """A scale, then 32 half-bytes that stand for -8 .. 7: the low halves first."""

    name, values, size = "Q4_0", 32, 18

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        return spread(build, halves(build, run), 0, lanes), run

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        scale, run = opened
        numbers = build.sub(half_bytes(build, run, 2, index, lanes), _all(8, lanes))
        return build.fmul(scale, build.sitofp(numbers, floats(lanes)))


class FourBitsAndOffset(Stored):
    """A scale, the lowest value, then 32 half-bytes that count up from it."""

    name, values, size = "Q4_1", 32, 20

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        numbers = halves(build, run)
        return spread(build, numbers, 0, lanes), spread(build, numbers, 1, lanes), run

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        scale, lowest, run = opened
        numbers = build.sitofp(half_bytes(build, run, 4, index, lanes), floats(lanes))
        return fma(build, scale, numbers, lowest)


class FourBitGroups(Stored):
    """Two scales of the block, a six-bit scale and depth of each 32 values, then half-bytes; see `decode_q4_k`."""

    name, values, size = "Q4_K", 256, 144
    start = 16  # of the half-bytes

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        """Scale and depth of the eight groups as two vectors, and the run."""
        numbers = halves(build, run)
        first, second, mixed = (
            build.zext(load(build, run, place, ir.VectorType(I8, 4)), _whole(4)) for place in (4, 8, 12)
        )
        scales = self._six_bits(build, first, build.and_(mixed, _all(15, 4)))
        depths = self._six_bits(build, second, build.lshr(mixed, _all(4, 4)))
        scale, depth = spread(build, numbers, 0, 8), spread(build, numbers, 1, 8)
        lowest = build.fneg(build.fmul(depth, build.sitofp(depths, floats(8))))
        return build.fmul(scale, build.sitofp(scales, floats(8))), lowest, run

    @staticmethod
    def _six_bits(build: Any, whole: Any, low: Any) -> Any:
        """The first four numbers are the low six bits of a byte; the others' upper two are what lies above those."""
        upper = build.shl(build.lshr(whole, _all(6, 4)), _all(4, 4))
        return shuffled(build, build.and_(whole, _all(63, 4)), build.or_(low, upper), range(8))

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        scales, lowest, run = opened
        group, within = divmod(index * lanes, 32)
        numbers = build.sitofp(self._numbers(build, run, group, within, lanes), floats(lanes))
        return fma(build, spread(build, scales, group, lanes), numbers, spread(build, lowest, group, lanes))

    def _numbers(self, build: Any, run: Any, group: int, within: int, lanes: int) -> Any:
        """Values `within` and on of a group, as int32."""
        place = self.start + group // 2 * 32 + within
        return _bits(build, _bytes(build, run, place, lanes), 4 * (group % 2), 15)


class FiveBitGroups(FourBitGroups):
    """With a fifth bit of each value before the half-bytes: bit g of 32 bytes is for group g."""

    name, values, size = "Q5_K", 256, 176
    start = 48

    def _numbers(self, build: Any, run: Any, group: int, within: int, lanes: int) -> Any:
        fifth = _bits(build, _bytes(build, run, 16 + within, lanes), group, 1)
        return build.or_(super()._numbers(build, run, group, within, lanes), build.shl(fifth, _all(4, lanes)))


class SixBitGroups(Stored):
    """Half-bytes, upper pairs of bits, 16 signed scales, and the block's own at the end; see `decode_q6_k`."""

    name, values, size = "Q6_K", 256, 210

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        numbers = spread(build, halves(build, run, 202), 3, 16)
        scales = build.sext(load(build, run, 192, ir.VectorType(I8, 16)), _whole(16))
        return build.fmul(numbers, build.sitofp(scales, floats(16))), run

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        scales, run = opened
        group, within = divmod(index * lanes, 32)
        half, quarter = divmod(group, 4)
        low = _bytes(build, run, half * 64 + quarter % 2 * 32 + within, lanes)
        high = _bits(build, _bytes(build, run, 128 + half * 32 + within, lanes), 2 * quarter, 3)
        numbers = build.or_(_bits(build, low, 4 * (quarter // 2), 15), build.shl(high, _all(4, lanes)))
        values = build.sitofp(build.sub(numbers, _all(32, lanes)), floats(lanes))
        return build.fmul(spread(build, scales, index * lanes // 16, lanes), values)


def _bytes(build: Any, run: Any, place: int, lanes: int) -> Any:
    """Bytes from `place` on, as int32."""
    return build.zext(load(build, run, place, ir.VectorType(I8, lanes)), _whole(lanes))


def _bits(build: Any, numbers: Any, shift: int, mask: int) -> Any:
    """Some bits of each byte."""
    lanes = numbers.type.count
    shifted = build.lshr(numbers, _all(shift, lanes)) if shift else numbers
    return build.and_(shifted, _all(mask, lanes))


def half_bytes(build: Any, run: Any, start: int, index: int, lanes: int) -> Any:
    """Half-bytes `index * lanes` and on of the 32 in 16 bytes from `start`, as int32."""
    per_half = 16 // lanes
    loaded = load(build, run, start + index % per_half * lanes, ir.VectorType(I8, lanes))
    numbers = build.zext(loaded, _whole(lanes))
    return build.and_(numbers, _all(15, lanes)) if index < per_half else build.lshr(numbers, _all(4, lanes))


def halves(build: Any, run: Any, place: int = 0, lanes: int = 4) -> Any:
    """Half-precision numbers of a block, as float32: four are widened as fast as one."""
    if HAS_HALVES:
        return build.fpext(load(build, run, place, ir.VectorType(ir.HalfType(), lanes)), floats(lanes))
    return _halves_by_bits(build, build.zext(load(build, run, place, ir.VectorType(I16, lanes)), _whole(lanes)), lanes)


def _halves_by_bits(build: Any, bits: Any, lanes: int) -> Any:
    """LLVM would call a function of the C compiler's, and end the process where nobody has linked it."""
    size = build.and_(bits, _all(0x7FFF, lanes))
    moved = build.shl(size, _all(13, lanes))  # fraction and exponent where float32 has them
    normal = build.add(moved, _all((127 - 15) << 23, lanes))
    endless = build.or_(moved, _all(0x7F800000, lanes))  # infinity and NaN
    steps = build.fmul(build.sitofp(size, floats(lanes)), ir.Constant(floats(lanes), [2.0**-24] * lanes))
    small = build.bitcast(steps, _whole(lanes))  # a whole number of the smallest step
    half = build.select(build.icmp_signed("<", size, _all(0x0400, lanes)), small, normal)
    half = build.select(build.icmp_signed(">=", size, _all(0x7C00, lanes)), endless, half)
    sign = build.shl(build.and_(bits, _all(0x8000, lanes)), _all(16, lanes))
    return build.bitcast(build.or_(half, sign), floats(lanes))


def spread(build: Any, numbers: Any, index: int, lanes: int) -> Any:
    """One number of a vector in all lanes of another."""
    return shuffled(build, numbers, None, [index] * lanes)


def _whole(lanes: int) -> Any:
    return ir.VectorType(I32, lanes)


def _all(value: int, lanes: int) -> Any:
    return ir.Constant(_whole(lanes), [value] * lanes)


FORMATS: tuple[Stored, ...] = (
    Float32(), BFloat16(), Float16(), EightBits(), FourBits(), FourBitsAndOffset(), FourBitGroups(), FiveBitGroups(),
    SixBitGroups(),
)  # fmt: skip
"""By their number in compiled code."""
FLOAT32 = 0


def number_of(name: str) -> int:
    """The number of a format by its name in GGUF."""
    return next(number for number, stored in enumerate(FORMATS) if stored.name == name)
