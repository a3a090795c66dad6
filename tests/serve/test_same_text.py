"""What comes over HTTP is what `decoder.generate` says, token for token, whoever else is served meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from serve.mixed import TEXTS, answered, body_of, expected, streamed
from serve.serving import Server, running


@pytest.mark.parametrize("number", range(5))
def test_alone(server: Server, number: int) -> None:
    body = body_of(number)
    assert answered(server, body) == expected(body)


@pytest.mark.slow
def test_among_neighbours_that_come_and_go(server: Server) -> None:
    """20 calls with 30 sequences at once, on a server that decodes 8 at a time; every second one is streamed."""

    def call(number: int) -> list[str]:
        return (streamed if number % 2 else answered)(server, body_of(number))

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(call, range(20)))
    assert found == [expected(body_of(number)) for number in range(20)]
    assert server.is_idle()


@pytest.mark.slow
def test_among_64_neighbours_of_which_some_leave() -> None:
    """96 clients at 64 rows: every third leaves in the middle, and the others hear what they would alone."""

    def call(server: Server, number: int) -> list[str] | None:
        body = body_of(number)
        if number % 3:
            return (streamed if number % 2 else answered)(server, body)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
            next(answer.iter_lines())
        return None

    with running(max_rows=64, max_queued=256) as server, ThreadPoolExecutor(96) as pool:
        found = list(pool.map(lambda number: call(server, number), range(96)))
        assert server.is_idle()
    assert found == [expected(body_of(number)) if number % 3 else None for number in range(96)]


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
