"""The rows of a device round: one table of numbers, written by the host when rows come or go, advanced by the device.

Between two rounds of the same rows nothing is copied to the device but draft lengths, and those only when they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.engine.bans import Bans
from forerun.engine.row import Row
from forerun.math.advance import HEAD, Standing
from forerun.types import Keys, LawParams

# Columns of the table; those of SETTINGS are the bits of float64.
NUMBERS = (
    "slots", "draft_slots", "past", "active", "budget", "seed", "request_id", "round", "position", "previous", "last",
    "top_k",
)  # fmt: skip
SETTINGS = ("temperature", "top_p", "min_p")
FLAGS = ("any_greedy", "all_greedy", "any_scaled", "any_top_k", "any_top_p", "any_min_p")


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one row's keys live."""

    slot: int  # in the target's cache
    draft_slot: int  # in the drafter's; any where there is none


class Seats:
    """`size` places for rows; those without a row run along on slots of nobody's."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.size, self.width = size, width  # R, and W: the most positions a round scores
        zeros = {"dtype": torch.int64, "device": device}
        self.table = torch.zeros(len(NUMBERS) + len(SETTINGS), size, **zeros)  # type: ignore[call-overload]
        self.asked = torch.zeros(size, **zeros)  # type: ignore[call-overload]
        block = torch.zeros(size, 1 + width, **zeros)  # type: ignore[call-overload]
        result = torch.zeros(size, HEAD + width - 1, **zeros)  # type: ignore[call-overload]
        column = dict(zip(NUMBERS, self.table, strict=False))
        self.slots, self.draft_slots, self.budget = column["slots"], column["draft_slots"], column["budget"]
        self.keys = Keys(column["seed"], column["request_id"], column["round"], column["position"])
        self.standing = Standing(column["past"], column["round"], column["position"], column["active"], block, result)
        self._ends = column["previous"], column["last"]
        settings = self.table[len(NUMBERS) :].view(torch.float64)
        flags = dict.fromkeys(FLAGS, False)
        self.params = LawParams(settings[0], column["top_k"], settings[1], settings[2], **flags)
        self.logprobs = torch.zeros(size, width, dtype=torch.float64, device=device)
        self.wants_logprobs = False
        self.bans = Bans()  # the same for all rows
        self.rows: tuple[Row, ...] = ()  # as they were seated; some may have finished since
        self._idle: set[int] = set()  # places of those that have
        self._last_asked: tuple[int, ...] = ()

    @property
    def state(self) -> list[Tensor]:
        """Everything a round changes that the next one starts from."""
        return [self.table, self.standing.block]

    @property
    def flags(self) -> tuple[object, ...]:
        """What kernels are chosen by, so that it is part of a recording's shape."""
        return (*(getattr(self.params, name) for name in FLAGS), self.wants_logprobs, self.bans.ids)

    def take(self, rows: Sequence[Row], seats: Sequence[Seat], nobody: Seat) -> None:
        """Seat `rows`, as the host knows them; nothing may be under way."""
        self.rows, self._idle = tuple(rows), set()
        self.wants_logprobs = any(row.request.logprobs is not None for row in rows)
        self.bans = rows[0].bans or Bans()
        idle = self.size - len(rows)
        law = LawParams.stack([row.request.params for row in rows])
        columns = [_numbers(row, seat) for row, seat in zip(rows, seats, strict=True)]
        columns += [_nobody(nobody)] * idle
        repeat = torch.arange(self.size).clamp(max=len(rows) - 1)  # nobody's law is somebody's: no flag changes
        numbers = torch.tensor(columns, dtype=torch.int64).T
        settings = torch.stack([law.temperature, law.top_p, law.min_p])[:, repeat].view(torch.int64)
        upload = torch.cat([numbers, law.top_k[repeat][None], settings])
        self._send(self.table, upload)
        self.standing.block[:, 0].copy_(self._ends[0])
        self.standing.block[:, 1].copy_(self._ends[1])
        self.params = LawParams(
            self.params.temperature, self.params.top_k, self.params.top_p, self.params.min_p,
            **{name: getattr(law, name) for name in FLAGS},
        )  # fmt: skip

    def place(self, seats: Sequence[Seat], past: Sequence[int], blocks: Sequence[Sequence[int]], nobody: Seat) -> None:
        """For a pass alone: where rows live, how long they are, and what follows. Nobody is seated afterwards."""
        self.rows = ()
        idle, count = self.size - len(past), max(map(len, blocks))
        slots = [seat.slot for seat in (*seats, *[nobody] * idle)]
        tokens = [[*block, *[0] * (count - len(block))] for block in (*blocks, *[[0]] * idle)]
        self._send(self.slots, torch.tensor(slots))
        self._send(self.standing.past, torch.tensor([*past, *[1] * idle]))
        self._send(self.standing.block[:, 1 : 1 + count], torch.tensor(tokens))

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row.finish_reason is None]

    def excuse(self) -> None:
        """Rows that have finished stay where they are from now on; their places are nobody's."""
        for place, row in enumerate(self.rows):
            if row.finish_reason is not None and place not in self._idle:
                self._idle.add(place)
                self.standing.active[place : place + 1].zero_()

    def ask(self, lengths: Sequence[int]) -> None:
        """Draft lengths of running rows for the coming round; the device shortens them to what a budget has left."""
        left = iter(lengths)
        own = [next(left) if row.finish_reason is None else 0 for row in self.rows]
        asked = (*own, *[0] * (self.size - len(own)))
        if asked != self._last_asked:
            self._last_asked = asked
            self._send(self.asked, torch.tensor(asked))

    def _send(self, place: Tensor, numbers: Tensor) -> None:
        """Without waiting. Fresh page-locked memory each time: its allocator keeps it until the copy has happened."""
        place.copy_(numbers.pin_memory() if place.is_cuda else numbers, non_blocking=True)


def _numbers(row: Row, seat: Seat) -> list[int]:
    request = row.request
    return [
        seat.slot, seat.draft_slot, len(row.history) - 1, 1, row.stop.budget, request.seed, request.request_id,
        row.round, len(row.output), row.history[-2] if len(row.history) > 1 else 0, row.history[-1],
    ]  # fmt: skip


def _nobody(seat: Seat) -> list[int]:
    """One key behind it, so that a draft can begin with two tokens."""
    return [seat.slot, seat.draft_slot, 1, 0, 1, 0, 0, 0, 0, 0, 0]
