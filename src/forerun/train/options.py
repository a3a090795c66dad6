"""What a training run was asked for, checked before anything large is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from forerun.errors import InvalidArgument
from forerun.math.losses import Mixture, parse_loss

KINDS = ("feature", "parallel", "causal")
# Changing these between a kill and a resume changes no weight.
FREE = frozenset({"log_every", "evaluate_every", "checkpoint_every", "checkpoint_minutes", "chunk"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Everything that decides which weights come out. Same options, same data, same seed: same weights on a CPU."""

    kind: str = "feature"
    loss: str = "tv+kl"
    """A mixture of tv, kl, reverse_kl, smooth_l1 and topk003, such as tv+0.1*kl."""
    layers: tuple[int, ...] | None = None
    """Layers of the target to begin from; None begins from random weights."""
    num_layers: int = 1
    """Layers of a draft that begins from random weights."""
    start: str | None = None
    """A drafter folder to begin from."""
    config: str | None = None
    """A transformers configuration file for a causal draft of another shape; it shares nothing with the target."""
    share: bool = True
    """Whether a causal draft uses the target's embedding and head; otherwise it gets copies that are trained."""
    draft_vocabulary: int | None = None
    """Keep only that many tokens, those most used in the data."""
    heads: int = 4
    """Tokens a parallel draft gives at once."""
    unroll: int = 4
    """Passes of a feature head: pass s reads what pass s - 1 made, as the s-th drafted token will."""
    depth_decay: float = 0.8
    """Weight of each pass or head over that of the one before."""
    rollout_share: float = 0.0
    """Share of the sequences whose continuation is drafted by the draft as it is at that step."""
    rollout_length: int = 8
    batch_tokens: int = 16384
    max_length: int = 512
    steps: int | None = None
    epochs: float | None = None
    max_minutes: float | None = None
    learning_rate: float = 6e-4
    warm_up: float = 0.03
    """Share of the run in which the learning rate rises; after it, it falls along a cosine."""
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    hold_out: int = 64
    """Sequences kept aside to measure acceptance on."""
    evaluate_every: int = 500
    checkpoint_every: int | None = None
    checkpoint_minutes: float = 5.0
    log_every: int = 20
    chunk: int = 4096
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        _check(self.kind in KINDS, "kind", self.kind, f"must be one of {', '.join(KINDS)}")
        parse_loss(self.loss)
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
        _check(self.hold_out >= 0, "hold_out", self.hold_out, "must be at least 0")

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
