"""Where in a run of new tokens does a row end? Several tokens arrive at once; the earliest position wins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from forerun.engine.request import FinishReason, Request

# A stop string is looked for in the text of the last tokens only. Every token is at least one byte, and up to four
# bytes make a character, so this many tokens hold it, with room for a multi-byte character cut at the window's edge.
BYTES_PER_CHARACTER, EDGE = 4, 8


class StopRule:
    """One row's end: stop ids, stop strings, the budget."""

    def __init__(self, request: Request, budget: int, tokenizer: Any) -> None:
        self.request, self.budget, self.tokenizer = request, budget, tokenizer
        self._settings = decode_settings(tokenizer, skip_special=False) if request.stop_strings else {}
        self._num_unstopped = 0 if request.stops_early else request.min_new_tokens  # tokens that complete none
        self.window = BYTES_PER_CHARACTER * max((len(text) for text in request.stop_strings), default=0) + EDGE

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of `new` are kept after `output`, and why the row ends there. A stop within the budget beats it."""
        for kept, token in enumerate(new, start=1):
            if token in self.request.stop_ids or self._completes_stop_string(output, new[:kept]):
                return kept, FinishReason.STOP
            if len(output) + kept >= self.budget:
                return kept, FinishReason.LENGTH
        return len(new), None

    def _completes_stop_string(self, output: Sequence[int], new: Sequence[int]) -> bool:
        """Whether one of them reaches into the last of `new`, wherever it began: in the prompt, too, as transformers
        has it. One that was whole before that token stops nothing."""
        if not self.request.stop_strings or len(output) + len(new) <= self._num_unstopped:
            return False
        recent = self._recent(output, new)
        text = self._decode(recent)
        present = [stop for stop in self.request.stop_strings if stop in text]
        if not present:
            return False
        before = self._decode(recent[:-1])
        known = next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(before))
        return any(stop in text[max(known - len(stop) + 1, 0) :] for stop in present)

    def _recent(self, output: Sequence[int], new: Sequence[int]) -> list[int]:
        """The last tokens of the row, those of the prompt included where they count."""
        gained = [*output[-self.window :], *new][-self.window :]
        missing = self.window - len(gained) if self.request.stops_in_prompt else 0
        return [*self.request.prompt[-missing:], *gained] if missing else gained

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, **self._settings)
        return text


def decode_settings(tokenizer: Any, skip_special: bool) -> dict[str, bool]:
    """Keywords for `tokenizer.decode`, of those that it takes: some have none. Nothing is tidied, whatever the
    tokenizer's settings say, so that the text which is told is the one that was looked through."""
    wanted = {"skip_special_tokens": skip_special, "clean_up_tokenization_spaces": False}
    return {name: value for name, value in wanted.items() if _takes(tokenizer.decode, name)}


def _takes(method: Callable[..., object], keyword: str) -> bool:
    """Whether a method has such a keyword, or takes any; not where it does not say."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # one that is not written in Python
        return False
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
