"""Which tests go to one worker: those that share models, oracles or compiled code, which every worker makes anew.

pytest-xdist has marks for this, but under pytest 9.2 its workers' names of tests no longer carry them.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Files that have Numba compile the CPU's kernels: half a minute, once where all of them are one worker's.
COMPILED = {
    "test_adapters", "test_changed_models", "test_cpu_body", "test_cpu_steps", "test_doctor_cpu", "test_kernels",
    "test_kernels_against_transformers", "test_kernels_option", "test_linear_patches", "test_odd_modules",
    "test_stored",
}  # fmt: skip


def group_of(test: str, slow: bool = False) -> str:
    """A test's file; tests of the laws share next to nothing, and slow tests little beside their length: alone."""
    path = PurePosixPath(test.partition("::")[0])
    if path.stem in COMPILED or path.parent.parts[-2:] == ("kernels", "cpu"):
        return "compiled"
    return test if slow or path.parent.name == "exactness" else str(path)


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]  # it has no annotations
    """The largest groups first and single tests last, so that in the end no worker waits for another."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid, slow=self.config.option.markexpr == "slow")
