"""Train a shallow draft for a Whisper on WAV files: its own transcripts of them are what is learnt.

python make_draft.py speech ranked.json draft --layers 3 --vocabulary 10752 --seconds 150

Files whose name begins with `real` are recordings of people: they are cut, strung together, and made faster or slower.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from shallow_decoder import Distillation, ShallowDecoder, ShallowOptions, distil, draft_vocabulary, measure, save
from sound import features_of, read_all, strung_together
from torch import Tensor
from transcripts import MOST_TOKENS, TranscribedWindows, concatenate, transcribe

from forerun.loading import load_speech_model

AT_ONCE = 1024  # windows that are transcribed together
TIMESTAMPED = 5  # every so many groups of windows one is written with timestamps
COPIES = 3  # each window is disturbed so often; what is written is the transcript of the first
LEAST_SURE = -0.7  # mean log-probability of a transcript that is learnt from
PEOPLE, SHARE = 5000, 0.25  # windows of people, transcribed twice each, and their share of a batch
HELD_OUT = 256
Say = Callable[[str], None]


class Transcriber:
    """The target's transcripts of windows of sound, and its outputs along them."""

    def __init__(self, model: Any, extractor: Any, distillation: Distillation, say: Say) -> None:
        self.model, self.extractor, self.distillation, self.say = model, extractor, distillation, say
        self.groups = 0

    def transcribe(self, groups: Iterator[Tensor], copies: int) -> TranscribedWindows:
        """All groups of sound [N, samples], each disturbed in several ways."""
        windows: list[TranscribedWindows] = []
        for audio in groups:
            windows += self._several_times(audio, copies)
            self.say(f"  {sum(map(len, windows))} windows")
        return concatenate(windows, int(self.model.generation_config.eos_token_id))

    def _several_times(self, audio: Tensor, copies: int) -> Iterator[TranscribedWindows]:
        self.groups += 1
        timed = self.groups % TIMESTAMPED == 0
        first = transcribe(self.model, self._features(audio, 0), timestamps=timed, batch_size=AT_ONCE)
        rows = torch.arange(len(first), device=audio.device)[first.lengths - first.first < MOST_TOKENS]
        first, audio = first.pick(rows), audio[rows]
        yield self.distillation.with_teacher(first).confident(LEAST_SURE)
        for copy in range(1, copies):
            parts = self._features(audio, copy).split(256)
            with torch.no_grad():
                states = torch.cat([self.model.get_encoder()(part).last_hidden_state for part in parts])
            again = TranscribedWindows(states, first.tokens, first.first, first.lengths)
            yield self.distillation.with_teacher(again).confident(LEAST_SURE)

    def _features(self, audio: Tensor, copy: int) -> Tensor:
        return features_of(audio, self.extractor, seed=100 * self.groups + copy).to(self.model.dtype)


def spoken(files: list[Path], device: torch.device) -> Iterator[Tensor]:
    for start in range(0, len(files), AT_ONCE):
        yield read_all(files[start : start + AT_ONCE], device)


def people(files: list[Path], device: torch.device) -> Iterator[Tensor]:
    """Windows made of a few recordings. Those the draft is judged by are not among them."""
    clips = [clip[: int(clip.nonzero()[-1]) + 1] for clip in read_all(files, device)]
    for start in range(0, PEOPLE, AT_ONCE):
        yield strung_together(clips, min(AT_ONCE, PEOPLE - start), seed=start)


def always_said(model: Any) -> list[int]:
    """The end, and every timestamp: they are the model's last tokens."""
    settings = model.generation_config
    return [int(settings.eos_token_id), *range(settings.no_timestamps_token_id + 1, model.config.vocab_size)]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, help="folder with WAV files, 16 bit, one channel")
    parser.add_argument("ranked", type=Path, help="JSON list of tokens, the commonest first")
    parser.add_argument("output", type=Path, help="folder of the draft")
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--layers", default="3", help="decoder layers to begin with, such as 3 or 0,3")
    parser.add_argument("--vocabulary", type=int, default=10752)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    return parser.parse_args()


def main() -> None:
    chosen, begun = parsed(), time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", flush=True)

    # float16 is what Whisper was trained in; bfloat16 would blur the laws that are to be learnt.
    model, processor = load_speech_model(chosen.model, dtype="float16" if torch.cuda.is_available() else "float32")
    model.requires_grad_(False)
    ranked = json.loads(chosen.ranked.read_text(encoding="utf-8"))
    layers = tuple(int(place) for place in chosen.layers.split(","))
    student = ShallowDecoder(model, layers, draft_vocabulary(ranked, chosen.vocabulary, always_said(model)))
    options = ShallowOptions(layers=layers, seconds=chosen.seconds, learning_rate=chosen.learning_rate)
    distillation = Distillation(model, student, options.loss)
    transcriber = Transcriber(model, processor.feature_extractor, distillation, say)
    files = sorted(chosen.speech.glob("*.wav"))
    real = [path for path in files if path.name.startswith("real")]
    windows = transcriber.transcribe(spoken([path for path in files if path not in real], model.device), COPIES)
    kept, known = windows.pick(torch.arange(HELD_OUT)), windows.pick(torch.arange(HELD_OUT * COPIES, len(windows)))
    parts = [(known, 1.0)]
    if real:
        parts = [(known, 1 - SHARE), (transcriber.transcribe(people(real, model.device), 2), SHARE)]
    steps = distil(distillation, parts, options, lambda step, _, loss: say(f"  step {step}: {loss:.4f}"))
    measured = asdict(measure(distillation, kept))
    say(f"{steps} steps; held out: {measured}")
    sizes = {"windows": sum(len(part) for part, _ in parts), "tokens": sum(int(p.judged.sum()) for p, _ in parts)}
    save(student, model, chosen.output, {"options": asdict(options), **sizes, "steps": steps, "held_out": measured})


if __name__ == "__main__":
    main()
