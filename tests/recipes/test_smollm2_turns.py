"""Prompts the target writes itself: which turns become prompts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import make_turns
import pytest

from forerun.engine import FinishReason
from forerun.errors import InvalidArgument
from forerun.train.options import WritingSettings
from forerun.train.writing import Item
from support.folders import byte_tokenizer


def scripted_turns(monkeypatch: pytest.MonkeyPatch, *turns: tuple[str, FinishReason]) -> list[str]:
    tokenizer = byte_tokenizer()

    def answers(engine: Any, items: list[Item], settings: WritingSettings) -> Iterator[list[Any]]:
        assert settings.temperatures == (1.0,) and settings.top_p < 1 and settings.stop_ids == {0}
        assert tokenizer.decode(items[0].prompt) == "<|start|>user\n"
        for item, (words, reason) in zip(items, turns, strict=True):
            tokens = (*tokenizer(words, add_special_tokens=False)["input_ids"], 0)
            request = SimpleNamespace(request_id=item.number)
            yield [SimpleNamespace(request=request, finish_reason=reason, tokens=tokens)]

    monkeypatch.setattr(make_turns, "write_items", answers)
    return list(make_turns.write_turns(None, tokenizer, len(turns)))


def test_good_turns_become_prompts_and_bad_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = FinishReason.STOP
    found = scripted_turns(
        monkeypatch,
        ("How tall is it? ", stop),
        ("How tall is it?", stop),
        ("Hi", stop),
        ("no end in sight here", FinishReason.LENGTH),
        ("one <|start|> two three", stop),
        ("la la la la la la la la la la", stop),
        ("Why is grass green?", stop),
    )
    assert found == ["How tall is it?", "Why is grass green?"]


def test_turns_need_a_template() -> None:
    with pytest.raises(InvalidArgument, match="chat template"):
        make_turns.turn_frame(byte_tokenizer(None))
