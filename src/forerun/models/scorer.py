"""A Hugging Face causal model that scores blocks of tokens for rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from forerun import ops
from forerun.cache.ragged import RaggedCache, ranges
from forerun.config import Kernels, kernels
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.math.attention import Form
from forerun.math.tree import is_chain
from forerun.models import families
from forerun.models.attention import KeysChanged, RaggedStates, forget_configs, ragged
from forerun.models.bodies.choose import choose_body
from forerun.models.bodies.whisper import WhisperBody
from forerun.models.families import Family, Layout
from forerun.models.fingerprint import Fingerprint
from forerun.models.passes import between_passes, restore
from forerun.models.patches.linear import LinearPatches
from forerun.models.patches.positions import PositionPatches
from forerun.models.patches.rotary import RotaryPatches
from forerun.types import RaggedRows, Source

P = ParamSpec("P")
T = TypeVar("T")

# For each row of a pass the parents of its last keys, the new ones included; see `models.branches`. Nobody else's rows
# are touched by it, and a row that ends in no tree has none.
Trees = Sequence[Sequence[int]]

# Tokens of one prompt pass, all rows together: long enough to keep a processor busy, short enough to bound its memory.
PREFILL_TOKENS = 1024


class HiddenStateObserver(Protocol):
    """Whoever wants the last hidden state of every position that a scorer runs."""

    def on_hidden_states(self, rows: Sequence[int], past: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        """`hidden` [N, H]: row `rows[i]` has had `past[i]` tokens and now `counts[i]` more, row by row."""
        ...

    def on_copy(self, source: int, row: int, length: int) -> None:
        """`row` was empty and has been given the first `length` tokens of `source`."""
        ...

    def on_keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        """Of the tokens from `start` on only those at `picks` stand, moved side by side."""
        ...


def _in_either_layout(method: Callable[Concatenate[Scorer, P], T]) -> Callable[Concatenate[Scorer, P], T]:
    """Repeat a pass with padded rows where the model turns out to make more of its keys than packed rows can follow.

    The cache holds the same in both layouts, so nothing that was computed before is lost.
    """

    @wraps(method)
    def run(self: Scorer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except KeysChanged:
            if not self._can_pad:
                raise
            self.family = replace(self.family, layout=Layout.PADDED)
        return method(self, *args, **kwargs)

    return run


class Scorer:
    """Rows of tokens behind a model: feed some, score some, cut some back.

    A `headless` one is a body that takes embeddings and gives hidden states: see `run`. The `layout` of its passes is
    the family's unless it is given; packed rows become padded ones for good where the model cannot be run packed.
    """

    _can_pad = True

    def __init__(
        self,
        model: PreTrainedModel,
        form: Form = Form.AUTO,
        cache: RaggedCache | None = None,
        *,
        headless: bool = False,
        use: Kernels | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.model = model
        self.observers: list[HiddenStateObserver] = []
        self.form = form
        self.cache = cache if cache is not None else RaggedCache()
        self.kernels = kernels(use)
        self._headless, self._layout = headless, layout
        with between_passes(model):
            self._connect()
            self._made_of = Fingerprint.of(model)

    def _connect(self) -> None:
        """Take from the model, as it is now, whatever passes need to know of it."""
        model = self.model
        self.family = self._inspect(model, self._headless)
        if self._layout is not None:
            self.family = replace(self.family, layout=self._layout)
        model.eval()
        self.device: torch.device = model.device
        self.body = choose_body(model, self.kernels) if self.family.layout is Layout.PACKED else None
        use = Kernels.OFF if self.body is not None else self.kernels
        self._products = LinearPatches(model, use, self._never_run(model))
        self._rotary = RotaryPatches(model, self.kernels)
        self._base = model.base_model
        self._picks_logits = "logits_to_keep" in signature(model.forward).parameters
        self._tell_positions(self._base)

    def _tell_positions(self, decoder: nn.Module) -> None:
        """Find out how `decoder` learns where new tokens stand."""
        inner = self.model.get_decoder()  # which `decoder` may merely wrap
        self._takes_positions = _takes(decoder, "position_ids") or (
            _takes(inner, "position_ids") and _hands_on(decoder)
        )
        self._positions = PositionPatches(inner, self._takes_positions)
        if not (self._takes_positions or self._positions.is_told or self.family.by_place):
            raise UnsupportedModel(
                f"{type(self.model).__name__} counts positions from the length of the cache, which is the same for "
                "all rows; use model.generate for it"
            )

    def has_changed(self) -> bool:
        """Whether modules, weights (their places, not their values), hooks or settings are no longer what they were."""
        with between_passes(self.model):
            return not self._made_of.fits(self.model)

    def renew(self) -> None:
        """Go on with the model as it is now, without any row: their keys are the old model's."""
        self.reset()
        forget_configs(self.model)
        with between_passes(self.model):
            self._connect()
            self._made_of = Fingerprint.of(self.model)

    def _inspect(self, model: PreTrainedModel, headless: bool) -> Family:
        return families.inspect(model, headless=headless)

    def _never_run(self, model: PreTrainedModel) -> nn.Module | None:
        """A part of the model that passes leave out."""
        return None

    @property
    def vocab_size(self) -> int:
        return self.family.vocab_size

    @property
    def context_length(self) -> int | None:
        return self.family.context_length

    def admit(self, row: int) -> None:
        self.cache.admit(row)

    def check_source(self, source: Source | None) -> None:
        """Raise unless rows may read this."""
        if source is not None:
            raise InvalidArgument(
                f"{type(self.model).__name__} has no encoder to read a source with: put the text into the prompt"
            )

    def read(self, row: int, source: Source) -> None:
        """What the encoder of an encoder-decoder model reads for a row."""
        self.check_source(source)

    @property
    def weights(self) -> Iterator[Tensor]:
        """What passes read, whose addresses a recorded pass holds."""
        yield from self.model.parameters()

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when keys have moved that a recorded pass holds the addresses of."""
        return (self.cache.version,)

    def lay_out(self) -> None:
        """Tell the device what passes of fixed shape look up, once rows have come or gone."""

    def encode(self) -> None:
        """Make what was read since the last time ready for a pass; nothing to do without an encoder."""

    def release(self, row: int) -> None:
        self.cache.release(row)

    def reset(self) -> None:
        """Forget all rows, whatever state an error has left them in."""
        restore(self.model)
        self.cache.clear()

    def length(self, row: int) -> int:
        return self.cache.length(row)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` tokens of each row."""
        for row, length in zip(rows, lengths, strict=True):
            self.cache.rewind(row, length)

    def keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        """Of a tree that begins at `start` keep the path `picks`: it becomes the row's own text."""
        self.cache.keep(row, start, picks)
        for observer in self.observers:
            observer.on_keep(row, start, picks)

    def check_trees(self) -> None:
        """Raise unless a pass may end in trees."""
        if self.family.by_place:
            raise UnsupportedModel(
                f"{type(self.model).__name__} tells positions from where keys lie in the cache, so it cannot score "
                "trees; use its drafter without a tree"
            )

    def feed(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Take in tokens whose logits nobody needs (a prompt), in passes of bounded size, without running the head."""
        copies = self._twins(rows, blocks)
        waiting = [(r, list(b)) for r, b in zip(rows, blocks, strict=True) if len(b) and r not in copies]
        while waiting:
            now, waiting = _next_pass(waiting)
            rows_now, blocks_now = [row for row, _ in now], [block for _, block in now]
            if self.body is not None:
                self._fused(rows_now, [len(block) for block in blocks_now], self._tokens(blocks_now))
            else:
                self._feed_pass(rows_now, blocks_now)
        for row, source in copies.items():
            self.cache.copy(source, row, self.cache.length(source))
            for observer in self.observers:
                observer.on_copy(source, row, self.cache.length(row))

    @_in_either_layout
    def _feed_pass(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        if self._reaches_too_far(rows, blocks):
            with self._all_or_none(rows):
                for row, block in zip(rows, blocks, strict=True):
                    self._forward(self._base, [row], [block])
            return
        self._forward(self._base, rows, blocks)

    def _reaches_too_far(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> bool:
        """Whether padding would take places past the end of a family's tables of places, though no row gets there."""
        if not self.family.by_place or self.context_length is None or len(rows) == 1:
            return False
        return max(map(self.length, rows)) + max(map(len, blocks)) > self.context_length

    @contextmanager
    def _all_or_none(self, rows: Sequence[int]) -> Iterator[None]:
        """Several passes of which one may fail: then none leaves a token behind."""
        before = [self.length(row) for row in rows]
        try:
            yield
        except BaseException:
            self.rewind(rows, before)
            raise

    def _twins(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> dict[int, int]:
        """Empty rows that are given the same prompt as an earlier empty row: it is encoded once and copied."""
        first: dict[tuple[Any, ...], int] = {}
        pairs = ((row, (self._read_by(row), *block)) for row, block in zip(rows, blocks, strict=True) if len(block))
        empty = [(row, text) for row, text in pairs if self.cache.length(row) == 0]
        return {row: first[text] for row, text in empty if first.setdefault(text, row) != row}

    def _read_by(self, row: int) -> Source | None:
        """What a row's keys depend on beside its tokens."""
        return None

    def score(
        self,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        tails: Sequence[int] | None = None,
        trees: Trees | None = None,
    ) -> Tensor:
        """Logits [N, V] after each of the last `tails[i]` tokens of each block (after all by default), row by row.

        With `trees`, tokens follow their parents instead of the token before them.
        """
        ends = list(accumulate(len(block) for block in blocks))
        if tails is None or sum(tails) == ends[-1]:
            return self._logits(rows, blocks, None, trees)
        starts = [end - tail for end, tail in zip(ends, tails, strict=True)]
        return self._logits(rows, blocks, ranges(starts, tails).to(self.device), trees)

    def score_last(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after the last token of each block."""
        return self.score(rows, blocks, [1] * len(rows))

    @_in_either_layout
    def run(self, rows: Sequence[int], counts: Sequence[int], embeddings: Tensor, trees: Trees | None = None) -> Tensor:
        """Hidden states [N, H] after `counts[i]` new positions of each row, given as embeddings [N, H], row by row."""
        trees = _with_branches(trees)
        if self.body is not None and trees is None:
            return self._fused(rows, counts, embeddings)
        states, out = self._pass(self._base, rows, counts, embeddings, trees)
        return _packed(out.last_hidden_state, states)

    @_in_either_layout
    @torch.inference_mode()
    def _logits(
        self, rows: Sequence[int], blocks: Sequence[Sequence[int]], keep: Tensor | None, trees: Trees | None
    ) -> Tensor:
        """The head runs only where it must: on all packed positions, or on those of `keep`."""
        trees = _with_branches(trees)
        if self.body is not None and trees is None:
            hidden = self._fused(rows, [len(block) for block in blocks], self._tokens(blocks))
            return self._head(hidden if keep is None else hidden[keep])
        if self._reaches_too_far(rows, blocks):
            with self._all_or_none(rows):
                logits = torch.cat([self._logits([r], [b], None, None) for r, b in zip(rows, blocks, strict=True)])
            return logits if keep is None else logits[keep]
        if self.family.layout is Layout.PACKED and keep is not None and self._picks_logits:
            _, out = self._forward(self.model, rows, blocks, trees, logits_to_keep=keep)
            picked: Tensor = out.logits[0]
            return picked
        states, out = self._forward(self.model, rows, blocks, trees)
        packed = _packed(out.logits, states)
        return packed if keep is None else packed[keep]

    def _forward(
        self,
        module: nn.Module,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        trees: Trees | None = None,
        **options: Any,
    ) -> tuple[RaggedStates, Any]:
        """One pass of `module` (the whole model, or what lies below its head) over new tokens of some rows."""
        return self._pass(module, rows, [len(block) for block in blocks], self._tokens(blocks), trees, **options)

    def _head(self, hidden: Tensor) -> Tensor:
        head: nn.Linear = self.model.get_output_embeddings()
        if hidden.device.type == "cpu":
            return ops.linear(hidden, head.weight, head.bias, self.kernels)
        return ops.project(hidden, head.weight, head.bias)

    def _tokens(self, blocks: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([token for block in blocks for token in block], device=self.device)

    @torch.inference_mode()
    def _fused(self, rows: Sequence[int], counts: Sequence[int], new: Tensor) -> Tensor:
        """Hidden states [N, H] by the fused body, over token ids [N] or embeddings [N, H]."""
        before = [self.cache.length(row) for row in rows]
        try:
            places = self.cache.extend(rows, counts)
            hidden = self._run_body(rows, places, new)
        except BaseException:
            self.rewind(rows, before)
            raise
        for observer in self.observers:
            observer.on_hidden_states(rows, places.past, places.counts, hidden)
        return hidden

    def _run_body(self, rows: Sequence[int], places: RaggedRows, new: Tensor) -> Tensor:
        assert self.body is not None and not isinstance(self.body, WhisperBody)
        embeddings: Tensor = new if new.is_floating_point() else self._base.get_input_embeddings()(new)
        return self.body.run_rows(embeddings, places, self.cache)

    @torch.inference_mode()
    def _pass(
        self,
        module: nn.Module,
        rows: Sequence[int],
        counts: Sequence[int],
        new: Tensor,
        trees: Trees | None = None,
        **options: Any,
    ) -> tuple[RaggedStates, Any]:
        """The same over what is `new`: token ids [N], or embeddings [N, H] in their place."""
        before = [self.cache.length(row) for row in rows]
        places = self.cache.extend(rows, counts)
        states = RaggedStates(self.cache, places, self.family, self.form, self.device, self.kernels, trees)
        positions = states.positions
        if states.padded is None:
            new, positions = new[None], positions[None]
        else:
            new, positions = new[states.padded.tokens], positions[states.padded.tokens]
        try:
            with (
                ragged(self.model, states),
                self._products.during_pass(new.shape[:2].numel()),
                self._rotary.during_pass() if states.padded is None else nullcontext(),
                self._overheard(rows, states),
            ):
                out = self.call(module, rows, states, new, positions, **options)
                states.check_read()
                return states, out
        except BaseException:
            self.rewind(rows, before)  # a pass that fails leaves no token behind
            raise

    def call(
        self,
        module: nn.Module,
        rows: Sequence[int],
        states: RaggedStates,
        new: Tensor,
        positions: Tensor,
        **options: Any,
    ) -> Any:
        """Run `module` within a pass."""
        options["inputs_embeds" if new.is_floating_point() else "input_ids"] = new
        if self._takes_positions:
            options["position_ids"] = positions
        with self._positions.during_pass(states):
            return module(past_key_values=states, use_cache=True, **options)

    @contextmanager
    def _overheard(self, rows: Sequence[int], states: RaggedStates) -> Iterator[None]:
        """Tell the listeners what the body made of a pass, once the pass has succeeded."""
        if not self.observers:
            yield
            return
        made: list[Any] = []
        # Some families (OPT) call what lies within their base model directly, so both are listened to.
        bodies = {id(body): body for body in (self._base, self.model.get_decoder()) if body is not self.model}
        hooks = [body.register_forward_hook(lambda *call: made.append(call[-1])) for body in bodies.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        hidden = _packed(made[0].last_hidden_state, states)
        for observer in self.observers:
            observer.on_hidden_states(rows, states.rows.past, states.rows.counts, hidden)


def _takes(module: nn.Module, name: str) -> bool:
    return name in signature(module.forward).parameters


def _hands_on(module: nn.Module) -> bool:
    """Whether a module passes keywords on that it does not know."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in signature(module.forward).parameters.values())


def _with_branches(trees: Trees | None) -> Trees | None:
    """None where all trees are chains, which need no mask of their own."""
    return None if trees is None or all(map(is_chain, trees)) else trees


def _packed(out: Tensor, states: RaggedStates) -> Tensor:
    """What a model gave for each new position, pads left out: [1, N, ..] or [B, T, ..] -> [N, ..]."""
    return out[0] if states.padded is None else states.padded.packed(out)


def _next_pass(
    waiting: list[tuple[int, list[int]]],
) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """As many tokens as fit one pass, taken from the front; the rest stays."""
    now, rest, room = [], [], PREFILL_TOKENS
    for row, block in waiting:
        if room and block:
            now.append((row, block[:room]))
        if len(block) > room:
            rest.append((row, block[room:]))
        room -= min(room, len(block))
    return now, rest
