"""Many different requests, and what `decoder.generate` says to each of them alone."""

from __future__ import annotations

from typing import Any

from forerun.result import decode_text
from serve.events import events
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
    texts = [""] * body["n"]
    for event in events(server, "/v1/completions", body):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def answered(server: Server, body: dict[str, Any]) -> list[str]:
    """In one piece."""
    return [choice["text"] for choice in server.complete(**body)["choices"]]
