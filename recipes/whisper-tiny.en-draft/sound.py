"""Windows of sound for a draft to learn from: read, strung together, disturbed, and as Whisper's features."""

from __future__ import annotations

import random
import wave
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RATE, SECONDS = 16000, 30
WINDOW = RATE * SECONDS
SPEEDS = (0.85, 0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.15)  # people's


def read_window(path: Path) -> tuple[Tensor, int]:
    """[samples] int16 and the rate."""
    with wave.open(str(path)) as file:
        rate = file.getframerate()
        data = file.readframes(SECONDS * rate)
    return torch.from_numpy(np.frombuffer(data, dtype=np.int16).copy()), rate


def at_16_khz(windows: Sequence[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """[N, WINDOW] float: all padded to half a minute; rates are changed by cutting spectra, exact for what remains."""
    out = torch.zeros(len(windows), WINDOW, device=device)
    for rate in {rate for _, rate in windows}:
        rows = [i for i, (_, its) in enumerate(windows) if its == rate]
        block = torch.zeros(len(rows), rate * SECONDS, device=device)
        for place, row in enumerate(rows):
            samples = windows[row][0].to(device)
            block[place, : len(samples)] = samples.float() / 32768
        if rate != RATE:
            spectrum = torch.fft.rfft(block)[:, : WINDOW // 2 + 1]
            block = torch.fft.irfft(spectrum, n=WINDOW) * (RATE / rate)
        out[rows] = block
    return out


def read_all(files: Sequence[Path], device: torch.device) -> Tensor:
    """[N, WINDOW] float."""
    with ThreadPoolExecutor(8) as pool:
        return at_16_khz(list(pool.map(read_window, files)), device)


def strung_together(clips: Sequence[Tensor], count: int, seed: int) -> Tensor:
    """[count, WINDOW]: half of them one clip alone, the others two to four with pauses, whole or cut, at any speed."""
    chance = random.Random(seed)
    weights = [max(len(clip), 4 * RATE) ** 0.5 for clip in clips]
    versions = {speed: [_at_speed(clip, speed) for clip in clips] for speed in set(SPEEDS)}
    out = torch.zeros(count, WINDOW, device=clips[0].device)
    for row in out:
        speed, pieces = chance.choice(SPEEDS), 1 if chance.random() < 0.5 else chance.randint(2, 4)
        at = 0 if chance.random() < 0.5 else chance.randrange(RATE // 2)
        for clip in chance.choices(versions[speed], weights, k=pieces):
            piece = _cut(clip, chance, 0.25 if pieces == 1 else 0.5)[: WINDOW - at]
            row[at : at + len(piece)] = piece * (chance.uniform(0.6, 1.4) if pieces > 1 else 1.0)
            at += len(piece) + int(chance.uniform(0.1, 0.7) * RATE)
            if at > WINDOW - 2 * RATE:
                break
    return out


def _at_speed(clip: Tensor, speed: float) -> Tensor:
    return F.interpolate(clip[None, None], size=int(len(clip) / speed), mode="linear", align_corners=False)[0, 0]


def _cut(clip: Tensor, chance: random.Random, share: float) -> Tensor:
    if len(clip) <= 2 * RATE or chance.random() >= share:
        return clip
    length = int(chance.uniform(1.2 * RATE, len(clip)))
    start = chance.randrange(len(clip) - length)
    return clip[start : start + length]


def disturbed(audio: Tensor, generator: torch.Generator) -> Tensor:
    """Machines speak in perfect rooms: some echo, some dull lines, some noise, but nothing that makes words unclear."""
    size, device = len(audio), audio.device

    def some(low: float, high: float) -> Tensor:
        return torch.rand(size, 1, generator=generator, device=device) * (high - low) + low

    spectrum = torch.fft.rfft(audio)
    hertz = torch.linspace(0, RATE / 2, spectrum.shape[1], device=device)
    tilt = (hertz.clamp(min=100) / 1000) ** some(-0.25, 0.25)
    dull = torch.sigmoid((some(3300, 7500) - hertz) / 300)
    spectrum = spectrum * tilt * torch.where(some(0, 1) < 0.2, dull, 1)
    times = torch.arange(RATE // 4, device=device) / RATE
    tail = torch.randn(size, RATE // 4, generator=generator, device=device) * torch.exp(-times / some(0.02, 0.06))
    tail = tail / tail.norm(dim=1, keepdim=True) * some(0.1, 0.35)
    tail[:, 0] = 1
    spectrum = torch.where(some(0, 1) < 0.25, spectrum * torch.fft.rfft(tail, n=audio.shape[1]), spectrum)
    clean = torch.fft.irfft(spectrum, n=audio.shape[1])
    loud = clean.square().mean(1, keepdim=True).sqrt()
    noise = torch.randn(clean.shape, generator=generator, device=device) * loud * 10 ** -some(1.2, 3.0)
    return (clean + noise) / clean.abs().amax(1, keepdim=True).clamp(min=1e-4) * some(0.1, 0.95)


def mel(audio: Tensor, extractor: Any) -> Tensor:
    """[N, bins, 3000], Whisper's features, computed where the audio is."""
    window = torch.hann_window(extractor.n_fft, device=audio.device)
    stft = torch.stft(audio, extractor.n_fft, extractor.hop_length, window=window, return_complex=True)
    filters = torch.from_numpy(extractor.mel_filters).float().to(audio.device)
    logs = (filters.T @ stft[..., :-1].abs() ** 2).clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8) + 4) / 4


def features_of(audio: Tensor, extractor: Any, seed: int, batch: int = 128) -> Tensor:
    """[N, bins, 3000] of the windows, disturbed as `seed` says."""
    generator = torch.Generator(audio.device).manual_seed(seed)
    return torch.cat([mel(disturbed(part, generator), extractor) for part in audio.split(batch)])
