"""What goes wrong costs what is wrong and nothing else; what is asked wrongly is answered."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

import forerun
from engine.scripted import PROMPT, VOCAB, Scripted, answer, engine_with
from forerun.config import SamplingParams
from forerun.drafters import DraftModel, PromptLookup
from forerun.engine import FinishReason, Request
from forerun.errors import ForerunWarning, InvalidArgument, NonFiniteLogits, TokenizerMismatch, UnknownArgument
from forerun.kernels import why_not_numba
from support.batches import padded
from support.tiny import draft_of, plain_greedy, ragged_prompts, tiny_model
from support.warned import forerun_warnings

PROMPTS = ragged_prompts(3, VOCAB, seed=41)


def failing(history: Sequence[int], room: int) -> list[int]:
    if len(history) % 3 == 0:
        raise RuntimeError("no idea")
    return [1] * room


BAD_SCRIPTS = {
    "raises": failing,
    "beyond the vocabulary": lambda history, room: [VOCAB] * room,
    "negative": lambda history, room: [-1] * room,
    "too long": lambda history, room: [1] * (room + 1),
}


@pytest.mark.quick("0.8-negative", "0.0-raises")
@pytest.mark.parametrize("kind", BAD_SCRIPTS)
@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_a_bad_drafter_costs_its_drafts_only(kind: str, temperature: float) -> None:
    settings: Any = {"max_new_tokens": 20, "temperature": temperature, "seed": 1}
    plain = forerun.SpeculativeDecoder(tiny_model("llama"), None, rule="coupled").generate(*padded(PROMPTS), **settings)
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), Scripted(BAD_SCRIPTS[kind]), policy=3, rule="coupled")
    with pytest.warns(ForerunWarning, match="Scripted failed") as caught:
        out = decoder.generate(*padded(PROMPTS), **settings)
    assert len(forerun_warnings(caught)) == 1
    assert out.new_tokens == plain.new_tokens


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("verb", ("admit", "rewind", "release"))
def test_a_drafter_that_stumbles_over_news_harms_nobody(verb: str) -> None:
    drafter = DraftModel(draft_of(tiny_model("llama")))
    plain = forerun.SpeculativeDecoder(tiny_model("llama"), None).generate(*padded(PROMPTS), max_new_tokens=20)

    def stumble(*arguments: Any) -> None:
        raise RuntimeError("what was that?")

    setattr(drafter, verb, stumble)
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), drafter, policy=3)
    with pytest.warns(ForerunWarning, match="DraftModel failed"):
        out = decoder.generate(*padded(PROMPTS), max_new_tokens=20)
    assert out.new_tokens == plain.new_tokens


@pytest.mark.skipif(why_not_numba() is not None, reason="no compiled kernels here")
@pytest.mark.quick("4")
@pytest.mark.parametrize("calls", (0, 4))
def test_a_kernel_that_does_not_compile_is_told_of_once(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or in the middle for a shape that comes late: the modules go on, and no token is lost or another."""
    from numba.core.errors import LoweringError

    from forerun.kernels.cpu import stack

    def made() -> forerun.SpeculativeDecoder:
        return forerun.SpeculativeDecoder(model, PromptLookup(min_ngram=1), policy=3, kernels="on")

    model = copy.deepcopy(tiny_model("llama"))
    settings: Any = {"max_new_tokens": 20, "temperature": 1.0, "seed": 1}
    decoder, want = made(), made().generate(*padded(PROMPTS), **settings).new_tokens
    run, left = stack.run_stack, [calls]

    def failing_later(*given: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise LoweringError("no such instruction")
        run(*given)

    monkeypatch.setattr(stack, "run_stack", failing_later)
    assert decoder.engine.target.is_fused
    with pytest.warns(ForerunWarning, match="no such instruction.*modules run from now on") as caught:
        assert decoder.generate(*padded(PROMPTS), **settings).new_tokens == want
    assert len(forerun_warnings(caught)) == 1 and not decoder.engine.target.is_fused
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        assert decoder.generate(*padded(PROMPTS), **settings).new_tokens == want


@pytest.mark.skipif(why_not_numba() is not None, reason="no compiled kernels here")
def test_a_compiler_of_the_users_own_is_not_taken_for_ours() -> None:
    from numba.core.errors import TypingError

    class Theirs(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            raise TypingError("of the user's kernel")

    model = copy.deepcopy(tiny_model("llama"))
    decoder = forerun.SpeculativeDecoder(model, None, kernels="on")
    with pytest.raises(TypingError, match="of the user's kernel"):
        decoder.generate(*padded(PROMPTS), max_new_tokens=5, logits_processor=[Theirs()])
    assert decoder.engine.target.is_fused


def test_another_error_of_a_pass_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = forerun.SpeculativeDecoder(model, None)

    def broken(call: Any) -> Any:
        raise RuntimeError("of the model's own")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.target.body, "run", broken)
        with pytest.raises(RuntimeError, match="of the model's own"):
            decoder.generate(*padded(PROMPTS), max_new_tokens=5)
    want = [plain_greedy(model, prompt, 5) for prompt in PROMPTS]
    assert decoder.generate(*padded(PROMPTS), max_new_tokens=5).new_tokens == want


class Halfway(DraftModel):
    """Fails after its cache has taken in tokens that will not stand."""

    def propose(self, context: Any) -> Any:
        draft = super().propose(context)
        if len(context.histories[0]) % 2:
            raise RuntimeError("lost the way")
        return draft


@pytest.mark.filterwarnings("ignore::forerun.errors.ForerunWarning")
def test_a_draft_model_recovers_from_a_failed_round() -> None:
    model = tiny_model("llama")
    decoder = forerun.SpeculativeDecoder(model, Halfway(model), policy=3)
    out = decoder.generate(*padded(PROMPTS), max_new_tokens=24)
    assert out.new_tokens == [plain_greedy(model, prompt, 24) for prompt in PROMPTS]
    assert out.stats.acceptance_rate == 1.0  # an equal model with a sound cache is never wrong


NAN_TOKEN = 9  # no prompt of this file has it, and none of its models says it unasked


def nan_model(family: str = "llama") -> Any:
    """One token's embedding is not a number."""
    model = copy.deepcopy(tiny_model(family))
    model.get_input_embeddings().weight.data[NAN_TOKEN] = torch.nan
    return model


@pytest.mark.parametrize("family", ("llama", "mistral", "codegen"))
@pytest.mark.parametrize("attention", ("pad", "split"))
@pytest.mark.parametrize("place", (0, 1, 2))
@pytest.mark.quick(every=18)
def test_nan_ends_its_own_row(family: str, attention: str, place: int) -> None:
    model = nan_model(family)
    prompts = [list(prompt) for prompt in PROMPTS]
    wanted = [plain_greedy(tiny_model(family), prompt, 12) for prompt in prompts]
    if any(NAN_TOKEN in tokens for tokens in wanted):
        pytest.fail("choose another token: the model says this one by itself")
    prompts[place] = [*prompts[place][:-1], NAN_TOKEN]
    decoder = forerun.SpeculativeDecoder(model, PromptLookup(), policy=3, attention=attention)
    out = decoder.generate(*padded(prompts), max_new_tokens=12)
    for row in range(3):
        if row == place:
            assert out.finish_reasons[row] is FinishReason.ERROR
            assert out.new_tokens[row] == []
            assert "NaN" in (out.errors[row] or "")
        else:
            assert out.new_tokens[row] == wanted[row]
            assert out.errors[row] is None
    again = decoder.generate(*padded([[1, 2, 3]] * 3), max_new_tokens=12)
    assert again.new_tokens == [plain_greedy(tiny_model(family), [1, 2, 3], 12)] * 3


def test_a_bias_beyond_the_vocabulary_is_refused_before_anybody_waits_for_it() -> None:
    engine = engine_with(PromptLookup())
    with pytest.raises(InvalidArgument, match=f"{VOCAB}.*the vocabulary ends at {VOCAB - 1}"):
        engine.add(Request(prompt=PROMPT, max_new_tokens=4, params=SamplingParams(logit_bias={3: 1.0, VOCAB: 1.0})))
    assert engine.is_idle


def test_nan_in_every_row_raises() -> None:
    decoder = forerun.SpeculativeDecoder(nan_model(), None)
    with pytest.raises(NonFiniteLogits, match="check the model's weights"):
        decoder.generate(*padded([[1, NAN_TOKEN], [NAN_TOKEN]]), max_new_tokens=4)
    assert decoder.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2).errors == [None]


def test_a_kept_row_is_not_kept_when_it_broke() -> None:
    decoder = forerun.SpeculativeDecoder(nan_model(), None, keep_rows=2)
    decoder.generate(*padded([[1, 2, 3, NAN_TOKEN], [1, 2, 3]]), max_new_tokens=4)
    assert len(decoder.engine.target.cache.rows) == 1


def test_a_model_that_raises_leaves_the_decoder_usable() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    decoder = forerun.SpeculativeDecoder(model, DraftModel(draft_of(model)), policy=2)

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.generate(*padded(PROMPTS), max_new_tokens=4)
    handle.remove()
    assert decoder.engine.target.cache.rows == ()
    assert decoder.generate(*padded(PROMPTS), max_new_tokens=9).new_tokens == [
        plain_greedy(model, p, 9) for p in PROMPTS
    ]


BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, InvalidArgument, "no prompts"),
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, InvalidArgument, "prompt 0 is empty"),
    ({"input_ids": [[1, 2.5]]}, InvalidArgument, "input_ids"),
    ({"input_ids": torch.tensor([1, 2])}, InvalidArgument, r"shape \(2,\)"),
    ({"attention_mask": torch.tensor([[0, 0, 0]])}, InvalidArgument, "prompt 0 is empty"),
    ({"attention_mask": torch.tensor([[1, 0, 1]])}, InvalidArgument, "hole"),
    ({"attention_mask": torch.tensor([[1, 1]])}, InvalidArgument, "agree"),
    ({"input_ids": torch.ones(1, 512, dtype=torch.long)}, InvalidArgument, "512 tokens.* shorten the prompt"),
    ({"input_ids": torch.tensor([[1, 97]])}, InvalidArgument, "token 97 is outside"),
    ({"input_ids": torch.tensor([[1, -1]])}, InvalidArgument, "token -1 is outside"),
    ({"temperature": -0.5}, InvalidArgument, "temperature=-0.5"),
    ({"top_p": 0.0}, InvalidArgument, "top_p=0.0"),
    ({"max_new_tokens": 0}, InvalidArgument, "max_new_tokens=0"),
    ({"max_length": 3}, InvalidArgument, "max_length=3 leaves no room"),
    ({"max_length": 8, "max_new_tokens": 20}, InvalidArgument, "max_length=8 beside max_new_tokens=20"),
    ({"num_return_sequences": 0}, InvalidArgument, "num_return_sequences=0"),
    ({"seed": 2**63, "temperature": 1.0}, InvalidArgument, "seed=9223372036854775808"),
    ({"request_ids": [1, 2]}, InvalidArgument, "give 1 different ids"),
    ({"request_ids": [2**32]}, InvalidArgument, "32 bits"),
    ({"do_sample": False, "temperature": 0.7}, InvalidArgument, "do_sample=False with temperature"),
    ({"logprobs": -1}, InvalidArgument, "logprobs=-1"),
    ({"stop_strings": "x"}, InvalidArgument, "need the tokenizer"),
    ({"use_cache": False}, InvalidArgument, "use_cache=False"),
    ({"temprature": 0.5}, UnknownArgument, "did you mean 'temperature'"),
    ({"xyzzy": 1}, UnknownArgument, "known are"),
    ({"num_beams": 4}, InvalidArgument, "beam search"),
    ({"assistant_model": object()}, InvalidArgument, "DraftModel"),
    ({"prompt_lookup_num_tokens": 3}, InvalidArgument, "PromptLookup"),
    ({"output_scores": True}, InvalidArgument, "logprobs=n"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS, ids=lambda value: str(value)[:40])
def test_bad_calls_are_answered(call: dict[str, Any], error: type[Exception], message: str) -> None:
    """And leave the decoder as it was."""
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None)
    with pytest.raises(error, match=message):
        decoder.generate(**{"input_ids": torch.tensor([[1, 2, 3]]), **call})
    assert decoder.generate(torch.tensor([PROMPT]), max_new_tokens=3).new_tokens == [list(answer()[:3])]


def test_one_bad_prompt_of_many_leaves_nothing_behind() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None)
    with pytest.raises(InvalidArgument, match="outside the target's vocabulary"):
        decoder.generate(torch.tensor([[1, 2], [1, 97]]), max_new_tokens=3)
    assert decoder.generate(torch.tensor([PROMPT]), max_new_tokens=3).new_tokens == [list(answer()[:3])]


def test_neutral_values_of_refused_keywords_pass() -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), None)
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=3, num_beams=1, typical_p=1.0, stopping_criteria=None)  # type: ignore[call-arg]
    assert out.new_tokens == [list(answer()[:3])]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "quick"}, "policy='quick'"),
        ({"policy": -1}, "policy=-1: a draft length"),
        ({"rule": "lossy"}, "rule='lossy': choose one of token"),
        ({"attention": "flat"}, "attention='flat'"),
        ({"drafter": 3}, "drafter=3"),
    ],
)
def test_bad_decoders_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        forerun.SpeculativeDecoder(tiny_model("llama"), **settings)


class Words:
    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return " ".join(self.words[token] for token in tokens)


def test_foreign_tokenizers_are_refused_by_name() -> None:
    target, draft = (copy.deepcopy(tiny_model("llama")) for _ in range(2))
    target.config.name_or_path, draft.config.name_or_path = "big-one", "small-one"
    with pytest.raises(TokenizerMismatch, match=r"big-one \(2 tokens\) and small-one \(3 tokens\)"):
        forerun.SpeculativeDecoder(target, DraftModel(draft, tokenizer=Words("a", "b", "c")), tokenizer=Words("a", "b"))
    forerun.SpeculativeDecoder(target, DraftModel(draft, tokenizer=Words("a", "b")), tokenizer=Words("a", "b"))
    with pytest.raises(TokenizerMismatch, match=r"\(97 tokens\) and .* \(2000 tokens\)"):
        forerun.SpeculativeDecoder(target, DraftModel(tiny_model("llama", vocab=2000)))


@pytest.mark.parametrize("size", (96, 100))
@pytest.mark.parametrize("rule", ("token", "block", "coupled"))
@pytest.mark.quick(every=6)
def test_vocabularies_may_differ_by_padding(size: int, rule: str) -> None:
    """A draft with fewer or more ids: no failure, nothing the target lacks, and what it says counts."""
    draft = tiny_model("llama", vocab=size)
    copied = copy.deepcopy(draft)
    target = tiny_model("llama")
    shared = min(size, VOCAB)
    copied.load_state_dict({**target.state_dict(), **{
        name: torch.cat([target.state_dict()[name][:shared], draft.state_dict()[name][shared:]])
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }})  # fmt: skip
    if size > VOCAB:
        copied.lm_head.weight.data[VOCAB:] = 3 * copied.lm_head.weight.data[:3]  # it likes to say what the target lacks
    decoder = forerun.SpeculativeDecoder(target, DraftModel(copied), policy=3, rule=rule)
    prompts = [*PROMPTS, [5, 96, 7], [96]]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        greedy = decoder.generate(*padded(prompts), max_new_tokens=20)
        sampled = decoder.generate(*padded(prompts), max_new_tokens=20, temperature=1.5, seed=1)
    assert greedy.new_tokens == [plain_greedy(target, prompt, 20) for prompt in prompts]
    assert greedy.stats.num_accepted_tokens > 20
    assert all(0 <= token < VOCAB for tokens in sampled.new_tokens for token in tokens)


def test_a_draft_model_that_sees_less_far_falls_silent() -> None:
    target, draft = tiny_model("llama"), tiny_model("llama", max_position_embeddings=24)
    decoder = forerun.SpeculativeDecoder(target, DraftModel(draft), policy=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForerunWarning)
        out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=40)
    assert tuple(out.new_tokens[0]) == answer()[:40]
    assert out.stats.num_accepted_tokens > 5
    assert out.stats.rounds > 40 - 24
