"""Bad bodies, too many callers, callers who leave: an error that says why, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import select
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from forerun.serve import app, translate
from forerun.serve.admission import RequestAdmission
from forerun.serve.errors import ApiError
from forerun.serve.schemas import ChatBody, CompletionBody
from serve.events import events
from serve.serving import KEY, Server, connected, make_decoder, running

BAD: tuple[tuple[dict[str, Any], str | None, str], ...] = (
    ({}, "prompt", "required"),
    ({"prompt": "x", "foo": 1}, "foo", "no such field"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "only continue"),
    ({"prompt": "x", "temperature": "1"}, "temperature", "valid number"),
    ({"prompt": "x", "temperature": -1}, "temperature", "greater than"),
    ({"prompt": "x", "n": 0}, "n", "greater than"),
    ({"prompt": "x", "n": True}, "n", "valid integer"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "stop": ""}, "stop", "at least 1"),
    ({"prompt": "x", "stop": ["a", 3]}, "stop.1", "valid string"),
    ({"prompt": "x", "best_of": 2, "n": 3}, "best_of", "at least n"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "known at the end"),
    ({"prompt": "x", "stream_options": {}}, None, "needs stream"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "x", "max_tokens": 0, "echo": True, "n": 2}, "n", "one text for each prompt"),
    ({"prompt": "x", "max_tokens": 0, "echo": True, "best_of": 2}, "best_of", "one text for each prompt"),
    ({"prompt": "x", "max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens", "max_tokens"),
    ({"prompt": "x", "max_tokens": 5, "min_tokens": 6}, "min_tokens", "6 is above the 5 tokens"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens", "above the 16 tokens"),
    ({"prompt": "x", "max_tokens": 0, "echo": True, "logit_bias": {"999": 1}}, "logit_bias", "vocabulary ends"),
    ({"prompt": "x", "max_tokens": 0, "echo": True, "guided_regex": "(a"}, "guided_regex", "cannot be followed"),
    ({"prompt": "x" * 2049, "max_tokens": 0, "echo": True}, "prompt", "holds 2048 tokens"),
    ({"prompt": "x", "max_tokens": 3000}, "max_tokens", "holds 2048 tokens"),
    ({"prompt": "x" * 3000}, "prompt", "holds 2048 tokens"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [999]}, "prompt", "vocabulary ends at token 257"),
    ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", "vocabulary ends"),
    ({"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids", "vocabulary ends"),
    ({"prompt": "x", "speculation": {"drafter": "other"}}, "speculation.drafter", "drafts with 'lookup'"),
    ({"prompt": "x", "speculation": {"enabled": False, "max_draft_tokens": 2}}, "speculation.max_draft_tokens", "use"),
    ({"prompt": "x", "speculation": {"speed": 2}}, "speculation.speed", "no such field"),
    ({"prompt": "x", "speculation": {"Enabled": True}}, "speculation.Enabled", "no such field"),
    *(({"prompt": "x", name: 1}, name, f"{name}: there is no such field")
      for name in ("Temperature", "MaxTokens", "str", "a[b]", "constrained-int", "body", "7")),
)  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=[json.dumps(body)[:50] for body, _, _ in BAD])
def test_a_field_that_cannot_be_honoured_is_named(server: Server, body: Any, param: str | None, message: str) -> None:
    answer = server.post("/v1/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and message in error["message"], error


@pytest.mark.parametrize("field", ("modalities", "audio", "store"))
def test_what_is_not_offered_says_so(server: Server, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: [{}]}
    error = server.post("/v1/chat/completions", **body).json()["error"]
    assert error["code"] == "not_offered" and error["param"] == field


@pytest.mark.parametrize(
    "content", (b"{", b"[]", b"\xff", b"[" * 20000, b'{"prompt": "\\ud800"}', b'{"prompt": "x", "top_p": NaN}', b"")
)
def test_bodies_that_are_no_json(server: Server, content: bytes) -> None:
    answer = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_paths_models_and_messages_that_are_not_there(server: Server) -> None:
    assert server.client.get("/nowhere").json()["error"]["type"] == "not_found_error"
    error = server.post("/v1/completions", prompt="x", model="other")
    assert error.status_code == 404 and error.json()["error"]["code"] == "model_not_found"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused = server.post("/v1/chat/completions", messages=image)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages.0.content.0.type"
    form = server.client.post(
        "/v1/chat/completions", content=b'{"messages": []}', headers={"Content-Type": "text/plain"}
    )
    assert form.status_code == 400 and "application/json" in form.json()["error"]["message"]
    assert server.post("/v1/chat/completions", messages=[{"role": "wizard", "content": "x"}]).status_code == 400


def test_errors_repeat_no_more_of_a_name_than_tells_it(server: Server) -> None:
    """Names of fields and models are the client's: an error of their size would be sent for each."""
    long = "x" * 100_000
    call = {"id": long, "type": "function", "function": {"name": "f", "arguments": "no"}}
    chat = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    for path, body in (
        ("/v1/completions", {"prompt": "x", long: 1}),
        ("/v1/completions", {"prompt": "x", "speculation": {long: 1}}),
        ("/v1/completions", {"prompt": "x", "model": long}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {long: 1}}),
        ("/v1/completions", {"prompt": "x", "speculation": {"drafter": long}}),
        ("/v1/chat/completions", chat),
    ):
        answer = server.post(path, **body)
        assert 400 <= answer.status_code < 500 and len(answer.content) < 1000, answer.text[:2000]


def test_an_answer_may_be_sent_back_as_clients_write_it(server: Server) -> None:
    nothing = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": []}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **nothing}]
    asked = {"messages": [*turns, {"role": "user", "content": "c"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", **asked).status_code == 200
    turns[1]["annotations"] = [{"type": "url_citation"}]
    refused = server.post("/v1/chat/completions", **asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages.1.annotations"


def test_bodies_that_are_too_large(server: Server) -> None:
    large = b" " * (9 * 2**20)
    whole = server.client.post("/v1/completions", content=large)
    assert whole.status_code == 413 and whole.json()["error"]["code"] == "body_too_large"
    parts = server.client.post("/v1/completions", content=(large[: 2**20] for _ in range(9)))
    assert parts.status_code == 413


def raw(server: Server, sent: bytes) -> bytes:
    """What comes back for these bytes."""
    with connected(server) as connection:
        connection.sendall(sent)
        return connection.recv(2000)


def test_headers_that_are_too_large(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    assert b"200 OK" in raw(server, head + b"A: " + b"b" * 1000 + b"\r\n\r\n")
    assert b" 400 " in raw(server, head + b"A: " + b"b" * 100_000)
    assert server.client.get("/health").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    assert b" 408 " in raw(server, head + b'{"prompt":')


def test_a_body_that_trickles_is_not_waited_for_longer_than_a_request() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with running(timeout=0.5) as server, connected(server) as slow:
        slow.sendall(head)
        started = time.monotonic()
        while not select.select([slow], [], [], 0.05)[0]:
            assert time.monotonic() - started < 20
            slow.sendall(b" ")
        assert b" 408 " in slow.recv(2000)


ELSEWHERE = (
    "audio", "best_of_n", "cache_salt", "chat_template", "chat_template_kwargs", "function_call", "functions",
    "include_stop_str_in_output", "length_penalty", "metadata", "modalities", "priority", "prompt_logprobs",
    "reasoning_effort", "safety_identifier", "service_tier", "skip_special_tokens", "spaces_between_special_tokens",
    "store", "structured_outputs", "truncate_prompt_tokens", "use_beam_search", "verbosity", "web_search_options",
)  # fmt: skip
"""Fields of OpenAI's and of other servers that are not offered here."""


def test_fields_of_others_are_refused_by_name(server: Server) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        for name in ELSEWHERE:
            answer = server.post(path, **body, **{name: 1})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == name and name in error["message"], error


def test_keys() -> None:
    with running(key=KEY) as server, httpx.Client(base_url=server.url, verify=False) as stranger:
        assert server.client.get("/v1/models").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": "Bearer ü"}):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            for path in ("/v1/models", "/v1/completions", "/tokenize", "/openapi.json"):
                answer = stranger.get(path, headers=raw)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert KEY not in answer.text
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert stranger.get(path).status_code == 200


def test_blanks_around_a_key_are_not_part_of_it() -> None:
    with running(key=f" {KEY}\n") as server, httpx.Client(base_url=server.url, verify=False) as stranger:
        for sent in (KEY, f" {KEY}"):
            answer = stranger.get("/v1/models", headers={"Authorization": f"Bearer {sent}"})
            assert answer.status_code == 200


def test_whoever_leaves_frees_the_row() -> None:
    body = {"prompt": "abc", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    with running(max_rows=2) as server:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3)
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        assert server.is_idle(10), "nobody decodes for those who left"
        assert 'finished_reason="abort"' in server.client.get("/metrics").text


@pytest.mark.parametrize("more", ({"n": 128}, {"best_of": 128}, {"n": 128, "guided_regex": "a"}), ids=str)
def test_sequences_that_never_fit_are_refused_before_one_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """A body of 4 KB asks for 128,000 of them."""
    made: list[int] = []
    make = translate.Request
    monkeypatch.setattr(translate, "Request", lambda **fields: (made.append(1), make(**fields))[1])
    answer = server.post("/v1/completions", prompt=[[1]] * 1000, max_tokens=1, **more)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "too_many_sequences" and "128000" in error["message"]
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, n=128)
    assert chat.status_code == 400 and chat.json()["error"]["code"] == "too_many_sequences"
    assert not made


def test_sequences_of_one_prompt_share_it(server: Server) -> None:
    requests = translate.completion_requests(CompletionBody(prompt=[1, 2], n=3), [[1, 2]], server.service.model)
    assert len({id(request.prompt) for request in requests}) == 1


def test_a_chat_without_a_limit_is_bounded_where_the_context_is_not(server: Server) -> None:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]})
    for context, budget in ((None, translate.ENDLESS_CHAT), (100, 98)):
        model = replace(server.service.model, context_length=context)
        (request,) = translate.chat_requests(body, [1, 2], None, model)
        assert request.max_new_tokens == budget
    (completion,) = translate.completion_requests(CompletionBody(prompt=[1]), [[1]], model)
    assert completion.max_new_tokens == 16


def test_excess_is_told_to_come_back_and_what_waits_is_served() -> None:
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with running(max_rows=1, max_queued=2) as server, ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: server.post("/v1/completions", **body), range(12)))
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 503]
        assert len(served) + len(refused) == 12 and len(served) >= 3 and refused
        assert len({answer.json()["choices"][0]["text"] for answer in served}) == 1
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        never = server.post("/v1/completions", **{**body, "n": 4})
        assert never.status_code == 400 and "at most 3" in never.json()["error"]["message"]
        assert server.is_idle()


def test_what_the_cache_cannot_hold_is_told_at_once() -> None:
    with running(make_decoder(cache_tokens=300)) as server:
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 300
        answer = server.post("/v1/completions", prompt="x" * 250, max_tokens=51)
        assert answer.status_code == 400 and "holds 300 tokens" in answer.json()["error"]["message"]
        with ThreadPoolExecutor(4) as pool:
            bodies = [{"max_tokens": 50, "temperature": 0, "ignore_eos": True}] * 4
            texts = list(pool.map(lambda body: server.complete("x" * 250, **body)["choices"][0]["text"], bodies))
        assert len(set(texts)) == 1, "one after the other, or preempted: the text is the same"
        assert "vllm:kv_cache_usage_perc" in server.client.get("/metrics").text


def test_time_is_bounded() -> None:
    body = {"prompt": "abc", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    with running(max_rows=1, timeout=0.4) as server, ThreadPoolExecutor(2) as pool:
        decoding, waiting = pool.map(lambda _: server.post("/v1/completions", **body), range(2))
        for answer in (decoding, waiting):
            assert answer.status_code == 408 and answer.json()["error"]["code"] == "timeout"
        *_, last = events(server, "/v1/completions", body)
        assert last["error"]["code"] == "timeout"
        assert server.is_idle()


def test_an_engine_that_fails_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder()
    step, failures = decoder.engine._step, iter(range(2))

    def failing() -> Any:
        if next(failures, None) is not None:
            raise RuntimeError("no memory at /secret/path")
        return step()

    monkeypatch.setattr(decoder.engine, "_step", failing)
    with running(decoder) as server:
        answer = server.post("/v1/completions", prompt="abc", max_tokens=5)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert server.complete("abc", max_tokens=5)["choices"][0]["finish_reason"]


def test_requests_under_way_end_while_new_ones_are_refused() -> None:
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with running() as server, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.post, "/v1/completions", **body)
        while not server.service.admission.num_running:
            time.sleep(0.005)
        server.service.is_draining = True
        late = server.post("/v1/completions", **body)
        assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
        assert server.client.get("/ready").status_code == 503 and server.client.get("/health").status_code == 200
        assert under_way.result(60).json()["usage"]["completion_tokens"] == 60


def test_a_queue_is_first_come_first_served() -> None:
    async def play() -> None:
        admission = RequestAdmission(max_rows=2, max_queued=3, max_queued_tokens=100)
        first = admission.enter([10, 10, 10])
        assert [place.is_running for place in first] == [True, True, False]
        second = admission.enter([40])
        assert (admission.num_running, admission.num_waiting, admission.num_waiting_tokens) == (2, 2, 50)
        with pytest.raises(ApiError, match="come back later"):
            admission.enter([60])
        with pytest.raises(ApiError, match="at most 5"):
            admission.enter([1] * 6)
        first[0].leave()
        assert first[2].is_running and not second[0].is_running
        second[0].leave()
        second[0].leave()
        for place in first:
            place.leave()
        assert admission.num_running == admission.num_waiting == 0

    asyncio.run(play())


@pytest.mark.parametrize("order", (1, -1), ids=("from the front", "from the back"))
def test_leaving_a_long_queue_takes_no_longer_for_each(order: int) -> None:
    """The event loop does it: with a search for each place, so many took seconds."""

    async def play() -> float:
        places = RequestAdmission(max_rows=1, max_queued=2**14, max_queued_tokens=2**14).enter([1] * 2**14)
        started = time.process_time()
        for place in places[::order]:
            place.leave()
        return time.process_time() - started

    assert asyncio.run(play()) < 0.5


def test_metrics_tell_who_waits_for_room_in_the_cache() -> None:
    """One at a time fits: others wait in the engine, and their time is not that of reading a prompt."""
    body = {"prompt": "x" * 200, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with running(make_decoder(cache_tokens=300)) as server, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.post, "/v1/completions", **body) for _ in range(3)]
        seen = []
        while not all(answer.done() for answer in answers):
            found = metrics_of(server)
            seen.append((found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]))
        assert (1, 2) in seen and (1, 1) in seen and not any(running > 1 for running, _ in seen[seen.index((1, 2)) :])
        found = metrics_of(server)
        queued, prefill = (found[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill"))
        assert found["vllm:request_queue_time_seconds_count"] == 3 and queued > 2 * prefill
        assert queued + prefill == pytest.approx(found["vllm:time_to_first_token_seconds_sum"])


def test_metrics_add_up() -> None:
    with running() as server:
        answers = [
            server.complete("the sea the sea", max_tokens=20 + i, temperature=0, ignore_eos=True) for i in range(3)
        ]
        counts = metrics_of(server)
    speculation = [answer["usage"]["speculation"][0] for answer in answers]
    assert counts["vllm:generation_tokens_total"] == 63 and counts["vllm:prompt_tokens_total"] == 45
    for metric, field in (("draft_tokens", "num_draft_tokens"), ("accepted_tokens", "num_accepted_tokens")):
        assert counts[f"vllm:spec_decode_num_{metric}_total"] == sum(entry[field] for entry in speculation) > 0
    assert (
        counts["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
        == counts["vllm:spec_decode_num_accepted_tokens_total"]
    )
    assert counts["vllm:time_to_first_token_seconds_count"] == counts["vllm:e2e_request_latency_seconds_count"] == 3
    assert counts["vllm:num_requests_running"] == counts["vllm:num_requests_waiting"] == 0


def test_metrics_tell_of_keys_that_were_there() -> None:
    with running(make_decoder(keep_rows=1)) as server:
        for prompt in ("the sea the sea", "the sea the sea, and"):
            server.complete(prompt, max_tokens=1, temperature=0)
        counts = metrics_of(server)
    assert counts["vllm:prefix_cache_queries_total"] == 15 + 20 and counts["vllm:prefix_cache_hits_total"] == 15


def metrics_of(server: Server) -> dict[str, float]:
    """Values by name, those of several labels added up."""
    values: dict[str, float] = {}
    for line in server.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.partition("{")[0].partition(" ")[0], float(line.rpartition(" ")[2])
            values[name] = values.get(name, 0.0) + value
    return values
