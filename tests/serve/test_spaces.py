"""A completion continues its prompt's text: with tokenizers that strip the first space of a text, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forerun import PromptLookup, SpeculativeDecoder
from forerun.result import decode_text
from serve.events import events
from serve.serving import Server, running
from support.folders import sentencepiece_tokenizer
from support.tiny import tiny_model

TOKENIZER = sentencepiece_tokenizer()
HELLO, WORLD, END = TOKENIZER.convert_tokens_to_ids(["\u2581hello", "\u2581world", "</s>"])
GREEDY = {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "logit_bias": {str(WORLD): 100.0}}


@pytest.fixture(scope="module")
def spaced() -> Iterator[Server]:
    model = tiny_model("llama", vocab=len(TOKENIZER), eos_token_id=END, max_position_embeddings=256)
    decoder = SpeculativeDecoder(model, PromptLookup(), tokenizer=TOKENIZER, rule="coupled", policy=3)
    with running(decoder, tokenizer=TOKENIZER) as server:
        yield server


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("prompt", ("hello", [HELLO], [HELLO, END], [END, HELLO, END, END]), ids=str)
@pytest.mark.parametrize("logprobs", (None, 1))
def test_a_completion_goes_on_behind_its_prompt(spaced: Server, prompt: Any, logprobs: int | None) -> None:
    body = {"prompt": prompt, **GREEDY, "logprobs": logprobs}
    assert spaced.complete(**body)["choices"][0]["text"] == " world world world"
    assert "".join(text_of(spaced, body)) == " world world world"
    for echoed in (spaced.complete(**body, echo=True)["choices"][0]["text"], "".join(text_of(spaced, body, echo=True))):
        assert echoed == "hello world world world"


def text_of(server: Server, body: dict[str, Any], **more: Any) -> list[str]:
    return [part["text"] for event in events(server, "/v1/completions", {**body, **more}) for part in event["choices"]]


def test_offsets_are_places_in_the_text(spaced: Server) -> None:
    (choice,) = spaced.complete(prompt="hello", **GREEDY, echo=True, logprobs=0)["choices"]
    found = [choice["text"][place:] for place in choice["logprobs"]["text_offset"]]
    assert found[-3:] == [" world world world", " world world", " world"]
    (alone,) = spaced.complete(prompt="hello", **GREEDY, logprobs=0)["choices"]
    assert alone["logprobs"]["text_offset"] == [0, 6, 12]


def test_a_stop_string_may_begin_with_the_space(spaced: Server) -> None:
    (choice,) = spaced.complete(prompt="hello", **GREEDY, stop=" world")["choices"]
    assert choice["text"] == "" and choice["finish_reason"] == "stop"


def test_behind_nothing_there_is_no_space_and_a_turn_of_a_chat_begins_anew(spaced: Server) -> None:
    assert spaced.complete(prompt=[END], **GREEDY)["choices"][0]["text"] == "world world world"
    answer = spaced.chat("hello", **GREEDY)
    assert answer["choices"][0]["message"]["content"] == "world world world"
    assert decode_text(TOKENIZER, [WORLD] * 3) == "world world world"
