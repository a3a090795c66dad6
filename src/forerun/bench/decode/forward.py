"""How near the forward passes of a pair come to reading their weights and caches once at the speed of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun import ops
from forerun.bench.hardware import work_of
from forerun.cache.base import ranges
from forerun.cache.paged import PagedCache
from forerun.config import SamplingParams
from forerun.errors import ForerunError
from forerun.math.ragged_attention import Reach
from forerun.measure.timing import linear_bandwidth, need_gpu, replay_times
from forerun.models.bodies import gpu
from forerun.models.bodies.gpu import GpuBody
from forerun.types import LawParams, RaggedRows

CAPACITY, FILLED = 1024, 512  # slots of a row, and how many hold a key
SHAPES = (("target", 1, 1), ("target", 1, 8), ("target", 8, 8), ("draft", 1, 1), ("draft", 8, 1))


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass, the head included; of a draft its sampling as well."""

    model: str
    rows: int
    positions: int  # of each row
    num_bytes: int  # weights and live keys and values
    seconds: tuple[float, ...]  # one entry a stretch of replays

    @property
    def name(self) -> str:
        return f"{self.model} {self.rows}x{self.positions}"

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Forward:
    """The passes of a pair, and the bandwidth they are held against: of one row through a large linear layer."""

    ceiling: float  # bytes a second
    passes: tuple[Pass, ...]

    def share(self, one: Pass) -> float:
        """Of the ceiling."""
        return one.num_bytes / one.median / self.ceiling


def measure(target: PreTrainedModel, draft: PreTrainedModel, repeats: int = 7) -> Forward:
    """All passes, captured in CUDA graphs and replayed."""
    ceiling = linear_bandwidth(need_gpu(), repeats)
    return Forward(ceiling, tuple(_passes({"target": target, "draft": draft}, repeats)))


def _passes(models: dict[str, PreTrainedModel], repeats: int) -> Iterator[Pass]:
    for name, rows, positions in SHAPES:
        model = models[name]
        if reason := gpu.why_not(model):
            raise ForerunError(f"the {name} cannot be run by the fused forward pass: {reason}")
        step = stepper(model, rows, positions, samples=name == "draft")
        seconds = replay_times([step], repeats)
        work = work_of(model)
        yield Pass(name, rows, positions, work.weight_bytes + rows * FILLED * work.bytes_per_key, seconds)


@torch.inference_mode()
def stepper(model: PreTrainedModel, rows: int, positions: int, samples: bool = False) -> Callable[[], Tensor]:
    """A pass over `positions` new tokens of each of `rows` rows with `FILLED` keys, again and again the same."""
    body, device = GpuBody(model), model.device
    cache = PagedCache(rows * CAPACITY, device)
    for row in range(rows):
        cache.admit(row)
    cache.extend(range(rows), [CAPACITY] * rows)
    for row in range(rows):
        cache.rewind(row, FILLED - positions)
    places = cache.extend(range(rows), [positions] * rows)
    tokens = torch.arange(places.num_tokens, device=device)
    where, addresses = ranges(places.past, places.counts).to(device), cache.addresses(places).to(device)
    reach = replace(_unknown_to_the_host(places, device), table=cache.table)
    params = LawParams.stack([SamplingParams(temperature=1.0)] * len(tokens), device)
    uniforms = torch.rand(len(tokens), dtype=torch.float64, device=device)

    @torch.inference_mode()
    def step() -> Tensor:
        logits = body.head(body.hidden_at(tokens, where, addresses, reach, cache))
        return ops.sample(logits, params, uniforms).tokens if samples else logits

    step()
    for layer in cache.layers.values():
        layer.keys.normal_()
        layer.values.normal_()
    return step


def _unknown_to_the_host(rows: RaggedRows, device: torch.device) -> Reach:
    """Lengths that only the device knows, as in a captured round: the host's bound is the cache's capacity."""

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [sum(rows.counts[:i]) for i in range(len(rows.counts) + 1)]
    return Reach(integers(rows.slots), integers(rows.lengths), integers(starts), max(rows.counts), CAPACITY)
