"""`python -m benchmarks.stamp`: what FORERUN_COMMIT must be where a copy of this checkout has no repository."""

from __future__ import annotations

import sys

from forerun.measure.provenance import stamp


def main() -> int:
    commit = stamp()
    if commit is None:
        print("this is no checkout, and FORERUN_COMMIT is not set", file=sys.stderr)
        return 1
    print(commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
