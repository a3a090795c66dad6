"""Prompts that the target writes itself: it is given the beginning of a user's turn and goes on as a user might.

python make_turns.py MODEL turns.jsonl --count 10000
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.engine import Engine, FinishReason
from forerun.errors import InvalidArgument
from forerun.loading import load_model
from forerun.measure.repetition import repeated_grams
from forerun.train.options import WritingSettings
from forerun.train.writing import Item, wide_engine, write_items

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
        raise InvalidArgument("a user's turn needs a chat template, and this model's tokenizer has none")
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    opening, _, closing = text.partition(MARK)
    ids, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (opening, closing))
    if not ids or not after:
        raise InvalidArgument("this chat template does not mark where a user's turn begins and ends")
    return TurnFrame(tuple(ids), after[0])


def write_turns(engine: Engine, tokenizer: Any, count: int, seed: int = 0, batch_size: int = 512) -> Iterator[str]:
    """The turns that are good as prompts, each once; `count` are tried."""
    frame = turn_frame(tokenizer)
    settings = WritingSettings(
        max_new_tokens=LONGEST,
        temperatures=(1.0,),
        top_p=TOP_P,
        stop_ids=frozenset({frame.end_id}),
        seed=seed,
        batch_size=batch_size,
    )
    seen: set[str] = set()
    for results in write_items(engine, [Item(number, frame.opening) for number in range(count)], settings):
        for result in results:
            ended = result.finish_reason is FinishReason.STOP
            turn = _good_turn(tokenizer, list(result.tokens[:-1])) if ended else None
            if turn is not None and turn not in seen:
                seen.add(turn)
                yield turn


def _good_turn(tokenizer: Any, tokens: list[int]) -> str | None:
    """The words, unless they are few, loop, or hold what only a template may write."""
    if set(tokens) & set(tokenizer.all_special_ids):
        return None
    text = tokenizer.decode(tokens).strip()
    repeated, grams = repeated_grams(tokens)
    loops = grams > 0 and repeated > MOST_REPEATED * grams
    if len(text.split()) < FEWEST_WORDS or "\ufffd" in text or loops:
        return None
    return str(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the target: a Hub name, a folder, or 'embedded'")
    parser.add_argument("output", type=Path, help="JSONL of prompts, for `forerun train data -p`")
    parser.add_argument("--count", type=int, default=10_000, help="turns to try; bad ones are dropped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=512)
    chosen = parser.parse_args()
    model, tokenizer = load_model(chosen.model)
    turns = write_turns(wide_engine(model, tokenizer), tokenizer, chosen.count, chosen.seed, chosen.batch_size)
    rows = [json.dumps({"prompt": turn}) for turn in turns]
    chosen.output.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} prompts of {chosen.count} turns are in {chosen.output}")


if __name__ == "__main__":
    main()
