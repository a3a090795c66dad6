"""What a training run was asked for, checked before anything large is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from forerun.errors import InvalidArgument

if TYPE_CHECKING:
    from forerun.math.losses import Mixture

KINDS = ("feature", "parallel", "causal")
# Changing these between a kill and a resume changes no weight.
FREE = frozenset({"log_every", "evaluate_every", "checkpoint_every", "checkpoint_minutes", "chunk"})


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
        for name in ("num_layers", "heads", "unroll", "rollout_length", "log_every", "evaluate_every", "chunk"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("steps", "epochs", "max_minutes", "draft_vocabulary", "checkpoint_every"):
            value = getattr(self, name)
            _check(value is None or value > 0, name, value, "must be above 0")
        for name in ("learning_rate", "depth_decay", "clip", "checkpoint_minutes"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "must be above 0")
        for name in ("rollout_share", "warm_up"):
            _check(0 <= getattr(self, name) < 1, name, getattr(self, name), "must be in [0, 1)")
        _check(self.max_length >= 4, "max_length", self.max_length, "must be at least 4")
        _check(self.batch_tokens >= self.max_length, "batch_tokens", self.batch_tokens,
               f"must hold one sequence of max_length={self.max_length}")  # fmt: skip
        for name in ("hold_out", "seed"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "must be at least 0")
        _ = self.mixture  # a loss that cannot be read is refused now

    def _check_shape(self) -> None:
        causal = self.kind == "causal"
        given = [name for name in ("layers", "start", "config") if getattr(self, name) is not None]
        _check(len(given) <= 1, " and ".join(given), "given", "cannot be used together: choose where to begin from")
        _check(causal or self.share, "share", self.share, f"cannot be off: a {self.kind} draft reads the target's head")
        _check(causal or self.config is None, "config", self.config, "is for causal drafts; use num_layers or layers")
        own = not self.share or self.config is not None
        _check(not own or self.draft_vocabulary is None, "draft_vocabulary", self.draft_vocabulary,
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
