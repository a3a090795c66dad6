"""`python -m forerun.bench.kernels [--sweep] [RECORD]`: the same as `forerun bench kernels`, without click and rich."""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.bench.command import measured
from forerun.bench.kernels.record import KernelRecord
from forerun.bench.kernels.report import remarks, tables
from forerun.bench.kernels.run import carry_out
from forerun.bench.listening import Listener


def main(arguments: list[str]) -> int:
    files = [Path(word) for word in arguments if not word.startswith("--")]

    def measure(output: Path, listener: Listener, command: list[str]) -> KernelRecord:
        return carry_out(output, listener, command, "--sweep" in arguments)

    return measured("kernels", arguments, files[0] if files else None, measure, tables, remarks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
