"""How speech is decoded: the choices that Whisper leaves to its users, by the names transformers gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from forerun.arguments import integer
from forerun.errors import InvalidArgument
from forerun.speech.languages import language_code

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""A window that goes wrong at one is tried again at the next, as in OpenAI's own program."""
BATCH_SIZE = 8  # recordings decoded together, unless told otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSettings:
    """What a transcript depends on besides the model. Thresholds may be None, which never applies them."""

    language: str | None = None
    """What is spoken: a name or code such as german or de; left out, the model finds out, file by file. English-only
    models know English."""
    task: Literal["transcribe", "translate"] | None = None
    """Write it down as spoken, or in English (multilingual models)."""
    timestamps: bool = True
    """Let the model say when each sentence begins and ends. Recordings longer than a window of thirty seconds are
    decoded with timestamps in any case, which say where the next window begins."""
    temperature: tuple[float, ...] = TEMPERATURES
    """Decode at the first, and again at the next where the text repeats itself or is unlikely; 0 is greedy."""
    condition_on_previous: bool = False
    """Give each window the text of those before it: steadier names and style, but mistakes go on, too."""
    compression_ratio_threshold: float | None = 1.35
    """Tokens that zlib shrinks by more than this repeat themselves, and their window is decoded again."""
    logprob_threshold: float | None = -1.0
    """Tokens with a lower mean log-probability are unlikely, and their window is decoded again."""
    no_speech_threshold: float | None = 0.6
    """Unlikely text is left out where silence is likelier than this."""
    seed: int = 0
    """Of the random numbers above temperature 0: same seed, same text."""

    def __post_init__(self) -> None:
        if not self.temperature or any(t < 0 for t in self.temperature):
            raise InvalidArgument(f"temperature={self.temperature}: give one or more numbers, 0 or above")
        integer("seed", self.seed, 0, remedy="must be from 0 to 2**63 - 1")
        if self.task not in (None, "transcribe", "translate"):
            raise InvalidArgument(f"task={self.task!r}: choose transcribe or translate")
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise InvalidArgument("no_speech_threshold needs a logprob_threshold, which it overrules; give both")

    def keywords(self, model: Any, is_long: bool) -> dict[str, Any]:
        """For the model's `generate`."""
        keywords = {
            "return_timestamps": self.timestamps or is_long,
            "temperature": self.temperature,
            "compression_ratio_threshold": self.compression_ratio_threshold,
            "logprob_threshold": self.logprob_threshold,
            "no_speech_threshold": self.no_speech_threshold,
            "condition_on_prev_tokens": self.condition_on_previous,
            **self._speech(model.generation_config),
        }
        return {name: value for name, value in keywords.items() if value is not None}

    def _speech(self, config: Any) -> dict[str, Any]:
        """Language and task, which an English-only model takes neither of."""
        if getattr(config, "is_multilingual", True):
            code = None if self.language is None else language_code(self.language, config)
            return {"language": code, "task": self.task}
        if self.task == "translate" or (self.language is not None and self.language.lower() not in ("en", "english")):
            asked = f"language={self.language!r}" if self.task != "translate" else "task='translate'"
            raise InvalidArgument(f"{asked}: this model writes English speech in English; load a multilingual one")
        return {}
