"""Prompts from files: every shape a row may have, every way it may be bad."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import InvalidArgument
from forerun.train.prompts import encode_reading, read_prompts
from support.folders import byte_tokenizer

USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "yes?"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, "a"),
        ({"text": "b"}, "b"),
        ({"question": "c", "answer": "7"}, "c"),
        ({"instruction": "d"}, "d"),
        ({"instruction": "d", "input": ""}, "d"),
        ({"instruction": "d", "input": "e"}, "d\n\ne"),
        ({"turns": ["f", "g"]}, "f"),
        ({"messages": [USER]}, [USER]),
        ({"messages": [USER, REPLY]}, [USER]),
        ({"messages": [USER, REPLY, USER]}, [USER, REPLY, USER]),
    ],
)
def test_rows_of_every_shape(tmp_path: Path, row: Any, expected: Any) -> None:
    assert read_prompts([write(tmp_path / "p.jsonl", row)]).prompts == (expected,)


@pytest.mark.parametrize(
    "row",
    ["{oops}\n", {"other": 1}, {"prompt": 5}, {"prompt": "  "}, {"turns": []}, {"messages": [REPLY]},
     {"messages": [{"role": "user"}]}, {"instruction": "a", "input": 3}, "3\n", {"turns": "text"}],
)  # fmt: skip
def test_a_bad_row_is_counted_and_named_by_line(tmp_path: Path, row: Any) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good"}, row, {"prompt": "fine"}, {"other": 2})
    reading = read_prompts([path])
    assert reading.prompts == ("good", "fine")
    assert reading.num_bad == 2
    assert reading.complaint is not None and "p.jsonl, line 2" in reading.complaint
    with pytest.raises(InvalidArgument, match=r"p\.jsonl, line 2.*--strict"):
        read_prompts([path], strict=True)


def test_good_files_have_no_complaint(tmp_path: Path) -> None:
    assert read_prompts([write(tmp_path / "p.jsonl", {"prompt": "good"})], strict=True).complaint is None


def test_text_by_line_and_by_paragraph(tmp_path: Path) -> None:
    path = write(tmp_path / "p.txt", "one\ntwo\n\n\nthree\n")
    assert read_prompts([path]).prompts == ("one", "two", "three")
    assert read_prompts([path], paragraphs=True).prompts == ("one\ntwo", "three")


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files(tmp_path: Path, suffix: str, opener: Any) -> None:
    path = tmp_path / f"p.jsonl{suffix}"
    with opener(path, "wt", encoding="utf-8") as file:
        file.write('{"prompt": "grün"}\n')
    assert read_prompts([path]).prompts == ("grün",)
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_prompts([path])


def test_a_json_list(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", json.dumps([{"instruction": "a"}, 3, "b"], indent=1))
    reading = read_prompts([path])
    assert reading.prompts == ("a", "b")
    assert reading.first_bad is not None and "entry 2" in reading.first_bad


def test_each_prompt_once_over_all_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.txt", "x\ny\nx\n"), write(tmp_path / "b.jsonl", {"text": "y"}, {"text": "z"})]
    assert read_prompts(paths).prompts == ("x", "y", "z")


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no prompts"):
        read_prompts([write(tmp_path / "p.txt", "\n\n")])
    with pytest.raises(InvalidArgument, match="line 1"):
        read_prompts([write(tmp_path / "p.jsonl", {"other": 1})])
    (tmp_path / "latin.txt").write_bytes("grün".encode("latin-1"))
    with pytest.raises(InvalidArgument, match="UTF-8"):
        read_prompts([tmp_path / "latin.txt"])


ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def test_a_conversation_that_the_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    """Among thousands of rows, one with a system message may not end it all."""
    bad = {"messages": [{"role": "system", "content": "be kind"}, USER]}
    path = write(tmp_path / "p.jsonl", {"messages": [USER]}, bad, {"prompt": "x y z"}, {"other": 1})
    tokenizer = byte_tokenizer(ALTERNATING)
    encoded, reading = encode_reading(read_prompts([path]), tokenizer, template=True)
    assert [tokenizer.decode(row) for row in encoded] == ["hello", "x y z"]
    assert reading.prompts == ([USER], "x y z") and reading.places[1].endswith("line 3")
    assert reading.num_bad == 2 and reading.first_bad is not None and "p.jsonl, line 4" in reading.first_bad
    again, _ = encode_reading(reading, tokenizer, template=True, strict=True)
    assert again == encoded
    with pytest.raises(InvalidArgument, match=r"p\.jsonl, line 2.*alternate.*--strict"):
        encode_reading(read_prompts([path]), tokenizer, template=True, strict=True)
    only = read_prompts([write(tmp_path / "q.jsonl", bad)])
    with pytest.raises(InvalidArgument, match=r"no prompt is left.*q\.jsonl, line 1"):
        encode_reading(only, tokenizer, template=True)
    assert len(encode_reading(only, tokenizer, template=False)[0]) == 1
