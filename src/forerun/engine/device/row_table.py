"""The rows of a device round: one table of numbers, written by the host when rows come or go, advanced by the device.

Between two rounds of the same rows nothing is copied to the device but draft lengths, and those only when they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.drafters.device import DeviceRows
from forerun.engine.device.row_options import make_options, wants_options, write_options
from forerun.engine.row import Row
from forerun.math.advance import HEAD, DeviceRowState
from forerun.math.row_options import RowOptions
from forerun.math.transfer import copy_into, to_device
from forerun.types import Keys, LawParams

# Columns of the table; those of SETTINGS are the bits of float64.
NUMBERS = (
    "slots", "draft_slots", "past", "active", "budget", "seed", "request_id", "round", "position", "previous", "last",
    "min_new_tokens", "top_k",
)  # fmt: skip
SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NOTES = 2  # of a tree, for the host: how deep it is, and whether nothing was drafted behind what was kept
FLAGS = ("any_greedy", "all_greedy", "any_scaled", "any_top_k", "any_top_p", "any_min_p")
# Numbers of eight bytes after which an address is a multiple of sixteen: kernels have a variant for those that are not.
EVEN = 2


@dataclass(frozen=True, slots=True)
class RowSlots:
    """Where one row's keys are stored."""

    slot: int  # in the target's cache
    draft_slot: int  # in the drafter's; any value where there is none


class RowTable:
    """`size` entries; those without a row are dummies that run along on spare cache slots."""

    def __init__(self, size: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.size, self.width, self.device = size, width, device  # R, and W: the most positions a round scores
        self.vocab_size = vocab_size
        zeros = {"dtype": torch.int64, "device": device}
        columns = len(NUMBERS) + len(SETTINGS)
        self.values = torch.zeros(columns, max(size, EVEN), **zeros)[:, :size]  # type: ignore[call-overload]
        self.asked = torch.zeros(size, **zeros)  # type: ignore[call-overload]
        # What the host found: draft lengths, whether it is a copy, its tokens. `take_copies` moves them into the block.
        self.sent_copies = torch.zeros(size, 1 + width, dtype=torch.int64, device=device)
        block = torch.zeros(size, 1 + width, **zeros)  # type: ignore[call-overload]
        # All that the host reads of a round: what `advance` writes down, and what a tree leaves behind it.
        self.result = torch.zeros(size, HEAD + width - 1 + NOTES, **zeros)  # type: ignore[call-overload]
        self.notes = self.result[:, -NOTES:]
        column = dict(zip(NUMBERS, self.values, strict=False))
        self.slots, self.draft_slots, self.budget = column["slots"], column["draft_slots"], column["budget"]
        self.keys = Keys(column["seed"], column["request_id"], column["round"], column["position"])
        self.row_state = DeviceRowState(
            column["past"], column["round"], column["position"], column["active"], block, self.result[:, :-NOTES]
        )
        self._last_two = column["previous"], column["last"]
        settings = self.values[len(NUMBERS) :].view(torch.float64)
        flags = dict.fromkeys(FLAGS, False)
        self.params = LawParams(settings[0], column["top_k"], settings[1], settings[2], **flags)
        self.recent = torch.zeros(size, width, **zeros)  # type: ignore[call-overload]
        self.has_options = False  # whether some row changes its logits
        self._options: RowOptions | None = None  # made when one first does
        self._option_columns = {
            "repetition": settings[3], "presence": settings[4], "frequency": settings[5],
            "min_new_tokens": column["min_new_tokens"],
        }  # fmt: skip
        self.alternatives: int | None = None  # whose log-probabilities are wanted beside those of emitted tokens
        self._logprobs: dict[int, Tensor] = {}  # by that number
        self.rows: tuple[Row, ...] = ()  # as they were assigned; some may have finished since
        self._inactive: set[int] = set()  # entries of those that have
        self._last_asked: tuple[int, ...] = ()

    @property
    def state(self) -> list[Tensor]:
        """Everything a round changes that the next one starts from."""
        return [self.values, self.row_state.block, self.recent, *([self.options.counts] if self.has_options else [])]

    @property
    def flags(self) -> tuple[object, ...]:
        """What kernels are chosen by, so that it is part of a recording's shape."""
        return (*self.law_flags, self.alternatives)

    @property
    def law_flags(self) -> tuple[object, ...]:
        """The part of it that a draft depends on."""
        return (*(getattr(self.params, name) for name in FLAGS), self.has_options)

    @property
    def options(self) -> RowOptions:
        """What the rows ask of their logits, where one of them asks for anything."""
        if self._options is None:
            self._options = make_options(self.size, self.vocab_size, self.device, **self._option_columns)
        return self._options

    @property
    def counts(self) -> Tensor | None:
        """[R, V] what each row has met, see `RowOptions`; None where nobody asks."""
        return self.options.counts if self.has_options else None

    @property
    def logprobs(self) -> Tensor | None:
        """[R, W, 1 + 2 n] float64, of each position: the emitted token's, n ids, theirs. None where nobody asks."""
        if self.alternatives is None:
            return None
        if self.alternatives not in self._logprobs:
            shape = self.size, self.width, 1 + 2 * self.alternatives
            self._logprobs[self.alternatives] = torch.zeros(shape, dtype=torch.float64, device=self.device)
        return self._logprobs[self.alternatives]

    @property
    def device_rows(self) -> DeviceRows:
        """What a drafter reads of the rows."""
        return DeviceRows(self.slots, self.draft_slots, self.row_state.past, self.row_state.block, self.recent)

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows if row.finish_reason is None]

    def assign(self, rows: Sequence[Row], slots: Sequence[RowSlots], dummy: RowSlots) -> None:
        """Write `rows` as the host knows them, and dummies at `dummy` behind them; no round may be pending."""
        self.rows, self._inactive = tuple(rows), set()
        self.has_options = any(map(wants_options, rows))
        self.alternatives = _alternatives(rows, self.vocab_size)
        law = LawParams.stack([row.request.params for row in rows])
        columns = [_numbers(row, row_slots) for row, row_slots in zip(rows, slots, strict=True)]
        columns += [_dummy_numbers(dummy)] * (self.size - len(rows))
        repeat = torch.arange(self.size).clamp(max=len(rows) - 1)  # a dummy has the last row's law: no flag changes
        numbers = torch.tensor(columns, dtype=torch.int64).T
        each = [[getattr(row.request.params, name) for name in SETTINGS] for row in rows]
        settings = torch.tensor(each, dtype=torch.float64).T[:, repeat].contiguous().view(torch.int64)
        copy_into(self.values, torch.cat([numbers, law.top_k[repeat][None], settings]))
        self.row_state.block[:, 0].copy_(self._last_two[0])
        self.row_state.block[:, 1].copy_(self._last_two[1])
        self.params = LawParams(
            self.params.temperature, self.params.top_k, self.params.top_p, self.params.min_p,
            **{name: getattr(law, name) for name in FLAGS},
        )  # fmt: skip
        if self.has_options:
            write_options(self.options, rows, partial(to_device, device=self.device))

    def cover_all(self, alternatives: Sequence[int] = ()) -> None:
        """Take the rows by what suits rows of every kind, which costs a little more: parameters are each row's own.

        Where rows want log-probabilities, as many are looked up as the next of `alternatives` says.
        """
        if self.alternatives is not None:
            wanted = self.alternatives
            self.alternatives = min((number for number in alternatives if number >= wanted), default=wanted)
        self.params = covering(self.params)
        if not self.has_options:
            self.has_options = True
            write_options(self.options, self.rows, partial(to_device, device=self.device))

    def assign_blocks(
        self, slots: Sequence[RowSlots], past: Sequence[int], blocks: Sequence[Sequence[int]], dummy: RowSlots
    ) -> None:
        """For one target pass alone: each row's slot, its keys and the tokens behind them. No row is assigned after."""
        self.rows = ()
        dummies, count = self.size - len(past), max(map(len, blocks))
        tokens = [[*block, *[0] * (count - len(block))] for block in (*blocks, *[[0]] * dummies)]
        copy_into(self.slots, torch.tensor([each.slot for each in (*slots, *[dummy] * dummies)]))
        copy_into(self.row_state.past, torch.tensor([*past, *[1] * dummies]))
        copy_into(self.row_state.block[:, 1 : 1 + count], torch.tensor(tokens))

    def assign_recent(self) -> None:
        """Write the last tokens of every row, for a drafter that reads them; a round then keeps them up to date."""
        last = [row.history[-self.width :] for row in self.rows] + [[0]] * (self.size - len(self.rows))
        copy_into(self.recent, torch.tensor([[*[0] * (self.width - len(tokens)), *tokens] for tokens in last]))

    def deactivate_finished(self) -> None:
        """From now on, entries of finished rows no longer advance."""
        for place, row in enumerate(self.rows):
            if row.finish_reason is not None and place not in self._inactive:
                self._inactive.add(place)
                self.row_state.active[place : place + 1].zero_()

    def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        """Of running rows, for the coming round; the device shortens them to what a budget has left."""
        left = iter(lengths)
        of_rows = [next(left) if row.finish_reason is None else 0 for row in self.rows]
        asked = (*of_rows, *[0] * (self.size - len(of_rows)))
        if asked != self._last_asked:
            copy_into(self.asked, torch.tensor(asked))
            self._last_asked = asked  # last: what an interrupt kept from being sent has to be sent again

    def send_copies(self, lengths: Sequence[int], copies: Sequence[Sequence[int]]) -> None:
        """Draft lengths of running rows for the coming round and the tokens of those that copy, in one transfer."""
        self._last_asked = ()  # `asked` will hold other lengths
        left = iter(zip(lengths, copies, strict=True))
        of_rows = [next(left) if row.finish_reason is None else (0, ()) for row in self.rows]
        of_rows += [(0, ())] * (self.size - len(of_rows))
        numbers = [[n, bool(copy), *copy, *[0] * (self.width - 1 - len(copy))] for n, copy in of_rows]
        copy_into(self.sent_copies, torch.tensor(numbers, dtype=torch.int64))

    @property
    def is_copied(self) -> Tensor:
        """[R] int64, 1 for rows whose draft was found by the host, in a round for which any was."""
        return self.sent_copies[:, 1]

    def take_copies(self, number: int) -> None:
        """Of what was sent, lengths and the first `number` tokens: work of a recorded round."""
        self.asked.copy_(self.sent_copies[:, 0])
        self.row_state.block[:, 2 : 2 + number].copy_(self.sent_copies[:, 2 : 2 + number])


def covering(params: LawParams) -> LawParams:
    """The same parameters, by what suits rows of every kind."""
    flags = dict.fromkeys(FLAGS, True) | {"all_greedy": False}
    return LawParams(params.temperature, params.top_k, params.top_p, params.min_p, **flags)


def _alternatives(rows: Sequence[Row], vocab_size: int) -> int | None:
    """How many alternatives a round looks up for every position: a power of two, because each is a recording."""
    wanted = [row.request.logprobs for row in rows if row.request.logprobs is not None]
    if not wanted:
        return None
    most = max(wanted)
    return min(1 << (most - 1).bit_length(), vocab_size) if most else 0


def _numbers(row: Row, slots: RowSlots) -> list[int]:
    request = row.request
    return [
        slots.slot, slots.draft_slot, len(row.history) - 1, 1, row.stop.budget, request.seed, request.request_id,
        row.round, len(row.output), row.history[-2] if len(row.history) > 1 else 0, row.history[-1],
        request.min_new_tokens,
    ]  # fmt: skip


def _dummy_numbers(slots: RowSlots) -> list[int]:
    """One key in the cache, so that a draft can begin with two tokens."""
    return [slots.slot, slots.draft_slot, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
