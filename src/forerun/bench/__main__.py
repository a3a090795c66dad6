"""`python -m forerun.bench`: the comparison where neither click nor rich is installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from forerun.bench.job import carry_out, check
from forerun.bench.plan import Plan
from forerun.bench.report import full_text
from forerun.errors import ForerunError

INTERRUPTED = 130


class PlainListener:
    """One line a call, on standard error."""

    def planned(self, plan: Plan) -> None:
        self._say(f"{len(plan.groups)} groups of prompts, about {plan.total_seconds / 60:.1f} minutes")

    def starting(self, what: str) -> None:
        self._say(what)

    def finished(self, expected_seconds: float) -> None:
        pass

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m forerun.bench", description="`forerun bench` offers more options.")
    parser.add_argument("--model", default="embedded", help="Hub name, folder, GGUF file or 'embedded'")
    parser.add_argument("--data", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--output", type=Path, help="where to keep the record")
    parser.add_argument("--quick", action="store_true", help="few prompts, about two minutes")
    chosen = parser.parse_args(arguments)
    try:
        job = check(model=chosen.model, data=chosen.data, output=chosen.output, quick=chosen.quick)
        if job.questions.note:
            print(job.questions.note, file=sys.stderr)
        record = carry_out(job, PlainListener(), ["python", "-m", "forerun.bench", *arguments])
    except ForerunError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    if record.measurements:
        print(full_text(record))
        print(f"Record: {job.output}", file=sys.stderr)
    return 0 if record.complete else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
