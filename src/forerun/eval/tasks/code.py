"""HumanEval and MBPP: programs, run against their tests in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forerun.eval.sandbox.run import ProgramLimits, run_program
from forerun.eval.tasks.rows import identity, json_rows, text
from forerun.eval.tasks.task import Answer, Example, Metric, Rows, Score, Task

FENCED = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL | re.IGNORECASE)
# What begins at the margin after a function's body does not belong to it.
AFTER_FUNCTION = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert ", "\n@", "\n```")
MBPP_END = "[DONE]"
MBPP_TEST = range(11, 511)
"""Task ids of the test split; the others are for prompts, training and validation."""
PASSED = (Metric("pass", "pass@1"),)


def code_blocks(answer: str) -> list[str]:
    """What stands between fences; the last may be left open."""
    return [match.group(1) for match in FENCED.finditer(answer)]


def humaneval_program(example: Example, answer: str) -> str:
    """The answer's own function under the prompt's imports and helpers, or the prompt gone on with; then the tests."""
    reference = example.reference
    name = reference["entry_point"]
    blocks = code_blocks(answer) or [answer]
    defines = re.compile(rf"^def\s+{re.escape(name)}\s*\(", re.MULTILINE)
    whole = next((block for block in blocks if defines.search(block)), None)
    if whole is None:
        solution = example.text + _cut(blocks[0], AFTER_FUNCTION)
    else:
        before = defines.split(example.text, maxsplit=1)[0]
        solution = f"{before}\n{whole}"
    return f"{solution}\n\n{reference['test']}\n\ncheck({name})\n"


def mbpp_program(example: Example, answer: str) -> str:
    solution = "\n\n".join(code_blocks(answer)) or answer.partition(MBPP_END)[0]
    return "\n".join([*example.reference["setup"], solution, *example.reference["tests"], ""])


def _cut(body: str, stops: tuple[str, ...]) -> str:
    places = [place for stop in stops if (place := body.find(stop)) >= 0]
    return body[: min(places)] if places else body


def _passing(program: Callable[[Example, str], str]) -> Callable[[Example, Answer, ProgramLimits], Score]:
    """A scorer that runs the program made of an answer."""

    def score(example: Example, answer: Answer, limits: ProgramLimits) -> Score:
        outcome = run_program(program(example, answer.text), limits)
        note = outcome.ending + (f": {outcome.message}" if outcome.message else "")
        return Score({"pass": float(outcome.passed)}, note)

    return score


def _humaneval(row: Mapping[str, Any]) -> Example:
    prompt = text(row, "prompt")
    reference = {"test": text(row, "test"), "entry_point": text(row, "entry_point")}
    return Example(identity(row, "task_id", otherwise=prompt), prompt, reference)


def _mbpp(row: Mapping[str, Any]) -> Example:
    prompt, tests = text(row, "text", "prompt"), row["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError("test_list must be a list of assertions, at least one")
    setup = [*row.get("test_imports", []), *([row["test_setup_code"]] if row.get("test_setup_code") else [])]
    return Example(identity(row, "task_id", otherwise=prompt), prompt, {"tests": tests, "setup": setup})


def _parse_mbpp(paths: tuple[Path, ...]) -> Rows:
    """The test split; rows without the usual numbers are all taken."""
    for where, row in json_rows(_mbpp)(paths):
        if isinstance(row, ValueError) or not row.id.isdecimal() or int(row.id) in MBPP_TEST:
            yield where, row


def _ask_humaneval(example: Example, chat: bool) -> str:
    if chat:
        return (
            "Complete this Python function. Answer with the whole function in one code block.\n\n"
            f"```python\n{example.text}```"
        )
    return example.text


def _ask_mbpp(example: Example, chat: bool) -> str:
    tests = "\n".join(example.reference["tests"])
    asked = f"{example.text.strip()} Your code should pass these tests:\n\n{tests}\n"
    if chat:
        return f"You are an expert Python programmer. {asked}\nAnswer with one Python code block."
    return f"You are an expert Python programmer, and here is your task: {asked}[BEGIN]\n"


HUMANEVAL = Task(
    name="humaneval",
    title="HumanEval",
    metrics=PASSED,
    places=(("humaneval/HumanEval.jsonl.gz",), ("HumanEval.jsonl.gz",), ("humaneval/HumanEval.jsonl",)),
    parse=json_rows(_humaneval),
    give="HumanEval.jsonl.gz",
    ask=_ask_humaneval,
    score=_passing(humaneval_program),
    max_new_tokens=256,
    stops=AFTER_FUNCTION,
    is_pass=True,
    runs_code=True,
)
MBPP = Task(
    name="mbpp",
    title="MBPP",
    metrics=PASSED,
    places=(("mbpp/sanitized-mbpp.json",), ("mbpp/mbpp.jsonl",), ("mbpp.jsonl",)),
    parse=_parse_mbpp,
    give="sanitized-mbpp.json or mbpp.jsonl",
    ask=_ask_mbpp,
    score=_passing(mbpp_program),
    max_new_tokens=256,
    stops=(MBPP_END,),
    is_pass=True,
    runs_code=True,
)
