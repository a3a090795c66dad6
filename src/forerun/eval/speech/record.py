"""What `forerun eval asr` leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.bench.records import content_of, damaged, provenance_of
from forerun.eval.speech.words import Words
from forerun.measure.provenance import Provenance

KIND = "asr"
TRANSFORMERS, PLAIN, SPECULATIVE = "model.generate", "plain", "speculative"


@dataclass(frozen=True, slots=True)
class WayFound:
    """One way of decoding all recordings at one batch size."""

    way: str
    batch: int
    files: int
    audio_seconds: float
    seconds: float  # features, encoder and decoder; reading files is not in it
    encoder_seconds: float
    decoder_seconds: float  # everything in generate but the encoder
    tokens: int
    rounds: int  # target passes that drafts were verified in; 0 where transformers decodes
    drafted: int
    accepted: int
    identical: int  # files whose tokens are those of the first way at this batch size
    words: Mapping[str, Words]  # by source

    @property
    def total(self) -> Words:
        return sum(self.words.values(), Words())

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def real_time_factor(self) -> float:
        return self.seconds / self.audio_seconds if self.audio_seconds else 0.0


@dataclass(frozen=True, slots=True)
class SpeechRecord:
    provenance: Provenance
    settings: Mapping[str, Any]
    complete: bool
    found: tuple[WayFound, ...]
    notes: tuple[str, ...] = ()
    kind: str = KIND

    def baseline(self, batch: int) -> WayFound:
        return next(found for found in self.found if found.batch == batch)


def summary(record: SpeechRecord) -> dict[str, Any]:
    """Derived figures, for people who read the file."""
    return {
        f"{found.way}, batch {found.batch}": {
            "word_error_rate": found.total.error_rate,
            "tokens_per_round": found.tokens_per_round,
            "real_time_factor": found.real_time_factor,
            "decoder_times_as_fast": record.baseline(found.batch).decoder_seconds / found.decoder_seconds,
            "times_as_fast": record.baseline(found.batch).seconds / found.seconds,
        }
        for found in record.found
    }


def read(path: Path) -> SpeechRecord:
    content = content_of(path)
    with damaged(path):
        return SpeechRecord(
            provenance=provenance_of(content),
            settings=content["settings"],
            complete=content["complete"],
            found=tuple(map(_found, content["found"])),
            notes=tuple(content["notes"]),
        )


def _found(entry: dict[str, Any]) -> WayFound:
    return WayFound(**entry | {"words": {source: Words(**words) for source, words in entry["words"].items()}})
