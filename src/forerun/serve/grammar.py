"""JSON schemas, regular expressions, choices and grammars: masks over the logits, position by position along a draft.

llguidance says which tokens may follow. A draft token that may not follow gets probability 0, so it is rejected with
certainty, and what comes after it is never reached. Which tokens spell an allowed text is left to the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from forerun.serve.errors import refused
from forerun.serve.schemas import Generation, ResponseFormat

MOST_CHARACTERS = 200_000  # of a grammar or a schema
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000
)
"""A fifth to a half of llguidance's own: other rows wait for a mask, and within its own limits one took 0.7 seconds."""
ANY_OBJECT = '{"type": "object"}'


class Grammar:
    """One grammar, compiled; every sequence gets a processor of its own."""

    def __init__(self, text: str, param: str, tokenizer: LLTokenizer, stop_ids: frozenset[int]) -> None:
        if len(text) > MOST_CHARACTERS:
            raise refused(param, f"has more than {MOST_CHARACTERS} characters")
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, tokenizer, limits=LIMITS)
        if is_wrong or messages:
            raise refused(param, f"cannot be followed: {messages[0].splitlines()[0] if messages else 'invalid'}")
        self._matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise refused(param, "cannot be followed: it is too large, or no text is ever complete")
        self.text, self._stop_ids = text, sorted(stop_ids)

    def processor(self, prompt_length: int) -> GrammarProcessor:
        return GrammarProcessor(self, self._matcher.deep_copy(), prompt_length, self._stop_ids)


class GrammarProcessor:
    """A logits processor for one sequence. It follows the text it is shown, forwards and backwards."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, prompt_length: int, stop_ids: Sequence[int]) -> None:
        self.grammar, self._matcher = grammar, matcher
        self._prompt_length, self._stop_ids = prompt_length, list(stop_ids)
        self._seen: list[int] = []  # what the matcher has consumed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.along(input_ids[0].tolist(), (), scores.clone())

    def along(self, history: Sequence[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
        """`logits` [n, V] where the first position follows `history`, and each later one a token of `drafted` more."""
        if not self._go_to(list(history[self._prompt_length :])):
            return logits  # behind a draft token that is rejected: never reached
        for place in range(len(logits)):
            logits[place].masked_fill_(self._forbidden(logits), -torch.inf)
            if place < len(drafted) and not self._consume(drafted[place]):
                break
        return logits

    def _go_to(self, output: list[int]) -> bool:
        """Bring the matcher to `output`; False where the grammar does not allow it."""
        pairs = zip(self._seen, output, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(self._seen), len(output)))
        if surplus := len(self._seen) - same:
            self._matcher.rollback(surplus)
            del self._seen[same:]
        return all(self._consume(token) for token in output[same:])

    def _consume(self, token: int) -> bool:
        """One at a time: what an end token means depends on how calls are split."""
        if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
            return False
        self._seen.append(token)
        return True

    def _forbidden(self, logits: Tensor) -> Tensor:
        """[V] bool. Once the text is complete and nothing may follow, only end tokens are left.

        A matcher that has run into its limits has no next token: this row ends with an error, the others go on.
        """
        size = logits.shape[1]
        allowed = np.zeros(size, dtype=bool)
        has_ended = self._matcher.is_stopped()
        mask = None if has_ended else self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return torch.ones(size, dtype=torch.bool, device=logits.device)
        if mask is None:
            allowed[self._stop_ids] = True
        else:
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            known = min(size, len(bits))
            allowed[:known] = bits[:known]
        return torch.from_numpy(~allowed).to(logits.device)


def make_tokenizer(tokenizer: Any, vocab_size: int, stop_ids: frozenset[int]) -> LLTokenizer:
    """The vocabulary as llguidance reads it; takes a second for a large one."""
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(stop_ids))
    except ValueError as error:
        raise refused("response_format", "this model's tokenizer cannot be constrained") from error


def wants_grammar(body: Generation) -> bool:
    """Whether one has to be made, which may take long."""
    return getattr(body, "tools", None) is not None or any(getattr(body, name) is not None for name in FIELDS)


def asked_grammar(body: Generation) -> tuple[str, str] | None:
    """The field that asks for one, and the grammar in llguidance's form; None where none does."""
    asked = [(name, value) for name in FIELDS if (value := getattr(body, name)) is not None]
    asked = [(name, value) for name, value in asked if not (name == "response_format" and value.type == "text")]
    if not asked:
        return None
    if len(asked) > 1:
        raise refused(asked[1][0], f"there is {asked[0][0]} already: give one of them")
    if body.ignore_eos:
        raise refused("ignore_eos", f"{asked[0][0]} says where the text ends: leave one of them out")
    ((name, value),) = asked
    return name, FIELDS[name](value)


def _from_schema(schema: dict[str, Any] | str) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        json.loads(text)
        return LLMatcher.grammar_from_json_schema(text)
    except (ValueError, RecursionError) as error:
        raise refused("guided_json", "must be a JSON schema") from error


def _from_format(asked: ResponseFormat) -> str:
    if asked.type == "json_object":
        return LLMatcher.grammar_from_json_schema(ANY_OBJECT)
    if asked.json_schema is None:
        raise refused("response_format.json_schema", "is missing")
    return _from_schema({} if asked.json_schema.schema_ is None else asked.json_schema.schema_)


def _from_choice(choices: list[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


FIELDS: dict[str, Any] = {
    "response_format": _from_format,
    "guided_json": _from_schema,
    "guided_regex": LLMatcher.grammar_from_regex,
    "guided_choice": _from_choice,
    "guided_grammar": LLMatcher.grammar_from_lark,
}
