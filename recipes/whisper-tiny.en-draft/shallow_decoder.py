"""A draft for a speech recogniser: few of its decoder's layers, on its own encoder, taught to write what it writes.

Encoder, embedding and head stay the target's; the head is read at the tokens transcripts use most. Batches hold the
target's own greedy transcripts, so that the draft practises where it will be asked.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from transcripts import TeacherOutputs, TranscribedWindows, concatenate, mixed_batches
from transformers import PreTrainedConfig, PreTrainedModel

from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import DRAFT_VOCABULARY, DrafterManifest, describe_target, save_drafter
from forerun.math.losses import TeacherLaw, parse_loss
from forerun.train.head_loss import LossResult, Positions, chunked_loss
from forerun.train.schedule import TrainSchedule
from forerun.train.writing import BACKENDS

CHUNK = 8192  # positions whose logits exist at one time
EMBEDDING = "decoder.embed_tokens.weight"  # the target's, and not trained


@dataclass(frozen=True, slots=True)
class ShallowOptions:
    layers: tuple[int, ...] = (3,)  # which of the target's decoder layers the draft begins with
    loss: str = "kl+tv"
    batch_size: int = 256
    seconds: float | None = 150.0
    steps: int | None = None  # the run ends after this many or after `seconds`, whichever is first
    learning_rate: float = 1.5e-3
    warm_up: float = 0.03
    seed: int = 0


class ShallowDecoder(nn.Module):
    """The draft while it is trained."""

    ids: Tensor  # [Vd] ascending: the tokens it can say

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], ids: Tensor) -> None:
        super().__init__()
        whole = target.get_decoder()
        self.config = shortened(target.config, len(layers))
        self.decoder = type(whole)(self.config).to(target.device)
        self.decoder.embed_tokens = whole.embed_tokens
        self.decoder.embed_positions.load_state_dict(whole.embed_positions.state_dict())
        self.decoder.layer_norm.load_state_dict(whole.layer_norm.state_dict())
        for mine, place in zip(self.decoder.layers, layers, strict=True):
            mine.load_state_dict(whole.layers[place].state_dict())
        self.register_buffer("ids", ids.to(target.device))

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        """[B, L], [B, S, H] -> [B, L, H], what the head reads."""
        hidden: Tensor = self.decoder(input_ids=tokens, encoder_hidden_states=states, use_cache=False).last_hidden_state
        return hidden

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained and saved: all but the embedding."""
        return {name: weight for name, weight in self.named_parameters() if name != EMBEDDING}


def shortened(config: PreTrainedConfig, layers: int) -> Any:
    shorter = copy.deepcopy(config)
    shorter.decoder_layers = layers
    shorter.dropout = shorter.attention_dropout = shorter.activation_dropout = shorter.decoder_layerdrop = 0.0
    return shorter


def draft_vocabulary(ranked: Sequence[int], count: int, always: Sequence[int] = ()) -> Tensor:
    """[at most `count`] ascending: those the draft must be able to say, then the first of `ranked`."""
    chosen = list(dict.fromkeys([*always, *ranked]))[:count]
    return torch.tensor(sorted(chosen))


class Distillation:
    """The loss of the draft against the target, on one batch."""

    def __init__(self, target: PreTrainedModel, student: ShallowDecoder, loss: str) -> None:
        self.target, self.student, self.loss = target, student, parse_loss(loss)
        self.head: Tensor = target.get_output_embeddings().weight.detach()
        self.small = self.head[student.ids].float()
        self.silenced = torch.tensor(sorted(target.generation_config.suppress_tokens or ()), device=self.head.device)
        self.silenced_here = torch.isin(student.ids, self.silenced)

    def loss_of(self, batch: TranscribedWindows, measure: bool = False) -> LossResult:
        outputs = batch.teacher or self._teacher_outputs(batch)
        judged, tokens = batch.judged, batch.tokens[:, :-1]
        features, mass = outputs.features[judged], outputs.mass[judged]
        with sdpa_kernel(BACKENDS), self._precision():
            hidden = self.student(tokens, batch.states)[judged]
        weights = torch.ones(1, len(hidden), device=hidden.device)
        positions = Positions(hidden.float()[None], weights, None, lambda part: self._law(features[part], mass[part]))
        return chunked_loss(positions, self.small, self.loss, CHUNK, measure)

    def with_teacher(self, windows: TranscribedWindows, size: int = 256) -> TranscribedWindows:
        """The same windows with the target's outputs, so that it need not run again: it is most of a step's work."""
        parts = [windows.pick(rows) for rows in _groups(windows, size)]
        return concatenate([replace(part, teacher=self._teacher_outputs(part)) for part in parts], _end(self.target))

    @torch.no_grad()
    def _teacher_outputs(self, batch: TranscribedWindows) -> TeacherOutputs:
        with sdpa_kernel(BACKENDS):
            features: Tensor = self.target.get_decoder()(
                input_ids=batch.tokens[:, :-1], encoder_hidden_states=batch.states, use_cache=False
            ).last_hidden_state
        chosen = torch.zeros(batch.tokens[:, 1:].shape, device=features.device)
        mass = torch.zeros_like(chosen)
        for place in batch.judged.nonzero().split(CHUNK):
            row, column = place.unbind(1)
            logits = (features[row, column].to(self.head.dtype) @ self.head.T).float()
            logits[:, self.silenced] = -torch.inf
            mass[row, column] = logits.logsumexp(-1)
            chosen[row, column] = logits.gather(1, batch.tokens[row, column + 1, None])[:, 0]
        return TeacherOutputs(features, mass, (chosen - mass).sum(1) / batch.judged.sum(1))

    def _law(self, features: Tensor, mass: Tensor) -> TeacherLaw:
        """Of what decoding really draws from: tokens that Whisper's settings silence have no mass."""
        logits = (features.to(self.head.dtype) @ self.small.to(self.head.dtype).T).float()
        logits[:, self.silenced_here] = -torch.inf
        return TeacherLaw.from_logits(logits, mass)

    def _precision(self) -> AbstractContextManager[Any]:
        on_gpu = self.head.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()


@dataclass(frozen=True, slots=True)
class Measured:
    """How often the draft would be kept, on windows it was not trained on."""

    acceptance: float  # mean of sum min(p, q): drawn at temperature 1
    agreement: float  # how often the likeliest tokens agree: greedy
    coverage: float  # of what the target wrote, the share that the draft can say
    loss: float


@torch.no_grad()
def measure(distillation: Distillation, windows: TranscribedWindows, size: int = 64) -> Measured:
    losses = [distillation.loss_of(windows.pick(rows), measure=True) for rows in _groups(windows, size)]
    written = windows.tokens[:, 1:][windows.judged]
    counts = torch.tensor([float(one.overlap.numel()) for one in losses])
    loss = (torch.tensor([float(one.loss) for one in losses]) * counts).sum() / counts.sum()
    return Measured(
        acceptance=float(torch.cat([one.overlap[0] for one in losses]).mean()),
        agreement=float(torch.cat([one.agreement[0] for one in losses]).mean()),
        coverage=float(torch.isin(written, distillation.student.ids).float().mean()),
        loss=float(loss),
    )


def _end(target: PreTrainedModel) -> int:
    return int(target.generation_config.eos_token_id)


def _groups(windows: TranscribedWindows, size: int) -> Sequence[Tensor]:
    groups: Sequence[Tensor] = torch.arange(len(windows), device=windows.tokens.device).split(size)
    return groups


Report = Callable[[int, float, float], None]  # step, progress from 0 to 1, loss


def distil(
    distillation: Distillation,
    parts: Sequence[tuple[TranscribedWindows, float]],
    options: ShallowOptions,
    report: Report,
) -> int:
    """Train for so many seconds or steps on batches with so much of each part; the number of steps taken."""
    if options.seconds is None and options.steps is None:
        raise InvalidArgument("training would never end: give seconds, steps or both")
    student = distillation.student.train()
    trained = list(student.trained().values())
    student.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(
        trained, lr=options.learning_rate, weight_decay=0.02, betas=(0.9, 0.98), fused=trained[0].is_cuda
    )
    schedule = TrainSchedule(options.steps, options.seconds, options.warm_up)
    generator = torch.Generator().manual_seed(options.seed)
    initial, step = time.perf_counter(), 0
    for batch in mixed_batches(parts, options.batch_size, generator, _end(distillation.target)):
        progress = schedule.progress(step, time.perf_counter() - initial)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * schedule.factor(progress)
        loss = distillation.loss_of(batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            report(step, progress, float(loss.detach()))
    student.eval()
    return step


def save(student: ShallowDecoder, target: PreTrainedModel, folder: Path, provenance: dict[str, Any]) -> None:
    """The folder a decoder loads: the draft's own layers in float16, and the tokens it can say."""
    manifest = DrafterManifest("decoder", 0, describe_target(target), ("encoder", "embedding", "head"), provenance)
    tensors = {f"model.{name}": weight.detach().half() for name, weight in student.trained().items()}
    save_drafter(folder, manifest, student.config, {**tensors, DRAFT_VOCABULARY: student.ids.to(torch.int32)})
