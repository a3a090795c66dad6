"""Stored weights as float32 vectors, made in registers: what a tile multiplies, from what lies in memory.

Each format says how a run of values is stored and emits the instructions that widen it. Every value is exactly what
`forerun.math.blocks` decodes: products of a half-precision scale and a small integer fit float32, and an offset is
added by one fused operation whose product is exact, so it rounds once as multiply-then-add does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

_FEATURES = llvmlite.binding.get_host_cpu_features()
MANY_REGISTERS = not _FEATURES.get("sse2", False) or _FEATURES.get("avx512f", False)
LANES = 8 if _FEATURES.get("avx2", False) else 4  # floats of a vector that every size of ours is a multiple of
WIDEST = 16 if _FEATURES.get("avx512f", False) else LANES  # floats of the longest vector register

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
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
        return _load(build, opened, 0, floats(lanes))


class BFloat16(Stored):
    """The upper half of a float32: widening is a shift."""

    name, values, size = "BF16", UNIT, 2

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        bits = build.zext(_load(build, opened, 0, ir.VectorType(I16, lanes)), _whole(lanes))
        return build.bitcast(build.shl(bits, _all(16, lanes)), floats(lanes))


class Float16(Stored):
    name, values, size = "F16", UNIT, 2

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        return build.fpext(_load(build, opened, 0, ir.VectorType(ir.HalfType(), lanes)), floats(lanes))


class EightBits(Stored):
    """A half-precision scale, then 32 signed bytes."""

    name, values, size = "Q8_0", 32, 34

    def open(self, build: Any, run: Any, lanes: int) -> Any:
        return spread(build, halves(build, run), 0, lanes), run

    def vector(self, build: Any, opened: Any, index: int, lanes: int) -> Any:
        scale, run = opened
        numbers = build.sext(_load(build, run, 2 + index * lanes, ir.VectorType(I8, lanes)), _whole(lanes))
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


def half_bytes(build: Any, run: Any, start: int, index: int, lanes: int) -> Any:
    """Half-bytes `index * lanes` and on of the 32 in 16 bytes from `start`, as int32."""
    per_half = 16 // lanes
    loaded = _load(build, run, start + index % per_half * lanes, ir.VectorType(I8, lanes))
    numbers = build.zext(loaded, _whole(lanes))
    return build.and_(numbers, _all(15, lanes)) if index < per_half else build.lshr(numbers, _all(4, lanes))


def halves(build: Any, run: Any) -> Any:
    """The half-precision numbers that a block begins with, as float32: four are widened as fast as one."""
    return build.fpext(_load(build, run, 0, ir.VectorType(ir.HalfType(), 4)), floats(4))


def spread(build: Any, numbers: Any, index: int, lanes: int) -> Any:
    """One number of a vector in all lanes of another."""
    return build.shuffle_vector(numbers, ir.Constant(numbers.type, ir.Undefined), _all(index, lanes))


def fma(build: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return build.call(cgutils.get_or_insert_function(build.module, kind, f"llvm.fma.v{a.type.count}f32"), [a, b, c])


def floats(lanes: int) -> Any:
    """The type of a vector of float32."""
    return ir.VectorType(F32, lanes)


def _whole(lanes: int) -> Any:
    return ir.VectorType(I32, lanes)


def _all(value: int, lanes: int) -> Any:
    return ir.Constant(_whole(lanes), [value] * lanes)


def _load(build: Any, run: Any, offset: int, kind: Any) -> Any:
    """What lies `offset` bytes behind a byte pointer, wherever that may be."""
    return build.load(build.bitcast(build.gep(run, [ir.Constant(I64, offset)]), kind.as_pointer()), align=1)


FORMATS: tuple[Stored, ...] = (Float32(), BFloat16(), Float16(), EightBits(), FourBits(), FourBitsAndOffset())
"""By their number in compiled code."""
FLOAT32 = 0


def number_of(name: str) -> int:
    """The number of a format by its name in GGUF."""
    return next(number for number, stored in enumerate(FORMATS) if stored.name == name)
