"""The nouns that travel between the layers. Read this file and you know the system.

Shapes: B rows in the batch, K the longest draft of the round, V the vocabulary, N positions scored in the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.config import Kernels, SamplingParams

SMALL_TOP_K = 128  # so few tokens, and those that tie with them, need no search of the vocabulary


@dataclass(frozen=True, slots=True)
class LawParams:
    """Sampling parameters of several rows as tensors, with host-side flags so that unused steps cost nothing."""

    temperature: Tensor  # [B] float64, 0 is greedy
    top_k: Tensor  # [B] int64, 0 is off
    top_p: Tensor  # [B] float64, 1 is off
    min_p: Tensor  # [B] float64, 0 is off
    any_greedy: bool
    all_greedy: bool
    any_scaled: bool  # some sampled row has a temperature other than 1
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    all_small_top_k: bool = False  # every sampled row has a top-k of at most SMALL_TOP_K

    @classmethod
    def stack(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> LawParams:
        """One row per entry of `params`."""
        sampled = [p for p in params if not p.is_greedy]
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
            top_k=torch.tensor([p.top_k or 0 for p in params], dtype=torch.int64, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
            any_greedy=len(sampled) < len(params),
            all_greedy=not sampled,
            any_scaled=any(p.temperature != 1 for p in sampled),
            any_top_k=any(p.top_k for p in sampled),
            any_top_p=any(p.top_p < 1 for p in sampled),
            any_min_p=any(p.min_p > 0 for p in sampled),
            all_small_top_k=all(0 < (p.top_k or 0) <= SMALL_TOP_K for p in sampled),
        )

    def select(self, rows: Tensor) -> LawParams:
        """The parameters of `rows` ([M] int64, repeats allowed), in that order."""
        return LawParams(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.any_greedy,
            self.all_greedy,
            self.any_scaled,
            self.any_top_k,
            self.any_top_p,
            self.any_min_p,
            self.all_small_top_k,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What the encoder of an encoder-decoder model reads for one row: token ids, features, or states made of them.

    Equal texts are equal sources, so that rows share what was made of them; anything else is equal to itself alone.
    """

    ids: tuple[int, ...] = ()  # without padding; beside `states` or `features` only for those who look up words in it
    features: Tensor | None = None  # what the encoder takes for one row of its batch, such as [mels, frames]
    mask: Tensor | None = None  # [frames] of features that come padded, where the encoder asks for one
    states: Tensor | None = None  # [S, H] what an encoder has made of it already
    worth: int | None = None  # states before what is only padding: drafts that borrow them read no further

    @property
    def is_text(self) -> bool:
        return self.features is None and self.states is None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Source) and self.is_text and other.is_text and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids) if self.is_text else id(self)


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Which rows one forward pass touches: new tokens are packed one row after the other, keys live in the cache."""

    slots: tuple[int, ...]  # where each row lives in the cache's tensors
    past: tuple[int, ...]  # keys each row had before this pass
    counts: tuple[int, ...]  # new tokens of each row, at least 1
    # The block that each row begins in, where its blocks follow one another in memory; None where they do not. Empty
    # where nobody has looked.
    first_blocks: tuple[int | None, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def lengths(self) -> list[int]:
        """Keys of each row, the new ones included."""
        return [past + count for past, count in zip(self.past, self.counts, strict=True)]

    @property
    def longest(self) -> int:
        """Keys of the longest row, the new ones included."""
        return max(self.lengths)


@runtime_checkable
class Law(Protocol):
    """A probability law over the vocabulary for every position of every row: the target's p or the draft's q."""

    def of(self, tokens: Tensor) -> Tensor:
        """Probability of one token a position: [B, K] int64 -> [B, K]. Positions past a row's length are garbage."""
        ...

    def at(self, position: Tensor) -> Tensor:
        """The whole law at one position a row: [B] int64 -> [B, V]."""
        ...


class Siblings(StrEnum):
    """How the candidates for one position of a tree came about, which decides how they are judged."""

    TOP = "top"  # a set that follows from the history: kept where the target's own draw is in it
    SAMPLED = "sampled"  # drawn one after the other without replacement: recursive rejection


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How the tokens of a draft hang together where they are no chain. Tokens with one parent are siblings.

    Whether a sibling is there may depend on everything but its own token and what was drawn after it; the first of
    them comes first.
    """

    parents: Tensor  # [B, M] int64: the token each one follows, always an earlier one; -1 is the row's last token
    ways: tuple[Siblings, ...]  # of each row
    depth: int | None = None  # no token lies deeper, where the host knows that
    width: int | None = None  # nor has more children
    # [B] bool: rows whose siblings are TOP, where the device alone knows that; `ways` then says what the others are.
    is_top: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes, and the law it really drew from (contract 1 of docs/architecture.md).

    With a `tree`, `law` is what each token was drawn from before its earlier siblings were taken out of it.
    """

    tokens: Tensor  # [B, K] int64, garbage past `lengths`
    lengths: Tensor  # [B] int64, 0 where the drafter had nothing to say
    law: Law
    # Deterministic drafts (point masses) are functions of the history, so a policy may look at them and cut them short
    # without bending the law. A sampled draft may not be cut after it was seen.
    deterministic: bool = False
    # A small integer per row that says how good the evidence behind the draft is (0 weakest), a function of the history
    # alone; policies keep acceptance statistics per class. Prompt lookup uses the length of the match.
    evidence: tuple[int, ...] | None = None
    # Which rows are deterministic, where a chain has drafts of both kinds in one round; None: as `deterministic` says.
    cuttable: tuple[bool, ...] | None = None
    tree: TreeShape | None = None  # None: each token follows the one before

    @property
    def width(self) -> int:
        """The longest draft of the round, K."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Keys:
    """What counts the random numbers of one round: nothing is consumed, so nothing depends on the neighbours."""

    seed: Tensor  # [B] int64
    request_id: Tensor  # [B] int64
    round: Tensor  # [B] int64, the row's own
    position: Tensor  # [B] int64, index among the row's new tokens of the first one this round may emit


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decided: how many draft tokens survive, and the token that follows them."""

    num_accepted: Tensor  # [B] int64
    next_token: Tensor  # [B] int64, a correction or the bonus
    finite: Tensor  # [B] bool, False where a round comes to logits with NaN or +inf, or with nothing but -inf
    # [B, K] int64, emitted in place of the draft's own; None where what is accepted is the draft. Only for lossy rules.
    tokens: Tensor | None = None
    # [B, K + 1] float64, log-probabilities of what is emitted under the target's law, 0 past it; None from a reference
    logprobs: Tensor | None = None
    path: Tensor | None = None  # [B, D] int64: of a tree, the tokens that survive; -1 past `num_accepted`


class Rule(StrEnum):
    """How drafts are verified. All of these are lossless; lossy rules are values of their own (`forerun.rules`)."""

    TOKEN = "token"  # modified rejection sampling, Leviathan et al. and Chen et al.
    BLOCK = "block"  # block verification, Sun et al. 2024: never accepts less
    COUPLED = "coupled"  # target noise keyed by position alone: same tokens for any drafter, length and batch


class Origin(StrEnum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"  # one more after a whole draft
    PLAIN = "plain"  # a round without a draft


# (logits [n, V] of consecutive positions of one row, the tokens drafted in this round, how many of them come before the
# first position) -> adjusted logits [n, V]. Position i sees the row's history and the first `first + i` drafted tokens.
Adjuster = Callable[[Tensor, Sequence[int], int], Tensor]


@dataclass(frozen=True, slots=True)
class DraftContext:
    """All a drafter may look at. A new kind of drafter adds a field here, not a parameter to everyone."""

    rows: tuple[int, ...]  # the permanent place of each batch entry, the key for state of your own
    histories: tuple[Sequence[int], ...]  # prompt and everything emitted so far; read only
    max_lengths: tuple[int, ...]  # draft at most that many tokens for each row; 0 means none
    params: LawParams  # each row's temperature, top-k, top-p, min-p
    # [B, K] float64 in [0, 1): draw token i of row b with uniforms[b, i] and nothing else. A drafter that needs more of
    # them than its longest draft has tokens says so: `num_draws(longest) -> int`.
    uniforms: Tensor
    adjusters: tuple[Adjuster | None, ...]  # penalties, bias and processors of each row, None where there are none
    vocab_size: int  # the target's
    device: torch.device
    # Room for a deterministic draft, which the policy may cut once it has seen it; None: as in `max_lengths`.
    copy_lengths: tuple[int, ...] | None = None
    # Where a drafter both copies and draws: how much to keep of each row's copy. Rows left without one may be drawn.
    keep_copies: Callable[[Draft], tuple[int, ...]] | None = None
    kernels: Kernels | None = None  # whether they may draw, as the decoder chose; None: as $FORERUN_KERNELS says


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a draft-length policy may look at before a round."""

    rows: tuple[int, ...]
    # Of each row a number that no other request of the engine has or had, and that it keeps: not `Request.request_id`,
    # which requests may have in common.
    request_ids: tuple[int, ...]
    max_lengths: tuple[int, ...]  # room left in each row's budget and context: the answer may not exceed it
    # Whether the drafter both copies (deterministic drafts, as good as free) and draws (each token takes time).
    is_mixed: bool = False
    # Lengths that rounds of these rows are recorded for: every draft between two of them takes as long as the longer,
    # and so do the others beside it. Empty where each drafted token has its own price.
    sizes: tuple[int, ...] = ()
    round_number: int = 0  # of the round that is asked for; its outcome carries the same
    # Tokens that each row will still gain, where that is certain of all rows and none waits for their places: the last
    # of them to end then ends the call. Empty where texts may end at any token, or others follow.
    tokens_left: tuple[int, ...] = ()
    # Tokens of each row that the drafter would have to take in before it could draw a draft. Empty where none are.
    unread: tuple[int, ...] = ()
    # Whether drawn drafts cost so much that only lengths by measured times are sure to pay.
    needs_clock: bool = False


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a policy learns after a round."""

    rows: tuple[int, ...]
    request_ids: tuple[int, ...]  # as in the view
    drafted: tuple[int, ...]  # tokens verified for each row; of a tree, its depth
    accepted: tuple[int, ...]
    evidence: tuple[int, ...] | None
    scored: int  # positions the target scored, all rows together
    draft_seconds: float
    score_seconds: float
    verify_seconds: float
    ended: tuple[bool, ...]  # the row emitted a stop token or ran out of budget in this round
    copied: tuple[bool, ...] | None = None  # rows whose draft was deterministic, where there were both kinds
    nodes: tuple[int, ...] | None = None  # tokens verified for each row where drafts were trees, else as `drafted`
    steps: int | None = None  # of a recorded round: the draft length that all its rows were run with
    round_number: int = 0  # as in the view it was asked with
    # Of rows for which a deterministic draft was found, verified or not: its evidence, and whether it began with the
    # token that the row gained. None for other rows.
    guessed: tuple[tuple[int, bool] | None, ...] | None = None
    # How much of such drafts the policy wanted: in vain where a round was sent off before they were found.
    wanted: tuple[int, ...] | None = None
    idle_seconds: float | None = None  # how long the device had waited for the host before a recorded round
