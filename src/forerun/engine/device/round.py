"""One round in three pieces of fixed shape: draft, score, verify. Nothing in here waits for the host.

Shapes: R rows, K drafted tokens, T >= K + 1 positions scored. A row whose draft is shorter is verified by its own
length; the scores behind it are not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from forerun import ops
from forerun.drafters.autoregressive import fitted
from forerun.drafters.device import DeviceDrafter, DeviceSteps, Shape
from forerun.engine.device.recorder import Scratch
from forerun.engine.device.row_table import EVEN, RowTable
from forerun.math.advance import emitted_logprobs, last_tokens
from forerun.math.laws import KEPT, LogitLaw, MixedLaw, PointMass, ReducedLaw
from forerun.models.static_pass import StaticPass, StaticRows
from forerun.types import Draft, Law, Rule, Verdict


class DeviceRound:
    """The work of a round over the rows of one table."""

    def __init__(
        self,
        table: RowTable,
        target: StaticPass,
        drafter: DeviceDrafter | None,
        rule: Rule,
        logits: Scratch,
        draft_logits: tuple[Scratch, Scratch],  # as the draft gives them, and as options leave them
        hidden: Scratch,
    ) -> None:
        self.table, self.target, self.drafter, self.rule = table, target, drafter, rule
        self.ids = ids = None if drafter is None else drafter.ids
        self.vocab_size, self.use = target.scorer.vocab_size, target.scorer.kernels
        self.logits, self._draft_scratches, self.hidden = logits, draft_logits, hidden
        self.kept = torch.zeros(table.width * table.size, KEPT, device=target.scorer.device)
        self._has_kept = False
        self._orders: dict[tuple[int, int], _Order] = {}
        self._wide: dict[tuple[int, int], Tensor] = {}
        self._places: Tensor | None = None
        if ids is not None:  # made before anything is recorded
            self._places = ReducedLaw(PointMass(ids[:0, None], 1), ids, self.vocab_size).places

    def draft(self, shape: Shape) -> None:
        """K tokens for every row: those that the host found, or else drawn here, with the logits they come from."""
        if shape.steps is not None:
            self.table.take_copies(shape.drafted)
        if not shape.drawn:
            return
        assert isinstance(self.drafter, DeviceSteps)
        uniforms = None
        if not self.table.params.all_greedy:  # turned, because kernels read a step's numbers side by side
            turned = ops.draft_uniforms(self.table.keys, shape.drawn, self.rule, self.use).T
            uniforms = turned.repeat(1, EVEN)[:, : self.table.size] if self.table.size < EVEN else turned.contiguous()
        drawn = replace(shape, drafted=shape.drawn)
        self.drafter.draft(self.table.device_rows, drawn, partial(self._draw, drawn, uniforms))

    def make_room(self, shape: Shape) -> None:
        """For the logits that `score` leaves, the most it takes, where their dtype is known before they are there."""
        if self.target.has_head:
            model = self.target.scorer.model
            like = torch.empty(0, self.vocab_size, dtype=model.dtype, device=model.device)
            self.logits.reserve(like, self.table.size * shape.scored)

    def score(self, shape: Shape) -> None:
        """The target's logits behind the last token and every drafted one: row b's are T from b * T on."""
        table, count = self.table, shape.scored
        rows = self._scored_rows(shape)
        tokens = table.row_state.block[:, 1 : 1 + count]
        number, hidden, is_heard = tokens.numel(), None, bool(self.target.scorer.observers)
        if self.target.has_head:  # which writes into the scratch rows directly
            hidden = self.target.hidden(tokens, rows)
            self.logits.reserve(hidden.new_empty(0, self.vocab_size), number)
            self.target.head_into(self.logits.rows[:number], hidden)
        else:
            if is_heard:
                logits, hidden = self.target.logits_and_hidden(tokens, rows)
            else:
                logits = self.target.logits(tokens, rows)
            self.logits.reserve(logits, number)
            self.logits.rows[:number].copy_(logits)
        if hidden is not None and is_heard:
            self.hidden.reserve(hidden, number)
            self.hidden.rows[:number].copy_(hidden)

    def _scored_rows(self, shape: Shape) -> StaticRows:
        return self.target.rows(self.table.slots, self.table.row_state.past, shape.scored, shape.key_bound)

    def verify(self, shape: Shape) -> None:
        """Verify, and move every row on."""
        table, number = self.table, shape.drafted
        lengths = ops.draft_lengths(table.asked, table.budget, table.row_state.position, number, self.use)
        tokens = table.row_state.block[:, 2 : 2 + number]
        draft = Draft(tokens, lengths, self._law(tokens, shape))
        order = self._order(table.size, shape.scored)
        logits = self.logits.rows[: table.size * shape.scored]
        law = LogitLaw(self._adjusted(logits), order.place[:, : number + 1], table.params, order.first)
        verdict = self._judged(law, draft)
        if table.logprobs is not None:
            scored, wanted = logits.view(table.size, shape.scored, -1)[:, : number + 1], table.alternatives or 0
            table.logprobs[:, : number + 1] = emitted_logprobs(scored, table.row_state.block, verdict, wanted)
        self._tell_drafter(verdict, self.hidden.rows[: table.size * shape.scored])
        ops.advance(table.row_state, lengths, verdict, self.vocab_size, table.counts, self.use)

    def _judged(self, law: LogitLaw, draft: Draft) -> Verdict:
        table = self.table
        return ops.verify(law, draft, self.rule, table.keys, table.params.all_greedy, self.use)

    def _tell_drafter(self, verdict: Verdict, hidden: Tensor) -> None:
        """Whatever a drafter reads of a round, before rows move on; `hidden` [R * T, H] where it hears that."""
        table, drafter = self.table, self.drafter
        if drafter is None:
            return
        if drafter.observer is not None:
            drafter.on_hidden_states(table.device_rows, hidden)
        if drafter.reads_recent:
            table.recent.copy_(last_tokens(table.recent, table.row_state.block, verdict, self.vocab_size))

    @property
    def draft_logits(self) -> Scratch:
        """Where the logits of a draft are kept: options are applied in float32, whatever the model's dtype."""
        plain, adjusted = self._draft_scratches
        return adjusted if self.table.has_options else plain

    def _adjusted(self, logits: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
        """What the rows' options make of logits behind the first `first` drafted tokens and those after them."""
        table = self.table
        if not table.has_options:
            return logits
        drafted = table.row_state.block[:, 2:]
        return ops.adjust_rows(logits, table.options, table.row_state.position, drafted, first, ids, self.use)

    def _draw(self, shape: Shape, uniforms: Tensor | None, step: int, logits: Tensor) -> None:
        """Token `step` for every row, written behind the others.

        A row with a copy keeps the copy's token, so that the drafter reads what may become the row's text.
        Out-of-range ids (a draft model whose logits are not numbers) are clamped: they are rejected anyway.
        """
        table, size = self.table, self.table.size
        if self.ids is None:
            logits = fitted(logits, self.vocab_size)
        logits = self._adjusted(logits, step, self.ids)
        if uniforms is None:
            drawn = logits.argmax(dim=-1)
        else:
            self.draft_logits.reserve(logits, shape.drawn * size)
            rows = slice(step * size, (step + 1) * size)
            self.draft_logits.rows[rows].copy_(logits)
            sample = ops.sample(self.draft_logits.rows[rows], table.params, uniforms[step], self.use)
            drawn = sample.tokens
            self._has_kept = sample.kept is not None
            if sample.kept is not None:
                self.kept[rows].copy_(sample.kept)
        place, most = table.row_state.block[:, step + 2], logits.shape[1] - 1
        if shape.steps is not None:
            drawn = drawn.clamp(0, most) if self.ids is None else self.ids[drawn.clamp(0, most)]
            place.copy_(torch.where(table.is_copied == 1, place, drawn))
        elif self.ids is None:
            torch.clamp(drawn, 0, most, out=place)
        else:
            place.copy_(self.ids[drawn.clamp(0, most)])

    def _law(self, tokens: Tensor, shape: Shape) -> Law:
        """What the draft was drawn from: step i of row b lies in row i * R + b."""
        number, params, copies = shape.drawn, self.table.params, PointMass(tokens, self.vocab_size)
        if not number or params.all_greedy:
            return copies
        size = self.table.size
        order = self._order(number, size)
        logits = self.draft_logits.rows[: number * size]
        kept = self.kept[: number * size] if self._has_kept else None
        # Behind the last step only copies go on: whatever stands there has to be readable, and is not used.
        index = order.turned if shape.steps is None else self._widened(order.turned, shape.drafted)
        on_logits = LogitLaw(logits, index, params, order.second, kept=kept)
        drawn = on_logits if self.ids is None else reduced(on_logits, self.ids, self.vocab_size, self._places)
        return drawn if shape.steps is None else MixedLaw(self.table.is_copied, (drawn, copies))

    def _widened(self, index: Tensor, width: int) -> Tensor:
        """[R, S] -> [R, width], the last column again and again; made once a shape, before it is recorded."""
        key = (index.shape[1], width)
        if key not in self._wide:
            columns = torch.arange(width, device=index.device).clamp(max=index.shape[1] - 1)
            self._wide[key] = index[:, columns].contiguous()
        return self._wide[key]

    def _order(self, rows: int, columns: int) -> _Order:
        """Made once a shape, before it is recorded."""
        if (rows, columns) not in self._orders:
            flat = torch.arange(rows * columns, device=self.table.device)
            self._orders[rows, columns] = _Order(
                flat.view(rows, columns), flat.view(rows, columns).T.contiguous(), flat // columns, flat % columns
            )
        return self._orders[rows, columns]


@dataclass(frozen=True, slots=True)
class _Order:
    """Numbers of a matrix's entries, row by row."""

    place: Tensor  # [A, B]
    turned: Tensor  # [B, A] the same, rows side by side in memory as kernels want them
    first: Tensor  # [A * B] the row of each entry
    second: Tensor  # [A * B] its column


def reduced(law: LogitLaw, ids: Tensor, vocab_size: int, places: Tensor | None) -> ReducedLaw:
    """A draft's law on its own `ids`, whose `places` were looked up before anything was recorded."""
    reduced_law = ReducedLaw(law, ids, vocab_size)
    reduced_law.__dict__["places"] = places  # a cached property
    return reduced_law
