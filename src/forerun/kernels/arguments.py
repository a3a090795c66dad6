"""Arguments of kernels that belong together, one tuple each.

Triton takes a NamedTuple of tensors and numbers as one argument and specialises every field as if it were passed by
itself. A NamedTuple that holds only what is known when a kernel is compiled is one `tl.constexpr` argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class LogitRows(NamedTuple):
    """Where the logits of the target or of the draft lie: position i of batch row b in row `index[b, i]`.

    What changes from round to round is passed beside the tuple and put into it by the kernel (`law.counted`): Triton
    would compile a variant for every kind of number.
    """

    logits: Any  # [N, V]
    index: Any  # [B, P] int64
    temperature: Any  # [B]
    stride: Any  # of `logits`
    vocab: Any
    index_stride: Any = 0
    positions: Any = 0  # P


class Truncation(NamedTuple):
    """Parameters of all batch rows, [B] each; in a kernel also those of one row."""

    top_k: Any
    top_p: Any
    min_p: Any


class Summaries(NamedTuple):
    """Of all rows that were asked for: the target's [B, P] first, then the draft's [B, K]."""

    peak: Tensor  # [R, C] float32, of chunks; C = 1 where they are merged
    mass: Tensor  # [R, C] float64, relative to the peak, of what is kept
    threshold: Tensor  # [R] float32, after warping; only meaningful where something is cut
    best: Tensor  # [R, C] int32, only where some row is greedy

    @property
    def chunks(self) -> int:
        return self.peak.shape[1]


class DraftTensors(NamedTuple):
    """A draft's tokens, and its law where that is not only logits; tensors its kind of law lacks are never read."""

    tokens: Any  # [B, K] int64
    tokens_stride: Any
    lengths: Any  # [B] int64
    kept: Any  # [N, 5] float32, see math.laws.KEPT
    places: Any  # [V] int32
    points: Any  # [B, K] int64
    points_stride: Any
    is_point: Any  # [B] bool
    sparse_ids: Any  # [B, P, S] int64
    sparse_probs: Any  # [B, P, S] float32
    num_sparse: Any  # S
    sparse_positions: Any  # P


class KeyRows(NamedTuple):
    """What the random numbers of each batch row are keyed by, [B] int64 each."""

    seed: Any
    request_id: Any
    round: Any
    uniforms: Any  # [B] float64, the final draw's in place of the keys', where `Case.GIVEN`


class Workspace(NamedTuple):
    """What verification writes."""

    out: Any  # [B, 3 + P] int64: kept tokens, next token, finite, log-probabilities of what is emitted (float64 bits)
    split_peaks: Any  # [B, S * LOOPS] float32, the sigmoid rule's
    sums: Any  # [B, P or 1, T] float64, of tiles
    counters: Any  # [B] int32, how many programs of a row are done: 0 before and after
    num_tiles: Any  # T
    num_splits: Any  # S, programs of a row


class Case(NamedTuple):
    """What is known of a verification when its kernels are compiled."""

    CHUNKS: int  # a power of two, no less than the chunks of a row's summaries
    POSITIONS: int  # a power of two, no less than the positions of a row
    ALL: int  # a power of two, no less than all tiles
    TILES: int  # that a program takes at once
    LOOPS: int  # how often it does
    KIND: int  # of the draft's law: `acceptance.LOGITS` ...
    RULE: int  # `acceptance.TOKEN` ...
    KEPT: bool  # the drafter kept its rows' summaries
    REDUCED: bool  # the draft's vocabulary is a part of the target's
    SCALED: bool  # some row has a temperature
    CUT: bool  # some row is truncated
    GREEDY: bool  # some row is greedy
    SUMMED: bool  # there are summaries
    GIVEN: bool  # the final draw's uniforms are given, and what verification needs of the row is kept
    LAST: bool  # the last program of a row to finish draws
