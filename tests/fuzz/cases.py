"""Random cases: what is decoded, how, and what `model.generate` says to the same. A case is its seed."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
)

import forerun
from engine.scripted import Spell
from forerun.policy import BassHeuristic, Constant, HfHeuristic
from fuzz.misbehaving import WildDrafter, WildPolicy
from support.ties import deviation
from support.tiny import EXTRA_FAMILIES, FAMILIES, check_stock, draft_of, tiny_model

VOCAB = 97
NOISE = {torch.float64: 1e-10}  # float32's is measured model by model
# Beside the families as they are, some with what others of their kind have.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (*FAMILIES, *EXTRA_FAMILIES)},
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_many_heads": ("llama", {"num_key_value_heads": 4}),
    "mistral_without_window": ("mistral", {"sliding_window": None}),
    "gemma3_narrow": ("gemma3", {"sliding_window": 4}),
}
NO_TREES = ("bloom", "falcon_alibi")  # their positions are their places in the cache
SINGLE = ("qwen2_moe",)  # torch's product over experts knows no float64
DRAFTERS = ("none", "model", "lookup", "table", "random", "exit", "chain", "tree", "wild", "wild", "wild")
POLICIES = (0, 1, 2, 3, 5, 8, "hf", "bass", "auto", "wild")


@dataclass(frozen=True, slots=True)
class Case:
    """One call of `generate`, and of which decoder."""

    seed: int
    family: str
    dtype: torch.dtype
    drafter: str
    policy: str | int
    rule: str
    kernels: str
    attention: str
    keep_rows: int
    copies: int
    prompts: tuple[tuple[int, ...], ...]
    temperatures: tuple[float, ...]  # 0 for greedy rows
    new: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What names the case in a failure: how it is repeated, and what it is."""
        name = "test_greedy_rows_are_transformers" if self.kernels == "off" else "test_with_kernels"
        kind = f"{self.family}, {self.drafter}, {self.policy}, {self.rule}, {self.dtype}"
        return f"pytest tests/fuzz -k '{name} and {self.seed}' ({kind})"

    @property
    def is_greedy(self) -> tuple[bool, ...]:
        """By sequence of the result."""
        return tuple(t == 0 for t in self.temperatures for _ in range(self.copies))


def case_of(seed: int, **fixed: Any) -> Case:
    """The case of a seed; settings that are `fixed` are not left to it, temperatures as many as rows are wanted."""
    rng = random.Random(seed)
    family, drafter = rng.choice(tuple(VARIANTS)), rng.choice(DRAFTERS)
    if "tree" in (drafter, fixed.get("drafter")) and family in NO_TREES:
        family = "llama"
    rows = len(fixed["temperatures"]) if "temperatures" in fixed else rng.randint(1, 4)
    lengths = [rng.randint(1, 14) for _ in range(rows)]
    prompts = tuple(tuple(rng.randrange(1, VOCAB) for _ in range(n)) for n in lengths)
    new = rng.randint(1, 16)
    case = Case(
        seed=seed,
        family=family,
        dtype=torch.float32 if family in SINGLE else rng.choice((torch.float64, torch.float32)),
        drafter=drafter,
        policy=rng.choice(POLICIES),
        rule="token" if drafter == "tree" else rng.choice(("token", "block", "coupled")),
        kernels="off",
        attention=rng.choice(("auto", "pad", "split")),
        keep_rows=rng.choice((0, 0, 2)),
        copies=rng.choice((1, 1, 2)),
        prompts=prompts,
        temperatures=tuple(rng.choice((0.0, 0.0, 0.7, 1.3)) for _ in prompts),
        new=new,
        options=_options(rng, new),
    )
    if fixed.get("dtype") is torch.float64 and family in SINGLE:
        fixed = {**fixed, "family": "llama"}
    return replace(case, **fixed)


def _options(rng: random.Random, new: int) -> dict[str, Any]:
    """Each is there now and then."""
    ids = rng.sample(range(VOCAB), 30)
    every: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice((0.8, 1.3)),
        "presence_penalty": lambda: rng.choice((-0.4, 0.7)),
        "frequency_penalty": lambda: rng.choice((0.5, 0.5, -0.2)),
        "logit_bias": lambda: {ids[0]: 1.5, ids[1]: -3.0, ids[2]: float("-inf")},
        "suppress_tokens": lambda: ids[3:9],
        "bad_words_ids": lambda: [[ids[9]], [ids[10], ids[11]]],
        "no_repeat_ngram_size": lambda: 2,
        "min_new_tokens": lambda: rng.randint(1, new),
        "eos_token_id": lambda: ids[12:18],
        "stop_strings": lambda: [f"<{ids[18]}", f"{ids[19] % 10}><{ids[20] // 10}"],
    }
    return {name: value() for name, value in every.items() if rng.random() < 0.3}


@lru_cache
def model_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    kind, overrides = VARIANTS[family]
    model = tiny_model(kind, **overrides)
    return model if dtype is torch.float32 else copy.deepcopy(model).to(dtype)


@lru_cache
def _draft_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return draft_of(model_of(family, dtype))


@lru_cache
def noise_of(family: str, dtype: torch.dtype) -> float:
    """How far logits of one position lie apart for the model itself."""
    text = [(7 * i) % (VOCAB - 1) + 1 for i in range(30)]
    return NOISE.get(dtype) or deviation(model_of(family, dtype), text)


def drafter_of(case: Case, name: str = "") -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "model": lambda: forerun.DraftModel(_draft_of(case.family, case.dtype)),
        "lookup": lambda: forerun.PromptLookup(max_ngram=2),
        "table": lambda: forerun.NgramTable.count([[*p, *p] for p in case.prompts], vocab_size=VOCAB),
        "random": lambda: forerun.RandomDraft(),
        "exit": lambda: forerun.EarlyExit(1),
        "chain": lambda: forerun.Chain(
            forerun.PromptLookup(min_ngram=2), forerun.DraftModel(_draft_of(case.family, case.dtype))
        ),
        "tree": lambda: forerun.Tree(
            forerun.DraftModel(_draft_of(case.family, case.dtype)), nodes=5, width=2,
            siblings=("top", "sampled")[case.seed % 2],
        ),
        "wild": lambda: WildDrafter(case.seed, VOCAB, _guesser(case)),
    }  # fmt: skip
    return makers[name or case.drafter]()


def _guesser(case: Case) -> Callable[[Sequence[int], int], list[int]]:
    """What the greedy target says next, where the history is one of its texts."""
    texts = [[*prompt, *oracle(case, prompt).tokens] for prompt in case.prompts]

    def guess(history: Sequence[int], room: int) -> list[int]:
        known = next((text for text in texts if text[: len(history)] == list(history)), [])
        return known[len(history) : len(history) + room]

    return guess


def policy_of(case: Case) -> Any:
    named: dict[str, Callable[[], Any]] = {
        "hf": HfHeuristic, "bass": BassHeuristic, "auto": lambda: "auto", "wild": lambda: WildPolicy(case.seed),
    }  # fmt: skip
    return Constant(case.policy) if isinstance(case.policy, int) else named[case.policy]()


class _Bias(LogitsProcessor):
    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = bias

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        for token, value in self.bias.items():
            changed[:, token] += value
        return changed


class _Counts(LogitsProcessor):
    """Presence and frequency penalty as OpenAI has them: over the output."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        for token, count in Counter(ids[0, self.prompt :].tolist()).items():
            changed[:, token] -= self.presence + self.frequency * count
        return changed


class _StopStrings(StoppingCriteria):
    """Ends with a string that the last token completes, even one that began in the prompt: transformers' own rule."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        *before, last = ids[0].tolist()
        known, text = len(Spell().decode(before)), Spell().decode([*before, last])
        ends = (match.end() for stop in self.strings for match in re.finditer(f"(?<={re.escape(stop)})", text))
        return torch.tensor([any(end > known for end in ends)])


@dataclass(frozen=True, slots=True)
class Oracle:
    """What `model.generate` says, and the scores it chose from."""

    tokens: list[int]
    scores: list[Tensor]  # of each token, [V], after all that was asked for


_oracles: dict[tuple[int, tuple[int, ...]], Oracle] = {}


def oracle(case: Case, prompt: tuple[int, ...]) -> Oracle:
    """Greedy decoding of one prompt alone by transformers itself, with processors in the documented order."""
    key = (case.seed, prompt)
    if key not in _oracles:
        _oracles[key] = _generate(model_of(case.family, case.dtype), prompt, case.new, case.options)
    return _oracles[key]


def _generate(model: PreTrainedModel, prompt: tuple[int, ...], new: int, options: dict[str, Any]) -> Oracle:
    check_stock(model)
    ids = torch.tensor([prompt])
    eos = options.get("eos_token_id")
    out: Any = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=eos,
        pad_token_id=0, logits_processor=_processors(len(prompt), options, eos or []),
        stopping_criteria=[_StopStrings(options["stop_strings"])] if "stop_strings" in options else [],
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    return Oracle(out.sequences[0, len(prompt) :].tolist(), [scores[0] for scores in out.scores])


def _processors(prompt: int, options: dict[str, Any], eos: list[int]) -> list[LogitsProcessor]:
    """In the order that docs/architecture.md gives."""
    makers: dict[str, Callable[[], LogitsProcessor]] = {
        "logit_bias": lambda: _Bias(options["logit_bias"]),
        "repetition_penalty": lambda: RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]),
        "presence_penalty": lambda: _Counts(prompt, options["presence_penalty"], 0.0),
        "frequency_penalty": lambda: _Counts(prompt, 0.0, options["frequency_penalty"]),
        "min_new_tokens": lambda: MinNewTokensLengthLogitsProcessor(prompt, options["min_new_tokens"], eos),
        "no_repeat_ngram_size": lambda: NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]),
        "bad_words_ids": lambda: NoBadWordsLogitsProcessor(options["bad_words_ids"], eos),
        "suppress_tokens": lambda: SuppressTokensLogitsProcessor(options["suppress_tokens"]),
    }
    return [make() for name, make in makers.items() if name in options and (name != "min_new_tokens" or eos)]


def decoder_of(case: Case, drafter: str = "") -> forerun.SpeculativeDecoder:
    return forerun.SpeculativeDecoder(
        model_of(case.family, case.dtype), drafter_of(case, drafter), policy=policy_of(case), rule=case.rule,
        tokenizer=Spell(), attention=case.attention, kernels=case.kernels, keep_rows=case.keep_rows,
    )  # fmt: skip


def texts_of(case: Case, decoder: forerun.SpeculativeDecoder) -> list[list[int]]:
    """New tokens of every sequence."""
    width = max(map(len, case.prompts))
    ids = torch.tensor([[7] * (width - len(p)) + list(p) for p in case.prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in case.prompts])
    settings: Any = {"eos_token_id": [], **case.options}
    out = decoder.generate(
        ids, mask, max_new_tokens=case.new, temperature=list(case.temperatures), num_return_sequences=case.copies,
        seed=case.seed, **settings,
    )  # fmt: skip
    return out.new_tokens


def check_case(case: Case, texts: Sequence[Sequence[int]]) -> int:
    """Compare greedy rows with `model.generate`; the number of ties. Anything else that differs fails."""
    ties = 0
    noise = noise_of(case.family, case.dtype)
    for row, got in enumerate(texts):
        prompt = case.prompts[row // case.copies]
        where = f"{case.label}: row {row}"
        assert all(0 <= token < VOCAB for token in got), f"{where}: ids outside the vocabulary"
        assert 1 <= len(got) <= case.new, f"{where}: {len(got)} tokens"
        if case.is_greedy[row]:
            ties += not _same(got, oracle(case, prompt), noise, where)
    return ties


def _same(got: Sequence[int], want: Oracle, noise: float, where: str) -> bool:
    """False where they part at a tie: past it there is nothing to compare."""
    if list(got) == want.tokens:
        return True
    place = next((i for i, (a, b) in enumerate(zip(got, want.tokens, strict=False)) if a != b), None)
    assert place is not None, f"{where}: {len(got)} tokens instead of {len(want.tokens)}"
    scores = want.scores[place]
    gap = float(scores.max() - scores[got[place]])
    assert gap <= 2 * noise, f"{where}: token {place} is {got[place]}, not {want.tokens[place]}; gap {gap:.2g}"
    return False


def check_against_transformers(case: Case) -> None:
    """Greedy rows say what transformers says, sampled ones under rule `coupled` what they say without a drafter."""
    decoder = decoder_of(case)
    texts = texts_of(case, decoder)
    check_case(case, texts)
    if case.keep_rows:  # again, from kept rows
        check_case(case, texts_of(case, decoder))
    if case.rule == "coupled" and case.dtype is torch.float64:
        plain = texts_of(case, decoder_of(case, "none"))
        assert texts == plain, f"{case.label}: sampled rows depend on the drafter"
