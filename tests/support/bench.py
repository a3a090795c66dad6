"""Methods that take no time, a tokenizer of words, and results by hand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from forerun.bench.methods import Run
from forerun.bench.results import Measurement, Refusal, Results
from forerun.measure.provenance import Machine, Provenance

ORIGIN = Provenance(
    date="2030-01-02T03:04:05+00:00",
    command="forerun bench",
    commit=None,
    versions={"torch": "2", "transformers": "5"},
    machine=Machine("A chip", 2, 2, 8.0, "Linux x86_64", "cpu", None),
)


class WordTokenizer:
    """Every word is a token of a vocabulary of 97."""

    chat_template = None
    pad_token_id = 0

    def __call__(self, texts: list[str], add_special_tokens: bool = True, **_: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[zlib.crc32(word.encode()) % 96 + 1 for word in text.split()] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(97)}


class FakeMethod:
    """Notes when it was called; `before` may interrupt it."""

    def __init__(
        self, name: str, diary: list[tuple[str, int]], seconds: float = 1.0, *, single: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.name, self.title, self.diary, self.seconds = name, name.upper(), diary, seconds
        self.single, self.before = single, before
        self.target: Any = "the one that all of them have"

    def refusal(self, batch: int) -> str | None:
        return "one row only" if self.single and batch > 1 else None

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Run:
        assert self.refusal(len(prompts)) is None, f"{self.name} was run at a batch size that it refuses"
        self.before()
        self.diary.append((self.name, len(prompts)))
        tokens = tuple(tuple(range(max_new_tokens)) for _ in prompts)
        return Run(tokens, self.seconds, rounds=max_new_tokens * len(prompts))

    def memory(self) -> int | None:
        return None


class Notebook:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.said: list[str] = []
        self.total = self.done = 0.0

    def start(self, what: str, total: float | None = None) -> None:
        self.started.append(what)
        if total is not None:
            self.total, self.done = total, 0.0

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    def say(self, line: str) -> None:
        self.said.append(line)


def measurement(method: str, batch: int, category: str, group: int, seconds: float, **more: Any) -> Measurement:
    facts: dict[str, Any] = {"prompt_tokens": 9, "new_tokens": 100, "rounds": 50, "drafted": None, "accepted": None}
    facts |= {"repeat": 0, "repeated": 0.25, "agreement": None}
    return Measurement(method=method, batch=batch, category=category, group=group, seconds=seconds, **facts | more)


def results_of(measurements: Sequence[Measurement], *refusals: Refusal) -> Results:
    titles = {"generate": "model.generate", "lookup": "transformers prompt lookup", "forerun-plain": "Forerun plain",
              "forerun": "Forerun", "forerun-random": "Forerun random drafts"}  # fmt: skip
    known = {*(m.method for m in measurements), *(r.method for r in refusals)}
    settings = {"model": "m", "max_new_tokens": 100, "temperature": 0.0, "prompts": "ours"}
    return Results(ORIGIN, settings, {n: t for n, t in titles.items() if n in known}, list(measurements), refusals)
