"""What a body is: something that runs one forward pass of a model over new tokens of ragged rows.

`modules.ModulesBody` runs transformers' own modules and takes every model, layout and tree: it is the specification.
The others run what lies below the head by kernels of ours, for the models that their `why_not` lets through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from forerun.cache.base import KeyValueCache
from forerun.models.cross_attention import SourcesRead
from forerun.types import RaggedRows

# For each row of a pass the parents of its last keys, the new ones included; see `models.branches`. A row that ends in
# no tree has none.
Trees = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """New tokens of some rows, packed one row after the other: N in all. The cache has room for their keys."""

    new: Tensor  # [N] token ids, or [N, H] embeddings in their place
    rows: RaggedRows
    cache: KeyValueCache
    trees: Trees | None = None  # None where every row is a chain
    sources: SourcesRead | None = None  # of an encoder-decoder model
    wants_logits: bool = False
    keep: Tensor | None = None  # [M] the positions among N whose logits are wanted; None: all
    wants_hidden: bool = True  # bodies that have to go out of their way for hidden states may leave them out
    may_skip_last: bool = False  # whether hidden states may be left before the last layer where no logits follow


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What was asked for of a pass; the keys and values of all layers are in the cache."""

    hidden: Tensor | None  # [N, H] last hidden states, the final norm included, but for what `finished` leaves out
    logits: Tensor | None  # [N, V] or [M, V]
    # Of each row so many last positions have been through the last layer; the others' `hidden` lies before it, for
    # `Body.finish`. None: all have.
    finished: tuple[int, ...] | None = None


class Body(ABC):
    """One way to run a model's passes."""

    longest_pass: int | None = None  # new tokens; others were seen to be faster with more. None: never
    beyond: Body | None = None  # who runs longer passes; None: the modules

    @abstractmethod
    def run(self, call: ForwardPass) -> PassOutput:
        """Run a pass. One that raises may leave keys behind, which the caller's lengths then do not count."""

    def finish(self, states: Tensor, rows: RaggedRows, cache: KeyValueCache) -> Tensor:
        """Last hidden states [N, H] of positions that a pass has left before the last layer, row by row."""
        raise NotImplementedError(f"{type(self).__name__} leaves no layer out")


class FusedBody(Body):
    """A body of ours below the model's own head. It takes chains only."""

    def run(self, call: ForwardPass) -> PassOutput:
        return self._with_logits(call, self.hidden(call))

    def _with_logits(self, call: ForwardPass, hidden: Tensor) -> PassOutput:
        assert call.trees is None, "trees are the modules' affair"
        if not call.wants_logits:
            return PassOutput(hidden, None)
        return PassOutput(hidden, self.head(hidden if call.keep is None else hidden[call.keep]))

    @abstractmethod
    def hidden(self, call: ForwardPass) -> Tensor:
        """Last hidden states [N, H], the final norm included."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """[M, H] -> logits [M, V]."""
