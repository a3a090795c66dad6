"""One server for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.serving import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(max_rows=8, max_queued=64) as one:
        yield one
