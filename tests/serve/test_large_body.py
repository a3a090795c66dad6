"""Large bodies are read as small ones are, and nobody waits for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from forerun.serve.large_body import LARGE, MANY_VALUES, PIECE, list_of_numbers, parse, read
from forerun.serve.schemas import AT_ONCE, FEW_BIASES, MOST_ITEMS, ChatBody, CompletionBody
from serve.serving import Server
from serve.waiting import LONGEST_WAIT, longest_wait, switching
from support.folders import byte_tokenizer

MANY = 3 * MANY_VALUES
NUMBERS = ", ".join(map(str, range(MANY)))
TEXTS = {
    "numbers": f"[{NUMBERS}]",
    "others among them": f'[{NUMBERS}, -1, 2.5, "a, b", null, [{NUMBERS}], {{"x": [{NUMBERS}]}}, {NUMBERS}]',
    "blanks": f"[ \n{NUMBERS.replace(', ', ' , ')} \t]",
    "pairs": json.dumps([[1, 2]] * MANY),
    "texts": json.dumps(['a, b\u00e9"' for _ in range(MANY)]),
    "an object": json.dumps({str(number): number for number in range(MANY)}),
    "not numbers": json.dumps([float("inf"), float("nan")] * MANY),
}
WRONG = {
    "a comma too many": f"[{NUMBERS},]",
    "two of them": f"[{NUMBERS},, 3]",
    "in the middle": f"[{NUMBERS}, ,{NUMBERS}]",
    "first": f"[,{NUMBERS}]",
    "no comma": f"[{NUMBERS} 3, {NUMBERS}]",
    "a zero in front": f"[{NUMBERS}, 007, {NUMBERS}]",
    "no end": f"[{NUMBERS}",
    "more behind": f"[{NUMBERS}] 1",
    "another bracket": f"[{NUMBERS}}}",
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ("utf-8", "utf-16"))
def test_they_are_what_the_standard_library_reads(name: str, encoding: str) -> None:
    text = TEXTS[name]
    assert text.count(",") >= MANY_VALUES and repr(parse(text.encode(encoding))) == repr(json.loads(text))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_json_is_refused_at_the_same_place(name: str) -> None:
    with pytest.raises(json.JSONDecodeError) as known:
        json.loads(WRONG[name])
    with pytest.raises(json.JSONDecodeError) as found:
        parse(WRONG[name].encode())
    assert (found.value.msg, found.value.pos) == (known.value.msg, known.value.pos)


def test_lists_of_numbers_are_written_as_json() -> None:
    for number in (0, 1, MANY_VALUES, MANY_VALUES + 1, MANY):
        assert json.loads(list_of_numbers(list(range(number)))) == list(range(number))


BODIES: dict[str, tuple[type[Any], Callable[[], Any]]] = {  # made where they are read: that takes a second
    "ids": (CompletionBody, lambda: {"prompt": list(range(1_000_000))}),
    "biases": (CompletionBody, lambda: {"prompt": "x", "logit_bias": {str(i): 1 for i in range(200_000)}}),
    "turns": (ChatBody, lambda: {"messages": [{"role": "user", "content": "x"}] * 20_000}),
    "lists": (CompletionBody, lambda: {"prompt": [[1, 2]] * 60_000}),
    "unknown fields": (CompletionBody, lambda: {f"k{i}": 1 for i in range(200_000)}),
}


@pytest.mark.quick("ids", "turns")
@pytest.mark.parametrize("name", BODIES)
def test_others_go_on_meanwhile(name: str) -> None:
    """Once of some times: other processes may keep the thread that looks from looking."""
    model, made = BODIES[name]
    body = json.dumps(made()).encode()
    with switching():
        assert any(longest_wait(lambda: read(body, model)) < LONGEST_WAIT for _ in range(5))


@pytest.mark.slow
def test_the_standard_library_keeps_others_waiting() -> None:
    """The control: in a thread as well, but in one step, which grows with the body: of three times as many ids it is
    too long on any machine."""
    body = json.dumps({"prompt": list(range(3_000_000))}).encode()
    with switching():
        assert (
            min(longest_wait(lambda: CompletionBody.model_validate(json.loads(body))) for _ in range(2)) > LONGEST_WAIT
        )


def test_over_http(server: Server) -> None:
    text = "the sea " * 250
    many = {str(token): -100 for token in range(2, 258)}
    small = {"prompt": text, "max_tokens": 5, "temperature": 0, "logit_bias": many}
    large = {**small, "logit_bias": {**many, **{f"{token:07d}": -100 for token in range(2, 258)}}, "user": "x" * LARGE}
    assert server.complete(**large)["choices"] == server.complete(**small)["choices"]
    ids = byte_tokenizer()(text).input_ids * 20
    told = server.post("/tokenize", prompt=text * 20).json()
    assert told == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": text * 20}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    (
        ({"prompt": [1] * AT_ONCE + ["x"]}, f"prompt.{AT_ONCE}", "valid integer"),
        ({"prompt": [1] * (2 * AT_ONCE)}, "prompt", "holds 2048 tokens"),
        ({"prompt": "x", "logit_bias": {str(i): i for i in range(FEW_BIASES)} | {"y" * LARGE: 1}}, None, "logit_bias"),
        ({"prompt": ["x"] * (MOST_ITEMS + 1)}, "prompt", f"at most {MOST_ITEMS}"),
        ({"prompt": "x", "user": "y" * LARGE, "foo": 1}, "foo", "no such field"),
        ({"prompt": "x", "user": "y" * LARGE, "stream_options": {}}, None, "needs stream"),
        ([1] * LARGE, None, "must be a JSON object"),
    ),
    ids=("id", "long", "bias", "prompts", "field", "ours", "list"),
)
def test_what_is_wrong_is_told_as_of_small_ones(server: Server, body: Any, param: str | None, words: str) -> None:
    answer = server.client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert param is None or error["param"] == param
    assert len(answer.content) < 1000
    broken = server.client.post(
        "/v1/completions", content=f'{{"prompt": [{NUMBERS},]}}', headers={"Content-Type": "application/json"}
    )
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json" and len(NUMBERS) > PIECE
