"""One server for all tests that leave it as they found it.

Models are imported inside it: a folder's conftest may be read before Triton's interpreter was chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serve.serving import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    from serve.serving import running

    with running(max_rows=8, max_queued=64) as one:
        yield one
