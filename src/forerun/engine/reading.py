"""How much of which prompt a step reads: whoever needs least ends first, and whoever came first always gets on.

A short prompt that waited for a long one would wait for somebody else's work. Equal prompts are read one after the
other: side by side all of them would end late.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.engine.row import Row
from forerun.models.scorer import LONG_BEGINNING

SURE = 4  # one in so many of a step's tokens is for whoever came first: short prompts that go on coming starve nobody


def shares(unread: Sequence[int], room: int) -> list[int]:
    """Tokens of each prompt, no more than `room` in all; prompts come in the order of their arrival."""
    given = [0] * len(unread)
    if not unread:
        return given
    given[0] = min(unread[0], -(-room // SURE))
    room -= given[0]
    for place in sorted(range(len(unread)), key=lambda place: unread[place]):  # stable: the earlier of equal ones first
        more = min(unread[place] - given[place], room)
        given[place] += more
        room -= more
    return given


def followers(rows: Sequence[Row], lengths: Sequence[int]) -> dict[int, Row]:
    """By place: rows that another one of them is about to read something for, and which one.

    They wait for its keys instead of reading the same beside it.
    """
    leaders: dict[object, int] = {}
    for place, row in enumerate(rows):
        key = _beginning(row)
        if key not in leaders or lengths[place] > lengths[leaders[key]]:
            leaders[key] = place
    places = {place: leaders[_beginning(row)] for place, row in enumerate(rows)}
    return {
        place: rows[leader]
        for place, leader in places.items()
        if place != leader and reads_for(rows[leader], rows[place], lengths[leader], lengths[place])
    }


def reads_for(leader: Row, row: Row, read: int, known: int) -> bool:
    """Whether what `leader` reads behind its first `read` tokens is what `row` needs, which has keys of `known`.

    They have begun alike. Of what follows only two tokens are looked at, which takes no time with long prompts; who
    waits for nothing now and then loses a step by it.
    """
    places = (min(known, read), read)
    return known <= read < len(row.history) - 1 and all(row.history[i] == leader.history[i] for i in places)


def _beginning(row: Row) -> object:
    return row.request.source, *row.history[:LONG_BEGINNING]
