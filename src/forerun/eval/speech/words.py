"""Word errors, counted after Whisper's own normaliser: case, punctuation, numbers and fillers are not mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Words:
    """How many words there were, and how many edits lead from them to what was written."""

    spoken: int = 0
    wrong: int = 0  # substituted, left out or put in

    def __add__(self, other: Words) -> Words:
        return Words(self.spoken + other.spoken, self.wrong + other.wrong)

    @property
    def error_rate(self) -> float:
        """May exceed 1: a transcript can have more words than were spoken."""
        return self.wrong / self.spoken if self.spoken else float(self.wrong > 0)


def count(reference: str, written: str) -> Words:
    import jiwer

    said, heard = (str(_normaliser()(text)) for text in (reference, written))
    if not said:
        return Words(0, len(heard.split()))
    edits = jiwer.process_words(said, heard)
    wrong = edits.substitutions + edits.deletions
    return Words(edits.hits + wrong, wrong + edits.insertions)


@lru_cache(maxsize=1)
def _normaliser() -> Any:
    """Without its table of British spellings, which is a file of its own that the offline model does not bring."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    return EnglishTextNormalizer({})
