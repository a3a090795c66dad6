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
