"""`prediction` over HTTP: fewer rounds where it comes true, and the same text whatever it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forerun import Chain, PredictedText, PromptLookup, SpeculativeDecoder
from serve.events import events
from serve.serving import Server, make_decoder, running
from support.folders import VOCAB, byte_tokenizer

PROMPT = "one two three four"
LETTERS = byte_tokenizer()("abcdefghijklmnopqrstuvwxyz").input_ids
NO_OTHER_LETTERS = {str(token): -100.0 for token in range(VOCAB) if token not in LETTERS}


@pytest.fixture(scope="module")
def predicting() -> Iterator[Server]:
    base = make_decoder()
    drafter = Chain(PredictedText(), PromptLookup(min_ngram=3))
    decoder = SpeculativeDecoder(base.target, drafter, tokenizer=byte_tokenizer(), rule="coupled", policy=4)
    with running(decoder) as server:
        yield server


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("sampling", ({"temperature": 0}, {"temperature": 0.8, "seed": 5}))
def test_any_prediction_gives_the_same_text_and_a_right_one_fewer_rounds(
    predicting: Server, sampling: dict[str, Any]
) -> None:
    body = {"max_tokens": 40, "logit_bias": NO_OTHER_LETTERS, **sampling}

    def ask(**more: Any) -> Any:
        return predicting.chat(PROMPT, **body, **more)

    plain = ask(speculation={"enabled": False})
    text = plain["choices"][0]["message"]["content"]
    rounds = {}
    for name, prediction in {
        "right": text, "in parts": [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}],
        "edited": text[:12] + "?" + text[13:], "wrong": "nothing of this is true " * 3,
    }.items():  # fmt: skip
        answer = ask(prediction=content(prediction))
        assert answer["choices"][0]["message"]["content"] == text, name
        rounds[name] = answer["usage"]["speculation"][0]["rounds"]
    assert plain["usage"]["speculation"][0]["rounds"] == 40
    assert rounds["right"] == rounds["in parts"] == 8, "five tokens a round"
    assert rounds["right"] < rounds["edited"] < rounds["wrong"]
    assert counted(ask(prediction=content(text))) == (32, 0), "four of each round's five tokens"
    chat = [{"role": "user", "content": PROMPT}]
    stream = list(events(predicting, "/v1/chat/completions", {"messages": chat, **body, "prediction": content(text)}))
    parts = [part["delta"].get("content") or "" for event in stream for part in event["choices"]]
    assert "".join(parts) == text


def counted(answer: Any) -> tuple[int, int]:
    """Tokens of the prediction that are in the answer, and that are not."""
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_only_predicted_tokens_are_counted_as_such(predicting: Server) -> None:
    """The text repeats itself, so the other drafter of the chain drafts as well, and often rightly."""
    bias = {str(token): -100.0 for token in range(VOCAB) if token not in LETTERS[:2]}
    body = {"max_tokens": 60, "temperature": 0, "logit_bias": bias}
    plain = predicting.chat(PROMPT, **body)
    text = plain["choices"][0]["message"]["content"]
    (found,) = plain["usage"]["speculation"]
    assert counted(plain) == (0, 0) and found["num_accepted_tokens"] > 0
    begun = predicting.chat(PROMPT, **body, prediction=content(text[0] + "z"))
    (spent,) = begun["usage"]["speculation"]
    assert begun["choices"][0]["message"]["content"] == text and counted(begun) == (1, 1)
    assert spent["num_accepted_tokens"] > 1, "others drafted the rest"


def test_predictions_that_cannot_be_used_are_refused(server: Server, predicting: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2, "prediction": content("y")}
    error = server.post("/v1/completions", **body).json()["error"]
    assert error["param"] == "prediction" and "--draft lookup,NAME and without --tree" in error["message"]
    for name, value in (("enabled", False), ("max_draft_tokens", 0)):
        off = predicting.post("/v1/completions", **body, speculation={name: value})
        assert off.status_code == 400 and off.json()["error"]["param"] == "prediction"
        assert f"speculation.{name}" in off.json()["error"]["message"]
    other = predicting.post("/v1/completions", **{**body, "prediction": {"type": "file", "content": "y"}})
    assert other.status_code == 400 and other.json()["error"]["param"] == "prediction.type"
    assert predicting.post("/v1/completions", **body).status_code == 200
