"""What splitting a target over devices should give against several whole copies of it: formulas, no measurement.

A pass reads its share of the weights and of the rows' keys, computes its share of the products, and adds partial sums
up over the devices twice a layer. docs/devices.md derives the formulas and says what they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.arguments import above, at_least, finite
from forerun.errors import InvalidArgument

RESERVED = 0.1  # of a device's memory, for activations and whatever else is there


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """Devices that a plan is made for, and what is decoded on them. The figures of the device are an H200's."""

    devices: int = 1
    """Predict, without measuring anything, how the target should be laid out over N devices: split over some of them,
    with as many copies as there is room for. A prediction by formulas (docs/devices.md)."""
    memory: float = 141.0
    """Gigabytes of one device."""
    bandwidth: float = 3900.0
    """Gigabytes a second that a device reads its weights with."""
    tflops: float = 700.0
    """Million million operations a second of a device, in the target's type."""
    link_bandwidth: float = 400.0
    """Gigabytes a second between devices, each way."""
    link_latency: float = 10.0
    """Microseconds that adding up a small tensor over devices takes."""
    alpha: float = 0.62
    """The chance that a drafted token is kept where it is reached; `forerun plan` without --devices measures it."""
    draft_length: int = 4
    """Tokens drafted in a round; 0 is plain decoding."""
    draft_cost: float = 0.05
    """The time of one draft step over a plain step of the whole target on one device."""
    rows: int = 32
    """Sequences at a time on all devices together, where there is room for their keys."""
    context: int = 1024
    """Tokens of a sequence, prompt included."""
    rate: float | None = None
    """Simulate so many requests a second that arrive at random, and predict how long they wait."""

    def __post_init__(self) -> None:
        at_least(self, 1, "devices", "rows", "context")
        at_least(self, 0, "draft_length", "draft_cost", "link_latency")
        above(self, 0, "memory", "bandwidth", "tflops", "link_bandwidth")
        above(self, 0, "rate")
        finite(self, "memory", "bandwidth", "tflops", "link_bandwidth", "link_latency", "draft_cost", "rate")
        if not 0 <= self.alpha <= 1:
            raise InvalidArgument(f"alpha={self.alpha}: a chance is from 0 to 1")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model its cost depends on."""

    weights: int  # numbers that tokens are multiplied by; the embedding, of which each meets one row, is left out
    stored: int  # numbers that lie in memory
    layers: int
    width: int
    heads: int
    key_heads: int
    key_bytes: int  # keys and values of one token
    vocabulary: int
    bytes_each: int  # of a number
    expert_weights: int = 0  # those of `weights` that lie in experts
    expert_share: float = 1.0  # of them that one token is sent to
    keeps_latents: bool = False  # which all heads share: every device of a copy holds them

    @classmethod
    def of(cls, model: Any) -> ModelShape:
        """Of a model of transformers, which may be on the meta device."""
        from forerun.loading.routers import EXPERTS, share_of_experts  # bring torch, which help can do without
        from forerun.models.cache_size import bytes_per_token, keeps_latents, key_heads

        config = model.config.get_text_config(decoder=True)
        stored = sum(weight.numel() for weight in model.parameters())
        heads = config.num_attention_heads
        embedding = model.get_input_embeddings().weight
        is_tied = model.get_output_embeddings().weight is embedding
        return cls(
            weights=stored - (0 if is_tied else embedding.numel()),
            stored=stored,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads=heads,
            key_heads=key_heads(config) or heads,
            key_bytes=bytes_per_token(model),
            vocabulary=config.vocab_size,
            bytes_each=model.dtype.itemsize,
            expert_weights=sum(weight.numel() for weight in model.parameters() if weight.ndim == EXPERTS),
            expert_share=share_of_experts(model),
            keeps_latents=keeps_latents(model),
        )

    def weights_met(self, tokens: float = 1.0) -> float:
        """By so many tokens together, each of which is sent to experts of its own."""
        unmet: float = (1 - self.expert_share) ** tokens
        return self.weights - self.expert_weights * unmet

    def key_bytes_each(self, split: int) -> float:
        """Of one token, on each of so many devices."""
        return self.key_bytes / (1 if self.keeps_latents else split)


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """A target split over `split` devices, with `copies` of that."""

    split: int
    copies: int
    weight_bytes: float  # on each device
    key_tokens: int  # of all sequences of one copy that there is room for
    rows: int  # sequences at a time on one copy
    collective_seconds: float  # of a round
    round_seconds: float
    row_tokens_per_second: float
    tokens_per_second: float  # of all copies


def layouts(shape: ModelShape, settings: DeviceSettings) -> list[DeviceLayout]:
    """All that fit: copies of 1, 2, 4 ... devices whose number divides the heads. None fit: an error that says why."""
    tried = (_layout(shape, settings, split) for split in splits(shape, settings.devices))
    fitting = [layout for layout in tried if layout is not None]
    if not fitting:
        _refuse_keys(shape, settings)
        needed = shape.stored * shape.bytes_each / 1e9 / (settings.memory * (1 - RESERVED))
        raise InvalidArgument(
            f"devices={settings.devices}: {shape.stored * shape.bytes_each / 1e9:.0f} GB of weights need at least "
            f"{int(needed) + 1} devices of {settings.memory:g} GB whose number divides {shape.key_heads} heads of keys"
        )
    return fitting


def _refuse_keys(shape: ModelShape, settings: DeviceSettings) -> None:
    """Raise where weights alone would fit."""
    split = splits(shape, settings.devices)[-1]
    left = settings.memory * (1 - RESERVED) - shape.stored * shape.bytes_each / split / 1e9
    if left > 0:
        needed = shape.key_bytes_each(split) * settings.context / 1e9
        raise InvalidArgument(
            f"context={settings.context}: keys and values of one sequence take {needed:.3g} GB on each of {split} "
            f"devices, and the weights leave {left:.3g}; use a shorter context, or more devices or memory"
        )


def splits(shape: ModelShape, devices: int) -> list[int]:
    """Numbers of devices that one copy can be split over."""
    return [n for n in range(1, devices + 1) if shape.heads % n == 0 and shape.key_heads % n == 0]


def _layout(shape: ModelShape, settings: DeviceSettings, split: int) -> DeviceLayout | None:
    from forerun.math.theory import expected_tokens  # brings torch, which the command's help can do without

    copies = settings.devices // split
    weight_bytes = shape.stored * shape.bytes_each / split
    room = settings.memory * 1e9 * (1 - RESERVED) - weight_bytes
    key_tokens = int(room / shape.key_bytes_each(split)) if room > 0 else 0
    rows = min(-(-settings.rows // copies), key_tokens // settings.context)
    if rows < 1:
        return None
    seconds = round_seconds(shape, settings, split, rows)
    gained = expected_tokens(settings.alpha, settings.draft_length)
    return DeviceLayout(
        split,
        copies,
        weight_bytes,
        key_tokens,
        rows,
        collective_seconds(shape, settings, split, rows * (settings.draft_length + 1)),
        seconds,
        gained / seconds,
        gained / seconds * min(rows * copies, settings.rows),  # there are no more to fill the last copies with
    )


def round_seconds(shape: ModelShape, settings: DeviceSettings, split: int, rows: float) -> float:
    """A draft on one device, then a pass over all rows' drafts on all devices of a copy."""
    draft = settings.draft_length * settings.draft_cost * pass_seconds(shape, settings, 1, rows, rows)
    return draft + pass_seconds(shape, settings, split, rows, rows * (settings.draft_length + 1))


def pass_seconds(shape: ModelShape, settings: DeviceSettings, split: int, rows: float, tokens: float) -> float:
    """Reading or computing, whichever takes longer, and adding up over the devices."""
    read = shape.weights_met(tokens) * shape.bytes_each / split + rows * settings.context * shape.key_bytes_each(split)
    reading = read / (settings.bandwidth * 1e9)
    computing = 2 * shape.weights_met() * tokens / split / (settings.tflops * 1e12)
    return max(reading, computing) + collective_seconds(shape, settings, split, tokens)


def collective_seconds(shape: ModelShape, settings: DeviceSettings, split: int, tokens: float) -> float:
    """Two sums a layer, one of the embedding, and the logits' parts brought together: a ring each."""
    if split == 1:
        return 0.0
    sums = 2 * shape.layers + 1
    summed = 2 * (split - 1) / split * tokens * shape.width * shape.bytes_each
    gathered = (split - 1) / split * tokens * shape.vocabulary * shape.bytes_each
    latency = (sums + 1) * settings.link_latency * 1e-6
    return latency + (sums * summed + gathered) / (settings.link_bandwidth * 1e9)
