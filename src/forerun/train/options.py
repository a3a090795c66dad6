"""What writing data, training a draft and evaluating it were asked for, checked before anything large is loaded."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from forerun.arguments import above, at_least, finite
from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from forerun.math.losses import Mixture

KINDS = ("feature", "parallel", "causal")
# Changing these between a kill and a resume changes no weight.
FREE = frozenset({"log_every", "evaluate_every", "checkpoint_every", "checkpoint_minutes", "chunk"})
SHORTEST = 8  # completions of fewer tokens teach nothing
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingSettings:
    """How texts are written."""

    max_new_tokens: int = 256
    """At most so many a text."""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """The prompts take them in turn."""
    top_p: float = 1.0
    """Of the sampled texts."""
    seed: int = 0
    """Another seed draws other texts."""
    batch_size: int = 512
    """Texts written at once."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""

    def __post_init__(self) -> None:
        at_least(self, 1, "batch_size", "max_new_tokens")
        at_least(self, 0, "temperatures", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Which prompts the target answers, what is kept of its texts, and when it stops."""

    paragraphs: bool = False
    """Text files: one prompt a paragraph."""
    strict: bool = False
    """A bad row is an error instead of being skipped."""
    chat: bool | None = None
    """Give prompts as a user's turn, or as they are."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out: one of them makes room for all."""
    slice: str = "0/1"
    """Take every N-th prompt from the I-th on; N processes with one folder share the work."""
    samples_per_prompt: int = 1
    """Texts for each prompt, of which at most one is greedy: all greedy ones are the same."""
    top_k: int = 0
    """Keep the target's K most likely tokens at each position, with their log-probabilities (6 K bytes each)."""
    tokens: int | None = None
    """Stop after N tokens, prompts and all slices included."""
    max_minutes: float | None = None
    """Stop after M minutes, loading not included."""
    disk_budget: str = "2GiB"
    """Write at most that much, all slices together."""
    shard_tokens: int = 1_000_000
    """Tokens of one file: what a killed run loses at most."""

    def __post_init__(self) -> None:
        at_least(self, 1, "max_prompt_tokens", "samples_per_prompt", "shard_tokens")
        above(self, 0, "tokens", "max_minutes")
        at_least(self, 0, "top_k")
        _ = self.slice_of_prompts, self.disk_bytes  # texts that cannot be read are refused now

    @property
    def slice_of_prompts(self) -> tuple[int, int]:
        """I and N."""
        match = re.fullmatch(r"(\d+)/(\d+)", self.slice)
        index, count = (int(match[1]), int(match[2])) if match else (0, 0)
        _check(index < count, "slice", self.slice, "is I/N with I from 0 to N - 1, such as 0/4")
        return index, count

    @property
    def disk_bytes(self) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", self.disk_budget.strip().lower())
        if match is None:
            raise InvalidArgument(f"disk_budget={self.disk_budget!r}: write a size such as 500MB or 2GiB")
        return int(float(match[1]) * UNITS[match[2] or ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramOptions:
    """What is counted of a text, and kept."""

    order: int = 3
    """Longest n-gram."""
    min_count: int = 2
    """Leave out what was seen less often: most n-grams of a text occur once and never again."""
    max_continuations: int = 8
    """Kept for each context."""

    def __post_init__(self) -> None:
        at_least(self, 1, "order", "min_count", "max_continuations")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """How held-out prompts are decoded with a trained draft."""

    draft_length: int = 4
    """Tokens of each draft."""
    max_new_tokens: int = 128
    """Of each answer."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Each is measured by itself."""
    limit: int | None = None
    """At most N prompts of each category."""
    batch_size: int = 16
    """Prompts at once."""
    timed: int = 3
    """Prompts decoded alone to measure what a draft step costs; 0 for none."""
    lookup: bool = False
    """Let prompt lookup speak first, as in the default drafter."""
    seed: int = 0
    """Of the sampled answers."""

    def __post_init__(self) -> None:
        at_least(self, 1, "draft_length", "max_new_tokens", "batch_size", "limit")
        at_least(self, 0, "timed", "seed", "temperatures")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Everything that decides which weights come out. Same options, same data, same seed: same weights on a CPU."""

    kind: str = "feature"
    """'feature' reads the target's last hidden state and drafts token by token; 'parallel' reads it once and gives
    several tokens at once; 'causal' is an ordinary small model."""
    loss: str = "tv+kl"
    """'tv' is the chance of a rejection itself; 'kl', 'reverse_kl'; 'topk003' regresses hidden states with a tenth of
    kl; mixtures such as tv+0.1*kl."""
    layers: tuple[int, ...] | None = None
    """Begin from copies of these layers of the target, counted from 0."""
    num_layers: int = 1
    """Layers of a draft that begins from random weights; as wide as the target's."""
    start: str | None = None
    """Begin from an existing draft."""
    config: str | None = None
    """Causal only: a transformers config.json of a shape of your own; it shares nothing with the target."""
    share: bool = True
    """Causal only: use the target's embedding and head, or train copies of them."""
    draft_vocabulary: int | None = None
    """Say only the N tokens the target uses most; exact all the same, and the head is most of a draft's cost."""
    heads: int = 4
    """Parallel only: tokens at once."""
    unroll: int = 4
    """Feature only: pass s learns from what pass s - 1 made, as the s-th drafted token must."""
    depth_decay: float = 0.8
    """Weight of a pass or head over the one before."""
    rollout_share: float = 0.0
    """Share of the sequences that the draft itself continues from a random place; the target scores them."""
    rollout_length: int = 8
    """For how many tokens."""
    batch_tokens: int = 16384
    """Tokens of a step, padding included."""
    max_length: int = 512
    """Longer sequences lose their beginning."""
    steps: int | None = None
    """Stop after N."""
    epochs: float | None = None
    """Stop after N times the data."""
    max_minutes: float | None = None
    """Stop after M minutes of training; the cosine ends then."""
    learning_rate: float = 6e-4
    """The highest; warm-up before, cosine after."""
    warm_up: float = 0.03
    """Share of the run in which the rate rises."""
    weight_decay: float = 0.01
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Same seed, same weights (CPU)."""
    hold_out: int = 64
    """Sequences that are not trained on: expected acceptance is measured on them."""
    evaluate_every: int = 500
    """Steps between looks at the held-out sequences."""
    checkpoint_every: int | None = None
    """Steps between checkpoints."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints."""
    log_every: int = 20
    """Steps between lines of train.jsonl."""
    chunk: int = 4096
    """Positions whose logits are in memory at one time."""

    def __post_init__(self) -> None:
        _check(self.kind in KINDS, "kind", self.kind, f"must be one of {', '.join(KINDS)}")
        self._check_shape()
        at_least(self, 1, "num_layers", "heads", "unroll", "rollout_length", "log_every", "evaluate_every", "chunk")
        above(self, 0, "steps", "epochs", "max_minutes", "draft_vocabulary", "checkpoint_every")
        above(self, 0, "learning_rate", "depth_decay", "clip", "checkpoint_minutes")
        for name in ("rollout_share", "warm_up"):
            _check(0 <= getattr(self, name) < 1, name, getattr(self, name), "must be in [0, 1)")
        at_least(self, 4, "max_length")
        at_least(self, 0, "hold_out", "seed", "weight_decay")
        finite(self, "epochs", "max_minutes", "learning_rate", "weight_decay", "depth_decay")
        _check(self.batch_tokens >= self.max_length, "batch_tokens", self.batch_tokens,
               f"must hold one sequence of max_length={self.max_length}")  # fmt: skip
        _ = self.mixture  # a loss that cannot be read is refused now

    def _check_shape(self) -> None:
        causal = self.kind == "causal"
        starts = [name for name in ("layers", "start", "config") if getattr(self, name) is not None]
        _check(len(starts) <= 1, " and ".join(starts), "given", "cannot be used together: choose where to begin from")
        _check(causal or self.share, "share", self.share, f"cannot be off: a {self.kind} draft reads the target's head")
        _check(causal or self.config is None, "config", self.config, "is for causal drafts; use num_layers or layers")
        has_own_head = not self.share or self.config is not None
        _check(not has_own_head or self.draft_vocabulary is None, "draft_vocabulary", self.draft_vocabulary,
               "needs the target's head: a draft with a head of its own keeps the whole vocabulary")  # fmt: skip
        _check(self.kind != "parallel" or not self.rollout_share, "rollout_share", self.rollout_share,
               "must be 0: parallel heads do not read drafted tokens")  # fmt: skip

    @property
    def mixture(self) -> Mixture:
        from forerun.math.losses import parse_loss  # needs torch, which --help does not wait for

        return parse_loss(self.loss)

    @property
    def depth(self) -> int:
        """Estimates the draft makes of every position: passes, heads, or one."""
        return {"feature": self.unroll, "parallel": self.heads, "causal": 1}[self.kind]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differing(self, other: dict[str, Any]) -> list[str]:
        """Options that are not as in a stored run, and matter."""
        mine = self.as_dict()
        names = [field.name for field in fields(self) if field.name not in FREE]
        return [name for name in names if _plain(mine[name]) != _plain(other.get(name))]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _check(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise InvalidArgument(f"{name}={value!r}: {name} {rule}")
