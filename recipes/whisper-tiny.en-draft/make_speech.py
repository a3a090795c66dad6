"""Sentences spoken by machines, for a draft to learn from. Debian's espeak-ng and flite are needed for `speak`.

python make_speech.py plan DATA plan.jsonl --count 15000    what is said, by whom: one window of at most 30 s a line
python make_speech.py speak plan.jsonl speech              one WAV file a line
python make_speech.py real DATA speech                     people too: the odd lines of the manifest
python make_speech.py rank DATA ranked.json                tokens by how often such texts use them
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

WORDS_PER_SECOND = 2.6
KINDS = {"books": 0.4, "web": 0.25, "encyclopedia": 0.2, "problems": 0.15}
FLITE = ("slt", "rms")
FLITE_SHARE = 0.4  # the clearer voices, and five times as slow to synthesise
ESPEAK = ("en-us", "en-us", "en-us", "en-gb", "en-gb-x-rp")
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
    passages = _passages(data)
    for _ in range(count):
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        seconds = chance.uniform(1.5, 8) if chance.random() < 0.3 else chance.uniform(8, 27)
        yield _window(chance, _text(chance, passages[kind], seconds * WORDS_PER_SECOND))


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
    speed = chance.uniform(0.75, 1.1)  # faster, and the target no longer understands them
    if chance.random() < FLITE_SHARE:
        voice = chance.choice(FLITE)
        return Window("flite", voice, speed, chance.randint(*((150, 220) if voice == "slt" else (85, 130))), text)
    return Window("espeak", chance.choice(ESPEAK) + chance.choice(VARIANTS), speed, chance.randint(30, 70), text)


def _passages(data: Path) -> dict[str, list[list[str]]]:
    """Runs of sentences by kind. None of it is said in the clips that are used for evaluation."""
    books = lzma.decompress((data / "corpora/gutenberg_sample.txt.xz").read_bytes()).decode("utf-8", "replace")
    wiki = (data / "wikitext2/valid.txt", data / "wikitext2/test.txt")
    kinds = {
        "books": (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", books)),
        "web": (json.loads(line)["text"] for line in _lines(data / "corpora/c4_demo.jsonl")),
        "encyclopedia": (
            *_lines(data / "corpora/wiki_demo.txt"),
            *(_joined(line) for path in wiki for line in _lines(path)),
        ),
        "problems": (json.loads(line)["question"] for line in _lines(data / "gsm8k/train.jsonl")),
    }
    return {kind: [passages for text in texts if (passages := _sentences(text))] for kind, texts in kinds.items()}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


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


def speak_whole(window: Window, path: Path) -> None:
    """Whoever watches the folder sees whole files alone."""
    unfinished = path.with_suffix(".part")
    speak(window, unfinished)
    unfinished.rename(path)


def speak_all(lines: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max((os.cpu_count() or 2) - 1, 1)) as pool:
        jobs = [pool.submit(speak_whole, Window(**json.loads(x)), folder / f"{i:05}.wav") for i, x in enumerate(lines)]
        for job in jobs:
            job.result()


SHARES = {"books": 0.5, "web": 0.3, "encyclopedia": 0.2, "recordings": 0.1, "order": 0.2}
"""What counts how much; `order` is the vocabulary's own, which was made from the web, commonest first."""


def rank(data: Path, count: int = 16384) -> list[int]:
    """Tokens by their share of texts of several kinds, the transcripts that are trained on among them."""
    from forerun.loading import load_speech_model

    tokenizer = load_speech_model(device="cpu")[1].tokenizer
    books = lzma.decompress((data / "corpora/gutenberg_sample.txt.xz").read_bytes()).decode("utf-8", "replace")
    web = (data / "corpora/c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    spoken = (data / "speech/manifest.jsonl").read_text(encoding="utf-8").splitlines()[1::2]
    kinds = {
        "books": [" ".join(part.split()) for part in re.split(r"\n\s*\n", books)[::3]],
        "web": [json.loads(line)["text"] for line in web],
        "encyclopedia": (data / "corpora/wiki_demo.txt").read_text(encoding="utf-8").splitlines(),
        "recordings": [json.loads(line)["text"] for line in spoken],
    }
    shares = {token: SHARES["order"] / (token + 300) / ORDER_TOTAL for token in range(LAST_WORD)}
    for kind, texts in kinds.items():
        encoded = tokenizer([" " + text for text in texts], add_special_tokens=False)["input_ids"]
        counts = Counter(token for ids in encoded for token in ids)
        for token, times in counts.items():
            shares[token] = shares.get(token, 0) + SHARES[kind] * times / counts.total()
    return sorted(shares, key=lambda token: -shares[token])[:count]


LAST_WORD = 50256  # where the vocabulary's words end
ORDER_TOTAL = sum(1 / (token + 300) for token in range(LAST_WORD))


def copy_recordings(data: Path, folder: Path) -> None:
    """Only the odd lines: every figure about the draft comes from the even ones."""
    import soundfile

    folder.mkdir(parents=True, exist_ok=True)
    lines = (data / "speech/manifest.jsonl").read_text(encoding="utf-8").splitlines()
    for place in range(1, len(lines), 2):
        samples, rate = soundfile.read(data / "speech" / json.loads(lines[place])["audio"], dtype="int16")
        soundfile.write(folder / f"real-{place:03}.wav", samples, rate, subtype="PCM_16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["plan", "speak", "real", "rank"])
    parser.add_argument("source", type=Path, help="the data folder, or the plan")
    parser.add_argument("output", type=Path, help="the plan, a folder for WAV files, or the list of tokens")
    parser.add_argument("--count", type=int, default=15000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.step == "speak":
        speak_all(chosen.source.read_text(encoding="utf-8").splitlines()[: chosen.count], chosen.output)
        return
    if chosen.step == "real":
        copy_recordings(chosen.source, chosen.output)
        return
    if chosen.step == "rank":
        chosen.output.write_text(json.dumps(rank(chosen.source)), encoding="utf-8")
        return
    lines = (json.dumps(asdict(window)) for window in plan(chosen.source, chosen.count, chosen.seed))
    chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
