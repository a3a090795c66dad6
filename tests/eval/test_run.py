"""The loop with scripted decoders: turns, scores, resuming, and whether a worse decoder is found out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eval.fakes import FakeWay, Letters, Script, fake_ways, small_data, sums
from forerun.errors import InvalidArgument
from forerun.eval.journal import Journal
from forerun.eval.methods import PLAIN, SPECULATIVE
from forerun.eval.prepare import Prepared, prepare
from forerun.eval.run import answer_all
from forerun.eval.settings import EvalSettings
from forerun.eval.summary import AGREE, DIFFER, SAME, TOO_FEW, TaskResult, summarise
from forerun.eval.tasks import TASKS
from forerun.eval.windows import Window

JOURNAL = "a.answers.jsonl"


def ready(folder: Path, name: str, settings: EvalSettings) -> Prepared:
    return prepare(TASKS[name].read(folder), Letters(), None, settings)


def go(
    folder: Path, name: str, ways: Sequence[FakeWay], settings: EvalSettings | None = None, **more: Any
) -> TaskResult | None:
    settings = settings or EvalSettings(batch_size=2)
    prepared = ready(folder, name, settings)
    journal = Journal(folder / JOURNAL, settings.identity)
    answer_all([prepared], ways, settings, journal, **more)
    return summarise(prepared, journal, settings, tasks=1)


def right(way: str, index: int, copy: int) -> str:
    return f"#### {index}"


def compare(prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> str:
    return "identical" if list(plain) == list(drafted) else "different"


def test_ways_take_turns_at_going_first_and_every_example_is_answered(tmp_path: Path) -> None:
    sums(tmp_path, 5)
    order: list[str] = []

    def script(way: str, index: int, copy: int) -> str:
        order.append(way)
        return right(way, index, copy)

    ways = fake_ways(script)
    finding = go(tmp_path, "gsm8k", ways, compare=compare)
    assert [way.calls for way in ways] == [[[0, 1], [0, 1], [2, 3], [4]]] * 2  # the first warms up
    assert order[4:] == [PLAIN] * 2 + [SPECULATIVE] * 4 + [PLAIN] * 2 + [PLAIN, SPECULATIVE]
    assert finding is not None and finding.examples == finding.total == 5 and finding.verdict == SAME
    assert finding.comparisons[0].plain.value == 1 and finding.agreement is not None
    assert finding.agreement.identical == 5
    assert finding.speeds[PLAIN].seconds == 5 and finding.speeds[PLAIN].tokens == 5 * 6
    assert finding.speeds[SPECULATIVE].acceptance_rate == 0.5


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, error: type[BaseException]) -> None:
    sums(tmp_path, 6)
    whole = go(tmp_path, "gsm8k", fake_ways(right), compare=compare)
    (tmp_path / JOURNAL).unlink()
    with nullcontext() if error is KeyboardInterrupt else pytest.raises(error):
        go(tmp_path, "gsm8k", fake_ways(right, fail_at=3, error=error), compare=compare)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"task": "gsm8k", "call": 2, "way": "pl')  # a kill in the middle of a line
    again = fake_ways(right)
    resumed = go(tmp_path, "gsm8k", again, compare=compare)
    assert [way.calls[1:] for way in again] == [[], [[4, 5]]]  # besides the warm-up, only what was missing
    assert resumed == whole
    idle = fake_ways(right)
    assert go(tmp_path, "gsm8k", idle, compare=compare) == whole and idle[0].calls == []


def test_answers_of_other_settings_or_data_are_not_mixed(tmp_path: Path) -> None:
    sums(tmp_path, 2)
    go(tmp_path, "gsm8k", fake_ways(right))
    with pytest.raises(InvalidArgument, match=r"temperature=0\.0"):
        go(tmp_path, "gsm8k", fake_ways(right), EvalSettings(batch_size=2, temperature=1.0))
    go(tmp_path, "gsm8k", fake_ways(right), EvalSettings(batch_size=2, confidence=0.9))  # the answers would be the same
    sums(tmp_path, 3)
    with pytest.raises(InvalidArgument, match=r"2 rows.*3 rows"):
        go(tmp_path, "gsm8k", fake_ways(right))


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    sums(tmp_path, 2)
    go(tmp_path, "gsm8k", fake_ways(right))
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_text("".join([*lines[:2], "{broken\n", *lines[2:]]))
    with pytest.raises(InvalidArgument, match="damaged"):
        go(tmp_path, "gsm8k", fake_ways(right))
    (tmp_path / JOURNAL).write_text('{"format": 99}\n')
    with pytest.raises(InvalidArgument, match="format"):
        go(tmp_path, "gsm8k", fake_ways(right))


def guesses(good: float, drafted: float) -> Script:
    """Right with one chance or the other, drawn anew for every example and way."""
    drawing = random.Random(3)

    def script(way: str, index: int, copy: int) -> str:
        chance = good if way == PLAIN else drafted
        return f"#### {index if drawing.random() < chance else -1}"

    return script


def test_equal_decoders_agree_and_a_worse_one_is_found_out(tmp_path: Path) -> None:
    sums(tmp_path, 80)
    sampled = EvalSettings(temperature=1.0, batch_size=8, limit=None)
    equal = go(tmp_path, "gsm8k", fake_ways(guesses(0.6, 0.6)), sampled)
    assert equal is not None and equal.verdict == AGREE and equal.comparisons[0].plain.value < 1
    (tmp_path / JOURNAL).unlink()
    worse = go(tmp_path, "gsm8k", fake_ways(guesses(0.6, 0.3)), sampled)
    assert worse is not None and worse.verdict == DIFFER and worse.comparisons[0].difference.value < 0


@pytest.mark.parametrize(("lost", "verdict"), [(4, AGREE), (5, TOO_FEW), (6, DIFFER)])
def test_texts_that_differ_by_a_toss_of_coins_do_not_tell_decoders_apart(
    tmp_path: Path, lost: int, verdict: str
) -> None:
    """Five of eighty all for the worse happen to equal decoders in 2 / 2^5 of the runs, six in 2 / 2^6."""
    sums(tmp_path, 80)

    def script(way: str, index: int, copy: int) -> str:
        return right(way, -1 if way == SPECULATIVE and index < lost else index, copy)

    finding = go(tmp_path, "gsm8k", fake_ways(script), EvalSettings(temperature=1.0, limit=None))
    assert finding is not None and finding.verdict == verdict
    assert finding.comparisons[0].p_value == 2 / 2**lost


def test_perplexity_differs_where_rounding_does_not_explain_it_however_few_windows_are_read(tmp_path: Path) -> None:
    """Nothing is drawn there, so that no toss of coins can be the cause."""
    small_data(tmp_path)

    def reader(window: Window, way: str) -> tuple[float, float]:
        return window.num_scored * (1.0 + (way == SPECULATIVE)), 1.0

    settings = EvalSettings(window=16, limit=3)
    finding = go(tmp_path, "wikitext2", fake_ways(right), settings, reader=reader)
    assert finding is not None and finding.examples == 3 and finding.verdict == DIFFER


def test_a_single_wrong_word_in_greedy_text_is_seen(tmp_path: Path) -> None:
    sums(tmp_path, 4)

    def script(way: str, index: int, copy: int) -> str:
        return right(way, index, copy) + ("!" if way == SPECULATIVE and index == 2 else "")

    finding = go(tmp_path, "gsm8k", fake_ways(script), compare=compare)
    assert finding is not None and finding.agreement is not None
    assert (finding.agreement.identical, finding.agreement.different) == (3, 1) and finding.verdict == AGREE


def test_several_sequences_give_pass_at_k_and_a_service(tmp_path: Path) -> None:
    """Copy 0 is the likeliest and the first to finish, and right on even examples; copy 1 always is, 2 and 3 never."""
    sums(tmp_path, 4)

    def script(way: str, index: int, copy: int) -> str:
        good = copy == 1 or (copy == 0 and index % 2 == 0)
        return f"#### {index if good else -1}"

    settings = EvalSettings(num_sequences=4, temperature=1.0, max_time=5.0, k=(1, 2))
    finding = go(tmp_path, "gsm8k", fake_ways(script), settings)
    assert finding is not None and finding.services is not None
    one, two = finding.comparisons
    assert one.metric == "pass@1" and one.plain.value == pytest.approx((0.5 + 0.25) / 2)
    assert two.metric == "pass@2" and two.plain.value == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    found = finding.services[SPECULATIVE]
    assert (found.pass_first, found.pass_finished, found.pass_all, found.finished) == (0.5, 1, 1, 1)
    assert found.first_latency is not None and found.last_latency is not None
    assert found.first_latency < found.last_latency


def test_programs_that_were_stopped_are_noted(tmp_path: Path) -> None:
    small_data(tmp_path)

    def script(way: str, index: int, copy: int) -> str:
        return "    return 1\n" if way == PLAIN else "    while True: pass\n"

    finding = go(tmp_path, "humaneval", fake_ways(script), EvalSettings(code_seconds=0.3))
    assert finding is not None and finding.comparisons[0].plain.value == 1
    assert finding.comparisons[0].speculative.value == 0
    assert any("speculative: programs stopped by the sandbox: 1 out of time" in note for note in finding.notes)


def test_no_more_programs_run_at_once_than_there_are_cores_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a wall clock of its own, which runs while it waits for a core."""
    small_data(tmp_path)
    made: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, max_workers: int) -> None:
            made.append(max_workers)
            super().__init__(max_workers)

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("forerun.eval.run.ThreadPoolExecutor", Pool)
    go(tmp_path, "humaneval", fake_ways(lambda way, index, copy: "    return 1\n"))
    assert made == [1, 1]


def test_spec_bench_is_told_by_category(tmp_path: Path) -> None:
    small_data(tmp_path)
    finding = go(tmp_path, "spec_bench", fake_ways(lambda way, index, copy: "abcd" * (index + 1)), compare=compare)
    assert finding is not None and [part.category for part in finding.parts] == ["qa", "rag", "mt_bench"]
    assert finding.parts[0].repeated[PLAIN] == 0 and finding.parts[1].repeated[PLAIN] == pytest.approx(1 / 5)
    assert finding.parts[2].agreement is not None and finding.verdict == SAME


def test_nothing_answered_both_ways_is_no_finding(tmp_path: Path) -> None:
    sums(tmp_path, 2)
    settings = EvalSettings()
    prepared = ready(tmp_path, "gsm8k", settings)
    assert summarise(prepared, Journal(tmp_path / JOURNAL, settings.identity), settings, 1) is None
