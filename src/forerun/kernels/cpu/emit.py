"""What writers of compiled code share: types, loads, shuffles, calls of LLVM's own functions, and counted loops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

F32, I8, I16, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
BYTES = I8.as_pointer()
_TO_LEVEL_2 = (ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1))  # read, keep in L2, data


def whole(value: int) -> Any:
    """A number in compiled code."""
    return ir.Constant(I64, value)


def floats(lanes: int) -> Any:
    """The type of a vector of float32."""
    return ir.VectorType(F32, lanes)


def load(build: Any, base: Any, offset: Any, kind: Any, align: int = 1) -> Any:
    """What lies `offset` behind a pointer, in what that points to; a number or a value of the code's."""
    place = whole(offset) if isinstance(offset, int) else offset
    return build.load(build.bitcast(build.gep(base, [place]), kind.as_pointer()), align=align)


def row_pointers(build: Any, base: Any, stride: Any, count: int) -> list[Any]:
    """Of `count` rows of float32 from an address on."""
    first = build.inttoptr(base, F32.as_pointer())
    return [build.gep(first, [build.mul(stride, whole(i))]) for i in range(count)]


def shuffled(build: Any, a: Any, b: Any, lanes: Iterable[int]) -> Any:
    """These lanes of two vectors side by side; `b` may be None."""
    places = list(lanes)
    other = ir.Constant(a.type, ir.Undefined) if b is None else b
    return build.shuffle_vector(a, other, ir.Constant(ir.VectorType(I32, len(places)), places))


def everywhere(build: Any, number: Any, lanes: int) -> Any:
    """A number in all lanes of a vector."""
    vector = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    first = build.insert_element(vector, number, ir.Constant(I32, 0))
    return build.shuffle_vector(first, vector, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def call(build: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of LLVM's by its name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return build.call(cgutils.get_or_insert_function(build.module, kind, name), arguments)


def fma(build: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(build, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def reduced(build: Any, how: str, vector: Any) -> Any:
    """One number of a vector of int32."""
    return call(build, f"llvm.vector.reduce.{how}.v{vector.type.count}i32", I32, vector)


def prefetch(build: Any, place: Any) -> None:
    """Ask for the cache line at a byte pointer; one that belongs to nobody does no harm."""
    call(build, "llvm.prefetch.p0", ir.VoidType(), place, *_TO_LEVEL_2)


@dataclass(frozen=True, slots=True)
class Loop:
    """A counted loop: what is written between `begin` and `end` is its body."""

    entry: Any
    body: Any
    done: Any

    @classmethod
    def begin(cls, build: Any, name: str) -> Loop:
        loop = cls(build.block, build.append_basic_block(name), build.append_basic_block(f"{name}.done"))
        build.branch(loop.body)
        build.position_at_end(loop.body)
        return loop

    def end(self, build: Any, counters: Sequence[tuple[Any, Any]], limit: Any, *sums: tuple[Any, Any]) -> None:
        """Once more while the first counter is below `limit`; each pair is a phi and what it becomes, 0 at first.

        `sums` are such pairs of lists of lists.
        """
        pairs = [*counters, *(pair for old, new in sums for rows in zip(old, new, strict=True)
                              for pair in zip(*rows, strict=True))]  # fmt: skip
        for phi, after in pairs:
            phi.add_incoming(ir.Constant(phi.type, None), self.entry)
            phi.add_incoming(after, self.body)
        build.cbranch(build.icmp_unsigned("<", counters[0][1], limit), self.body, self.done)
        build.position_at_end(self.done)
