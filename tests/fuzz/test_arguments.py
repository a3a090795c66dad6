"""Whatever is given for whatever argument: a result, or an error of ours that names the argument. And never for ever.

Every argument of the constructor, of `generate`, of `stream` and of `check` meets every odd value of a table, one at a
time; then several meet several at random. The quick part takes a sample of them, the slow part all.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import forerun
from engine.scripted import Spell
from forerun.checks.settings import CheckSettings
from forerun.errors import ForerunError, InvalidArgument, UnsupportedModel
from forerun.inputs import ENCODER_KEYWORDS
from forerun.keywords import CHECKS, KNOWN, REFUSED, WITHOUT_EFFECT
from fuzz.odd_values import IDS, MASKS, ODD, PROCESSORS, PROMPT, model
from support.seq2seq import batch_of, rows_of
from support.tiny import plain_greedy, tiny_model

NEW = 4
LIMIT = 60.0  # seconds a call may take on the slowest machine; the longest takes a fraction of one
LONGEST_MESSAGE = 1500  # an error that prints a whole model is none that helps
QUICK = 120
SHORT = CheckSettings(samples=100, max_new_tokens=2)

pytestmark = pytest.mark.filterwarnings("ignore")


SPECIAL = {"input_ids": IDS, "attention_mask": MASKS, "logits_processor": PROCESSORS}
FEW = (
    "True",
    "1",
    "3.5",
    "nan",
    "'a'",
    "[]",
    "[1]",
    "{5: nan}",
    "Unkind()",
    "np.array([1, 2])",
    "tensor([1, 2])",
    "model",
)
SETTINGS = tuple(signature(forerun.SpeculativeDecoder).parameters)
CHECKED = (*(name for name in signature(forerun.check).parameters if name != "options"), "policy", "rule")
# Other words by which a message may speak of an argument.
ALIASES = {
    "input_ids": ("prompt",),
    "decoder_input_ids": ("prompt",),
    "attention_mask": ("input_ids",),
    "prompts": ("prompt",),
    "open_prompts": ("prompt",),
    "generation_config": tuple(KNOWN),
}


@dataclass(frozen=True)
class Case:
    """One call: of `generate`, `stream` or `check` with these arguments, or of a constructor."""

    method: str
    arguments: dict[str, Callable[[], Any]]
    label: str


def decoder_of(drafter: Any = None, **settings: Any) -> forerun.SpeculativeDecoder:
    return forerun.SpeculativeDecoder(model(), drafter, policy=2, tokenizer=Spell(), kernels="off", **settings)


def calls() -> list[Case]:
    """Every argument of `generate` with every value; a third of them as a stream."""
    offered = sorted({*KNOWN, "input_ids", "attention_mask"})
    pairs = [(name, label, make) for name in offered for label, make in {**ODD, **SPECIAL.get(name, {})}.items()]
    pairs += [(name, label, ODD[label]) for name in sorted(REFUSED) for label in FEW]
    return [
        Case("stream" if place % 3 == 0 else "generate", {name: make}, f"{name}={label}")
        for place, (name, label, make) in enumerate(pairs)
    ]


def constructions() -> list[Case]:
    pairs = [(name, label) for name in SETTINGS for label in ODD]
    pairs.remove(("kernels", "'auto'"))  # a good value, which compiles for a minute where they never were
    return [Case("new", {name: ODD[label]}, f"{name}={label}") for name, label in pairs]


def checks() -> list[Case]:
    pairs = [(name, label, make) for name in CHECKED for label, make in ODD.items()]
    pairs += [(name, label, make) for name in ("prompts", "open_prompts") for label, make in IDS.items()]
    return [Case("check", {name: make}, f"check {name}={label}") for name, label, make in pairs]


def check_settings() -> list[Case]:
    names = [field.name for field in fields(CheckSettings)]
    return [
        Case("settings", {name: make}, f"CheckSettings {name}={label}") for name in names for label, make in ODD.items()
    ]


def mixtures(count: int, seed: int) -> list[Case]:
    """Two to four arguments at once."""
    chance = random.Random(seed)
    names = sorted({*KNOWN - ENCODER_KEYWORDS, "input_ids", "attention_mask"})
    found = []
    for _ in range(count):
        picked = {}
        for name in chance.sample(names, chance.randint(2, 4)):
            label, make = chance.choice(sorted({**ODD, **SPECIAL.get(name, {})}.items()))
            picked[name] = (label, make)
        label = ", ".join(f"{name}={value}" for name, (value, _) in picked.items())
        found.append(Case("generate", {name: make for name, (_, make) in picked.items()}, label))
    return found


class Hang(BaseException):
    """Not caught by anything on the way."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def perform(case: Case, decoder: Any, inputs: dict[str, Any]) -> Any:
    arguments = {name: make() for name, make in case.arguments.items()}
    if case.method == "new":
        settings = {"target": model(), "drafter": None, "kernels": "off", **arguments}
        return forerun.SpeculativeDecoder(**settings)
    if case.method == "settings":
        return CheckSettings(**arguments)
    if case.method == "check":
        pair: dict[str, Any] = {"target": model(), "drafter": None, "kernels": "off"}
        prompts = {"prompts": [PROMPT], "open_prompts": [PROMPT], "settings": SHORT}
        return forerun.check(**{**pair, **prompts, **arguments})
    given = {**inputs, "max_new_tokens": NEW, **arguments}
    if case.method == "stream":
        stream = decoder.stream(**given)
        for _ in stream:
            pass
        return stream.result
    return decoder.generate(**given)


def complaint(case: Case, decoder: Any, inputs: dict[str, Any], limit: float = LIMIT) -> str | None:
    """What is wrong with the answer to one call; None for a result or an error that helps."""
    try:
        with limited(limit):
            answer = perform(case, decoder, inputs)
    except Hang:
        return f"{case.label}: no end after {limit} s"
    except ForerunError as error:
        return _unclear(case, str(error))
    except Exception as error:
        return f"{case.label}: {type(error).__name__}: {str(error)[:200]}"
    if case.method in ("check", "settings"):
        return None
    if case.method == "new":
        try:
            answer = answer.generate(**inputs, max_new_tokens=2)
        except ForerunError as error:  # a cache that no text fits into is told by the first text
            return _unclear(case, str(error))
    odd = [row.tokens for row in answer.rows if not all(isinstance(token, int) for token in row.tokens)]
    return f"{case.label}: tokens {odd}" if odd else None


def _unclear(case: Case, message: str) -> str | None:
    names = [word for name in case.arguments for word in (name, *ALIASES.get(name, ()))]
    if not any(name in message for name in names):
        return f"{case.label}: the message names no argument: {message[:200]}"
    if "weights" in message:
        return f"{case.label}: the weights are blamed: {message[:200]}"
    if len(message) > LONGEST_MESSAGE:
        return f"{case.label}: a message of {len(message)} characters"
    return None


def complaints(cases: Sequence[Case], decoder: Any, inputs: dict[str, Any], expected: list[list[int]]) -> list[str]:
    """Of all calls, and of the decoder itself where one of them has spoiled it."""
    found = []
    for case in cases:
        if problem := complaint(case, decoder, inputs):
            found.append(problem)
        if decoder.generate(**inputs, max_new_tokens=3).new_tokens != expected:
            found.append(f"{case.label}: the decoder does not work any more")
    return found


def plain_inputs() -> dict[str, Any]:
    return {"input_ids": torch.tensor([PROMPT])}


def plain_answer() -> list[list[int]]:
    return [plain_greedy(model(), PROMPT, 3)]


def seq2seq_calls(family: str) -> list[Case]:
    names = (*sorted(ENCODER_KEYWORDS), "attention_mask", "forced_bos_token_id", "suppress_tokens")
    floats = {
        "nan features": lambda: torch.full((1, 8, 48), math.nan), "long features": lambda: torch.ones(1, 8, 31),
        "wide features": lambda: torch.ones(1, 9, 48), "flat features": lambda: torch.ones(8, 48),
        "states": lambda: torch.ones(1, 5, 32), "wide states": lambda: torch.ones(1, 5, 33),
        "many states": lambda: torch.ones(3, 5, 32), "tuple": lambda: (torch.ones(1, 5, 32),),
    }  # fmt: skip
    return [
        Case("generate", {name: make}, f"{family} {name}={label}")
        for name in names
        for label, make in {**ODD, **IDS, **MASKS, **floats}.items()
    ]


def seq2seq_decoder(family: str) -> tuple[Any, dict[str, Any], list[list[int]]]:
    decoder = forerun.SpeculativeDecoder(tiny_model(family), None, kernels="off")
    inputs: dict[str, Any] = dict(batch_of(family, rows_of(family)[:1]))
    return decoder, inputs, decoder.generate(**inputs, max_new_tokens=3).new_tokens


def sampled(cases: Sequence[Case], count: int) -> list[Case]:
    return random.Random(5).sample(list(cases), min(count, len(cases)))


def test_a_sample_of_calls() -> None:
    assert not complaints(sampled(calls(), QUICK), decoder_of(), plain_inputs(), plain_answer())


def test_a_sample_of_constructions() -> None:
    assert not complaints(sampled(constructions(), QUICK // 3), decoder_of(), plain_inputs(), plain_answer())


def test_a_sample_of_mixtures() -> None:
    assert not complaints(mixtures(QUICK // 2, seed=0), decoder_of(), plain_inputs(), plain_answer())


def test_a_sample_of_checks() -> None:
    assert not list(filter(None, (complaint(case, None, {}) for case in sampled(checks(), QUICK // 3))))


def test_every_setting_of_a_check() -> None:
    cases = check_settings()
    assert len(cases) == 7 * len(ODD)
    assert not list(filter(None, (complaint(case, None, {}) for case in cases)))


REFUSED_CHECKS: list[tuple[dict[str, Any], str]] = [
    ({"target": "gpt2"}, "target='gpt2': give a loaded model"),
    ({"prompts": "ab", "tokenizer": Spell()}, "prompts='ab': must be a list"),
    ({"prompts": [[]]}, r"prompts\[0\]=\[\]: is empty"),
    ({"prompts": [[1, 97]]}, r"prompts\[0\]\[1\]=97"),
    ({"open_prompts": [[1, 2], [-1]]}, r"open_prompts\[1\]\[0\]=-1"),
    ({"prompts": torch.tensor([[1, 97]])}, "prompts: token 97 is outside"),
    ({"prompts": [[1.5]]}, r"prompts\[0\]\[0\]=1.5"),
    ({"settings": {"samples": 100}}, "settings={'samples': 100}: must be a CheckSettings"),
    ({"reporter": 3}, "reporter=3"),
    ({"tokenizer": 3}, "tokenizer=3"),
    ({"policy": "fast"}, "policy='fast'"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED_CHECKS, ids=lambda value: str(value)[:40])
def test_a_check_refuses_before_it_runs(given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.measure.reference.deviation", lambda *_: pytest.fail("it runs"))
    case = Case("check", {name: lambda value=value: value for name, value in given.items()}, str(given))
    with pytest.raises(InvalidArgument, match=message):
        perform(case, None, {})


def test_a_check_refuses_an_encoder_decoder_model() -> None:
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is an encoder-decoder model"):
        perform(Case("check", {"target": lambda: tiny_model("t5")}, "t5"), None, {})


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_inputs_and_processors(name: str) -> None:
    cases = [case for case in calls() if case.label.split("=")[0] == name and case.label.split("=")[1] in SPECIAL[name]]
    assert len(cases) == len(SPECIAL[name])
    assert not complaints(cases, decoder_of(), plain_inputs(), plain_answer())


@pytest.mark.slow
def test_every_call() -> None:
    assert not complaints(calls(), decoder_of("lookup"), plain_inputs(), plain_answer())


@pytest.mark.slow
def test_every_construction() -> None:
    assert not complaints(constructions(), decoder_of(), plain_inputs(), plain_answer())


@pytest.mark.slow
def test_every_check() -> None:
    assert not list(filter(None, (complaint(case, None, {}) for case in checks())))


@pytest.mark.slow
def test_many_mixtures() -> None:
    drafter = forerun.DraftModel(model())
    assert not complaints(mixtures(600, seed=1), decoder_of(drafter), plain_inputs(), plain_answer())


@pytest.mark.slow
@pytest.mark.parametrize("family", ("t5", "whisper"))
def test_every_call_of_an_encoder_decoder_model(family: str) -> None:
    assert not complaints(seq2seq_calls(family), *seq2seq_decoder(family))


def test_every_keyword_has_its_check() -> None:
    elsewhere = {"generation_config", "drafter", "policy"}
    assert CHECKS.keys() | ENCODER_KEYWORDS - {"input_ids"} | elsewhere == KNOWN


def test_every_field_of_a_generation_config_is_known() -> None:
    """A new one of transformers is honoured or refused on purpose, not by chance."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= KNOWN | REFUSED.keys() | WITHOUT_EFFECT
    assert not WITHOUT_EFFECT & (KNOWN | REFUSED.keys())


class Broken:
    """What a decoder must not do, for every way in which it might."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer, self.sound = answer, decoder_of()

    def generate(self, **given: Any) -> Any:
        return self.answer() if given["max_new_tokens"] != 3 else self.sound.generate(**given)


def _raise(error: BaseException) -> Any:
    raise error


def _forever() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (lambda: 3 + "a", "TypeError"),  # type: ignore[operator]
        (lambda: torch.zeros(2).item(), "RuntimeError"),
        (lambda: _raise(ForerunError("must be a number")), "names no argument"),
        (lambda: _raise(ForerunError("top_k" + 2000 * "x")), "2005 characters"),
        (lambda: _raise(ForerunError("top_k: check the model's weights")), "weights are blamed"),
        (_forever, "no end"),
    ],
)
def test_obscure_errors_and_hangs_are_noticed(answer: Callable[[], Any], found: str) -> None:
    case = Case("generate", {"top_k": lambda: "a"}, "top_k='a'")
    assert found in (complaint(case, Broken(answer), plain_inputs(), limit=0.2) or "")


def test_a_spoiled_decoder_is_noticed() -> None:
    case = Case("generate", {"top_k": lambda: "a"}, "top_k='a'")
    (problem,) = complaints([case], decoder_of(), plain_inputs(), [[0, 0, 0]])
    assert "does not work" in problem
