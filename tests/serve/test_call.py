"""Events of a stream, without a server."""

from __future__ import annotations

from forerun.engine import Request, Stats
from forerun.serve.formats import usage
from forerun.serve.service import Choice

REQUEST = Request(prompt=(5, 6, 7), max_new_tokens=9)


def test_speculation_is_told_of_the_choice_that_it_was_for() -> None:
    """Of several choices the second may be the first that has gained something."""
    told = usage(3, [Choice(1, REQUEST, num_tokens=4, stats=Stats(rounds=2))])
    assert [(each["index"], each["rounds"]) for each in told["speculation"]] == [(1, 2)]
