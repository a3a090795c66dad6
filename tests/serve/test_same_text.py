"""What comes over HTTP is what `decoder.generate` says, token for token, whoever else is served meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forerun.result import decode_text
from serve.serving import Server, make_decoder
from support.folders import byte_tokenizer

TOKENIZER = byte_tokenizer()
DECODER = make_decoder()
TEXTS = ("the sea the sea the sea", "abc", "one two one two", "Größe und Größe", "x" * 40)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.7, "seed": 7, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.9, "seed": 8, "repetition_penalty": 1.3, "logit_bias": {"40": 3.0, "50": -100.0}},
)


def body_of(number: int) -> dict[str, Any]:
    """One of many different requests; some draft, some do not, some little."""
    bounds = (None, {"enabled": False}, {"max_draft_tokens": 1})
    return {
        "prompt": TEXTS[number % len(TEXTS)],
        "max_tokens": 8 + 5 * (number % 4),
        "n": 1 + number % 2,
        "ignore_eos": True,
        "logprobs": 0 if number % 3 == 0 else None,
        "speculation": bounds[number % 3],
        **SETTINGS[number % len(SETTINGS)],
    }


def expected(body: dict[str, Any]) -> list[str]:
    names = ("temperature", "seed", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    keywords = {name: body[name] for name in (*names, "frequency_penalty") if name in body}
    if "logit_bias" in body:
        keywords["logit_bias"] = {int(token): value for token, value in body["logit_bias"].items()}
    done = DECODER.generate(
        [TOKENIZER(body["prompt"]).input_ids], max_new_tokens=body["max_tokens"], num_return_sequences=body["n"],
        eos_token_id=[], **keywords,
    )  # fmt: skip
    return [decode_text(TOKENIZER, row.tokens) for row in done.rows]


def streamed(server: Server, body: dict[str, Any]) -> list[str]:
    from serve.events import events

    texts = [""] * body["n"]
    for event in events(server, "/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.mark.parametrize("number", range(5))
def test_alone(server: Server, number: int) -> None:
    body = body_of(number)
    assert [choice["text"] for choice in server.complete(**body)["choices"]] == expected(body)


def test_among_neighbours_that_come_and_go(server: Server) -> None:
    """20 calls with 30 sequences at once, on a server that decodes 8 at a time; every second one is streamed."""

    def call(number: int) -> list[str]:
        body = body_of(number)
        if number % 2:
            return streamed(server, body)
        return [choice["text"] for choice in server.complete(**body)["choices"]]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(call, range(20)))
    assert found == [expected(body_of(number)) for number in range(20)]
    assert server.is_idle()


def test_speculation_is_on_off_or_bounded_per_request(server: Server) -> None:
    bodies = [
        {"prompt": TEXTS[0], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "speculation": asked}
        for asked in (None, {"enabled": False}, {"max_draft_tokens": 1})
    ]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: server.complete(**body), bodies))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    free, plain, short = (answer["usage"]["speculation"][0] for answer in answers)
    assert plain["num_draft_tokens"] == 0 and plain["rounds"] == 40
    assert len(free["num_draft_tokens_per_pos"]) == 3 and len(short["num_draft_tokens_per_pos"]) == 1
