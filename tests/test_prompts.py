"""Rows of files as prompts; files for training (tests/train) and for commands (tests/cli) test the shapes of rows."""

from __future__ import annotations

import pytest

from forerun.errors import InvalidArgument
from forerun.prompts import encode_prompts, prompt_of, rows_in, uses_template
from support.folders import byte_tokenizer

USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "yes?"}


def test_text_stands_as_it_is_behind_its_place() -> None:
    text = "  indented\n\nlast \n"
    assert list(rows_in(text, "p")) == [("p, line 1", "  indented"), ("p, line 3", "last ")]
    assert list(rows_in("a\n b\n\nc", "p", paragraphs=True)) == [("p, line 1", "a\n b"), ("p, line 4", "c")]


def test_json_may_hold_what_ends_a_line_elsewhere() -> None:
    [(where, row)] = rows_in('{"prompt": "one\u2028line"}\n', "p")
    assert where == "p, line 1" and prompt_of(row) == "one\u2028line"


def test_a_line_of_text_ends_where_files_end_it() -> None:
    """At \\n or \\r\\n. What else Unicode takes for the end of a line may stand in a prompt."""
    text = "one\u2028two\r\nthree\x0bfour\x85five\rsix\n\r\nseven"
    assert [row for _, row in rows_in(text, "p")] == ["one\u2028two", "three\x0bfour\x85five\rsix", "seven"]
    assert [where for where, _ in rows_in(text, "p")] == ["p, line 1", "p, line 2", "p, line 4"]


@pytest.mark.parametrize(("text", "rows"), [
    ('[\n {"prompt": "a"},\n {"prompt": "b"}\n]\n', [{"prompt": "a"}, {"prompt": "b"}]),
    (' ["a", "b\\nc"]', ["a", "b\nc"]),
    ("[]", []),
    ("[1] a footnote\n[2] another", ["[1] a footnote", "[2] another"]),
    ("[1, 2]\n", ["[1, 2]"]),
    ('["a"]\n["b"]\n', ['["a"]', '["b"]']),
])  # fmt: skip
def test_a_list_is_known_by_what_it_holds(text: str, rows: list[object]) -> None:
    """Without a name that says so, as from standard input; text that begins with a bracket stays text."""
    assert [row for _, row in rows_in(text, "-")] == rows


@pytest.mark.parametrize("suffix", ("", ".json", ".txt"))
def test_one_object_may_be_written_over_several_lines(suffix: str) -> None:
    assert list(rows_in('{\n  "prompt": "a"\n}\n', "p", suffix)) == [("p, entry 1", {"prompt": "a"})]
    two = list(rows_in('{"prompt": "a"}\n{"prompt": "b"}\n', "p", suffix))
    assert two == [("p, line 1", {"prompt": "a"}), ("p, line 2", {"prompt": "b"})]
    (where, broken), *_ = rows_in('{\n  "prompt": \n}\n', "p", suffix)
    assert where == "p, line 1" and isinstance(broken, ValueError)


@pytest.mark.parametrize("row", [
    {"prompt": "half \ud83d"}, {"messages": [{"role": "user", "content": "\udc00"}]}, {"turns": ["\ud83d"]}, "\ud83d",
    {"messages": [{"role": "\ud83d", "content": "hello"}]}, {"instruction": "a", "input": "\udfff"},
])  # fmt: skip
def test_half_of_a_character_is_no_text(row: object) -> None:
    """It has no UTF-8, and tokenizers fail on it, with all other rows."""
    with pytest.raises(ValueError, match="half of a character"):
        prompt_of(row)
    assert prompt_of({"prompt": "whole \U0001f600"}) == "whole \U0001f600"


def test_prompts_go_through_the_template() -> None:
    tokenizer = byte_tokenizer()
    said, talk, raw = (
        tokenizer.decode(encode_prompts(tokenizer, [prompt], template)[0])
        for prompt, template in (("hello", True), ([USER, REPLY, USER], True), ("hello", False))
    )
    assert said == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert talk.count("<|start|>") == 4 and "yes?" in talk
    assert raw == "hello"


def test_templates_are_used_where_there_are_some() -> None:
    with_one, without = byte_tokenizer(), byte_tokenizer(None)
    assert uses_template(with_one, None) and not uses_template(without, None) and not uses_template(with_one, False)
    with pytest.raises(InvalidArgument, match="--raw"):
        uses_template(without, True, off="--raw")
