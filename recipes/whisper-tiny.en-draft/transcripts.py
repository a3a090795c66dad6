"""Training data of the draft: windows of speech as the target's encoder reads them, and its own transcripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from forerun.train.writing import BACKENDS

MOST_TOKENS = 150  # of a window's transcript; half a minute of fast speech has about 120


@dataclass(frozen=True, slots=True)
class TeacherOutputs:
    """The target's outputs at every position of its transcripts, computed once instead of in every step."""

    features: Tensor  # [N, L - 1, H] what its head reads there
    mass: Tensor  # [N, L - 1] logsumexp of its logits over all tokens it may say
    mean_logprob: Tensor  # [N] mean log-probability of what it wrote

    def pick(self, rows: Tensor, width: int) -> TeacherOutputs:
        return TeacherOutputs(self.features[rows, :width], self.mass[rows, :width], self.mean_logprob[rows])


@dataclass(frozen=True, slots=True)
class TranscribedWindows:
    """Windows of speech and their transcripts."""

    states: Tensor  # [N, S, H] the encoder's
    tokens: Tensor  # [N, L] int64: prefix, transcript and its end; the end repeated as padding
    first: Tensor  # [N] where the transcript begins
    lengths: Tensor  # [N] prefix and transcript together, the end included
    teacher: TeacherOutputs | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: Tensor) -> TranscribedWindows:
        """Some windows, cut to the longest of them."""
        lengths = self.lengths[rows]
        width = int(lengths.max())
        outputs = None if self.teacher is None else self.teacher.pick(rows, width - 1)
        return TranscribedWindows(self.states[rows], self.tokens[rows, :width], self.first[rows], lengths, outputs)

    @property
    def judged(self) -> Tensor:
        """[N, L - 1] bool: positions after which the target chose a token."""
        place = torch.arange(self.tokens.shape[1] - 1, device=self.tokens.device)
        return (place >= self.first[:, None] - 1) & (place < self.lengths[:, None] - 1)

    def finished(self) -> TranscribedWindows:
        """Without the windows whose transcript never ended: the target went in circles there."""
        return self.pick((self.lengths - self.first < MOST_TOKENS).nonzero()[:, 0])

    def confident(self, least: float) -> TranscribedWindows:
        """Without the windows the target was unsure of: what it guessed there teaches nothing."""
        assert self.teacher is not None, "run the target first: with_teacher"
        return self.pick((self.teacher.mean_logprob > least).nonzero()[:, 0])


def concatenate(parts: Sequence[TranscribedWindows], end: int) -> TranscribedWindows:
    width = max(part.tokens.shape[1] for part in parts)
    tokens = torch.cat([F.pad(part.tokens, (0, width - part.tokens.shape[1]), value=end) for part in parts])
    columns = ([getattr(part, name) for part in parts] for name in ("states", "first", "lengths"))
    states, first, lengths = (torch.cat(column) for column in columns)
    outputs = [part.teacher for part in parts if part.teacher is not None]
    teacher = _join_outputs(outputs, width - 1) if len(outputs) == len(parts) else None
    return TranscribedWindows(states, tokens, first, lengths, teacher)


def _join_outputs(parts: Sequence[TeacherOutputs], width: int) -> TeacherOutputs:
    features = torch.cat([F.pad(part.features, (0, 0, 0, width - part.features.shape[1])) for part in parts])
    mass = torch.cat([F.pad(part.mass, (0, width - part.mass.shape[1])) for part in parts])
    return TeacherOutputs(features, mass, torch.cat([part.mean_logprob for part in parts]))


@torch.no_grad()
def transcribe(
    target: PreTrainedModel,
    features: Tensor,
    *,
    timestamps: bool,
    batch_size: int = 512,
    most_tokens: int = MOST_TOKENS,
    done: Callable[[int], None] = lambda count: None,
) -> TranscribedWindows:
    """The target's own greedy transcripts of `features` [N, bins, frames]; `done` is told how many it has."""
    parts = []
    with sdpa_kernel(BACKENDS):
        for piece in features.split(batch_size):
            parts.append(_transcribe_batch(target, piece.to(target.device, target.dtype), timestamps, most_tokens))
            done(sum(map(len, parts)))
    return concatenate(parts, _end(target))


def _transcribe_batch(
    target: PreTrainedModel, features: Tensor, timestamps: bool, most_tokens: int
) -> TranscribedWindows:
    states = target.get_encoder()(features).last_hidden_state
    prefix = transcript_prefix(target, timestamps).expand(len(features), -1)
    # Whisper's own `generate` cuts ends off and joins windows: the loop below it gives what was decoded.
    tokens: Tensor = GenerationMixin.generate(
        target,
        encoder_outputs=BaseModelOutput(states),
        attention_mask=torch.ones_like(states[..., 0], dtype=torch.long),
        decoder_input_ids=prefix,
        generation_config=_plain_settings(target, timestamps, most_tokens),
    )
    ends = (tokens[:, prefix.shape[1] :] == _end(target)).int()
    written = torch.where(ends.any(1), ends.argmax(1) + 1, ends.shape[1])
    first = torch.full_like(written, prefix.shape[1])
    return TranscribedWindows(states, tokens, first, written + prefix.shape[1])


def transcript_prefix(target: PreTrainedModel, timestamps: bool) -> Tensor:
    """[1, P]: the tokens an English model is given before it writes."""
    settings: Any = target.generation_config
    prefix = [settings.decoder_start_token_id] + ([] if timestamps else [settings.no_timestamps_token_id])
    return torch.tensor([prefix], device=target.device)


def _plain_settings(target: PreTrainedModel, timestamps: bool, most_tokens: int) -> GenerationConfig:
    """Greedy, with the tokens silenced that Whisper silences.

    Of its rules for timestamps only the first is kept, that a window begins with one: the others look at every row by
    itself, take longer than the model, and seldom change what it says.
    """
    told: Any = target.generation_config
    never, not_first = list(told.suppress_tokens or ()), list(told.begin_suppress_tokens or ())
    if timestamps:
        never, not_first = [*never, told.no_timestamps_token_id], [*range(told.no_timestamps_token_id + 1)]
    return GenerationConfig(
        max_new_tokens=most_tokens,
        do_sample=False,
        suppress_tokens=never or None,
        begin_suppress_tokens=not_first or None,
        decoder_start_token_id=told.decoder_start_token_id,
        bos_token_id=told.bos_token_id,
        eos_token_id=_end(target),
        pad_token_id=_end(target),
    )


def _end(target: PreTrainedModel) -> int:
    return int(target.generation_config.eos_token_id)


def mixed_batches(
    parts: Sequence[tuple[TranscribedWindows, float]], size: int, generator: torch.Generator, end: int
) -> Iterator[TranscribedWindows]:
    """Batches without end, of each part the share of `size` beside it; a small part is met more often."""
    streams = [_repeated_batches(part, max(round(size * share), 1), generator) for part, share in parts]
    for some in zip(*streams, strict=False):
        yield some[0] if len(some) == 1 else concatenate(some, end)


def _repeated_batches(
    windows: TranscribedWindows, size: int, generator: torch.Generator
) -> Iterator[TranscribedWindows]:
    while True:
        yield from batches(windows, size, generator)


def batches(windows: TranscribedWindows, size: int, generator: torch.Generator) -> Iterator[TranscribedWindows]:
    """One pass over all windows in a random order, neighbours in a batch about as long as each other."""
    blur = torch.empty(len(windows)).uniform_(0.8, 1.25, generator=generator)
    order = (windows.lengths.cpu() * blur).argsort()
    groups = order.split(size)
    for place in torch.randperm(len(groups), generator=generator).tolist():
        yield windows.pick(groups[place].to(windows.tokens.device))
