"""Prompts of the target's own: it is given the beginning of a user's turn and goes on as a user might."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.engine import Engine, FinishReason
from forerun.errors import InvalidArgument
from forerun.train.writing import Item, WritingSettings, repeated_grams, write_items

LONGEST = 160  # tokens of a turn
TOP_P = 0.95
FEWEST_WORDS = 3
MOST_REPEATED = 0.2  # of a turn's 4-grams
MARK = "\u2021\u2021"  # stands for the user's words; no template has it


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """What a chat template puts around a user's words."""

    opening: tuple[int, ...]
    end_id: int


def turn_frame(tokenizer: Any) -> TurnFrame:
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidArgument("--bare-turns needs a chat template, and this model's tokenizer has none: leave it out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    opening, _, closing = text.partition(MARK)
    ids, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (opening, closing))
    if not ids or not after:
        raise InvalidArgument("--bare-turns: this chat template does not mark where a user's turn begins and ends")
    return TurnFrame(tuple(ids), after[0])


def write_turns(
    engine: Engine, tokenizer: Any, numbers: Sequence[int], settings: WritingSettings
) -> Iterator[tuple[int, str | None]]:
    """(number, the turn), or None for one that is no good as a prompt or has been seen before."""
    frame = turn_frame(tokenizer)
    items = [Item(number, frame.opening) for number in numbers]
    own = replace(
        settings, max_new_tokens=LONGEST, temperatures=(1.0,), top_p=TOP_P, stop_ids=frozenset({frame.end_id})
    )
    seen: set[str] = set()
    for results in write_items(engine, items, own):
        for result in results:
            ended = result.finish_reason is FinishReason.STOP
            turn = _good_turn(tokenizer, result.tokens[:-1]) if ended else None
            yield result.request.request_id, None if turn in seen else turn
            if turn is not None:
                seen.add(turn)


def _good_turn(tokenizer: Any, tokens: Sequence[int]) -> str | None:
    """The words, unless they are few, loop, or hold what only a template may write."""
    if set(tokens) & set(tokenizer.all_special_ids):
        return None
    text = tokenizer.decode(tokens).strip()
    repeated, grams = repeated_grams(tokens)
    loops = grams > 0 and repeated > MOST_REPEATED * grams
    if len(text.split()) < FEWEST_WORDS or "\ufffd" in text or loops:
        return None
    return str(text)
