"""Intervals that hold what they promise, and a test that tells decoders apart where they differ and nowhere else."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import t

from forerun.eval import estimate
from forerun.eval.estimate import agresti_min, compare, mean, sign_flip_test, student, wilson


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "RESAMPLES", 500)


def test_wilson_by_hand() -> None:
    none = wilson([0.0] * 10, 0.95)
    z = 1.959964
    assert none.value == 0 and none.low == 0 and none.high == pytest.approx(z * z / (10 + z * z), abs=1e-6)
    half = wilson([0.0, 1.0] * 50, 0.95)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert mean([1.0] * 10).high == 1


def test_agresti_min_by_hand() -> None:
    plain, drafted = [1.0] * 5 + [0.0] * 15, [0.0] * 3 + [1.0] * 3 + [0.0] * 14  # 3 lost, 1 gained
    found = agresti_min(plain, drafted, 0.95)
    half = 1.959964 * math.sqrt(1.5 + 3.5 - 4 / 22) / 22
    assert found.value == pytest.approx(-2 / 20)
    assert (found.low, found.high) == pytest.approx((-2 / 22 - half, -2 / 22 + half), abs=1e-6)


def test_the_sign_flip_test_enumerates_small_cases() -> None:
    values = [0.3, -0.1, 0.5, 0.0, 0.2]
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((1, -1), repeat=5)
    ]
    assert sign_flip_test(values) == pytest.approx(sum(total >= 0.9 - 1e-9 for total in sums) / 32)
    assert sign_flip_test([0.0] * 9) == 1.0
    assert sign_flip_test([1.0]) is None
    assert sign_flip_test([1.0] * 40) < 0.01


def test_one_example_has_no_interval() -> None:
    found = compare([0.3], [0.4])
    assert found.difference.low is None and found.difference.holds(0.0) is None
    assert found.difference.value == pytest.approx(0.1)


def test_equal_texts_have_no_difference() -> None:
    found = compare([0.1, 0.5, 0.7], [0.1, 0.5, 0.7])
    assert (found.difference.low, found.difference.high, found.p_value) == (0, 0, 1)
    assert found.difference.holds(0.0)


def test_perplexity_weighs_windows_by_their_tokens() -> None:
    found = compare([1.0, 2.0, 1.5], [1.0, 2.0, 1.5], weights=[30.0, 10.0, 20.0], exponential=True)
    assert found.plain.value == pytest.approx(math.exp(80 / 60))
    assert found.plain.low is not None and found.plain.low < found.plain.value


def scores(kind: str, n: int, worse: float, seed: int) -> tuple[list[float], list[float]]:
    """Two decoders that share the difficulty of each example; the second is `worse` by that much on the average."""
    generator = torch.Generator().manual_seed(seed)
    ease = torch.rand(n, generator=generator) * 0.6 + 0.2
    noise = torch.rand(2, n, generator=generator)
    if kind == "binary":
        first, second = (noise[0] < ease), (noise[1] < ease - worse)
    else:
        first, second = ease + 0.3 * (noise[0] - 0.5), ease - worse + 0.3 * (noise[1] - 0.5)
    return first.double().tolist(), second.double().tolist()


@pytest.mark.quick("binary")
@pytest.mark.parametrize("kind", ["binary", "graded"])
def test_equal_decoders_agree_and_worse_ones_do_not(kind: str) -> None:
    """200 experiments each: at 95 % about 10 false alarms are due, 23 would come once in 10,000 times."""
    alarms = found = low_p = 0
    for seed in range(200):
        equal = compare(*scores(kind, 60, 0.0, seed))
        alarms += not equal.difference.holds(0.0)
        low_p += equal.p_value is not None and equal.p_value < 0.05
        found += not compare(*scores(kind, 60, 0.3, seed)).difference.holds(0.0)
    assert alarms <= 23 and low_p <= 23
    assert found >= 170  # the control: such a loss is not missed


@pytest.mark.quick("binary")
@pytest.mark.parametrize("kind", ["binary", "graded"])
def test_intervals_hold_the_truth_as_often_as_they_say(kind: str) -> None:
    held = 0
    for seed in range(300):
        values, _ = scores(kind, 40, 0.0, seed)
        found = mean(values, confidence=0.9)
        held += bool(found.holds(0.5))
    assert 0.84 <= held / 300 <= 0.96
    narrow = sum(bool(mean(scores(kind, 40, 0.0, seed)[0], confidence=0.5).holds(0.5)) for seed in range(300))
    assert narrow / 300 < 0.66  # the control: a narrower interval holds it less often


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 11, 200])
def test_student_is_students(confidence: float, freedom: int) -> None:
    assert student(confidence, freedom) == pytest.approx(t.ppf(0.5 + confidence / 2, freedom), rel=0.01)


@pytest.mark.slow
def test_a_handful_of_examples_is_not_believed_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six examples, 400 experiments: at 95 % about 20 false alarms are due, 36 would come once in 1,000 times."""

    def alarms() -> int:
        return sum(not compare(*scores("graded", 6, 0.0, seed)).difference.holds(0.0) for seed in range(400))

    assert alarms() <= 36
    monkeypatch.setattr(estimate, "student", lambda confidence, freedom: estimate._normal(confidence))
    assert alarms() > 36  # the control: the plain bootstrap
