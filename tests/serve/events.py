"""Streams of a server, read as a client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from serve.serving import Server


def events(server: Server, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each event's object; the stream must end as OpenAI's does."""
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))
