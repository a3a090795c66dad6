"""Whisper's rules for all positions of a draft at once, held to transformers' own processors position by position."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from forerun.speech.rules import Rules

VOCAB, END, NONE = 24, 14, 17
FIRST = NONE + 1  # timestamps 18 to 23
PROMPT = [15, 3, 16]  # what came before the window, however long


def processors(times: bool, latest: int | None = 3, by_mass: bool = True) -> list[Any]:
    config = GenerationConfig(eos_token_id=END, bos_token_id=END)
    config.no_timestamps_token_id = NONE
    config.max_initial_timestamp_index = latest
    config._detect_timestamp_from_logprob = by_mass
    found: list[Any] = [
        SuppressTokensAtBeginLogitsProcessor([2, END], begin_index=len(PROMPT)),
        SuppressTokensLogitsProcessor([1, 5, 15, 16]),
    ]
    return [*found, WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))] if times else found


def theirs(given: list[Any], said: list[int], logits: Tensor) -> Tensor:
    return LogitsProcessorList(given)(torch.tensor([[*PROMPT, *said]]), logits[None].clone())[0]


def ours(given: list[Any], said: list[int], drafted: list[int], logits: Tensor) -> Tensor:
    rules = Rules.of(given, torch.device("cpu"))
    assert rules is not None
    return rules.apply(logits.clone(), said, drafted)


def random_logits(num: int, seed: int, lift: float = 0.0) -> Tensor:
    logits = 3 * torch.randn(num, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[:, FIRST:] += lift
    return logits


KINDS = (4, END, FIRST, FIRST + 2)  # a word, the end, the earliest time, a later one
HISTORIES = [list(said) for length in range(4) for said in product(KINDS, repeat=length)]


@pytest.mark.parametrize("lift", [-4.0, 0.0, 4.0], ids=["words", "close", "times"])
@pytest.mark.parametrize("times", [False, True], ids=["plain", "timed"])
def test_every_history_allows_what_transformers_allows(times: bool, lift: float) -> None:
    given = processors(times)
    for number, said in enumerate(HISTORIES):
        logits = random_logits(1, number, lift)
        torch.testing.assert_close(ours(given, said, [], logits)[0], theirs(given, said, logits[0]), rtol=0, atol=0)


@pytest.mark.parametrize(("latest", "by_mass"), [(None, True), (0, True), (3, False)])
def test_settings_of_the_timestamps_are_read(latest: int | None, by_mass: bool) -> None:
    given = processors(True, latest, by_mass)
    for number, said in enumerate(HISTORIES):
        logits = random_logits(1, number)
        torch.testing.assert_close(ours(given, said, [], logits)[0], theirs(given, said, logits[0]), rtol=0, atol=0)


def test_positions_along_a_draft_are_those_of_plain_decoding() -> None:
    given = processors(True)
    for number, said in enumerate(HISTORIES):
        drafted = [*reversed(HISTORIES[-number - 1]), 7][:3]
        logits = random_logits(len(drafted) + 1, number)
        found = ours(given, said, drafted, logits)
        expected = torch.stack([theirs(given, [*said, *drafted[:i]], row) for i, row in enumerate(logits)])
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_comparison_notices_a_rule_that_looks_one_token_too_far() -> None:
    """The control: positions that take the draft's next token for one already said must not pass."""
    given = processors(True)
    differ = 0
    for number, said in enumerate(HISTORIES):
        logits = random_logits(1, number)
        differ += not torch.equal(ours(given, [*said, FIRST + 3], [], logits)[0], theirs(given, said, logits[0]))
    assert differ > len(HISTORIES) // 2


def test_processors_that_are_not_known_are_not_guessed_at() -> None:
    device = torch.device("cpu")
    assert Rules.of([*processors(True), NoRepeatNGramLogitsProcessor(2)], device) is None
    assert Rules.of([*processors(True), SuppressTokensLogitsProcessor([3])], device) is None
