"""Train a shallow draft for a Whisper on WAV files: its own transcripts of them are what is learnt.

python make_draft.py speech ranked.json draft --layers 3 --vocabulary 10752 --seconds 50
"""

from __future__ import annotations

import argparse
import json
import time
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.loading import load_speech_model
from forerun.train.listening import Heard, join, listen
from forerun.train.shallow import ShallowDecoder, ShallowOptions, Teaching, common_tokens, distil, measure, save

RATE, SECONDS = 16000, 30
TIMESTAMPED = 4  # every so many windows one is written with timestamps
HELD_OUT = 256


def read_window(path: Path) -> tuple[Tensor, int]:
    """[samples] int16 and the rate."""
    with wave.open(str(path)) as file:
        rate = file.getframerate()
        data = file.readframes(SECONDS * rate)
    return torch.from_numpy(np.frombuffer(data, dtype=np.int16).copy()), rate


def at_16_khz(windows: Sequence[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """[N, 480000] float: all padded to half a minute; rates are changed by cutting spectra, exact for what remains."""
    out = torch.zeros(len(windows), RATE * SECONDS, device=device)
    for rate in {rate for _, rate in windows}:
        rows = [i for i, (_, its) in enumerate(windows) if its == rate]
        block = torch.zeros(len(rows), rate * SECONDS, device=device)
        for place, row in enumerate(rows):
            samples = windows[row][0].to(device)
            block[place, : len(samples)] = samples.float() / 32768
        if rate != RATE:
            spectrum = torch.fft.rfft(block)[:, : RATE * SECONDS // 2 + 1]
            block = torch.fft.irfft(spectrum, n=RATE * SECONDS) * (RATE / rate)
        out[rows] = block
    return out


def disturbed(audio: Tensor, generator: torch.Generator) -> Tensor:
    """Machines speak in perfect rooms. A third of the windows get an echo, a third a dull line, all some noise."""
    size, device = len(audio), audio.device

    def some(low: float, high: float) -> Tensor:
        return torch.rand(size, 1, generator=generator, device=device) * (high - low) + low

    spectrum = torch.fft.rfft(audio, n=audio.shape[1])
    hertz = torch.linspace(0, RATE / 2, spectrum.shape[1], device=device)
    tilt = (hertz.clamp(min=100) / 1000) ** some(-0.25, 0.25)
    dull = torch.sigmoid((some(3000, 7500) - hertz) / 300)
    spectrum = spectrum * tilt * torch.where(some(0, 1) < 0.33, dull, 1)
    times = torch.arange(RATE // 4, device=device) / RATE
    tail = torch.randn(size, RATE // 4, generator=generator, device=device) * torch.exp(-times / some(0.02, 0.08))
    tail = tail / tail.norm(dim=1, keepdim=True) * some(0.1, 0.5)
    tail[:, 0] = 1
    spectrum = torch.where(some(0, 1) < 0.33, spectrum * torch.fft.rfft(tail, n=audio.shape[1]), spectrum)
    clean = torch.fft.irfft(spectrum, n=audio.shape[1])
    loud = clean.square().mean(1, keepdim=True).sqrt()
    noise = torch.randn(clean.shape, generator=generator, device=device) * loud * 10 ** -some(0.9, 2.5)
    return (clean + noise) / clean.abs().amax(1, keepdim=True).clamp(min=1e-4) * some(0.1, 0.95)


def mel(audio: Tensor, extractor: Any) -> Tensor:
    """[N, bins, 3000], Whisper's features, computed where the audio is."""
    window = torch.hann_window(extractor.n_fft, device=audio.device)
    stft = torch.stft(audio, extractor.n_fft, extractor.hop_length, window=window, return_complex=True)
    filters = torch.from_numpy(extractor.mel_filters).float().to(audio.device)
    logs = (filters.T @ stft[..., :-1].abs() ** 2).clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8) + 4) / 4


def features_of(files: Sequence[Path], extractor: Any, device: torch.device, seed: int, batch: int = 128) -> Tensor:
    """[N, bins, 3000] float16."""
    generator = torch.Generator(device).manual_seed(seed)
    found = []
    with ThreadPoolExecutor(8) as pool:
        for start in range(0, len(files), batch):
            windows = list(pool.map(read_window, files[start : start + batch]))
            found.append(mel(disturbed(at_16_khz(windows, device), generator), extractor).half())
    return torch.cat(found)


def hear(model: Any, features: Tensor, say: Any) -> Heard:
    """Some of the windows with timestamps, the others without, in a random order."""
    timed = torch.arange(len(features)) % TIMESTAMPED == 0
    parts = [
        listen(model, features[timed], timestamps=True, done=lambda count: say(f"  {count} with timestamps")),
        listen(model, features[~timed], timestamps=False, done=lambda count: say(f"  {count} without")),
    ]
    ended = join(parts, int(model.generation_config.eos_token_id)).finished()
    return ended.pick(torch.randperm(len(ended), generator=torch.Generator().manual_seed(0)).to(model.device))


def always_said(model: Any) -> list[int]:
    """The end, and every timestamp: they are the model's last tokens."""
    settings = model.generation_config
    return [int(settings.eos_token_id), *range(settings.no_timestamps_token_id + 1, model.config.vocab_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path, help="folder with WAV files, 16 bit, one channel")
    parser.add_argument("ranked", type=Path, help="JSON list of tokens, the commonest first")
    parser.add_argument("output", type=Path, help="folder of the draft")
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--layers", default="3", help="decoder layers to begin with, such as 3 or 0,3")
    parser.add_argument("--vocabulary", type=int, default=10752)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    chosen = parser.parse_args()
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {text}", flush=True)

    # float16 is what Whisper was trained in; bfloat16 would blur the laws that are to be learnt.
    model, processor = load_speech_model(chosen.model, dtype="float16" if torch.cuda.is_available() else "float32")
    model.requires_grad_(False)
    features = features_of(sorted(chosen.speech.glob("*.wav")), processor.feature_extractor, model.device, seed=0)
    say(f"{len(features)} windows read")
    heard = hear(model, features, say)
    places = torch.arange(len(heard), device=model.device)
    kept, known = heard.pick(places[:HELD_OUT]), heard.pick(places[HELD_OUT:])
    ranked = json.loads(chosen.ranked.read_text(encoding="utf-8"))
    ids = common_tokens(ranked, chosen.vocabulary, always_said(model))
    say(f"{int(heard.judged.sum())} tokens written, {len(ids)} kept")
    layers = tuple(int(place) for place in chosen.layers.split(","))
    options = ShallowOptions(layers=layers, seconds=chosen.seconds, learning_rate=chosen.learning_rate)
    student = ShallowDecoder(model, layers, ids)
    teaching = Teaching(model, student, options.loss)
    steps = distil(teaching, known, options, lambda step, _, loss: say(f"  step {step}: {loss:.4f}"))
    measured = asdict(measure(teaching, kept))
    say(f"{steps} steps; held out: {measured}")
    provenance = {"options": asdict(options), "windows": len(known), "steps": steps, "held_out": measured}
    save(student, model, chosen.output, provenance)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
