"""One round in three pieces of fixed shape: draft, score, judge. Nothing in here waits for the host.

Shapes: R rows, K drafted tokens, T >= K + 1 positions scored. A row whose own draft is shorter is judged by its own
length; what lies behind it is scored for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun import ops
from forerun.drafters.autoregressive import fitted
from forerun.engine.device.scratch import Scratch
from forerun.engine.device.seats import Seats
from forerun.math.advance import emitted_logprobs
from forerun.math.laws import KEPT, LogitLaw, PointMass, ReducedLaw
from forerun.models.static_pass import StaticPass, StaticRows
from forerun.types import Draft, Law, Rule


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recording is made for, beside the number of rows."""

    drafted: int  # K
    scored: int  # T
    span: int  # no row has more keys than that


class Round:
    """What is done in a round, over one set of seats."""

    def __init__(
        self,
        seats: Seats,
        target: StaticPass,
        draft: StaticPass | None,
        rule: Rule,
        ids: Tensor | None,
        logits: Scratch,
        draft_logits: Scratch,
        hidden: Scratch,
    ) -> None:
        self.seats, self.target, self.draft_pass, self.rule, self.ids = seats, target, draft, rule, ids
        self.vocab_size, self.use = target.scorer.vocab_size, target.scorer.kernels
        self.logits, self.draft_logits, self.hidden = logits, draft_logits, hidden
        self.kept = torch.zeros(seats.width * seats.size, KEPT, device=target.scorer.device)
        self._has_kept = False
        self._orders: dict[tuple[int, int], _Order] = {}
        self._columns: dict[tuple[tuple[int, ...], bool], Tensor] = {}
        self._places: Tensor | None = None
        if ids is not None:  # made before anything is recorded
            self._places = ReducedLaw(PointMass(ids[:0, None], 1), ids, self.vocab_size).places

    def draft(self, shape: Shape) -> None:
        """K tokens for every row, and the logits they were drawn from.

        The first step takes two tokens, because after a fully kept draft the drafter is one key behind; the others
        take the token before. Where a row has but one, the other lies before its beginning and is nobody's.
        """
        assert self.draft_pass is not None
        seats, number = self.seats, shape.drafted
        block, past = seats.standing.block, seats.standing.past
        first = self.draft_pass.rows(seats.draft_slots, past - 1, 2, shape.span)
        others = self.draft_pass.steps(seats.draft_slots, past + 1, 1, number - 1, shape.span) if number > 1 else []
        uniforms = None
        if not seats.params.all_greedy:  # turned, because kernels read a step's numbers side by side
            uniforms = ops.draft_uniforms(seats.keys, number, self.rule, self.use).T.contiguous()
        for step, rows in enumerate([first, *others]):
            tokens = block[:, :2] if step == 0 else block[:, step + 1 : step + 2]
            logits = self._draft_logits(tokens, rows)
            self._forbid(logits, logits if step == 0 else None, self.ids)
            self._draw(logits, step, number, None if uniforms is None else uniforms[step])

    def score(self, shape: Shape) -> None:
        """The target's logits behind the last token and every drafted one: row b's are T from b * T on."""
        seats, count = self.seats, shape.scored
        rows = self.target.rows(seats.slots, seats.standing.past, count, shape.span)
        tokens = seats.standing.block[:, 1 : 1 + count]
        if self.target.has_hidden:
            self._score_hidden(self.target.hidden(tokens, rows))
            return
        logits = self.target.logits(tokens, rows)
        self.logits.hold(logits, len(logits))
        self.logits.rows[: len(logits)].copy_(logits)

    def _score_hidden(self, hidden: Tensor) -> None:
        """Hidden states are kept for those who listen; logits go where they are wanted at once."""
        number = len(hidden)
        if self.target.scorer.observers:
            self.hidden.hold(hidden, number)
            self.hidden.rows[:number].copy_(hidden)
        self.logits.hold(hidden.new_empty(0, self.vocab_size), number)
        self.target.head_into(self.logits.rows[:number], hidden)

    def judge(self, shape: Shape) -> None:
        """Verify, and move every row on."""
        seats, number = self.seats, shape.drafted
        lengths = ops.draft_lengths(seats.asked, seats.budget, seats.standing.position, number, self.use)
        tokens = seats.standing.block[:, 2 : 2 + number]
        draft = Draft(tokens, lengths, self._law(tokens))
        order = self._order(seats.size, shape.scored)
        logits = self.logits.rows[: seats.size * shape.scored]
        self._forbid(logits, logits[:: shape.scored])
        law = LogitLaw(logits, order.place[:, : number + 1], seats.params, order.first)
        verdict = ops.verify(law, draft, self.rule, seats.keys, seats.params.all_greedy, self.use)
        if seats.wants_logprobs:
            scored = logits.view(seats.size, shape.scored, -1)[:, : number + 1]
            seats.logprobs[:, : number + 1] = emitted_logprobs(scored, seats.standing.block, verdict)
        ops.advance(seats.standing, lengths, verdict, self.vocab_size, self.use)

    def _draft_logits(self, tokens: Tensor, rows: StaticRows) -> Tensor:
        assert self.draft_pass is not None
        logits = self.draft_pass.logits(tokens, rows, last_only=True)
        return fitted(logits, self.vocab_size) if self.ids is None else logits

    def _forbid(self, logits: Tensor, first: Tensor | None, ids: Tensor | None = None) -> None:
        """What may not be said gets no mass in `logits` [N, V]; `first` [R, V] are those of each row's next token."""
        never, not_first = self.seats.bans.ids
        if never:
            logits.index_fill_(1, self._banned(never, ids), -torch.inf)
        if not_first and first is not None:
            columns, begins = self._banned(not_first, ids), self.seats.standing.position[:, None] == 0
            first.index_copy_(1, columns, first.index_select(1, columns).masked_fill(begins, -torch.inf))

    def _banned(self, tokens: tuple[int, ...], ids: Tensor | None) -> Tensor:
        """Where these lie in the vocabulary, or among the `ids` a draft can say; made once, before it is recorded."""
        if (key := (tokens, ids is None)) not in self._columns:
            wanted = torch.tensor(tokens, device=self.seats.table.device)
            wanted = wanted[wanted < self.vocab_size] if ids is None else torch.isin(ids, wanted).nonzero()[:, 0]
            self._columns[key] = wanted
        return self._columns[key]

    def _draw(self, logits: Tensor, step: int, number: int, uniforms: Tensor | None) -> None:
        """One token a row, written behind the others; a drafter that lost its mind still says something sayable."""
        seats, size = self.seats, self.seats.size
        if uniforms is None:
            drawn = logits.argmax(dim=-1)
        else:
            self.draft_logits.hold(logits, number * size)
            own = slice(step * size, (step + 1) * size)
            self.draft_logits.rows[own].copy_(logits)
            found = ops.sample(self.draft_logits.rows[own], seats.params, uniforms, self.use)
            drawn = found.tokens
            self._has_kept = found.kept is not None
            if found.kept is not None:
                self.kept[own].copy_(found.kept)
        place, most = seats.standing.block[:, step + 2], logits.shape[1] - 1
        if self.ids is None:
            torch.clamp(drawn, 0, most, out=place)
        else:
            place.copy_(self.ids[drawn.clamp(0, most)])

    def _law(self, tokens: Tensor) -> Law:
        """What the draft was drawn from: step i of row b lies in row i * R + b."""
        number = tokens.shape[1]
        params = self.seats.params
        if not number or params.all_greedy:
            return PointMass(tokens, self.vocab_size)
        size = self.seats.size
        order = self._order(number, size)
        logits = self.draft_logits.rows[: number * size]
        kept = self.kept[: number * size] if self._has_kept else None
        law = LogitLaw(logits, order.turned, params, order.second, kept=kept)
        return law if self.ids is None else _reduced(law, self.ids, self.vocab_size, self._places)

    def _order(self, rows: int, columns: int) -> _Order:
        """Made once a shape, before it is recorded."""
        if (rows, columns) not in self._orders:
            flat = torch.arange(rows * columns, device=self.seats.table.device)
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


def _reduced(law: LogitLaw, ids: Tensor, vocab_size: int, places: Tensor | None) -> ReducedLaw:
    reduced = ReducedLaw(law, ids, vocab_size)
    reduced.__dict__["places"] = places  # a cached property: made once, outside of any recording
    return reduced
