"""Which body runs a model: transformers' modules, or the fused one where it fits and measures faster."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from forerun import kernels
from forerun.cache.ragged import RaggedCache
from forerun.config import Kernels
from forerun.models.bodies.whisper import WhisperBody, whisper_body

if TYPE_CHECKING:
    from forerun.models.bodies.cpu import CpuBody
    from forerun.models.bodies.gpu import GpuBody

TIMED = (1, 4, 16)  # new tokens of a pass: plain decoding, a short draft, a batch
PAST = 64  # keys behind them


def choose_body(model: PreTrainedModel, use: Kernels) -> CpuBody | GpuBody | WhisperBody | None:
    """The fused body of `model`, where it is to be used. A GPU's needs no timing: it saves most of the launches."""
    if use is Kernels.OFF:
        return None
    if (whisper := whisper_body(model, use)) is not None:
        return whisper
    if kernels.triton_missing(model.device.type) is None:
        from forerun.models.bodies import gpu

        return gpu.GpuBody(model) if gpu.why_not(model) is None else None
    if why_not(model) is not None:
        return None
    from forerun.kernels.cpu.threads import most_threads
    from forerun.models.bodies.cpu import CpuBody

    if use is Kernels.ON:
        return CpuBody(model, most_threads())
    times = measured(model)
    threads = min((name for name in times if name != "modules"), key=lambda name: times[name])
    return CpuBody(model, int(threads)) if times[threads] < times["modules"] else None


def why_not(model: PreTrainedModel) -> str | None:
    """What keeps a model from being fused, in words for `forerun doctor`; None where nothing does."""
    if reason := kernels.missing():
        return reason
    from forerun.models.bodies import cpu

    return cpu.why_not(model)


def measured(model: PreTrainedModel) -> dict[str, float]:
    """Seconds of a few passes by the modules, and by the fused body with 1, 2, 4 ... threads; timed once a machine."""
    from forerun.kernels.cpu.measured import remembered
    from forerun.kernels.cpu.threads import most_threads

    found: dict[str, float] = remembered(
        f"body {_signature(model)} threads {most_threads()}", lambda: _measure(model, most_threads())
    )
    return found


def _measure(model: PreTrainedModel, most: int) -> dict[str, float]:
    """For each candidate the sum over `TIMED` of its best pass."""
    from forerun.kernels.cpu.measured import seconds
    from forerun.models.bodies.cpu import CpuBody

    counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    steps = {str(count): _stepper(model, CpuBody(model, count)) for count in counts}
    steps["modules"] = _stepper(model, None)
    totals = dict.fromkeys(steps, 0.0)
    for tokens in TIMED:
        for name, time in seconds({name: partial(step, tokens) for name, step in steps.items()}, 3).items():
            totals[name] += time
    return totals


def _stepper(model: PreTrainedModel, body: CpuBody | None) -> Callable[[int], None]:
    """A pass over some new tokens behind `PAST` old ones, again and again the same."""
    from forerun.models.scorer import Scorer

    scorer = Scorer(model, cache=RaggedCache(), headless=True, use=Kernels.OFF)
    scorer.body = body
    scorer.admit(0)
    embeddings = torch.rand(PAST + max(TIMED), model.config.get_text_config(decoder=True).hidden_size)
    scorer.run([0], [PAST], embeddings[:PAST])

    def step(tokens: int) -> None:
        scorer.run([0], [tokens], embeddings[:tokens])
        scorer.rewind([0], [PAST])

    return step


def _signature(model: PreTrainedModel) -> str:
    """Models of the same shape take the same time."""
    config = model.config.get_text_config(decoder=True)
    shapes = [tuple(p.shape) for name, p in model.base_model.named_parameters() if "layers." in name]
    digest = hashlib.sha256(str(shapes).encode()).hexdigest()[:12]
    return f"{config.model_type} {digest}"
