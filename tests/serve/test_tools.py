"""Calls of tools: in the model's own format, with arguments that fit their schemas, whole and streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import PromptLookup, SpeculativeDecoder
from forerun.serve.answer_text import TextPiece
from forerun.serve.call_formats import FORMATS, CallFormat, Tools, find_format
from forerun.serve.call_reader import CallReader
from forerun.serve.schemas import Function
from serve.events import events
from serve.serving import NAME, Server, running
from serve.tool_models import MARKS, tool_tokenizer
from support.folders import VOCAB, byte_tokenizer
from support.tiny import tiny_model

PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/place"}, "soon": {"type": "boolean"}},
    "required": ["place", "soon"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOKENIZER = tool_tokenizer("hermes")
MARK = TOKENIZER.convert_tokens_to_ids("<tool_call>")


def served(tokenizer: Any) -> Any:
    model = tiny_model("llama", vocab=len(tokenizer), eos_token_id=0, max_position_embeddings=2048)
    decoder = SpeculativeDecoder(model, PromptLookup(), tokenizer=tokenizer, rule="coupled", policy=3)
    return running(decoder, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def tool_server() -> Iterator[Server]:
    with served(TOKENIZER) as server:
        yield server


def body(**more: Any) -> dict[str, Any]:
    return {"messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 150, "seed": 3, **more}


def check(call: Any) -> None:
    """That its arguments are what the tool takes."""
    arguments = json.loads(call["function"]["arguments"])
    assert call["type"] == "function" and len(call["id"]) == 9
    if call["function"]["name"] == "clock":
        assert arguments == {}
    else:
        assert call["function"]["name"] == "weather"
        assert arguments.keys() == {"place", "soon"} and arguments["place"] in ("Rome", "Oslo")


def gathered(stream: list[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and finish reason, as clients put chunks together."""
    content, calls, reason = "", dict[int, dict[str, Any]](), ""
    for choice in (choice for event in stream for choice in event["choices"]):
        content += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for part in choice["delta"].get("tool_calls", ()):
            if part["index"] not in calls:
                assert part["id"] and part["function"]["name"], "a call begins with who is called"
                calls[part["index"]] = {**part, "function": dict(part["function"])}
            else:
                assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return content, [calls[index] for index in sorted(calls)], reason


@pytest.mark.parametrize(
    ("template", "name"),
    (("hermes", "hermes"), ("mistral", "mistral"), ("mistral args", "mistral"), ("llama3", "llama3"), ("xml", None)),
)
def test_the_format_is_the_templates(template: str, name: str | None) -> None:
    found = find_format(tool_tokenizer(template))
    assert (found and found.name) == name
    assert find_format(byte_tokenizer()) is None, "this one knows no tools"


def test_a_required_call_is_made_and_streamed_alike(tool_server: Server) -> None:
    asked = body(tool_choice="required", parallel_tool_calls=False)
    (choice,) = tool_server.post(PATH, **asked).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    check(call)
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    content, (streamed,), reason = gathered(list(events(tool_server, PATH, asked)))
    assert (content, reason, streamed["function"]) == ("", "tool_calls", call["function"])
    again = [*ASK, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    assert tool_server.post(PATH, messages=again, max_tokens=3).status_code == 200


def test_the_named_tool_is_called(tool_server: Server) -> None:
    for name in ("weather", "clock"):
        choice = {"type": "function", "function": {"name": name}}
        answer = tool_server.post(PATH, **body(tool_choice=choice, n=2, parallel_tool_calls=False)).json()
        for each in answer["choices"]:
            (call,) = each["message"]["tool_calls"]
            check(call)
            assert call["function"]["name"] == name


def test_a_model_that_may_call_decides_by_itself(tool_server: Server) -> None:
    """A bias of the mark stands for what a trained model wants."""
    calls = tool_server.post(PATH, **body(logit_bias={str(MARK): 100.0})).json()["choices"][0]
    assert [check(call) for call in calls["message"]["tool_calls"]] and calls["message"]["content"] is None
    free = body(logit_bias={str(MARK): -100.0}, max_tokens=12, temperature=0)
    answer = tool_server.post(PATH, **free).json()["choices"][0]
    assert "tool_calls" not in answer["message"] and answer["finish_reason"] in ("length", "stop")
    prompt = tool_server.post("/tokenize", messages=ASK, tools=free["tools"]).json()["tokens"]
    alone = tool_server.complete(prompt, max_tokens=12, temperature=0, logit_bias={str(MARK): -100.0})
    assert answer["message"]["content"] == alone["choices"][0]["text"], "up to a call the text is the model's own"


def test_openais_client_reads_calls_whole_and_streamed(tool_server: Server) -> None:
    """Its stream reads calls of strict tools alone; ours always keep to their schemas."""
    openai = pytest.importorskip("openai")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in (WEATHER, CLOCK)]
    asked: Any = {**body(tools=strict, tool_choice="required"), "model": NAME}
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            streamed = stream.current_completion_snapshot.choices[0]
        calls, parts = whole.message.tool_calls or [], streamed.message.tool_calls or []
        answers: Any = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        again = [*asked["messages"], whole.message, *answers]
        assert client.chat.completions.create(model=NAME, messages=again, max_tokens=3).choices
    assert calls and [call.function.arguments for call in parts] == [call.function.arguments for call in calls]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.delta" in kinds


def test_none_leaves_tools_out(tool_server: Server) -> None:
    quiet = tool_server.post(PATH, **body(tool_choice="none", max_tokens=9)).json()
    plain = tool_server.post(PATH, messages=ASK, max_tokens=9, seed=3).json()
    assert quiet["choices"] == plain["choices"] and quiet["usage"] == plain["usage"]


@pytest.mark.slow
@pytest.mark.parametrize("template", ("mistral", "mistral args", "llama3"))
@pytest.mark.parametrize("marks", (False, True))
def test_other_formats(template: str, marks: bool) -> None:
    with served(tool_tokenizer(template, marks)) as server:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            (found,) = server.post(PATH, **body(tool_choice=choice)).json()["choices"]
            calls = found["message"]["tool_calls"]
            assert calls and found["finish_reason"] in ("tool_calls", "length")
            for call in calls[: -1 if found["finish_reason"] == "length" else None]:  # the last one was cut off
                check(call)


TEXTS = {
    "hermes": 'A<b <tool_call>\n{"name": "weather", "arguments": {"place": "}\\"{"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "mistral": 'A<b [TOOL_CALLS] [{"name": "weather", "arguments": {"place": "}\\"{"}}, {"name": "clock", "arguments": '
    "{}}]",
    "mistral args": 'A<b [TOOL_CALLS]weather[ARGS]{"place": "}\\"{"}[TOOL_CALLS]clock[ARGS]{}',
    "llama3": '{"name": "weather", "parameters": {"place": "}\\"{"}}',
}


def tools_of(form: CallFormat, marks: bool) -> Tools:
    tokens = {mark: VOCAB + number for number, mark in enumerate(MARKS)} if marks else {}
    functions = [Function(name="weather"), Function(name="clock")]
    return Tools(form, functions, must_call=False, may_repeat=True, tokens=tokens)


@pytest.mark.parametrize("marks", (False, True))
@pytest.mark.parametrize("template", TEXTS)
def test_calls_are_read_however_the_text_is_cut(template: str, marks: bool) -> None:
    """Special tokens have no text: what is read must not depend on it."""
    tokenizer, rng = tool_tokenizer(template, marks), random.Random(0)
    form = find_format(tokenizer)
    assert form is not None
    pieces = [
        TextPiece("" if token >= VOCAB and "[" in MARKS[token - VOCAB] else tokenizer.decode([token]), token, "plain")
        for token in tokenizer(TEXTS[template]).input_ids
    ]
    for _ in range(5):
        reader, content, rest = CallReader(tools_of(form, marks)), "", list(pieces)
        while rest:
            size = rng.randint(1, 12)
            content += reader.push(rest[:size]).content
            rest = rest[size:]
        assert content + reader.finish().content == ("" if template == "llama3" else "A<b ")
        called = [(call.name, json.loads(call.arguments)) for call in reader.calls]
        assert called == [("weather", {"place": '}"{'}), ("clock", {})][: 1 if template == "llama3" else 2]
        assert reader.has_called


def test_text_that_only_looks_like_a_call_is_text() -> None:
    for form, text in ((FORMATS[0], "a <tool_cal"), (FORMATS[-1], 'no {"name": "weather"')):
        reader = CallReader(tools_of(form, marks=False))
        parts = [reader.push([TextPiece(char, 5, "plain")]).content for char in text]
        assert "".join(parts) + reader.finish().content == text and not reader.calls
    reader = CallReader(tools_of(FORMATS[0], marks=False))
    reader.push([TextPiece('<tool_call>\n{"name": "weather", "arguments": {"pl', 5, "plain")])
    assert reader.calls[0].name == "weather" and not reader.has_called, "it was cut in the middle"


@pytest.mark.parametrize(
    ("more", "param", "message"),
    (
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool of this name"),
        ({"tools": [CLOCK, CLOCK]}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [{"type": "search"}]}, "tools.0.type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]}, "tools", "cannot be"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "obj"),
        ({"response_format": {"type": "json_object"}}, "response_format", "tools say"),
        ({"ignore_eos": True}, "ignore_eos", "ends"),
        ({"functions": []}, "functions", "use tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
    ),
)
def test_what_cannot_be_called_is_refused(tool_server: Server, more: Any, param: str, message: str) -> None:
    answer = tool_server.post(PATH, **body(**more))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error


def test_earlier_calls_are_shown_to_the_model_as_it_writes_them(tool_server: Server) -> None:
    def asked(arguments: str) -> Any:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return tool_server.post("/tokenize", messages=[*turns, {"role": "tool", "tool_call_id": "1", "content": "12"}])

    text = TOKENIZER.decode(asked('{"place":"Rome"}').json()["tokens"])
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>' in text
    for wrong in ("", "[1]", "{"):
        assert "must be a JSON object" in asked(wrong).json()["error"]["message"]


def test_a_model_without_tools_says_so(server: Server) -> None:
    error = server.post(PATH, **body()).json()["error"]
    assert error["param"] == "tools" and error["code"] == "not_offered" and "knows no tools" in error["message"]
