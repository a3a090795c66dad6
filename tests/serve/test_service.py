"""What a service counts of sequences that nobody reads to their end, and how it hears of a process that is lost."""

from __future__ import annotations

import re
import threading
import time
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from forerun import PromptLookup, SpeculativeDecoder
from forerun.errors import RankLost
from forerun.parallel import Coordinator, coordinator
from forerun.parallel.link import Link
from forerun.serve.backend import LocalBackend
from serve.serving import Server, make_decoder, running
from support.folders import VOCAB, byte_tokenizer
from support.processes import wait_for
from support.tiny import tiny_model

# One token again and again, which lookup drafts.
LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 1900, "temperature": 0, "ignore_eos": True,
                        "logit_bias": {str(byte_tokenizer().convert_tokens_to_ids("a")): 100}}  # fmt: skip
TIMEOUT = 2.0
NAMES = ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total", "forerun:rounds_total")


class SlowLookup(PromptLookup):
    """So slow that 1900 tokens take longer than a request may."""

    def propose(self, context: Any) -> Any:
        time.sleep(0.02)
        return super().propose(context)


def counted(server: Server) -> list[float]:
    """Tokens, accepted ones, rounds."""
    text = server.client.get("/metrics").text
    found = [re.search(rf"^{name}\{{.*?\}} (\S+)", text, re.MULTILINE) for name in NAMES]
    return [float(each[1]) for each in found if each is not None]


def counted_at_last(server: Server, before: float) -> list[float]:
    """Once more tokens than before are told; nobody decodes meanwhile."""
    assert server.is_idle(20)
    end = time.monotonic() + 20
    while (now := counted(server))[0] <= before and time.monotonic() < end:
        time.sleep(0.02)
    return now


def left(server: Server) -> None:
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        assert len(list(islice(answer.iter_lines(), 24))) == 24  # a line a token, and one between two


def timed_out(server: Server) -> None:
    assert server.post("/v1/completions", **LONG).status_code == 408


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in this process"])
@pytest.mark.parametrize("end", [left, timed_out])
def test_tokens_are_counted_with_the_rounds_that_made_them(end: Any, apart: bool) -> None:
    """Every round gives one token of its own, and those that it accepts."""
    model = tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048)
    decoder = SpeculativeDecoder(model, SlowLookup(), tokenizer=byte_tokenizer(), policy=3)
    with running(decoder, apart=apart, timeout=TIMEOUT if end is timed_out else 60.0) as server:
        end(server)
        tokens, accepted, rounds = counted_at_last(server, 0)
        assert accepted > 0 and rounds > 0, "nothing was counted, so nothing was tested"
        assert tokens == accepted + rounds
        server.complete(**LONG | {"max_tokens": 40})
        more, accepted, rounds = counted_at_last(server, tokens)
        assert more == tokens + 40
        assert more <= accepted + rounds, "the last round may be cut short"


def answer_until(enough: threading.Event, connection: Connection) -> None:
    """As a rank does that waits for work, and then is gone."""
    while not enough.is_set():
        connection.recv_bytes()
        connection.send("here")
    connection.close()


def test_a_process_that_is_lost_while_nobody_asks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PING_SECONDS", 0.01)
    ours, theirs = Pipe()
    ranks = Coordinator.__new__(Coordinator)
    ranks.link, ranks._gone, ranks._lock = Link({1: cast(Connection, ours)}), [], threading.Lock()
    decoder, enough, heard = make_decoder(), threading.Event(), threading.Event()
    rank = threading.Thread(target=answer_until, args=(enough, theirs))
    rank.start()
    backend = LocalBackend(cast(Any, SimpleNamespace(engine=decoder.engine, ranks=ranks)))
    try:
        backend.on_lost = heard.set
        assert backend.is_split and backend.state.is_alive
        enough.set()
        assert heard.wait(20) and not backend.state.is_alive
        with pytest.raises(RankLost, match="rank 1 has ended"):
            ranks.link.check()
    finally:
        backend.close(drain=False)
        ranks.link.close("the test is over")
        rank.join(20)


def test_who_leaves_before_the_turn_comes_is_counted_as_nothing() -> None:
    with running(max_rows=1) as server, server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.3)
        assert counted(server) == [0, 0, 0]
        wait_for(lambda: 'finished_reason="abort"' in server.client.get("/metrics").text, 20)
        assert re.search(r"^vllm:prompt_tokens_total\{.*\} 0", server.client.get("/metrics").text, re.MULTILINE)
