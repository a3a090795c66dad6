"""A Hugging Face causal model that scores blocks of tokens for rows of different lengths."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.cache.base import CacheFull, KeyValueCache, common_length, ranges
from forerun.config import Kernels, kernels
from forerun.errors import (
    ForerunWarning,
    InvalidArgument,
    LayersNotBuilt,
    RankLost,
    UnsupportedModel,
    kind_and_line,
)
from forerun.kernels import is_not_built
from forerun.math.attention import Form
from forerun.math.transfer import int64, to_device
from forerun.math.tree import is_chain
from forerun.models import families
from forerun.models.attention import forget_configs
from forerun.models.bodies.base import Body, ForwardPass, PassOutput, Trees
from forerun.models.bodies.choose import choose_body, choose_shard_body
from forerun.models.bodies.modules import ModulesBody
from forerun.models.cache_size import cache_scheme, new_cache
from forerun.models.cross_attention import SourcesRead
from forerun.models.families import Family, Layout
from forerun.models.fingerprint import Fingerprint
from forerun.models.passes import between_passes, restore
from forerun.models.sharded import Counterparts, PassCall, RecordedCall, ranks_of
from forerun.types import RaggedRows, Source

# Tokens of one prompt pass, all rows together: long enough to keep a processor busy, short enough to bound its memory.
# On a GPU fewer than 4096 leave the device waiting for the host.
PREFILL_TOKENS = 2048
PREFILL_TOKENS_GPU = 4096
Unread = tuple[int, list[int]]  # a row, and tokens that it has not taken in
LONG_PREFIX = 64  # tokens that texts must begin with in common before one waits for the other's keys


@dataclass(frozen=True, slots=True)
class PromptEnds:
    """Rows whose logits [V] are wanted after the last token that they are given, and those that have been made."""

    wanted: frozenset[int] = frozenset()
    logits: dict[int, Tensor] = field(default_factory=dict)


RecordedFeed = Callable[[list[Unread], PromptEnds], list[Unread]]


class HiddenStateObserver(Protocol):
    """Whoever wants the last hidden state of every position that a scorer runs."""

    def on_hidden_states(
        self,
        rows: Sequence[int],
        past: Sequence[int],
        counts: Sequence[int],
        hidden: Tensor,
        finished: Sequence[int] | None = None,
    ) -> None:
        """`hidden` [N, H]: row `rows[i]` has had `past[i]` tokens and now `counts[i]` more, row by row.

        All but the `finished[i]` last of them are states before the last layer, which `Scorer.finish` runs. None: no
        state is.
        """
        ...

    def on_copy(self, source: int, row: int, length: int) -> None:
        """`row` was empty and has been given the first `length` tokens of `source`."""
        ...

    def on_keep(self, row: int, start: int, picks: Sequence[int]) -> None:
        """Of the tokens from `start` on only those at `picks` stand, moved side by side."""
        ...


class Scorer:
    """Rows of tokens behind a model: feed some, score some, cut some back.

    Passes are run by `body`; those over trees by `modules`, which is the same body where no other is faster. A
    `headless` scorer takes embeddings and gives hidden states: see `run`. The `layout` of rows is the family's unless
    it is given; packed rows become padded ones for good where the model cannot be run packed. All rows together have at
    most `cache_tokens` keys; None leaves that to `models.cache_size`. `cache_dtype` ("int8", "fp8") rounds keys and
    values. A `cache` that is given is used as it is. The model is put into evaluation mode;
    `models.evaluation` gives it back as it was to whoever trains it.
    """

    _modules_type = ModulesBody

    def __init__(
        self,
        model: PreTrainedModel,
        form: Form = Form.AUTO,
        cache: KeyValueCache | None = None,
        *,
        headless: bool = False,
        use: Kernels | None = None,
        layout: Layout | None = None,
        cache_tokens: int | None = None,
        cache_dtype: str | None = None,
    ) -> None:
        self.model = model
        self.observers: list[HiddenStateObserver] = []
        self.num_shared = 0  # tokens of prompts that were read once for several rows of one `feed`: for the others
        self._skipped_by: Body | None = None  # who has left positions before the last layer
        self._recorded_feed: WeakMethod[RecordedFeed] | None = None
        self.form = form
        self.kernels = kernels(use)
        self._headless, self._layout = headless, layout
        self._cache_tokens, self._has_own_cache = cache_tokens, cache is None
        self._cache_scheme = cache_scheme(cache_dtype)
        self.ranks = ranks_of(model)
        with between_passes(model):
            number = self._open()
            self.cache = self._new_cache() if cache is None else cache
            self.counterparts = Counterparts.of(self.ranks, number, self.cache)
            self._connect()
            self._made_of = Fingerprint(model)

    def _open(self) -> int | None:
        """Let other ranks make a counterpart, where the model is split over several; its number."""
        if self.ranks is None:
            return None
        options: dict[str, Any] = {"form": self.form, "use": self.kernels, "layout": self._layout}
        options["cache_tokens"] = self._cache_tokens
        if self._cache_scheme is not None:
            options["cache_dtype"] = self._cache_scheme.name
        return self.ranks.open(self.model, options)

    def _connect(self) -> None:
        """Take from the model, as it is now, whatever passes need to know of it."""
        model, family = self.model, self._inspect()
        if self._layout is not None:
            family = replace(family, layout=self._layout)
        self.device: torch.device = model.device
        may_fuse = self._layout in (None, Layout.PACKED) and (self.cache.reads_in_place or model.device.type != "cpu")
        choose = choose_body if self.ranks is None else choose_shard_body
        fused = choose(model, self.kernels) if may_fuse else None
        linear = self.kernels if fused is None else Kernels.OFF
        self.modules = self._modules_type(model, family, self.form, self.kernels, linear)
        self.body: Body = self.modules if fused is None else fused
        # What passes read, whose addresses a recorded pass holds: looked for once, since rounds look at the addresses.
        self.weights = list(self._weights())

    def _new_cache(self) -> KeyValueCache:
        agreed = None if self.ranks is None else self.ranks.smallest
        longest, scheme = self._inspect().context_length, self._cache_scheme
        return new_cache(self.model, self._cache_tokens, self.kernels, longest, agreed, scheme)

    def _inspect(self) -> Family:
        return families.inspect(self.model, headless=self._headless)

    @property
    def family(self) -> Family:
        return self.modules.family

    @property
    def is_fused(self) -> bool:
        """Whether passes without trees are run by a body of ours."""
        return self.body is not self.modules

    def has_changed(self) -> bool:
        """Whether modules, weights (their places, not their values), hooks or settings are no longer what they were."""
        with between_passes(self.model):
            return not self._made_of.fits(self.model)

    def has_other_vocabulary(self) -> bool:
        """Whether the head has other ids than it had: a part of `has_changed` that costs nothing."""
        return self.model.get_output_embeddings() is not None and families.head_size(self.model) != self.vocab_size

    def renew(self) -> None:
        """Go on with the model as it is now, without any row: their keys are the old model's."""
        self.reset()
        self.cache.give_back(self.model.device)
        forget_configs(self.model)
        self.counterparts = self._skipped_by = None
        with between_passes(self.model):
            if self.ranks is None:
                ranks_of(self.model)  # split since: by no one who runs its passes in step
            number = self._open()
            if self._has_own_cache:
                self.cache = self._new_cache()
            self.counterparts = Counterparts.of(self.ranks, number, self.cache)
            self._connect()
            self._made_of = Fingerprint(self.model)

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

    def _weights(self) -> Iterator[Tensor]:
        yield from self.model.parameters()

    @property
    def version(self) -> tuple[int, ...]:
        """Changes when keys have moved that a recorded pass holds the addresses of."""
        return (self.cache.version,)

    def lay_out(self) -> None:
        """Tell the device what passes of fixed shape look up, once rows have come or gone."""

    def encode(self) -> None:
        """Make what was read since the last time ready for a pass; nothing to do without an encoder."""

    def why_unread(self, row: int) -> str | None:
        """Why the encoder cannot read a row's source; None where it can, or where there is none."""
        return None

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

    def begin(self, row: int, tokens: Sequence[int]) -> int:
        """Give an empty row the longest beginning of `tokens` that the cache still has keys of; how many those are.

        Not while somebody listens to hidden states: those of the beginning would never be heard.
        """
        return 0 if self.observers else self.cache.begin(row, tokens, self._read_by(row))

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """Let other rows begin with this one's keys, those of `tokens`."""
        self.cache.remember(row, tokens, self._read_by(row))

    def feed(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Take in tokens whose logits nobody needs (a prompt), in passes of bounded size, without running the head.

        What empty rows begin with in common is encoded once and copied.
        """
        self._feed_shared(rows, blocks, PromptEnds())

    def feed_to_end(
        self, rows: Sequence[int], blocks: Sequence[Sequence[int]], ending: Sequence[int]
    ) -> dict[int, Tensor]:
        """The same, and the head runs on the last token of each row of `ending`: the logits [V] after it, by row."""
        ends = PromptEnds(frozenset(ending))
        self._feed_shared(rows, blocks, ends)
        return ends.logits

    def _feed_shared(self, rows: Sequence[int], blocks: Sequence[Sequence[int]], ends: PromptEnds) -> None:
        shared = self._shared_prefixes(rows, blocks)
        new = dict(zip(rows, blocks, strict=True))
        self._feed([(row, block) for row, block in new.items() if row not in shared], ends)
        for row, (source, count) in shared.items():
            # A last token whose logits are wanted is not copied but run.
            self.copy(source, row, min(count, len(new[row]) - 1) if row in ends.wanted else count)
            self.num_shared += self.cache.length(row)
        self._feed([(row, new[row][self.cache.length(row) :]) for row in shared], ends)

    def copy(self, source: int, row: int, length: int) -> None:
        """Give `row` the first `length` tokens of `source` in place of its own; fewer where there is no room for all.

        Both read the same, where there is an encoder. Where somebody listens to hidden states, `row` has been empty.
        """
        self.cache.rewind(row, 0)
        self.cache.copy(source, row, length)
        for observer in self.observers:
            observer.on_copy(source, row, self.cache.length(row))

    @property
    def recorded_feed(self) -> RecordedFeed | None:
        """Takes in tokens of rows, and says what it has left: an engine lends this method of what it has recorded.

        Held weakly, because its object holds the scorer: a cycle would keep a GPU's memory when both are dropped.
        """
        return None if self._recorded_feed is None else self._recorded_feed()

    @recorded_feed.setter
    def recorded_feed(self, method: RecordedFeed | None) -> None:
        self._recorded_feed = None if method is None else WeakMethod(method)

    @property
    def most_prefilled(self) -> int:
        """Tokens of prompts that one pass takes."""
        return PREFILL_TOKENS if self.device.type == "cpu" else PREFILL_TOKENS_GPU

    def _feed(self, new: Sequence[tuple[int, Sequence[int]]], ends: PromptEnds) -> None:
        waiting = [(row, list(block)) for row, block in new if len(block)]
        while waiting:
            feed = self.recorded_feed
            if feed is not None and not self.observers:
                waiting = self._feed_recorded(feed, waiting, ends)  # also what is left of a long prompt
                if not waiting:
                    return
            now, waiting = _next_pass(waiting, self.most_prefilled)
            unfinished = {row for row, _ in waiting}
            ending = [row for row, _ in now if row in ends.wanted and row not in unfinished]
            logits = self._feed_pass([row for row, _ in now], [block for _, block in now], ending=ending)
            if logits is not None:
                ends.logits.update(zip(ending, logits, strict=True))

    def _feed_recorded(self, feed: RecordedFeed, waiting: list[Unread], ends: PromptEnds) -> list[Unread]:
        """What recorded passes leave. From one that fails on there are no more: prompts are read without them."""
        before = {row: self.cache.length(row) for row, _ in waiting}
        try:
            return feed(waiting, ends)
        except CacheFull:  # nobody's fault: fewer rows will do
            raise
        except Exception as error:
            self.recorded_feed = None
            what = f"a pass over prompts could not be recorded ({type(error).__name__}: {error})"
            warnings.warn(f"{what}; they are read without CUDA graphs, slower", ForerunWarning, stacklevel=5)
        read = {row: self.cache.length(row) - length for row, length in before.items()}
        return [(row, block[read[row] :]) for row, block in waiting if len(block) > read[row]]

    def _feed_pass(
        self,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        body: Body | None = None,
        ending: Sequence[int] = (),
    ) -> Tensor | None:
        """Logits [E, V] after the last tokens of the rows of `ending`, which come in the order of `rows`."""
        counts, keep = [len(block) for block in blocks], None
        if ending:
            last = zip(rows, accumulate(counts), strict=True)
            keep = to_device(int64(end - 1 for row, end in last if row in ending), self.device)
        return self._run(rows, counts, self._tokens(blocks), wants_logits=bool(ending), keep=keep, body=body).logits

    def _shared_prefixes(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
        """Empty rows that are given the text of an earlier empty row, or begin alike for long: that row, how many."""
        first: dict[tuple[Any, ...], tuple[int, Sequence[int]]] = {}
        shared = {}
        for row, block in zip(rows, blocks, strict=True):
            if len(block) and self.cache.length(row) == 0:
                earlier, text = first.setdefault((self._read_by(row), *block[:LONG_PREFIX]), (row, block))
                if earlier != row:
                    shared[row] = earlier, common_length(text, block)
        return shared

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
        return self._logits(rows, blocks, to_device(ranges(starts, tails), self.device), trees)

    def score_last(self, rows: Sequence[int], blocks: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after the last token of each block."""
        return self.score(rows, blocks, [1] * len(rows))

    def run(self, rows: Sequence[int], counts: Sequence[int], embeddings: Tensor, trees: Trees | None = None) -> Tensor:
        """Hidden states [N, H] after `counts[i]` new positions of each row, given as embeddings [N, H], row by row."""
        hidden = self._run(rows, counts, embeddings, trees, wants_hidden=True).hidden
        assert hidden is not None
        return hidden

    @torch.inference_mode()
    def finish(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], states: Tensor) -> Tensor:
        """Last hidden states [N, H] of `counts[i]` positions of each row from `starts[i]` on, row by row.

        `states` [N, H] are what observers were told of them before the last layer.
        """
        assert self._skipped_by is not None
        slots = tuple(self.cache.slot(row) for row in rows)
        return self._skipped_by.finish(states, RaggedRows(slots, tuple(starts), tuple(counts)), self.cache)

    def _by(self, body: Body, call: ForwardPass) -> PassOutput:
        """Compilers' errors are told apart here: elsewhere they may be those of a user's own kernels."""
        try:
            return body.run(call)
        except Exception as error:
            if body is self.modules or not is_not_built(error):
                raise
            raise LayersNotBuilt(kind_and_line(error)) from error

    def _logits(
        self, rows: Sequence[int], blocks: Sequence[Sequence[int]], keep: Tensor | None, trees: Trees | None
    ) -> Tensor:
        """The head runs only where it must: on all packed positions, or on those of `keep`."""
        counts = [len(block) for block in blocks]
        logits = self._run(rows, counts, self._tokens(blocks), trees, wants_logits=True, keep=keep).logits
        assert logits is not None
        return logits

    def _tokens(self, blocks: Sequence[Sequence[int]]) -> Tensor:
        return to_device(int64(chain.from_iterable(blocks)), self.device)

    @torch.inference_mode()
    def _run(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        new: Tensor,
        trees: Trees | None = None,
        *,
        wants_logits: bool = False,
        keep: Tensor | None = None,
        wants_hidden: bool = False,
        body: Body | None = None,
    ) -> PassOutput:
        """One pass over what is `new`: token ids [N], or embeddings [N, H] in their place."""
        if trees is not None and all(map(is_chain, trees)):
            trees = None  # chains need no mask of their own
        sources, may_skip_last = self._sources(rows), not wants_hidden
        wants_hidden = wants_hidden or bool(self.observers)
        before = [self.cache.length(row) for row in rows]
        try:
            places = self.cache.extend(rows, counts)
            longest = self.body.longest_pass
            if body is None and trees is None:
                is_long = longest is not None and len(new) > longest
                body = self.body.beyond if is_long else self.body
            body = body or self.modules
            call = ForwardPass(new, places, self.cache, trees, sources, wants_logits, keep, wants_hidden, may_skip_last)
            with self._on_all_ranks(call, body):
                out = self._by(body, call)
        except BaseException:
            known = map(self.cache.length, rows)  # fewer than before where memory for keys ran out on the way
            self.rewind(rows, list(map(min, before, known)))  # a pass that fails leaves no token behind
            raise
        self._skipped_by = self._skipped_by if out.finished is None else body
        for observer in self.observers:
            assert out.hidden is not None
            observer.on_hidden_states(rows, places.past, places.counts, out.hidden, out.finished)
        return out

    def _on_all_ranks(self, call: ForwardPass, body: Body) -> AbstractContextManager[None]:
        if self.counterparts is None:
            return nullcontext()
        return self.counterparts.run(
            call.new,
            call.trees,
            call.keep,
            wants_logits=call.wants_logits,
            wants_hidden=call.wants_hidden,
            by_modules=body is self.modules,
        )

    def repeat(self, call: PassCall) -> None:
        """On a rank that follows: bring the cache to the state of rank 0's and run its pass."""
        with torch.inference_mode():
            places = self.catch_up(call)
            tokens = torch.tensor(call.tokens, device=self.device)
            keep = None if call.keep is None else torch.tensor(call.keep, device=self.device)
            body = self.modules if call.by_modules else self.body
            body.run(
                ForwardPass(tokens, places, self.cache, call.trees, None, call.wants_logits, keep, call.wants_hidden)
            )

    def catch_up(self, call: PassCall | RecordedCall) -> Any:
        """Bring the cache to the state of rank 0's; what the last change returned."""
        result = self.cache.replay(call.changes)
        if call.digest is not None and call.digest != self.cache.digest():
            raise RankLost("the caches of two ranks are no longer in the same state: this is a fault in Forerun")
        return result

    def _sources(self, rows: Sequence[int]) -> SourcesRead | None:
        """What the rows of a pass read, encoded."""
        return None


def _next_pass(
    waiting: list[tuple[int, list[int]]], room: int
) -> tuple[list[tuple[int, list[int]]], list[tuple[int, list[int]]]]:
    """As many tokens as there is `room` for in one pass, taken from the front; the rest stays."""
    now, rest = [], []
    for row, block in waiting:
        if room and block:
            now.append((row, block[:room]))
        if len(block) > room:
            rest.append((row, block[room:]))
        room -= min(room, len(block))
    return now, rest
