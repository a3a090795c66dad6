"""Events of a stream, without a server: what is written by hand is what a library would write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.engine import Request, Stats
from forerun.serve.answer_text import TextPiece
from forerun.serve.formats import AnswerFormat, ChatFormat, CompletionFormat, usage
from forerun.serve.model import ServedModel
from forerun.serve.text import Choice, Gain
from support.folders import VOCAB, byte_tokenizer

REQUEST = Request(prompt=(5, 6, 7), max_new_tokens=9)
MODEL = ServedModel(byte_tokenizer(), 'a "name" with ü and %d', 0, "auto", "cpu", VOCAB, 99, frozenset(), False)
TEXTS = ("plain", 'quotes " and \\ and /', "lines\n\r\t\x00\x1f\x7f", "ü 海 \U0001f30a \u2028", "%d %s {} </script>")


def parsed(event: bytes) -> Any:
    """An event is one line, written as short as JSON can be."""
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    answer = json.loads(event[len(b"data: ") :])
    assert event == f"data: {json.dumps(answer, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
    return answer


@pytest.mark.parametrize("told", ({}, {"logprobs": True}, {"origins": True}), ids=("text", "logprobs", "origins"))
@pytest.mark.parametrize("kind", (ChatFormat, CompletionFormat))
def test_chunks_are_what_their_parts_say(kind: type[AnswerFormat], told: dict[str, bool]) -> None:
    for place, text in enumerate(TEXTS):
        for reason in (None, "stop"):
            choice, pieces = Choice(place, REQUEST), [TextPiece(text[:3], 5, "plain"), TextPiece(text[3:], 6, "plain")]
            form = kind(MODEL, **{"logprobs": False, "origins": False, **told})
            news = form.news(Gain(choice, pieces, reason))
            assert news is not None
            answer = parsed(form.chunk(news, "null"))
            head = {"id": form.id, "object": kind.chunk_kind, "created": form.created, "model": MODEL.name}
            assert answer.items() >= head.items() and list(answer)[-2:] == ["choices", "usage"]
            again = kind(MODEL, **{"logprobs": False, "origins": False, **told})
            assert answer["choices"] == [again.part(place, pieces, reason)] and answer["usage"] is None


@pytest.mark.parametrize("kind", (ChatFormat, CompletionFormat))
def test_chunks_around_the_text(kind: type[AnswerFormat]) -> None:
    form = kind(MODEL, logprobs=False, origins=False)
    assert form.news(Gain(Choice(0, REQUEST), [], None)) is None, "in the middle of a character"
    assert parsed(form.chunk())["choices"] == [] and "usage" not in parsed(form.chunk())
    assert parsed(form.chunk(usage='{"prompt_tokens":3}'))["usage"] == {"prompt_tokens": 3}
    opening = form.opening(2)
    assert (opening is None) == (kind is CompletionFormat)
    if opening is not None:
        assert parsed(form.chunk(opening))["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_speculation_is_told_of_the_choice_that_it_was_for() -> None:
    """Of several choices the second may be the first that has gained something."""
    told = usage(3, [Choice(1, REQUEST, num_tokens=4, stats=Stats(rounds=2))])
    assert [(each["index"], each["rounds"]) for each in told["speculation"]] == [(1, 2)]


def test_speculation_of_those_that_are_returned_comes_first_by_their_place_in_the_answer() -> None:
    choices = [Choice(index, REQUEST, num_tokens=4, stats=Stats(rounds=10 + index)) for index in range(4)]
    told = usage(3, choices, [choices[3], choices[1]])
    assert [(each["index"], each["rounds"]) for each in told["speculation"]] == [
        (0, 13),
        (1, 11),
        (None, 10),
        (None, 12),
    ]
    assert told["completion_tokens"] == 16
