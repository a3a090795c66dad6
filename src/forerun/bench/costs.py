"""What a method costs beside its new tokens: the time to read a prompt, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from forerun.bench.methods import LIBRARIES_ALONE, Method
from forerun.bench.results import MemoryUse, PromptTime, Results
from forerun.bench.schedule import Pools, Prompt
from forerun.errors import InvalidArgument
from forerun.measure.memory import peak_of_script
from forerun.measure.turns import Turn

PROMPT_TURNS = 3
ALONE = "Python and its libraries alone"


def without_drafts(methods: Sequence[Method]) -> list[Method]:
    """The baseline, and Forerun's plain methods: drafts change neither how a prompt is read nor what weights take."""
    return [method for place, method in enumerate(methods) if place == 0 or method.name.endswith("-plain")]


def prompt_turns(pools: Pools, lengths: Sequence[int], methods: Sequence[Method], results: Results) -> list[Turn]:
    """Methods without drafts read a prompt of each length and write one token; each time it is another prompt."""
    text = tuple(chain.from_iterable(chain.from_iterable(pools.values())))
    return [
        Turn(f"a prompt of {length}, {method.title}", partial(_read, method, _cut(text, length, turn), results))
        for length in lengths
        for turn in range(PROMPT_TURNS + 1)  # the first is a warm-up: kernels and plans of that size are made
        for method in without_drafts(methods)
    ]


def memory_turns(methods: Sequence[Method], results: Results) -> list[Turn]:
    def keep(title: str, measure: Callable[[], int | None]) -> None:
        if (peak := measure()) is not None:
            results.memory.append(MemoryUse(title, peak))

    measured: dict[str, Callable[[], int | None]] = {ALONE: lambda: peak_of_script(LIBRARIES_ALONE)}
    measured |= {method.title: method.memory for method in without_drafts(methods)}
    return [Turn(f"memory, {title}", partial(keep, title, measure)) for title, measure in measured.items()]


def _read(method: Method, prompt: Prompt, results: Results) -> None:
    results.prompt_times.append(PromptTime(method.name, len(prompt), method.run([prompt], 1).seconds))


def _cut(text: Prompt, length: int, turn: int) -> Prompt:
    """Prompts that begin differently: what two of them have in common may be read once."""
    if len(text) < length + PROMPT_TURNS:
        raise InvalidArgument(f"prompt_lengths={length}: all prompts together have {len(text)} tokens; ask for fewer")
    start = turn * (len(text) - length) // PROMPT_TURNS
    return text[start : start + length]
