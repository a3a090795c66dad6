"""`forerun chat --server`: turns over HTTP, what is sent, and what is said where something is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from forerun.cli import chat_server as module
from forerun.cli.main import cli
from support.api_server import Call, Reply, api_server, stream, text_event, whole

USAGE = {"completion_tokens": 4, "speculation": [{"rounds": 2, "num_draft_tokens": 4, "num_accepted_tokens": 2}]}
ENDING = {"choices": [], "usage": USAGE}
ORIGINS = [{"text": "a", "origin": "accepted"}, {"text": "b", "origin": "plain"}]


def served(call: Call) -> Reply:
    if call.path == "/v1/models":
        return whole({"data": [{"id": "first", "owned_by": "forerun"}, {"id": "second"}]})
    if call.body["messages"][-1]["content"] == "too long":
        return whole({"error": {"message": "holds 10 tokens"}}, 400)
    choice: dict[str, Any] = {"index": 0, "delta": {"content": "ab"}, "origins": ORIGINS}
    return stream({"choices": [choice]}, text_event(f" {len(call.body['messages'])}"), ENDING)


def chat(url: str, *arguments: str, stdin: str = "hello\n", **environment: str) -> Result:
    return CliRunner(env=environment).invoke(cli, ["chat", "--server", url, *arguments], input=stdin)


def test_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server(served) as server:
        result = chat(server.url, "--system", "be brief", stdin="hello\nmore\n/stats\n/reset\nagain\n")
        bodies = [call.body for call in server.calls if call.body]
    assert result.exit_code == 0 and result.stdout == "ab 2\nab 4\nab 2\n"
    assert "8 tokens, 2.00 a round, 4 of 8 drafted accepted" in result.stderr
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    answer = {"role": "assistant", "content": "ab 2"}
    assert bodies[1]["messages"] == [*turns, answer, {"role": "user", "content": "more"}]
    assert bodies[0] == {
        "model": "first", "max_tokens": 512, "temperature": 0.0, "stream": True, "messages": turns,
        "stream_options": {"include_usage": True}, "speculation": {"origins": True},
    }  # fmt: skip


def test_settings_the_key_and_the_model_are_sent() -> None:
    with api_server(served) as server:
        arguments = ("-m", "second", "--top-k", "5", "--seed", "3", "--stop", "x", "--logit-bias", "7=-1")
        assert chat(server.url, *arguments, "--max-new-tokens", "9", FORERUN_API_KEY="sesame").exit_code == 0
        body = server.calls[-1].body
        assert {call.headers["authorization"] for call in server.calls} == {"Bearer sesame"}
    body.pop("messages")
    assert body == {
        "model": "second", "max_tokens": 9, "temperature": 1.0, "top_k": 5, "seed": 3, "stop": ["x"], "stream": True,
        "logit_bias": {"7": -1.0}, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_a_turn_that_is_refused_is_told_and_forgotten() -> None:
    with api_server(served) as server:
        result = chat(server.url, stdin="hello\ntoo long\nmore\n")
    assert result.exit_code == 1 and result.stdout == "ab 1\n\nab 3\n"
    assert "turn 2" in result.stderr and "holds 10 tokens (/reset forgets" in result.stderr


def test_what_belongs_to_a_model_here_is_refused() -> None:
    refused = chat("http://127.0.0.1:1", "--draft", "off", "--device", "cpu")
    assert refused.exit_code == 2 and "--device, --draft: of a model in this process" in refused.stderr
    for option in (("--quantize", "int8"), ("--tensor-parallel", "2"), ("--max-time", "9")):
        assert f"{option[0]}: of a model in this process" in chat("http://127.0.0.1:1", *option).stderr
    alone = CliRunner().invoke(cli, ["chat", "--api-key", "x"], input="hi\n")
    assert alone.exit_code == 2 and "--api-key is for a --server" in alone.stderr
    nobody = chat("http://127.0.0.1:1")
    assert nobody.exit_code == 2 and "start one with `forerun serve`" in nobody.stderr


def test_control_c_ends_the_answer_and_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    write, pieces = module.ServerTalk._write, []

    def interrupted(talk: Any, choice: Any, said: list[str]) -> None:
        write(talk, choice, said)
        pieces.append(choice)
        if len(pieces) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.ServerTalk, "_write", interrupted)
    with api_server(served) as server:
        result = chat(server.url, stdin="hello\nmore\n")
        assert server.calls[-1].body["messages"][1] == {"role": "assistant", "content": "ab"}
    assert result.exit_code == 0 and result.stdout == "ab\nab 3\n"
