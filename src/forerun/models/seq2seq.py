"""An encoder-decoder model that scores blocks of tokens: a `Scorer` whose rows also read a source."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from forerun.cache.base import KeyValueCache
from forerun.config import Kernels
from forerun.errors import ForerunWarning, InvalidArgument
from forerun.math.attention import Form
from forerun.models import families
from forerun.models.bodies.base import Trees
from forerun.models.bodies.modules import Seq2SeqModules
from forerun.models.cross_attention import Sources, SourcesRead, SourceTable, projections
from forerun.models.encoder import Encoder
from forerun.models.families import Family
from forerun.models.scorer import Scorer
from forerun.types import Source

FEW = 8  # positions of a row that the head may run on for nothing: fewer than a pass of their own would cost


class Seq2SeqScorer(Scorer):
    """Rows of tokens behind an encoder-decoder model: `admit` a row, let it `read` its source, then score as ever.

    The encoder runs once for all sources that were read since the last pass, and once for rows that read the same.
    A source that the encoder cannot read is refused, but not by a draft: that guesses for the row from one state of
    zeros, because a refusal would cost its neighbours' drafts too: their tokens would depend on who is beside them.
    `borrowed` are encoder states of another scorer, for a draft that shares its target's encoder; one that works
    `beside` another shares its sources altogether, for a draft that is made of its target's own layers.
    """

    _modules_type = Seq2SeqModules

    def __init__(
        self,
        model: PreTrainedModel,
        form: Form = Form.AUTO,
        cache: KeyValueCache | None = None,
        *,
        use: Kernels | None = None,
        is_draft: bool = False,
        borrowed: Callable[[Source], Tensor] | None = None,
        beside: Seq2SeqScorer | None = None,
        cache_tokens: int | None = None,
        cache_dtype: str | None = None,
    ) -> None:
        self._is_draft, self._has_warned = is_draft, False
        self.sources: Sources
        self._borrowed, self._beside = borrowed, beside
        self.directory = SourceTable()
        self.keeps_states = False  # set by whoever borrows them
        self._states: dict[Source, Tensor] = {}
        super().__init__(model, form, cache, use=use, cache_tokens=cache_tokens, cache_dtype=cache_dtype)

    def _connect(self) -> None:
        super()._connect()
        self._projections = projections(self.modules.decoder)
        self.encoder = Encoder(self.model, self._is_draft)
        if self._beside is not None:
            self.sources = self._beside.sources
            return
        # Not by a method of its own: the cache holds what it is counted by, and a cycle would keep a GPU's memory.
        length = self.encoder.length if self._borrowed is None else partial(_length_of_worth, self.encoder)
        self.cache.sources = self.sources = Sources(self.cache.for_sources(), length)

    def renew(self) -> None:
        self.directory = SourceTable()
        super().renew()

    def _inspect(self) -> Family:
        return families.inspect_seq2seq(self.model)

    def _weights(self) -> Iterator[Tensor]:
        yield from self.modules.decoder.parameters()
        yield from self.model.get_output_embeddings().parameters()

    def check_trees(self) -> None:
        """All of these families are told positions row by row."""

    def check_source(self, source: Source | None) -> None:
        if source is None:
            raise InvalidArgument(
                f"{type(self.model).__name__} reads a source: give Request(source=Source(ids=...)) or, to "
                f"SpeculativeDecoder.generate, {self.encoder.name}"
            )
        if self._borrowed is None:
            self.encoder.check(source)

    def read(self, row: int, source: Source) -> None:
        if not self._is_draft:
            self.check_source(source)
        self.sources.read(row, source)

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """As ever, but only where another row can read the same text: nobody comes again with these very tensors, and
        to know the row by them would keep them."""
        if self.sources.of(row).is_text:
            super().remember(row, tokens)

    def encode(self) -> None:
        """Run the encoder over what was read since the last time, and make cross-attention's keys of it."""
        waiting = self.sources.waiting
        if self._beside is not None:
            self._beside.encode()
            return
        if not waiting:
            return
        if self._borrowed is None:
            states, unread = self.encoder.run(waiting)
        else:
            states, unread = [self._borrowed(source)[: source.worth] for source in waiting], {}
        self.sources.put(states, self._projections, self.kernels)
        self.sources.unread |= unread
        if self.keeps_states:
            self._states.update(zip(waiting, states, strict=True))
        if unread and self._is_draft and not self._has_warned:
            self._has_warned = True
            what = f"a draft's encoder cannot read a source: {next(iter(unread.values()))}"
            warnings.warn(
                f"{what}; it guesses without it there, and few guesses will be kept", ForerunWarning, stacklevel=2
            )

    def why_unread(self, row: int) -> str | None:
        """Why the encoder cannot read a row's source, once it was tried; None where it can."""
        return self.sources.unread.get(self.sources.of(row)) if self.sources.unread else None

    @property
    def version(self) -> tuple[int, ...]:
        return self.cache.version, self.sources.cache.version, self.directory.version

    def lay_out(self) -> None:
        self.encode()
        self.directory.write(self.cache, self.sources, self.device)

    def states_of(self, source: Source) -> Tensor:
        """[S, H] what the encoder made of a source that some row reads; kept where `keeps_states` says so."""
        self.encode()
        return self._states[source]

    def release(self, row: int) -> None:
        if (gone := self.sources.release(row)) is not None:
            self._states.pop(gone, None)
        super().release(row)

    def reset(self) -> None:
        """Sources first: an interrupt may come in between, and blocks of a pool that is new belong to no source."""
        self.sources.clear()
        self._states.clear()
        super().reset()

    def score(
        self,
        rows: Sequence[int],
        blocks: Sequence[Sequence[int]],
        tails: Sequence[int] | None = None,
        trees: Trees | None = None,
    ) -> Tensor:
        """As ever. These heads run on every position, so a long beginning goes ahead without one."""
        early = [] if tails is None else [len(block) - tail for block, tail in zip(blocks, tails, strict=True)]
        if max(early, default=0) <= FEW:
            return super().score(rows, blocks, tails, trees)
        before = [self.length(row) for row in rows]
        self.feed(rows, [block[:count] for block, count in zip(blocks, early, strict=True)])
        try:
            return super().score(rows, [block[n:] for block, n in zip(blocks, early, strict=True)], tails, trees)
        except BaseException:
            self.rewind(rows, before)
            raise

    def run(self, rows: Sequence[int], counts: Sequence[int], embeddings: Tensor, trees: Any = None) -> Tensor:
        raise InvalidArgument(f"{type(self.model).__name__} is scored by tokens, not by embeddings")

    def _read_by(self, row: int) -> Source | None:
        return self.sources.of(row)

    def _sources(self, rows: Sequence[int]) -> SourcesRead:
        self.encode()  # the encoder attends as it always does, so before the pass begins
        reason = None if self._is_draft else next(filter(None, map(self.why_unread, rows)), None)
        if reason is not None:
            raise InvalidArgument(reason)
        return self.sources.read_by(rows)


def _length_of_worth(encoder: Encoder, source: Source) -> int:
    length = encoder.length(source)
    return length if source.worth is None else min(length, source.worth)


def scorer_of(
    model: PreTrainedModel,
    form: Form = Form.AUTO,
    cache: KeyValueCache | None = None,
    *,
    use: Kernels | None = None,
    is_draft: bool = False,
    cache_tokens: int | None = None,
    cache_dtype: str | None = None,
) -> Scorer:
    """A scorer of the kind that a model takes."""
    options: dict[str, Any] = {"use": use, "cache_tokens": cache_tokens, "cache_dtype": cache_dtype}
    if getattr(model.config, "is_encoder_decoder", False):
        return Seq2SeqScorer(model, form, cache, is_draft=is_draft, **options)
    return Scorer(model, form, cache, **options)
