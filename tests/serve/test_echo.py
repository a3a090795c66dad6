"""`echo`: prompts that are told again are let in, bounded in time and left like any other work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from forerun.errors import EngineClosed
from forerun.serve import echo
from forerun.serve.answer_text import TextPiece
from forerun.serve.backend import LocalBackend
from forerun.serve.prompt_logprobs import prompt_logprobs
from serve.events import events
from serve.serving import Server, make_decoder, running
from support.folders import byte_tokenizer

ECHO = {"echo": True, "max_tokens": 0, "logprobs": 1}


def test_each_prompt_is_echoed_once_and_in_its_place(server: Server) -> None:
    for logprobs in (None, 1):
        body = {"prompt": ["abc", "de"], "echo": True, "max_tokens": 0, "logprobs": logprobs}
        whole = server.complete(**body)
        assert [choice["text"] for choice in whole["choices"]] == ["abc", "de"]
        assert whole["usage"]["prompt_tokens"] == 5 and whole["usage"]["completion_tokens"] == 0
        texts = {0: "", 1: ""}
        ends = []
        for part in (part for event in events(server, "/v1/completions", body) for part in event["choices"]):
            texts[part["index"]] += part["text"]
            ends.append(part["finish_reason"])
        assert texts == {0: "abc", 1: "de"} and sorted(filter(None, ends)) == ["length", "length"]


def test_sequences_of_several_prompts_follow_their_own(server: Server) -> None:
    body = {"prompt": ["abc", "de"], "echo": True, "max_tokens": 2, "n": 2, "ignore_eos": True, "seed": 1}
    texts = [choice["text"] for choice in server.complete(**body)["choices"]]
    assert [text[: len(prompt)] for text, prompt in zip(texts, ("abc", "abc", "de", "de"), strict=True)] == [
        "abc", "abc", "de", "de",
    ]  # fmt: skip
    best = server.complete(**{**body, "best_of": 3})["choices"]
    assert [choice["text"][:2] for choice in best] == ["ab", "ab", "de", "de"]


def test_a_prompt_may_fill_the_context(server: Server) -> None:
    for logprobs in (None, 0):
        (choice,) = server.complete("x" * 2048, echo=True, max_tokens=0, logprobs=logprobs)["choices"]
        assert choice["text"] == "x" * 2048


def test_who_finds_no_place_is_told_to_come_back() -> None:
    body = {"prompt": "abc", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
    with running(max_rows=1, max_queued=0) as server:
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as under_way:
            lines = under_way.iter_lines()  # which would close the stream if it were not kept
            next(lines)
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", **ECHO})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded"
        assert server.is_idle() and server.post("/v1/completions", prompt="abc", **ECHO).status_code == 200


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """Log-probabilities that never come: when they were begun, and given up."""
    begun, left = threading.Event(), threading.Event()

    async def wait(self: LocalBackend, prompt: Sequence[int], alternatives: int) -> Any:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            left.set()

    monkeypatch.setattr(LocalBackend, "prompt_logprobs", wait)
    return [begun, left]


@pytest.mark.parametrize("apart", (True, False))
def test_time_is_bounded_and_whoever_leaves_ends_it(endless: list[threading.Event], apart: bool) -> None:
    begun, left = endless
    with running(timeout=1.0, apart=apart) as server:
        answer = server.post("/v1/completions", prompt="abc", **ECHO)
        assert answer.status_code == 408 and left.wait(10)
        *_, last = events(server, "/v1/completions", {"prompt": "abc", **ECHO})
        assert last["error"]["code"] == "timeout"
        assert server.is_idle()
    begun.clear()
    left.clear()
    with running(apart=apart) as server:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", **ECHO}, timeout=0.5)
        assert begun.is_set() and left.wait(10) and server.is_idle()


@pytest.mark.usefixtures("endless")
def test_structured_answers_do_not_wait_for_log_probabilities() -> None:
    with running(timeout=3.0) as server, ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(server.post, "/v1/completions", prompt="abc", **ECHO) for _ in range(8)]
        while server.service.admission.num_running < len(waiting):
            time.sleep(0.01)
        assert server.complete("x", guided_choice=["aa"])["choices"][0]["text"] == "aa"
        assert {each.result().status_code for each in waiting} == {408}


@pytest.mark.parametrize("logprobs", (None, 1))
def test_an_engine_that_has_ended_is_told_so(logprobs: int | None) -> None:
    with running(apart=False) as server:
        server.service.backend.close()
        answer = server.post("/v1/completions", prompt="abc", echo=True, max_tokens=1, logprobs=logprobs)
        assert answer.status_code == 503, answer.text


def test_an_engine_that_ends_meanwhile_is_no_cancellation() -> None:
    class Closing:
        def between_steps(self, function: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            return future

    model = make_decoder().target
    with pytest.raises(EngineClosed):
        asyncio.run(prompt_logprobs(Closing(), model, (5, 6, 7), 1))  # type: ignore[arg-type]


class Telling:
    async def prompt_logprobs(self, prompt: Sequence[int], alternatives: int) -> list[None]:
        return [None] * len(prompt)


@pytest.mark.parametrize("alternatives", (None, 1))
@pytest.mark.parametrize("size", (echo.SHORT_PROMPT, echo.SHORT_PROMPT + 1))
def test_pieces_of_a_long_prompt_are_made_beside_the_loop(
    size: int, alternatives: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many at once took the event loop from everybody else for as long."""
    threads = set()

    def noted(*fields: Any) -> TextPiece:
        threads.add(threading.get_ident())
        return TextPiece(*fields)

    monkeypatch.setattr(echo, "TextPiece", noted)
    prompt = tuple(byte_tokenizer()("x" * size).input_ids)
    made = asyncio.run(echo.Echo(byte_tokenizer(), Telling(), alternatives).of(prompt))  # type: ignore[arg-type]
    assert "".join(piece.text for piece in made) == "x" * size
    assert (threads == {threading.get_ident()}) == (size <= echo.SHORT_PROMPT) and len(threads) == 1
