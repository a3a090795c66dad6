"""Sounds that cost nothing: tones, noise and silence as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

Sound = NDArray[np.float32]


def tone(seconds: float, rate: int = 16_000, pitch: float = 440.0) -> Sound:
    at = np.arange(round(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * pitch * at)).astype(np.float32)


def babble(seconds: float, seed: int, rate: int = 16_000) -> Sound:
    """Tones that change several times a second: no two windows are alike."""
    generator = np.random.default_rng(seed)
    steps = max(round(seconds * 8), 1)
    pitch = np.repeat(generator.uniform(100, 3000, steps), rate // 8)[: round(seconds * rate)]
    sound = 0.2 * np.sin(2 * np.pi * np.cumsum(pitch) / rate) + 0.01 * generator.standard_normal(len(pitch))
    return sound.astype(np.float32)


def write(path: Path, sound: Sound, rate: int = 16_000, **how: str) -> Path:
    """A file of it; without the packages for that the test is skipped."""
    soundfile = pytest.importorskip("soundfile", reason="sound files need the extra `speech`")
    pytest.importorskip("soxr", reason="sound files need the extra `speech`")
    soundfile.write(path, sound, rate, **how)
    return path
