"""Sampled text over HTTP follows the model's law, masked by a JSON schema too; a lossy rule is found out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from serve.serving import Server, make_decoder, running
from support.folders import VOCAB, byte_tokenizer

TOKENIZER = byte_tokenizer()
CHOICES = 128  # of one request
LETTERS = [TOKENIZER(chr(code)).input_ids[0] for code in range(33, 127)]
OTHERS = {str(token): -100.0 for token in range(VOCAB) if token not in LETTERS}
"""Biases that leave one token a character, so that texts tell tokens."""
DICE = random.Random(95)
TWICE = [DICE.choice(LETTERS) for _ in range(3)]
PROMPT = [*TWICE, *TWICE, *TWICE[:2]]  # what is drafted has a chance of a fifth
TOP_K = 3
QUOTED = 'ab"ab"ab"ab'
WORDS = ("ab", "ba", "cc")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": list(WORDS)}}}
HOT = 3.0  # a temperature at which every word has a chance
FOUND, DIFFERS = 1e-4, 1e-6  # chances at which a right law is doubted, and a wrong one is found out
BROKEN = "lenient:0.2"
MODEL = make_decoder().target


@pytest.fixture(scope="module", params=("token", "block", "coupled", BROKEN))
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Server]]:
    with running(make_decoder(rule=request.param), max_rows=32, max_queued=512) as server:
        yield request.param, server


def law(ids: Sequence[int], allowed: Sequence[int], temperature: float = 1.0) -> dict[int, float]:
    """Of the next token among those allowed, by a forward pass over everything before it."""
    with torch.inference_mode():
        logits = MODEL(torch.tensor([list(ids)])).logits[0, -1].double()
    chances = torch.softmax(logits[list(allowed)] / temperature, dim=-1).tolist()
    return dict(zip(allowed, chances, strict=True))


def best(chances: Mapping[int, float]) -> list[int]:
    return sorted(chances, key=lambda token: -chances[token])[:TOP_K]


def pairs() -> dict[str, float]:
    """Two characters under top-k."""
    found = {}
    for one, chance in law(PROMPT, best(law(PROMPT, LETTERS))).items():
        ids = [*PROMPT, one]
        for two, more in law(ids, best(law(ids, LETTERS))).items():
            found[TOKENIZER.decode([one, two])] = chance * more
    return found


def words() -> dict[str, float]:
    """Under the schema: a quotation mark, then letters that can still become one of the words."""
    found = {}
    for word in WORDS:
        chance, ids = 1.0, TOKENIZER(f'{QUOTED}"').input_ids
        for place, letter in enumerate(word):
            allowed = sorted({other[place] for other in WORDS if other[:place] == word[:place]})
            tokens = [TOKENIZER(each).input_ids[0] for each in allowed]
            token = tokens[allowed.index(letter)]
            chance *= law(ids, tokens, HOT)[token]
            ids.append(token)
        found[word] = chance
    return found


def fits(counts: Mapping[Any, int], expected: Mapping[Any, float]) -> float:
    """The chance of counts at least so far from the law."""
    assert not counts.keys() - expected.keys(), "what the law rules out"
    number = sum(counts.values())
    return float(chisquare([counts.get(key, 0) for key in expected], [number * p for p in expected.values()]).pvalue)


def judge(rule: str, chance: float) -> None:
    if rule == BROKEN:
        assert chance < DIFFERS, "a control that nobody finds out tests nothing"
    else:
        assert chance > FOUND


def sample(server: Server, prompt: Any, requests: int, **settings: Any) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(requests):
        answer = server.complete(prompt, seed=seed, n=CHOICES, **settings)
        counts.update(choice["text"].strip('"') for choice in answer["choices"])
        accepted = sum(each["num_accepted_tokens"] for each in answer["usage"]["speculation"])
        assert accepted > 0, "drafts decide some of it"
    return counts


@pytest.mark.quick("token", BROKEN)
def test_first_tokens(served: tuple[str, Server]) -> None:
    rule, server = served
    counts = sample(server, PROMPT, 4, top_k=TOP_K, max_tokens=2, logit_bias=OTHERS)
    judge(rule, fits(counts, pairs()))


@pytest.mark.quick("token")
def test_words_of_a_schema(served: tuple[str, Server]) -> None:
    rule, server = served
    counts = sample(server, QUOTED, 3, temperature=HOT, max_tokens=8, response_format=SCHEMA)
    judge(rule, fits(counts, words()))
