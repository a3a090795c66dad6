"""Which instructions are asked for: those of the processor that Numba compiles for, whatever this one has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

import llvmlite.binding
from numba.core.codegen import JITCPUCodegen

from forerun.kernels.cpu import panels
from forerun.kernels.cpu.processor import HAS_PARTIAL_SUMS, PROCESSOR, Processor, compiled_for

ARM = "aarch64-unknown-linux-gnu"
LISTED_OF_ARM = "+neon,+fp-armv8,+lse"  # LLVM's list of an ARM server's: dot products are never among them


@pytest.fixture(autouse=True)
def all_processors() -> None:
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()


@pytest.mark.skipif(not HAS_PARTIAL_SUMS, reason="LLVM before 22 is not asked for dot products")
@pytest.mark.parametrize(
    ("name", "has_them"),
    [("neoverse-n1", True), ("neoverse-v2", True), ("apple-m1", True), ("cortex-a72", False), ("generic", False)],
)
def test_dot_products_are_known_by_an_arm_processors_name(name: str, has_them: bool) -> None:
    processor = Processor(ARM, name, LISTED_OF_ARM)
    assert processor.has_dot_products() is has_them
    assert panels.best_way(processor) == (panels.DOT_PRODUCTS if has_them else panels.PAIRS_OF_WORDS)


def test_instructions_of_x86_are_listed() -> None:
    old, new = Processor("x86_64-unknown-linux-gnu", "", "+avx2,-avx512vnni"), "+avx2,+avx512f,+avx512vnni"
    assert panels.best_way(old) == panels.PAIRS_OF_WORDS and old.is_x86 and old.has("avx2")
    assert panels.best_way(Processor(old.triple, "", new)) == panels.BYTES_OF_FOUR
    assert not old.has_dot_products() and not Processor(ARM, "", LISTED_OF_ARM).is_x86


def test_what_numba_compiles_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PROCESSOR.triple, "generic", ""
    monkeypatch.setattr(JITCPUCodegen, "magic_tuple", lambda self: plain)
    assert compiled_for() == Processor(*plain) and not compiled_for().has("avx2")
    assert panels.best_way(compiled_for()) == panels.PAIRS_OF_WORDS


PROGRAM = """
import torch
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.kernels.cpu.linear import linear
from forerun.math.panels import encode_panels, panel_format, panel_linear, panel_parts
from support.stored import stored_rows
multiply = torch.nn.functional.linear
integers = NarrowWeight(encode_panels(torch.randn(32, 96)), panel_format(96))
blocks = NarrowWeight(*stored_rows("Q8_0", 9))
x, y = torch.randn(5, 96), torch.randn(5, blocks.shape[1])
print(torch.equal(multiply(x, integers), panel_linear(x, *panel_parts(integers.raw))))
print(torch.equal(multiply(y, blocks), linear(y, blocks.dense(), None, 1)))
"""


@pytest.mark.slow  # the tests above see the choice; this one compiles anew for a processor without extensions
@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME=generic", "NUMBA_ENABLE_AVX=0"])
def test_a_program_for_an_older_processor_runs(setting: str) -> None:
    path = os.pathsep.join(filter(None, sys.path))  # the tests' own folder is found by pytest alone
    environment = {**os.environ, "PYTHONPATH": path, **dict([setting.split("=")])}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr
