"""What goes wrong, in the model, the drafter, a client or the machine: it costs its own request and nobody else's."""

from __future__ import annotations

import copy
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch

from forerun import PromptLookup, SpeculativeDecoder
from forerun.serve import errors
from forerun.serve.answer_text import AnswerText
from forerun.serve.formats import CompletionFormat
from serve.events import events
from serve.mixed import DECODER, answered, body_of, expected
from serve.process import served
from serve.serving import Server, connected, make_decoder, running
from support.folders import byte_tokenizer

BAD_TOKEN = 9
LONG = {"prompt": "abc", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
NUMBERS = range(4)


@contextmanager
def neighbours(server: Server) -> Iterator[None]:
    """Others are served while the block does harm, and hear what they would have heard alone."""
    with ThreadPoolExecutor(len(NUMBERS)) as pool:
        under_way = pool.map(lambda number: answered(server, body_of(number)), NUMBERS)
        yield
        assert list(under_way) == [expected(body_of(number)) for number in NUMBERS]
    assert server.is_idle(60)


def decoder_of(model: Any, drafter: Any = None) -> SpeculativeDecoder:
    drafter = PromptLookup() if drafter is None else drafter
    return SpeculativeDecoder(model, drafter, tokenizer=byte_tokenizer(), rule="coupled", policy=3)


class Stumbling(PromptLookup):
    """Raises every second time, the engine's copies of it included."""

    calls = itertools.count()

    def propose(self, context: Any) -> Any:
        if next(self.calls) % 2:
            raise RuntimeError("no idea")
        return super().propose(context)


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize(("kind", "method"), ((AnswerText, "push_all"), (CompletionFormat, "news")))
def test_a_fault_of_ours_is_the_last_event_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, kind: Any, method: str, direct: bool
) -> None:
    def fail(*given: Any) -> Any:
        raise KeyError("/home/somebody/secret")

    logged: list[str] = []
    monkeypatch.setattr(errors.log, "error", lambda words, exc_info: logged.append(repr(exc_info)))
    with running(direct=direct) as server:
        with monkeypatch.context() as patched:
            patched.setattr(kind, method, fail)
            with server.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                told = answer.read().decode()
        assert "server_error" in told and told.endswith("data: [DONE]\n\n") and "secret" not in told
        assert len(logged) == 1 and "secret" in logged[0] and server.is_idle()
        if method == "push_all":
            assert 'finished_reason="error"' in server.client.get("/metrics").text
        assert server.complete("abc", max_tokens=2)["choices"]


@pytest.mark.filterwarnings("ignore::forerun.errors.ForerunWarning")
def test_a_drafter_that_raises_costs_drafts_only() -> None:
    with running(decoder_of(DECODER.target, Stumbling())) as server, neighbours(server):
        pass
    assert next(Stumbling.calls) > 4


def test_logits_that_are_no_numbers_end_their_own_request() -> None:
    model = copy.deepcopy(DECODER.target)
    model.get_input_embeddings().weight.data[BAD_TOKEN] = torch.nan
    body = {**LONG, "prompt": [40, BAD_TOKEN], "logit_bias": {str(BAD_TOKEN): -100}}
    with running(decoder_of(model)) as server, neighbours(server):
        whole = server.post("/v1/completions", **body)
        assert whole.status_code == 500 and whole.json()["error"]["code"] == "not_finite"
        *_, last = events(server, "/v1/completions", body)
        assert last["error"]["code"] == "not_finite" and "NaN" in last["error"]["message"]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("error", (torch.OutOfMemoryError, MemoryError), ids=lambda error: error.__name__)
def test_no_memory_in_a_round_is_survived(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that fails has done nothing, and is tried again."""
    decoder = make_decoder()
    step, rounds = decoder.engine._step, iter(range(10**6))

    def short_of_memory() -> Any:
        if next(rounds) % 5 == 2:
            raise error("tried to allocate 2.00 GiB at /secret/path")
        return step()

    monkeypatch.setattr(decoder.engine, "_step", short_of_memory)
    with running(decoder) as server, neighbours(server):
        pass


def head(length: int) -> bytes:
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def test_a_client_that_reads_byte_by_byte_keeps_no_row() -> None:
    """Its row ends when its text does; what it has not read waits for it."""
    body = json.dumps({**LONG, "stream": True, "logprobs": 20}).encode()  # more than sockets hold for it
    with running(max_rows=2) as server, connected(server, received=4096) as slow:
        slow.sendall(head(len(body)) + body)
        read = b"".join(slow.recv(1) for _ in range(20))
        with neighbours(server):  # ends only where the engine is idle, the slow client's row included
            read += b"".join(slow.recv(1) for _ in range(20))
        while piece := slow.recv(2**16):
            read += piece
    assert read.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in read and read.count(b'"finish_reason":"length"') == 1


@pytest.mark.slow
def test_bodies_that_never_end_and_connections_that_say_nothing_hold_nothing() -> None:
    body = json.dumps(LONG).encode()
    with running(max_rows=2, max_queued=4) as server:
        before = len(os.listdir("/proc/self/fd"))
        halves = [connected(server) for _ in range(20)]
        for place, one in enumerate(halves):
            one.sendall((b"", head(len(body)), head(len(body)) + body[:20])[place % 3])
        with neighbours(server):
            assert server.service.admission.num_waiting <= 4
        for one in halves:
            one.close()
        end = time.monotonic() + 10
        while len(os.listdir("/proc/self/fd")) > before + 8 and time.monotonic() < end:  # clients' own are among them
            time.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before + 8, "descriptors of those who left"


def stream_all(url: str, max_tokens: int = 300) -> list[str]:
    body = {**LONG, "stream": True, "max_tokens": max_tokens}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        return [line for line in answer.iter_lines() if line]


@pytest.mark.slow
def test_sigterm_under_load_loses_nobody(tmp_path: Path) -> None:
    with served(tmp_path / "m", "--max-rows", "4") as (process, url, _), ThreadPoolExecutor(8) as pool:
        under_way = [pool.submit(stream_all, url) for _ in range(8)]
        while metric(url, "vllm:num_requests_waiting") < 4:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        ended = [one.result(120) for one in under_way]
        assert all(lines[-1] == "data: [DONE]" for lines in ended) and len({texts(lines) for lines in ended}) == 1
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/completions", json=LONG)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_after_sigkill_a_new_server_says_the_same(tmp_path: Path) -> None:
    with served(tmp_path / "m") as (process, url, _), ThreadPoolExecutor(3) as pool:
        wanted = stream_all(url)
        under_way = [pool.submit(stream_all, url, 1900) for _ in range(3)]  # not over before they are looked at
        while metric(url, "vllm:num_requests_running") < 3:
            time.sleep(0.02)
        process.kill()
        for one in under_way:
            with pytest.raises(httpx.TransportError):  # told at once, not left waiting
                one.result(30)
        port = urlsplit(url).port
    assert port is not None
    with served(tmp_path / "m", port=port) as (_, again, _):
        assert again == url and texts(stream_all(again)) == texts(wanted)


def texts(lines: list[str]) -> str:
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def metric(url: str, name: str) -> float:
    found = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return float(found[0].rpartition(" ")[2])
