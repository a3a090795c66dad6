"""Formats and grammars along drafts: every text keeps to them, and the law is the model's, masked."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from forerun import PromptLookup, SamplingParams, SpeculativeDecoder
from forerun.cache.base import KeyValueCache
from forerun.cache.paged import PagedCache
from forerun.cache.ragged import RaggedCache
from forerun.engine import Engine, Request
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.serve import grammar as grammars
from forerun.serve.errors import ApiError
from forerun.serve.grammar import Grammar, make_tokenizer, with_deep_stack
from serve.serving import Server
from support.finish import finished
from support.folders import VOCAB, byte_tokenizer
from support.tiny import tiny_model

TOKENIZER = byte_tokenizer()
GUIDE = make_tokenizer(TOKENIZER, VOCAB, frozenset({0}))
NO_SPACE = {str(token): -100.0 for token in TOKENIZER(" \n\t\r").input_ids}  # JSON may hold any number of them
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def ask(server: Server, **more: Any) -> str:
    answer = server.complete('{"a": "x"} {"a": "x"}', max_tokens=60, seed=2, **more)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", "the grammar says where the text ends"
    return choice["text"]


def guided(kind: str, value: Any) -> dict[str, Any]:
    """As vLLM had it before 0.12."""
    return {f"guided_{kind}": value}


def structured(kind: str, value: Any) -> dict[str, Any]:
    """As vLLM has it since."""
    return {"structured_outputs": {kind: value}}


@pytest.mark.quick("guided")
@pytest.mark.parametrize("said", (guided, structured))
def test_texts_keep_to_what_was_asked_for(server: Server, said: Callable[[str, Any], dict[str, Any]]) -> None:
    regex = r"[ab]{3,9}c"
    assert re.fullmatch(regex, ask(server, **said("regex", regex)))
    assert ask(server, **said("choice", ["Größe", "Maß"])) in ("Größe", "Maß")
    assert ask(server, **said("grammar", 'start: "a" b\nb: "b" | "b" b "b"')).strip("b") == "a"
    for asked in (
        said("json", SCHEMA),
        said("json", json.dumps(SCHEMA)),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ):
        found = json.loads(ask(server, **asked, logit_bias=NO_SPACE))
        assert found["a"] in ("x", "yy") and isinstance(found["b"], bool)


def test_a_stop_string_may_end_in_the_token_that_ends_the_text(server: Server) -> None:
    assert ask(server, **guided("choice", ["aEND"]), stop=["END<|end|>"]) == "a"


def test_any_object_is_asked_for_in_two_ways(server: Server) -> None:
    """Both are one grammar: the same request then has the same text."""
    body = {"logit_bias": NO_SPACE, "max_tokens": 40, "seed": 2}
    texts = [
        server.complete('{"a": 1} {"a": 1}', **asked, **body)["choices"][0]["text"]
        for asked in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}})
    ]
    assert texts[0] == texts[1] and texts[0].startswith("{")


def test_a_processor_equals_a_fresh_matcher_at_every_place() -> None:
    """Along drafts that are right, wrong in the middle, taken back and gone on with."""
    grammar = Grammar(LLMatcher.grammar_from_regex("(ab|ac)*d"), "guided_regex", GUIDE, frozenset({0}))
    processor, prompt = grammar.processor(2), [5, 6]
    generator, output = torch.Generator().manual_seed(0), TOKENIZER("ab").input_ids
    for drafted in ("acab", "axab", "acad", "d", "ab"):
        ids = TOKENIZER(drafted).input_ids
        logits = torch.randn(len(ids) + 1, VOCAB, generator=generator)
        found = processor.along([*prompt, *output], ids, logits.clone())
        for place in range(len(ids) + 1):
            alone = Grammar(LLMatcher.grammar_from_regex("(ab|ac)*d"), "guided_regex", GUIDE, frozenset({0})).processor(
                2
            )
            history = torch.tensor([[*prompt, *output, *ids[:place]]])
            assert torch.equal(found[place], alone(history, logits[place : place + 1])[0]), (drafted, place)


def law_of_first_tokens(masked: bool, samples: int) -> Counter[int]:
    model = tiny_model("llama", vocab=VOCAB, eos_token_id=0)
    decoder = SpeculativeDecoder(model, "lookup", policy=2)
    grammar = Grammar(LLMatcher.grammar_from_regex("[a-h]{2}"), "guided_regex", GUIDE, frozenset({0}))
    prompt = tuple(TOKENIZER("abcdabcdab").input_ids)
    for number in range(samples):
        processors = (grammar.processor(len(prompt)),) if masked else ()
        params = SamplingParams(temperature=3.0)
        decoder.engine.add(
            Request(prompt=prompt, max_new_tokens=2, params=params, seed=1, request_id=number, processors=processors)
        )
    return Counter(row.tokens[1] for row in finished(decoder.engine))


def test_the_law_under_a_grammar_is_the_models_masked() -> None:
    """Second tokens, summed over the first: what a draft was verified by. Without the mask the same test fails."""
    model, prompt = tiny_model("llama", vocab=VOCAB, eos_token_id=0), TOKENIZER("abcdabcdab").input_ids
    letters = TOKENIZER("abcdefgh").input_ids

    def law(ids: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([ids])).logits[0, -1].double() / 3.0
        return torch.softmax(logits[letters], dim=-1)

    first = law(prompt)
    expected = sum(first[i] * law([*prompt, letter]) for i, letter in enumerate(letters))
    samples = 500

    def statistic(counts: Counter[int]) -> float:
        seen = torch.tensor([counts[letter] for letter in letters], dtype=torch.float64)
        return float((((seen - samples * expected) ** 2) / (samples * expected)).sum())

    critical = 24.3  # chi-square with 7 degrees of freedom: 0.1 %
    assert statistic(law_of_first_tokens(True, samples)) < critical
    assert statistic(law_of_first_tokens(False, samples)) > critical


@pytest.mark.quick("paged-2")
@pytest.mark.parametrize("draft", [0, 2])
@pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "ragged"])
def test_a_grammar_outlives_being_sent_away(is_paged: bool, draft: int) -> None:
    """A row that had to wait again goes on in the middle of its text, by the rules, with what it would have said."""
    pattern = "([ab]{3}[cd]{2})*"
    grammar = Grammar(LLMatcher.grammar_from_regex(pattern), "guided_regex", GUIDE, frozenset({0}))

    def texts(cache: KeyValueCache | None) -> tuple[dict[int, str], int]:
        target = Scorer(tiny_model("llama", vocab=VOCAB, eos_token_id=0), cache=cache)
        engine, prompt = (
            Engine(target, PromptLookup(min_ngram=1), Constant(draft)),
            tuple(TOKENIZER("abccab").input_ids),
        )
        for number in range(6):
            processors = (grammar.processor(len(prompt) + number),)
            asked = Request(
                prompt=(*prompt, *prompt[:number]), max_new_tokens=30 + number, seed=1, request_id=number,
                params=SamplingParams(temperature=1.0, logit_bias={0: -100.0}), processors=processors,
            )  # fmt: skip
            engine.add(asked)
        said = {row.request.request_id: TOKENIZER.decode(row.tokens) for row in finished(engine)}
        return said, engine.num_preempted

    alone, preempted = texts(None)
    assert preempted == 0 and len(alone) == 6
    for number, text in alone.items():
        assert len(text) == 30 + number and re.fullmatch(pattern + "[ab]{0,3}[cd]{0,1}", text)
    cache = PagedCache(96, torch.device("cpu"), block_size=8) if is_paged else RaggedCache(120)
    again, preempted = texts(cache)
    assert again == alone and preempted > 0


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(200):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}
NAMED = {"name": "s", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    (
        ({"guided_regex": "(a"}, "guided_regex", "cannot be followed"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "ever complete"),
        ({"guided_json": NESTED}, "guided_json", "cannot be followed"),
        ({"guided_json": {"not": {}}}, "guided_json", "Unimplemented"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_json": {"$ref": "http://a/b"}}, "guided_json", "cannot be followed"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "give one"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "cannot be followed"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON schema"),
        ({"structured_outputs": {}}, "structured_outputs", "one of json, regex, choice, grammar, json_object"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "not regex and choice"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "True"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "no such field"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "no ",
        ),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex", "give one"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "ends"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "response_format", "type: json_schema"),
        ({"response_format": {"type": "text", "json_schema": NAMED}}, "response_format", "leave json_schema out"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ),
)
def test_grammars_that_cannot_be_followed(server: Server, body: dict[str, Any], param: str, message: str) -> None:
    answer = server.post("/v1/completions", prompt="x", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error


def test_a_grammar_that_runs_into_its_limits_ends_its_own_row_alone(server: Server) -> None:
    """It is found out on the way: the text that was asked for cannot be had, and nobody else notices."""
    with ThreadPoolExecutor(2) as pool:
        endless = {"prompt": "aaaa", "max_tokens": 400, "guided_regex": "((a{1,100}){1,100}){1,100}", "min_tokens": 400}
        failing = pool.submit(server.post, "/v1/completions", **endless)
        beside = server.complete("abc", max_tokens=60, temperature=0, ignore_eos=True)
        assert failing.result().status_code == 400 and failing.result().json()["error"]["code"] == "no_token"
    alone = server.complete("abc", max_tokens=60, temperature=0, ignore_eos=True)
    assert beside["choices"][0]["text"] == alone["choices"][0]["text"]


MANY_STATES = r"(.|\n)*(a(.|\n){12}b)?(.|\n)*"
"""Everything is allowed, but to follow it takes a state for every pattern of the last thirteen characters."""


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"initial_lexer_fuel": 500_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000}
    monkeypatch.setattr(grammars, "LIMITS", LLParserLimits(**limits, max_lexer_states=50))


def allowed(matcher: LLMatcher, output: list[int]) -> int:
    """How many tokens may follow, as a matcher says that has seen nothing else; 0 where that is too much for it."""
    assert all(matcher.try_consume_tokens([token]) for token in output) or len(output) > 40
    bits = matcher.compute_bitmask()
    return 0 if matcher.is_error() else sum(byte.bit_count() for byte in bits)


def test_behind_a_token_that_is_too_much_for_the_grammar_there_is_none(few_states: None) -> None:
    text = LLMatcher.grammar_from_regex(MANY_STATES)
    grammar, prompt = Grammar(text, "guided_regex", GUIDE, frozenset({0})), [5, 6]
    plain, varied = TOKENIZER("c").input_ids, TOKENIZER("aababbbaabbabaa" * 4).input_ids

    def free(processor: Any, history: list[int], drafted: list[int]) -> list[int]:
        masked = processor.along([*prompt, *history], drafted, torch.zeros(len(drafted) + 1, VOCAB))
        return torch.isfinite(masked).sum(dim=-1).tolist()

    alone = [allowed(LLMatcher(GUIDE, text, limits=grammars.LIMITS), varied[:size]) for size in range(len(varied) + 1)]
    assert alone[0] and not alone[-1]
    for size, number in enumerate(alone):  # whatever texts before it have used up
        assert free(grammar.processor(2), varied[:size], []) == [number]
    processor = grammar.processor(2)
    along = free(processor, [], varied)
    assert along[0] == alone[0] and set(along) == {alone[0], 0} and not along[-1]
    assert sorted(along, reverse=True) == along, "what follows a place without tokens has none either"
    assert free(processor, plain, []) == [0], "it has begun anew once"
    assert free(grammar.processor(2), plain, [*varied])[0] == alone[0]


def test_what_others_used_up_does_not_end_a_text(server: Server, few_states: None) -> None:
    """Copies of a matcher share its lexer: a text that is too much for it must not take the others' grammar away."""
    bias = {str(token): 100.0 for token in TOKENIZER("ab").input_ids}
    body = {"prompt": "abba", "max_tokens": 60, "seed": 1, "guided_regex": MANY_STATES, "stop": ["cc"]}
    for _ in range(2):
        answer = server.post("/v1/completions", **body, logit_bias=bias)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_token", answer.text
        short = server.complete(**body, logit_bias={str(TOKENIZER("c").input_ids[0]): 100.0})
        assert short["choices"][0]["finish_reason"] == "stop" and short["choices"][0]["text"] == ""


def chain(kind: str, number: int) -> str:
    if kind == "rules":
        rules = (f'a{i}: "x" | a{i + 1} "y"' for i in range(number))
        return LLMatcher.grammar_from_lark("\n".join(("start: a0", *rules, f'a{number}: "z"')))
    shapes: dict[str, Callable[[Any], Any]] = {
        "references": lambda ref: ref,
        "objects": lambda ref: {"type": "object", "properties": {"x": ref}},
        "all of": lambda ref: {"allOf": [ref]},
    }
    named = {f"a{i}": shapes[kind]({"$ref": f"#/$defs/a{i + 1}"}) for i in range(number)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**named, f"a{number}": {"type": "null"}}}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def follow(text: str) -> None:
    grammar = Grammar(text, "grammar", LLTokenizer("byte"), frozenset({256}))
    grammar.processor(0)
    grammar.renewed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"), [("rules", 6000), ("references", 5400), ("objects", 2600), ("all of", 4000)]
)
def test_rules_that_lead_to_rules_without_end_do_not_end_the_process(kind: str, number: int) -> None:
    """In a process of its own, which died of the recursion: a copy of this one, for importing all takes it seconds."""
    text = chain(kind, number)
    assert 0.6 * grammars.MOST_CHARACTERS < len(text) < grammars.MOST_CHARACTERS, (kind, len(text))
    process = multiprocessing.get_context("fork").Process(target=follow, args=(text,), daemon=True)
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0, (kind, process.exitcode)


def test_a_grammar_that_no_thread_can_be_started_for_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ApiError) as refused:
        with_deep_stack(lambda: 1)
    monkeypatch.undo()
    assert refused.value.status == 503 and refused.value.retry_after and threading.stack_size() == 0
    assert with_deep_stack(lambda: 2) == 2
