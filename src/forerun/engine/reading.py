"""Reading prompts in pieces: whoever needs least ends first, and whoever came first always gets on.

A short prompt that waited for a long one would wait for somebody else's work. Equal prompts are read one after the
other: side by side all of them would end late.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from forerun.cache.base import CacheFull, common_length
from forerun.engine.memory import is_out_of_memory
from forerun.engine.pair import Pair
from forerun.engine.roster import Roster
from forerun.engine.row import Row, RowText
from forerun.models.scorer import LONG_PREFIX

# Tokens of prompts that a step encodes beside rows that decode: as long as some rounds take.
PROMPT_TOKENS = {"cuda": 512, "cpu": 128}
# Times that many are encoded in a step where nobody decodes: what the next to come waits for.
NOBODY_DECODES = 4
JOIN_TOKENS = 2048  # of prompts that a round takes along whole where rounds are not recorded: a pass less for each
# The same where the head then runs on all of them: the work, and the memory for the logits, outweigh the pass.
JOIN_WITH_HEAD = 128
SURE = 4  # one in so many of a step's tokens is for whoever came first: short prompts that go on coming starve nobody


class PromptReader:
    """Brings rows of the roster to where they decode."""

    def __init__(self, pair: Pair, roster: Roster, room: int) -> None:
        self.pair, self.roster, self.target = pair, roster, pair.target
        self.room = room  # what may still be read beside rows that decode, before their next round

    def read(self, usual: int, join: int, *, together: bool) -> None:
        """Feed prompts up to their last token, except those that the coming round can take along whole.

        A text that several rows have is read once: the others have its keys when the first has read all of it. Where
        first tokens come from these passes, prompts are fed to their ends; a single token left is any round's.
        `usual` and `join` are the engine's `prompt_tokens` and `join_tokens`; `together`, where nobody decodes, all is
        read now.
        """
        is_recorded, target = self.pair.is_recorded, self.target
        rows = [row for row in self.roster.reading if row.first_logits is None and row.finish_reason is None]
        texts = Counter(row.text for row in rows)
        rows, copying = self._without_copies(rows)
        is_waited_for = not self.roster.decoding
        room = self._room_for(rows, usual, together) if is_waited_for else self.room
        following = self._followers(rows, room)
        rows = [row for row in rows if row.handle not in following]
        for row in rows:
            if room > 0 and target.length(row.number) == 0:  # others may have read its beginning meanwhile
                self.roster.begin(row)
        join = 0 if is_recorded else join
        parts: dict[int, list[int]] = {}  # that are read now, by row number
        fed, ending = list[Row](), dict[int, Row]()  # the second by handle: those that are read to their ends
        lengths = [target.length(row.number) for row in rows]
        unread = [len(row.history) - known for row, known in zip(rows, lengths, strict=True)]
        for row, known, left, share in zip(rows, lengths, unread, divide_room(unread, max(room, 0)), strict=True):
            if texts[row.text] == 1 and left <= min(join, share) and self._may_join(row, left):
                join -= left
                self.room -= left
                row.is_reading = False
            elif share > 0:
                is_ending = is_recorded and row.begins_plain and not row.round and 1 < left <= share
                part = row.history[known : known + (left if is_ending else min(left - 1, share))]
                if is_ending:
                    ending[row.handle] = row
                self.room -= len(part)
                parts[row.number] = part
                fed.append(row)
        self._feed(parts, list(ending.values()))
        for row in fed:
            row.is_reading = row.handle in ending or target.length(row.number) < len(row.history) - 1
            target.remember(row.number, row.history)
        self._copy(copying, ending)
        self._copy_prefixes(following.values(), ending)
        has_more = any(row.is_reading and row.handle not in ending for row in rows)
        if is_waited_for and has_more and target.device.type == "cuda":
            torch.cuda.synchronize(target.device)  # or the device would have the whole prompt before anybody comes

    def _without_copies(self, rows: Sequence[Row]) -> tuple[list[Row], list[tuple[Row, Row]]]:
        """Rows that read, and those that wait for the keys of one with the same text: behind it."""
        first, reading, copying = dict[RowText, Row](), list[Row](), list[tuple[Row, Row]]()
        for row in rows:
            if row.text in first and self._may_copy(row):
                copying.append((first[row.text], row))
            else:
                first.setdefault(row.text, row)
                reading.append(row)
        return reading, copying

    def _may_copy(self, row: Row) -> bool:
        """Whether it can be given the keys of a row that reads the same text, once that has read all of it.

        Where rows lie in blocks, what it has begun with makes no difference; but whoever listens to hidden states has
        heard those of what a kept row has.
        """
        return self.target.length(row.number) == 0 or not (self.target.cache.reads_in_place or self.target.observers)

    def _room_for(self, rows: Sequence[Row], usual: int, together: bool) -> int:
        """Tokens of prompts that are read while nobody decodes. One that is alone is read in the largest passes."""
        if together:
            return sys.maxsize
        return max(NOBODY_DECODES * usual, self.target.most_prefilled if len(rows) == 1 else 0)

    def _followers(self, rows: Sequence[Row], room: int) -> dict[int, tuple[Row, Row]]:
        """By handle: rows that wait for keys of a beginning which another one reads, and that one.

        Not where all is read now: a pass finds what its rows have in common.
        """
        lengths = [self.target.length(row.number) for row in rows]
        unread = sum(len(row.history) for row in rows) - sum(lengths)
        if unread <= room or self.target.cache.reads_in_place or self.target.observers:
            return {}
        return {rows[place].handle: (rows[place], leader) for place, leader in readers_ahead(rows, lengths).items()}

    def _may_join(self, row: Row, unread: int) -> bool:
        """Not where drafts begin once a prompt was read: its neighbours would decide when, and so what is drawn.

        Nor where a draft is made behind the target's keys: it would read the prompt itself, and draft behind its own.
        """
        drafter = self.pair.drafting.drafter
        if drafter is not None and drafter.reads_targets_keys and row.most_drafted > 0:
            return False
        if unread > JOIN_WITH_HEAD and not (self.target.is_fused or self.target.modules.picks_logits):
            return False
        return not self.target.observers or row.request.params.is_greedy

    def _feed(self, parts: dict[int, list[int]], ending: Sequence[Row]) -> None:
        """Where room runs out midway, nobody judges whoever was read to the end by then: its last token is a round's
        again."""
        logits: dict[int, Tensor] = {}
        with self.pair.memory_as_room():
            if not ending:
                self.target.feed(list(parts), list(parts.values()))
                return
            try:
                ends = [row.number for row in ending]
                logits = self.target.feed_to_end(list(parts), list(parts.values()), ends)
            except Exception as error:
                if isinstance(error, CacheFull) or is_out_of_memory(error):
                    known = [min(self.target.length(row.number), len(row.history) - 1) for row in ending]
                    self.target.rewind(ends, known)
                raise
        for row in ending:
            row.first_logits = logits[row.number]

    def _copy(self, copying: Iterable[tuple[Row, Row]], ending: Collection[int]) -> None:
        """Keys for rows whose text another one has read to its end by now."""
        for source, row in copying:
            if source.handle in ending and row.begins_plain and not row.round:
                self.roster.copy(source, row, len(row.history))
                if self.target.length(row.number) == len(row.history):
                    row.first_logits = source.first_logits
                    continue
            elif source.handle in ending or not source.is_reading:
                self.roster.copy(source, row, len(row.history) - 1)
            else:
                continue
            row.is_reading = self.target.length(row.number) < len(row.history) - 1

    def _copy_prefixes(self, following: Iterable[tuple[Row, Row]], ending: Collection[int]) -> None:
        """For rows that have waited: what they have in common with one that has read it all by now."""
        for row, leader in following:
            known, had = self.target.length(leader.number), self.target.length(row.number)
            is_going_on = leader.is_reading and leader.handle not in ending
            if is_going_on and reads_for(leader, row, known, had):
                continue
            common = min(known, common_length(row.history, leader.history), len(row.history) - 1)
            if common > had:
                self.roster.copy(leader, row, common)


def divide_room(unread: Sequence[int], room: int) -> list[int]:
    """Tokens of each prompt, no more than `room` in all; prompts come in the order of their arrival."""
    tokens = [0] * len(unread)
    if not unread:
        return tokens
    tokens[0] = min(unread[0], -(-room // SURE))
    room -= tokens[0]
    for place in sorted(range(len(unread)), key=lambda place: unread[place]):  # stable: the earlier of equal ones first
        more = min(unread[place] - tokens[place], room)
        tokens[place] += more
        room -= more
    return tokens


def readers_ahead(rows: Sequence[Row], lengths: Sequence[int]) -> dict[int, Row]:
    """By place: rows that another one of them is about to read something for, and which one.

    They wait for its keys instead of reading the same beside it.
    """
    leaders: dict[object, int] = {}
    for place, row in enumerate(rows):
        key = _prefix(row)
        if key not in leaders or lengths[place] > lengths[leaders[key]]:
            leaders[key] = place
    places = {place: leaders[_prefix(row)] for place, row in enumerate(rows)}
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


def _prefix(row: Row) -> object:
    return row.request.source, *row.history[:LONG_PREFIX]
