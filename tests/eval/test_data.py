"""Rows that are wrong and files that are not there: named, counted, survived."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eval.fakes import Letters, small_data, sums, write_jsonl
from forerun.errors import InvalidArgument
from forerun.eval.prepare import bad_rows, find, prepare, spread
from forerun.eval.settings import EvalSettings
from forerun.eval.tasks import TASKS, chosen
from support.data import data_folder, lack_of

ROWS = {
    "xsum": 1000, "cnn_dailymail": 100, "humaneval": 164, "mbpp": 257, "gsm8k": 1319, "wikitext2": 1, "spec_bench": 480,
}  # fmt: skip


def test_every_task_reads_its_small_file(tmp_path: Path) -> None:
    found, missing = find(chosen(("all",)), small_data(tmp_path))
    assert not missing and all(not entry.bad for entry in found)
    sizes = {entry.task.name: len(entry.examples) for entry in found}
    assert sizes == {
        "xsum": 3, "cnn_dailymail": 1, "humaneval": 1, "mbpp": 1, "gsm8k": 4, "wikitext2": 1, "spec_bench": 3,
    }  # fmt: skip
    assert [e.category for e in found[-1].examples] == ["qa", "rag", "mt_bench"]
    assert str(tmp_path) not in found[0].source and "sha256" in found[0].source


@pytest.mark.parametrize("name", TASKS)
def test_every_task_reads_the_real_file(name: str) -> None:
    task = TASKS[name]
    lacks = [lack_of(*names) for names in task.places]
    if all(lacks):
        pytest.skip(lacks[0])
    reading = task.read(data_folder())
    assert not reading.bad and len(reading.examples) == ROWS[name]
    assert "<t>" not in str(reading.examples[0].reference)


BAD_SUMS = [
    "not json\n",
    "[1, 2]\n",
    '{"question": "no answer?"}\n',
    '{"question": 5, "answer": "#### 5"}\n',
    '{"question": "", "answer": "#### 5"}\n',
    '{"question": "no number?", "answer": "nothing"}\n',
    '{"question": "good?", "answer": "#### 5"}\n',
    '{"question": "good?", "answer": "#### 5"}\n',
    "\n",
    "[" * 100_000 + "\n",
]


def test_bad_rows_are_counted_named_and_skipped(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k.jsonl", BAD_SUMS)
    reading = TASKS["gsm8k"].read(tmp_path)
    assert [example.text for example in reading.examples] == ["good?"]
    told = {int(bad.where.rpartition(" ")[2]): bad.why for bad in reading.bad}
    assert sorted(told) == [1, 2, 3, 4, 5, 6, 8, 10]
    for line, words in {
        1: "not JSON",
        2: "list",
        3: "answer",
        4: "int, not text",
        5: "empty",
        6: "no number",
        8: "id",
    }.items():
        assert words in told[line]
    (note,) = bad_rows(reading)
    assert "8 bad rows skipped" in note and "line 1" in note and "5 more" in note


def test_a_file_of_nothing_but_bad_rows_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "gsm8k.jsonl", BAD_SUMS[:2])
    with pytest.raises(InvalidArgument, match="line 1: not JSON"):
        TASKS["gsm8k"].read(tmp_path)


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("mbpp", {"task_id": 11, "text": "x", "test_list": "assert 1"}, "test_list"),
        ("mbpp", {"task_id": 11, "text": "x"}, "test_list"),
        ("humaneval", {"prompt": "def f():", "test": "x"}, "entry_point"),
        ("spec_bench", {"category": "qa", "turns": []}, "turns"),
        ("xsum", {"document": "x"}, "summary"),
    ],
)
def test_each_task_says_what_a_row_lacks(name: str, row: dict[str, object], words: str, tmp_path: Path) -> None:
    place = tmp_path / TASKS[name].places[0][0]
    place.parent.mkdir()
    content = json.dumps(row).encode()
    place.write_bytes(gzip.compress(content) if place.suffix == ".gz" else content)
    with pytest.raises(InvalidArgument, match=words):
        TASKS[name].read(tmp_path)


def test_a_missing_file_names_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gsm8k/test\.jsonl.*put test\.jsonl of GSM8K"):
        TASKS["gsm8k"].read(tmp_path)
    with pytest.raises(InvalidArgument, match="--data FOLDER"):
        TASKS["gsm8k"].read(None)
    sums(tmp_path, 2)
    found, missing = find(chosen(("gsm8k", "xsum")), tmp_path)
    assert [entry.task.name for entry in found] == ["gsm8k"] and [lack.task for lack in missing] == ["xsum"]


def test_unequal_pairs_of_lines_and_broken_archives(tmp_path: Path) -> None:
    folder = tmp_path / "summarization"
    folder.mkdir()
    (folder / "realsumm_cnndm_documents.txt").write_text("one\n\nthree")
    (folder / "realsumm_cnndm_references.txt").write_text("<t> A . </t> <t> B . </t>\nx\nC")
    reading = TASKS["cnn_dailymail"].read(tmp_path)
    assert [example.reference for example in reading.examples] == ["A . B .", "C"] and len(reading.bad) == 1
    (folder / "realsumm_cnndm_references.txt").write_text("one line")
    with pytest.raises(InvalidArgument, match="3 lines"):
        TASKS["cnn_dailymail"].read(tmp_path)
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        TASKS["humaneval"].read(tmp_path)


def test_examples_are_spread_over_the_file_and_long_prompts_left_out(tmp_path: Path) -> None:
    assert spread(range(10), 4) == [0, 2, 5, 7] and spread(range(3), None) == [0, 1, 2]
    write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "x" * n, "answer": "#### 1"} for n in (5, 500, 6)])
    found = TASKS["gsm8k"].read(tmp_path)
    prepared = prepare(found, Letters(), 100, EvalSettings(max_new_tokens=50))
    assert [one.index for one in prepared.asked] == [0, 2] and "1 prompts left out" in prepared.notes[0]
    assert prepared.keywords["stop_strings"] and prepared.keywords["max_new_tokens"] == 50
    with pytest.raises(InvalidArgument, match="no prompt leaves room"):
        prepare(found, Letters(), 20, EvalSettings(max_new_tokens=50))


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0}, {"temperature": -1.0}, {"num_sequences": 2}, {"confidence": 1.0}, {"max_time": 0.0}, {"k": (2,)},
        {"top_p": 0.9}, {"top_k": 40},
    ],
)  # fmt: skip
def test_settings_answer_back(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        EvalSettings(**wrong)  # type: ignore[arg-type]


def test_rows_of_a_call() -> None:
    assert EvalSettings().prompts_per_call == 8
    assert EvalSettings(max_time=1.0).prompts_per_call == 1
    assert EvalSettings(num_sequences=4, temperature=1.0).prompts_per_call == 2
    assert EvalSettings(num_sequences=16, temperature=1.0, batch_size=8).prompts_per_call == 1
