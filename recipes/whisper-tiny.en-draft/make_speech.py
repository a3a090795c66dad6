"""Sentences spoken by machines, for a draft to learn from. Debian's espeak-ng and flite are needed for `speak`.

python make_speech.py plan DATA plan.jsonl --count 8000    what is said, by whom: one window of at most 30 s a line
python make_speech.py speak plan.jsonl speech              one WAV file a line
python make_speech.py real DATA speech                     people too: the odd lines of the manifest
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

WORDS_PER_SECOND = 2.6
REPEATED = 6  # a few recordings of people among thousands by machines
FLITE = ("slt", "rms")
FLITE_SHARE = 0.35  # the clearer voices, and five times as slow to synthesise
ESPEAK = ("en-us", "en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029")
VARIANTS = ("", "+m1", "+m2", "+m3", "+m4", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5")
SENTENCE = re.compile(r"(?<=[.!?])[\"']?\s+(?=[\"']?[A-Z])")
PLAIN = re.compile(r"[A-Za-z0-9 ,.;:!?'\"$%()-]+")


@dataclass(frozen=True)
class Window:
    """What one recording says and how."""

    engine: str  # "flite" or "espeak"
    voice: str
    speed: float  # 1 is the voice's own
    pitch: int  # espeak's 0 .. 99, or hertz for flite
    text: str


def plan(data: Path, count: int, seed: int) -> Iterator[Window]:
    """Short remarks and long passages alike: clips in the field last from two seconds to half a minute."""
    chance = random.Random(seed)
    passages = [passage for passage in _passages(data) if passage]
    for _ in range(count):
        seconds = chance.uniform(1.5, 8) if chance.random() < 0.3 else chance.uniform(8, 27)
        yield _window(chance, _text(chance, passages, seconds * WORDS_PER_SECOND))


def _text(chance: random.Random, passages: list[list[str]], words: float) -> str:
    """Sentences that follow each other, about as many words as asked for."""
    while True:
        sentences = chance.choice(passages)
        start = chance.randrange(len(sentences))
        said, length = [], 0
        for sentence in sentences[start:]:
            if said and length + len(sentence.split()) > 1.3 * words:
                break
            said.append(sentence)
            length += len(sentence.split())
            if length >= 0.8 * words:
                break
        if length <= 1.6 * words + 4:
            return " ".join(said)


def _window(chance: random.Random, text: str) -> Window:
    speed = chance.uniform(0.85, 1.2)
    if chance.random() < FLITE_SHARE:
        voice = chance.choice(FLITE)
        return Window("flite", voice, speed, chance.randint(*((150, 220) if voice == "slt" else (85, 130))), text)
    return Window("espeak", chance.choice(ESPEAK) + chance.choice(VARIANTS), speed, chance.randint(30, 70), text)


def _passages(data: Path) -> Iterator[list[str]]:
    """Runs of sentences: books, encyclopedia, word problems. None of it belongs to the clips used for evaluation."""
    books = lzma.decompress((data / "corpora/gutenberg_sample.txt.xz").read_bytes()).decode("utf-8", "replace")
    for paragraph in re.split(r"\n\s*\n", books):
        yield _sentences(" ".join(paragraph.split()))
    for name in ("wikitext2/valid.txt", "wikitext2/test.txt"):
        for line in (data / name).read_text(encoding="utf-8").splitlines():
            yield _sentences(_joined(line))
    for line in (data / "gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines():
        yield _sentences(json.loads(line)["question"])


def _sentences(text: str) -> list[str]:
    pieces = (piece.strip().replace("--", ", ") for piece in SENTENCE.split(text))
    return [
        p for p in pieces if 2 <= len(p.split()) <= 45 and PLAIN.fullmatch(p) and not p.isupper() and p[0].isupper()
    ]


def _joined(line: str) -> str:
    """WikiText sets spaces around its punctuation."""
    if line.strip().startswith("="):
        return ""
    line = re.sub(r" @([-,.])@ ", r"\1", line.strip())
    return re.sub(r" ([,.;:!?)'%])", r"\1", re.sub(r"([($]) ", r"\1", line)).replace(" n't", "n't")


def speak(window: Window, path: Path) -> None:
    if window.engine == "flite":
        settings = (
            "--setf",
            f"duration_stretch={1 / window.speed:.2f}",
            "--setf",
            f"int_f0_target_mean={window.pitch}",
        )
        command = [f"flite_cmu_us_{window.voice}", *settings, "-t", window.text, "-o", str(path)]
    else:
        speed = ("-s", str(round(165 * window.speed)), "-p", str(window.pitch))
        command = ["espeak-ng", "-v", window.voice, *speed, "-w", str(path), window.text]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def speak_all(lines: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(speak, Window(**json.loads(x)), folder / f"{i:05}.wav") for i, x in enumerate(lines)]
        for job in jobs:
            job.result()


def copy_recordings(data: Path, folder: Path) -> None:
    """Only the odd lines: every figure about the draft comes from the even ones."""
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    lines = (data / "speech/manifest.jsonl").read_text(encoding="utf-8").splitlines()
    for place in range(1, len(lines), 2):
        samples, rate = soundfile.read(data / "speech" / json.loads(lines[place])["audio"], dtype="int16")
        for copy in range(REPEATED):  # each is disturbed in another way later
            soundfile.write(folder / f"real-{place:03}-{copy}.wav", samples, rate, subtype="PCM_16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["plan", "speak", "real"])
    parser.add_argument("source", type=Path, help="the data folder, or the plan")
    parser.add_argument("output", type=Path, help="the plan, or a folder for WAV files")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.step == "speak":
        speak_all(chosen.source.read_text(encoding="utf-8").splitlines()[: chosen.count], chosen.output)
        return
    if chosen.step == "real":
        copy_recordings(chosen.source, chosen.output)
        return
    lines = (json.dumps(asdict(window)) for window in plan(chosen.source, chosen.count, chosen.seed))
    chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
