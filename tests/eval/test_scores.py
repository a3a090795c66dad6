"""Scorers against values by hand, pass@k against enumeration, a service whose measures are known."""

from __future__ import annotations

import itertools
from decimal import Decimal

import pytest

from forerun.errors import InvalidArgument
from forerun.eval.passes import Candidate, pass_at_k, service
from forerun.eval.sandbox.run import ProgramLimits
from forerun.eval.tasks import TASKS, Answer, Example, chosen
from forerun.eval.tasks.code import code_blocks, humaneval_program, mbpp_program
from forerun.eval.tasks.gsm8k import last_number

LIMITS = ProgramLimits(seconds=2)


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score")
    score = TASKS["xsum"].score
    example = Example("1", "", "the cat sat on the mat")
    found = score(example, Answer("the cat lay on the mat", ()), LIMITS).values
    # 5 of 6 words; pairs "the cat", "on the", "the mat" of 5; the longest common subsequence leaves out one word
    assert found["rouge1"] == pytest.approx(5 / 6)
    assert found["rouge2"] == pytest.approx(3 / 5)
    assert found["rougeL"] == pytest.approx(5 / 6)
    short = score(example, Answer("mat", ()), LIMITS).values
    assert short["rouge1"] == pytest.approx(2 * (1 / 1) * (1 / 6) / (1 + 1 / 6)) and short["rouge2"] == 0
    assert set(score(example, Answer("", ()), LIMITS).values.values()) == {0.0}
    assert score(example, Answer("The CATS sat on the mats.", ()), LIMITS).values["rouge1"] == 1  # stemmed, lower case


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so 3 + 4 = 7", "7"),
        ("#### 18", "18"),
        ("It is 5.\n#### 1,234.50 dollars, of 9", "1234.50"),
        ("#### no idea, maybe 3 or 4", "3"),
        ("9 in all ####", "9"),
        ("minus: -12", "-12"),
        ("$2,000,000.", "2000000"),
        (".5", "0.5"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(answer: str, number: str | None) -> None:
    assert last_number(answer) == (None if number is None else Decimal(number))


def test_exact_match_compares_values_not_letters() -> None:
    example = Example("1", "", "18")
    match = TASKS["gsm8k"].score
    assert match(example, Answer("#### 18.0", ()), LIMITS).values["exact_match"] == 1
    assert match(example, Answer("#### 180", ()), LIMITS).values["exact_match"] == 0
    assert match(example, Answer("", ()), LIMITS).values["exact_match"] == 0


def test_code_is_taken_from_fences() -> None:
    assert code_blocks("Here:\n```python\nx = 1\n```\nand\n```\ny = 2\n```") == ["x = 1", "y = 2"]
    assert code_blocks("```py\nx = 1\nleft open") == ["x = 1\nleft open"]
    assert code_blocks("no code") == []


HUMANEVAL = Example(
    "HumanEval/0",
    'import math\n\ndef helper(x):\n    return x\n\ndef twice(x):\n    """Twice x."""\n',
    {"entry_point": "twice", "test": "def check(f):\n    assert f(2) == 4 and f(0) == 0"},
)


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("    return 2 * x\n", True),
        ("    return 2 * x\n\ndef other():\n    broken(", True),  # what follows the function is cut
        ("```python\ndef twice(x):\n    return math.floor(2 * helper(x))\n```\nDone.", True),
        ("First:\n```\nx = 1\n```\nThen:\n```python\ndef twice(x):\n    return 2 * x\n```", True),
        ("    return x\n", False),
        ("", False),
        ("    while True: pass\n", False),
        ("    import os\n    os.remove('/')\n", False),
    ],
)
def test_humaneval(answer: str, passes: bool) -> None:
    found = TASKS["humaneval"].score(HUMANEVAL, Answer(answer, ()), ProgramLimits(seconds=0.6))
    assert found.values["pass"] == passes, humaneval_program(HUMANEVAL, answer)
    assert found.note


def test_mbpp() -> None:
    example = Example("11", "", {"tests": ["assert root(9) == 3"], "setup": ["import math"]})
    good = "```python\ndef root(x):\n    return math.isqrt(x)\n```"
    assert TASKS["mbpp"].score(example, Answer(good, ()), LIMITS).values["pass"] == 1
    assert "[DONE]" not in mbpp_program(example, "def root(x): return 3\n[DONE]\nmore")
    assert TASKS["mbpp"].score(example, Answer("def root(x): return 2", ()), LIMITS).values["pass"] == 0


def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass() -> None:
    for num in range(1, 7):
        for correct in range(num + 1):
            for k in range(1, num + 1):
                choices = list(itertools.combinations([True] * correct + [False] * (num - correct), k))
                assert pass_at_k(num, correct, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)
    for wrong in ((1, 2, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(InvalidArgument):
            pass_at_k(*wrong)


def candidate(passed: bool, finished: bool, logprob: float, seconds: float, tokens: int = 10) -> Candidate:
    return Candidate(passed, finished, logprob, seconds, tokens)


def test_the_measures_of_a_service() -> None:
    prompts = [
        # the likeliest finished answer is wrong, another finished one is right
        [candidate(True, True, -0.5, 3.0), candidate(False, True, -0.1, 1.0), candidate(True, False, -0.01, 9.0)],
        # the likeliest finished one is right
        [candidate(True, True, -0.2, 2.0), candidate(False, True, -0.9, 4.0), candidate(False, True, -0.8, 6.0)],
        # right, but not in time
        [candidate(True, False, -0.2, 9.0), candidate(False, False, -0.9, 9.0), candidate(False, False, -1.0, 9.0)],
    ]
    found = service(prompts)
    assert (found.prompts, found.sequences) == (3, 3)
    assert found.finished == pytest.approx(5 / 9)
    assert found.pass_first == pytest.approx(1 / 3)
    assert found.pass_finished == pytest.approx(2 / 3)
    assert found.pass_all == 1
    assert found.first_latency == pytest.approx((0.1 + 0.2) / 2)
    assert found.last_latency == pytest.approx((0.3 + 0.6) / 2)
    assert found.all_latency == pytest.approx((0.2 + 0.4) / 2)
    late = service(prompts[2:])
    assert late.pass_finished == 0 and late.first_latency is None


def test_tasks_are_chosen_by_name() -> None:
    assert [task.name for task in chosen(("gsm8k", "xsum", "gsm8k"))] == ["xsum", "gsm8k"]
    assert len(chosen(("all",))) == len(TASKS) == 7
    with pytest.raises(InvalidArgument, match="humaneval"):
        chosen(("xsumm",))
