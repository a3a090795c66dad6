"""The processor that Numba compiles for: this one, or what NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and NUMBA_ENABLE_AVX say.

LLVM ends the process where it is asked by name for an instruction that its processor does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding
from numba.core.registry import cpu_target

HAS_PARTIAL_SUMS = llvmlite.binding.llvm_version_info >= (22,)  # LLVM's function that becomes SDOT
_PARTIAL_SUMS = """
declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)
define <4 x i32> @grown(<4 x i32> %total, <16 x i8> %a, <16 x i8> %b) {
  %left = sext <16 x i8> %a to <16 x i32>
  %right = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %left, %right
  %sums = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %total, <16 x i32> %products)
  ret <4 x i32> %sums
}
"""


@dataclass(frozen=True, slots=True)
class Processor:
    triple: str
    name: str  # LLVM's
    listed: str  # "+this,-that"; on ARM a name implies more than is listed

    @property
    def is_x86(self) -> bool:
        return self.triple.startswith("x86_64")

    def has(self, feature: str) -> bool:
        """Whether it is listed, as all of x86 are that we ask for."""
        return f"+{feature}" in self.listed.split(",")

    def has_dot_products(self) -> bool:
        """ARM's SDOT, which no list names: whether LLVM makes one of what it stands for."""
        if not HAS_PARTIAL_SUMS or not self.triple.startswith(("aarch64", "arm64")):
            return False
        machine = llvmlite.binding.Target.from_triple(self.triple).create_target_machine(self.name, self.listed)
        return "sdot" in machine.emit_assembly(llvmlite.binding.parse_assembly(_PARTIAL_SUMS))


def compiled_for() -> Processor:
    return Processor(*map(str, cpu_target.target_context.codegen().magic_tuple()))


PROCESSOR = compiled_for()
