"""A pass of fixed shape whose rows are device tensors: what a CUDA graph can hold.

Every row has the same number of new tokens. One that has fewer to say writes keys nobody will see past its own, which
later passes overwrite; so the cache must have room for them, and reserving it is the caller's business.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from forerun import ops
from forerun.config import Kernels
from forerun.errors import UnsupportedModel
from forerun.math.ragged_attention import Reach
from forerun.models import plain
from forerun.models.attention import ragged
from forerun.models.bodies.gpu import GpuBody
from forerun.models.families import Layout
from forerun.models.patches.modules import ModulePatches
from forerun.models.patches.rotary import RotaryPatches
from forerun.models.ragged_states import RaggedStates
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer


@dataclass(frozen=True, slots=True)
class StaticRows:
    """Where the new tokens of R rows go, T of each: N = R * T, row by row."""

    positions: Tensor  # [N] int64
    addresses: Tensor  # [N] int64
    reach: Reach


class StaticStates(RaggedStates):
    """What transformers sees of the cache during such a pass. Only mask rules that kernels know can be said."""

    is_static = True

    def __init__(self, scorer: Scorer, rows: StaticRows) -> None:
        self.cache, self.layout, self.device, self.use = scorer.cache, Layout.PACKED, scorer.device, scorer.kernels
        self.asked_form = scorer.form
        self.takes_rules = True
        self.positions, self.addresses = rows.positions, rows.addresses
        self.width = rows.reach.most_tokens
        self.longest_past = rows.reach.longest - self.width
        self.branches = self.padded = self.current = self.returned = self.cross = None
        self.tree = rows.reach.tree
        self.is_cross_attention = self.is_unread = False
        self.shares_keys, self._earlier, self._written = scorer.family.shares_keys, {}, set()
        self._counting_layers = scorer.family.counting_layers
        self.bidirectional = rows.addresses.new_empty(0)
        self.layers: list[Any] = []
        self._reach, self._rules, self._plans, self._masks = rows.reach, {}, {}, {}

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        assert self._reach is not None
        return self._reach.longest, 0

    def plan(self, mask: Tensor | None, group: int, bias: Tensor | None = None) -> NoReturn:
        raise UnsupportedModel("attention that no kernel covers cannot be part of a recorded pass; set compile=False")


class StaticPass:
    """Runs a scorer's model over rows that the device knows."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        parameters = signature(scorer.model.forward).parameters
        self.picks_logits = "logits_to_keep" in parameters
        self._body = scorer.body if isinstance(scorer.body, GpuBody) else None
        self._kept_starts: dict[tuple[int, int], Tensor] = {}
        self._rotary = RotaryPatches(scorer.model, scorer.kernels)
        # Of causal models' modules only where kernels are asked for: there they were compared on CPUs alone.
        patches_modules = isinstance(scorer, Seq2SeqScorer) or scorer.kernels is Kernels.ON
        parts = (scorer.model.get_decoder(), scorer.model.get_output_embeddings()) if patches_modules else ()
        self._patches = ModulePatches(*(part for part in parts if part is not None and self._body is None))

    def rows(self, slots: Tensor, past: Tensor, count: int, span: int) -> StaticRows:
        """`count` new tokens for each of `slots` [R], behind `past` [R] keys; no row will have more than `span`."""
        return self.steps(slots, past, count, 1, span)[0]

    def steps(self, slots: Tensor, past: Tensor, count: int, number: int, span: int) -> list[StaticRows]:
        """The same for `number` passes, each one token further on: made at once, because small kernels add up."""
        cache = self.scorer.cache
        layout = ops.lay_out(slots, past, count, number, cache.piece, self._most, cache.table, self.scorer.kernels)
        longest = span if cache.table is None else min(span, cache.capacity)
        reach = Reach(
            layout.slots, layout.ends[0], self._starts(slots.shape[0], count), count, longest, table=cache.table
        )
        return [
            StaticRows(p, a, replace(reach, lengths=e))
            for p, a, e in zip(layout.positions, layout.addresses, layout.ends, strict=True)
        ]

    def tree(self, slots: Tensor, past: Tensor, depths: Tensor, seen: Tensor, span: int) -> StaticRows:
        """New tokens that are trees: token i of a row stands `depths` [R, T] or [T] behind its `past` [R] keys.

        `seen` [R, T, T] bool says which of the row's new tokens it sees beside the others, itself included.
        """
        rows = self.rows(slots, past, seen.shape[1], span)
        positions = (past.unsqueeze(-1) + depths).clamp(max=self._most - 1)
        return StaticRows(positions.flatten(), rows.addresses, replace(rows.reach, tree=seen.flatten(0, 1)))

    @property
    def _most(self) -> int:
        """Positions there are."""
        capacity, limit = self.scorer.cache.capacity, self.scorer.context_length
        return capacity if limit is None else min(limit, capacity)

    def _starts(self, rows: int, count: int) -> Tensor:
        """[R + 1] where each row's new tokens begin: the same in every pass of a shape, so kept."""
        if (rows, count) not in self._kept_starts:
            ends = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=self.scorer.device)
            self._kept_starts[rows, count] = ends
        return self._kept_starts[rows, count]

    def logits(self, tokens: Tensor, rows: StaticRows, last: int | None = None) -> Tensor:
        """[R, T] -> [R * T, V], row by row; of each row's `last` tokens alone [R * last, V]."""
        last = None if last == tokens.shape[1] else last
        if self.has_head:
            hidden = self.hidden(tokens, rows)
            return self.head(hidden if last is None else last_of(hidden, tokens.shape[1], last))
        if last is not None:
            keep = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)[:, -last:].flatten()
            return self.logits_at(tokens, rows, keep)
        logits: Tensor = self._call(self.scorer.model, tokens.flatten(), rows).logits[0]
        return logits

    def logits_at(self, tokens: Tensor, rows: StaticRows, keep: Tensor) -> Tensor:
        """[R, T] -> [K, V] after the tokens at `keep` [K] among all R * T."""
        if self.has_head:
            return self.head(self.hidden(tokens, rows)[keep])
        options: dict[str, Any] = {"logits_to_keep": keep} if self.picks_logits else {}
        logits: Tensor = self._call(self.scorer.model, tokens.flatten(), rows, **options).logits[0]
        return logits if self.picks_logits else logits[keep]

    @property
    def has_head(self) -> bool:
        """Whether logits are made of hidden states by `head`, and not by the model's own modules."""
        return self._body is not None

    def hidden(self, new: Tensor, rows: StaticRows) -> Tensor:
        """Last hidden states [R * T, H], row by row, of token ids [R, T] or embeddings [R * T, H]."""
        new = new if new.is_floating_point() else new.flatten()
        if self._body is None:
            states: Tensor = self._call(self.scorer.modules.decoder, new, rows).last_hidden_state[0]
            return states
        return self._body.hidden_at(new, rows.positions, rows.addresses, rows.reach, self.scorer.cache)

    def logits_and_hidden(self, tokens: Tensor, rows: StaticRows) -> tuple[Tensor, Tensor]:
        """Both [R * T, ..], where the model's own modules make the logits."""
        outputs: list[Any] = []
        with self.scorer.modules.watching(outputs):
            logits: Tensor = self._call(self.scorer.model, tokens.flatten(), rows).logits[0]
        return logits, outputs[0].last_hidden_state[0]

    def head(self, hidden: Tensor) -> Tensor:
        assert self._body is not None
        return self._body.head(hidden)

    def head_into(self, out: Tensor, hidden: Tensor) -> None:
        """Logits [N, V] left in `out`."""
        assert self._body is not None
        self._body.head_into(out, hidden)

    def _call(self, module: nn.Module, new: Tensor, rows: StaticRows, **options: Any) -> Any:
        """The model's own modules, or those below its head, over ids [N] or embeddings [N, H]."""
        states, scorer = StaticStates(self.scorer, rows), self.scorer
        if isinstance(scorer, Seq2SeqScorer):
            states.cross = scorer.directory.cross_states(states, scorer.sources, rows.reach)
        with ragged(scorer.model, states), self._rotary.during_pass(), self._patches.during_pass():
            return scorer.modules.call(module, states, new[None], rows.positions[None], **options)


def last_of(hidden: Tensor, count: int, last: int = 1) -> Tensor:
    """The `last` of `count` vectors of each row: [R * count, H] -> [R * last, H]."""
    return hidden.view(-1, count, hidden.shape[1])[:, -last:].reshape(-1, hidden.shape[1]).contiguous()


def why_not(scorer: Scorer) -> str | None:
    """What keeps a model from such passes; None where nothing is known to."""
    if isinstance(scorer.body, GpuBody):
        return None
    if scorer.family.layout is not Layout.PACKED:
        return f"{type(scorer.model).__name__} computes attention in its own modules"
    is_seq2seq = isinstance(scorer, Seq2SeqScorer)  # row by row, by `models.patches.positions`
    if not is_seq2seq and "position_ids" not in signature(scorer.model.base_model.forward).parameters:
        return f"{type(scorer.model).__name__} takes no positions"
    return _python_inside(scorer.model)


def _python_inside(model: nn.Module) -> str | None:
    """Somebody's own code around modules, which a recording would run once and never again."""
    if plain.has_global_hooks():
        return "forward hooks are registered for all modules"
    for name, module in model.named_modules():
        if plain.is_compiled(module):
            return f"{name or 'the model'} is compiled"
        if "forward" in module.__dict__ or plain.has_hooks(module):
            return f"{name or 'the model'} has forward hooks or a forward of its own"
    return None
