"""JSON schemas, regular expressions, choices and grammars: masks over the logits, position by position along a draft.

llguidance says which tokens may follow. A draft token that may not follow gets probability 0, so it is rejected with
certainty, and what comes after it is never reached. Which tokens spell an allowed text is left to the model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from forerun.cache.base import common_length
from forerun.serve.errors import RETRY_AFTER, ApiError, refused
from forerun.serve.schemas import Generation, ResponseFormat, StructuredOutputs

MOST_CHARACTERS = 200_000  # of a grammar or a schema
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000
)
"""A fifth to a half of llguidance's own: other rows wait for a mask, and within its own limits one took 0.7 seconds."""
ANY_OBJECT = '{"type": "object"}'
STACK = 256 * 2**20
"""Bytes, of which only those are taken that are used. llguidance goes from rule to rule and from reference to reference
by recursion, some 10 KB each: a thousand of them in a row fill a thread's usual 8 MB, and the process dies of it.
Within `MOST_CHARACTERS` there is room for all that there can be."""
T = TypeVar("T")
_starting = threading.Lock()


class Grammar:
    """One grammar, compiled; every sequence gets a processor of its own."""

    def __init__(self, text: str, param: str, tokenizer: LLTokenizer, stop_ids: frozenset[int]) -> None:
        if len(text) > MOST_CHARACTERS:
            raise refused(param, f"has more than {MOST_CHARACTERS} characters")
        self.text, self._tokenizer, self._stop_ids = text, tokenizer, sorted(stop_ids)
        self._matcher = with_deep_stack(lambda: self._checked(param))

    def matcher(self) -> LLMatcher:
        """At the beginning of a text. Copies share what their lexer has worked out, and how much more it may."""
        return self._matcher.deep_copy()

    def renewed(self) -> LLMatcher:
        """The same, and for all who come later, where other texts have used up what the lexer may work out."""
        self._matcher = with_deep_stack(self._compiled)
        return self.matcher()

    def processor(self, prompt_length: int) -> GrammarProcessor:
        return GrammarProcessor(self, prompt_length, self._stop_ids)

    def _checked(self, param: str) -> LLMatcher:
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(self.text, self._tokenizer, limits=LIMITS)
        if is_wrong or messages:
            raise refused(param, f"cannot be followed: {messages[0].splitlines()[0] if messages else 'invalid'}")
        matcher = self._compiled()
        matcher.compute_bitmask()
        if matcher.is_error():
            raise refused(param, "cannot be followed: it is too large, or no text is ever complete")
        return matcher

    def _compiled(self) -> LLMatcher:
        return LLMatcher(self._tokenizer, self.text, log_level=0, limits=LIMITS)


def with_deep_stack(work: Callable[[], T]) -> T:
    """What it returns or raises, done by a thread with a large stack while this one waits."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with _starting:  # the size is the process's, for threads that are started next
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="forerun-grammar", daemon=True).start()
        except RuntimeError as error:
            message = "there is no memory to read a grammar now: come back later"
            raise ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER) from error
        finally:
            threading.stack_size(usual)
    return done.result()


class GrammarProcessor:
    """A logits processor for one sequence. It follows the text it is shown, forwards and backwards."""

    def __init__(self, grammar: Grammar, prompt_length: int, stop_ids: Sequence[int]) -> None:
        self.grammar, self._matcher = grammar, grammar.matcher()
        self._prompt_length, self._stop_ids = prompt_length, list(stop_ids)
        self._seen: list[int] = []  # what the matcher has consumed
        self._is_lost = False  # the matcher has run into its limits, and says nothing any more
        self._is_renewed = False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.along(input_ids[0].tolist(), (), scores.clone())

    def along(self, history: Sequence[int], drafted: Sequence[int], logits: Tensor) -> Tensor:
        """`logits` [n, V] where the first position follows `history`, and each later one a token of `drafted` more.

        Positions behind a draft token that is rejected stay as they are: they are never reached. Where the matcher runs
        into its limits there is no next token: this row ends with an error if it gets there, the others go on.
        """
        output = list(history[self._prompt_length :])
        masks = self._masks(output, drafted, *logits.shape)
        if self._is_lost and not self._is_renewed:  # perhaps by other texts, or by drafts that were not kept
            self._matcher, self._seen = self.grammar.renewed(), []
            self._is_lost, self._is_renewed = False, True  # once: others wait meanwhile
            masks = self._masks(output, drafted, *logits.shape)
        for place, allowed in enumerate(masks):
            logits[place].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
        if self._is_lost:
            logits[len(masks) :] = -torch.inf
        return logits

    def _masks(self, output: list[int], drafted: Sequence[int], number: int, size: int) -> list[NDArray[np.bool_]]:
        """[V] for each position, as far as the grammar can be followed along the draft."""
        masks: list[NDArray[np.bool_]] = []
        if self._is_lost or not self._go_to(output):
            return masks
        while len(masks) < number and (allowed := self._allowed(size)) is not None:
            masks.append(allowed)
            if len(masks) <= len(drafted):
                token = drafted[len(masks) - 1]
                if not allowed[token] or not self._consume(token):
                    break
        return masks

    def _go_to(self, output: list[int]) -> bool:
        """Bring the matcher to `output`; False where the grammar does not allow it, or it is lost on the way."""
        same = len(self._seen)
        if output[:same] != self._seen:  # most often the text has only grown
            same = common_length(self._seen, output)
        if surplus := len(self._seen) - same:
            self._matcher.rollback(surplus)
            del self._seen[same:]
        return all(self._consume(token) for token in output[same:])

    def _consume(self, token: int) -> bool:
        """One at a time: what an end token means depends on how calls are split."""
        if self._matcher.is_stopped():
            return False
        if not self._matcher.try_consume_tokens([token]):
            # Where the limits are the reason, the matcher sees it only when it is asked for what may follow.
            self._matcher.compute_bitmask()
            self._is_lost = self._matcher.is_error()
            return False
        self._seen.append(token)
        return True

    def _allowed(self, size: int) -> NDArray[np.bool_] | None:
        """[V]. Once the text is complete and nothing may follow, only end tokens are left. None where it is lost."""
        allowed = np.zeros(size, dtype=bool)
        has_ended = self._matcher.is_stopped()
        mask = None if has_ended else self._matcher.compute_bitmask()
        self._is_lost = self._matcher.is_error()
        if self._is_lost:
            return None
        if mask is None:
            allowed[self._stop_ids] = True
        else:
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            known = min(size, len(bits))
            allowed[:known] = bits[:known]
        return allowed


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


def _from_schema(schema: dict[str, Any] | str, param: str = "guided_json") -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        json.loads(text)
        return LLMatcher.grammar_from_json_schema(text)
    except (ValueError, RecursionError) as error:
        raise refused(param, "must be a JSON schema") from error


def _from_format(asked: ResponseFormat) -> str:
    if asked.type == "json_object":
        return LLMatcher.grammar_from_json_schema(ANY_OBJECT)
    if asked.json_schema is None:
        raise refused("response_format.json_schema", "is missing")
    schema = asked.json_schema.schema_
    return _from_schema({} if schema is None else schema, "response_format.json_schema.schema")


def _from_structured(asked: StructuredOutputs) -> str:
    ((kind, value),) = asked.asked()
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema(ANY_OBJECT)
    if kind == "json":
        return _from_schema(value, "structured_outputs.json")
    return str(FIELDS[f"guided_{kind}"](value))


def _from_choice(choices: list[str]) -> str:
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


FIELDS: dict[str, Any] = {
    "response_format": _from_format,
    "structured_outputs": _from_structured,
    "guided_json": _from_schema,
    "guided_regex": LLMatcher.grammar_from_regex,
    "guided_choice": _from_choice,
    "guided_grammar": LLMatcher.grammar_from_lark,
}
