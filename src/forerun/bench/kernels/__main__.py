"""`python -m forerun.bench.kernels [--sweep] [RECORD]`: the same as `forerun bench kernels`, without click and rich."""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.bench.kernels.report import remarks, tables
from forerun.bench.kernels.run import carry_out
from forerun.bench.listening import Lines
from forerun.bench.records import default_path


def main(arguments: list[str]) -> None:
    files = [Path(word) for word in arguments if not word.startswith("--")]
    output = files[0] if files else default_path(prefix="kernels")
    record = carry_out(output, Lines(), ["python", "-m", "forerun.bench.kernels", *arguments], "--sweep" in arguments)
    for table in tables(record):
        print(f"\n{table.title}\n" + " | ".join(table.headings))
        for row in table.rows:
            print(" | ".join(row))
    print("\n" + "\n".join(remarks(record)))


if __name__ == "__main__":
    main(sys.argv[1:])
