"""Large answers are written as small ones are, and nobody waits for them."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from forerun.engine import Request
from forerun.engine.row import TokenLogprob
from forerun.serve.answer_text import TextPiece
from forerun.serve.formats import LEAST_LOGPROB, AnswerFormat, ChatFormat, CompletionFormat
from forerun.serve.model import ServedModel
from forerun.serve.text import Choice
from serve.events import events
from serve.serving import Server
from serve.waiting import LONGEST_WAIT, longest_wait, switching
from support.folders import VOCAB, byte_tokenizer

TOP = 20
REQUEST = Request(prompt=(5, 6, 7), max_new_tokens=9)
ECHO = {"prompt": "x" * 600, "echo": True, "max_tokens": 0, "logprobs": TOP}


def model() -> ServedModel:
    return ServedModel(byte_tokenizer(), "tiny", 0, "auto", "cpu", VOCAB, 99, frozenset(), False)


def choices(number: int, tokens: int) -> list[Choice]:
    made = []
    for index in range(number):
        entries = [
            TokenLogprob(
                place % 250, -place * 50.5, tuple(((place + top) % 250, -top - place / 9) for top in range(TOP))
            )
            for place in range(tokens)
        ]
        pieces = [
            TextPiece("海" if place % 3 else "a", entry.token, "plain", entry) for place, entry in enumerate(entries)
        ]
        made.append(Choice(index, REQUEST, tokens, pieces, "length"))
    return made


@pytest.mark.parametrize("kind", (ChatFormat, CompletionFormat))
def test_what_is_written_is_the_answer(kind: type[AnswerFormat]) -> None:
    """By the standard library, of the same choices; very unlikely tokens have the least number there is."""
    made, form = choices(2, 300), kind(model(), logprobs=True, origins=True)
    told = json.loads(form.whole(made, {"prompt_tokens": 3}))
    assert list(told) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert told["usage"] == {"prompt_tokens": 3} and told["object"] == kind.kind
    names = {token: model().token_bytes(token).decode("utf-8", "replace") for token in range(250)}
    for choice, written in zip(made, told["choices"], strict=True):
        entries = [piece.logprob for piece in choice.pieces if piece.logprob is not None]
        values = [max(entry.logprob, LEAST_LOGPROB) for entry in entries]
        if kind is ChatFormat:
            listed = written["logprobs"]["content"]
            assert [each["logprob"] for each in listed] == values and min(values) == LEAST_LOGPROB
            assert [[top["logprob"] for top in each["top_logprobs"]] for each in listed] == [
                [max(value, LEAST_LOGPROB) for _, value in entry.top] for entry in entries
            ]
            assert [each["token"] for each in listed] == [names[entry.token] for entry in entries]
        else:
            assert written["logprobs"]["token_logprobs"] == values
            assert written["logprobs"]["top_logprobs"] == [
                {names[token]: max(value, LEAST_LOGPROB) for token, value in reversed(entry.top)} for entry in entries
            ]
        assert (written["message"]["content"] if kind is ChatFormat else written["text"]) == choice.text
        assert len(written["origins"]) == len(entries) and written["finish_reason"] == "length"


@pytest.mark.quick("CompletionFormat-12000")
@pytest.mark.parametrize(("kind", "tokens"), ((ChatFormat, 3000), (CompletionFormat, 12000)))
def test_others_go_on_meanwhile(kind: type[AnswerFormat], tokens: int) -> None:
    """Once of some times, as with large bodies. So many tokens take `json.dumps` three times as long as others wait."""
    made, form = choices(1, tokens), kind(model(), logprobs=True, origins=False)
    with switching():
        assert any(longest_wait(lambda: form.whole(made, {})) < LONGEST_WAIT for _ in range(5))


def test_a_token_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    served, asked = model(), []
    look_up = served.tokenizer.convert_ids_to_tokens
    monkeypatch.setattr(served.tokenizer, "convert_ids_to_tokens", lambda token: asked.append(token) or look_up(token))
    ChatFormat(served, logprobs=True, origins=False).whole(choices(1, 40), {})
    assert len(asked) == len(set(asked)) == 40 + TOP - 1


@pytest.mark.parametrize("stream", (False, True))
def test_the_server_answers_others_meanwhile(stream: bool, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing stands still until another client was answered."""
    reached, answered, token_bytes = threading.Event(), threading.Event(), ServedModel.token_bytes
    waited: list[bool] = []

    def late(served: ServedModel, token: int) -> bytes:
        if not reached.is_set():
            reached.set()
            waited.append(answered.wait(10))
        return token_bytes(served, token)

    told: list[Any] = []

    def ask() -> None:
        told.append(list(events(server, "/v1/completions", ECHO)) if stream else server.complete(**ECHO))

    monkeypatch.setattr(ServedModel, "token_bytes", late)
    asking = threading.Thread(target=ask)
    asking.start()
    assert reached.wait(30)
    try:
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    finally:
        answered.set()
        asking.join(30)
    assert waited == [True] and told
