"""A model behind ragged rows computes what the same model computes without them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaModel

from forerun.config import SamplingParams
from forerun.drafters import DraftModel, EarlyExit
from forerun.errors import UnsupportedModel
from forerun.math.attention import Form
from forerun.models import scorer as scorer_module
from forerun.models.scorer import Scorer
from forerun.types import DraftContext, LawParams
from support.recompute import check, recomputed
from support.tiny import EXTRA_FAMILIES, FAMILIES, REFUSED_FAMILIES, draft_of, plain_greedy, ragged_prompts, tiny_model

ALL = (*FAMILIES, *EXTRA_FAMILIES)
GAMMA = 4
TEXT = ragged_prompts(2, 97, seed=11, longest=120)[1]


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Tokens of each forward of the model's body, pads included."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].numel())

    handle = model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("family", ALL)
@pytest.mark.quick(every=8)
def test_logits_after_every_cut(family: str) -> None:
    """Accepted counts 0 .. gamma, each followed by each: the rolled-back cache is as good as none at all."""
    model = tiny_model(family)
    scorer = Scorer(model)
    scorer.admit(0)
    text = TEXT[:3]
    scorer.feed([0], [text[:-1]])
    follows = [n for first in range(GAMMA + 1) for second in range(GAMMA + 1) for n in (first, second)]
    for step, accepted in enumerate(follows):
        draft = [(7 * step + i) % 97 for i in range(GAMMA)]
        logits = scorer.score([0], [[text[-1], *draft]])
        check(logits, recomputed(model, [*text, *draft])[-GAMMA - 1 :])
        text = [*text, *draft[:accepted], (step * 5) % 97]
        scorer.rewind([0], [len(text) - 1])
    assert len(text) > 100


def draft_context(scorer: Scorer, histories: list[list[int]], room: int) -> DraftContext:
    uniforms = torch.rand(len(histories), room, dtype=torch.float64)
    params = LawParams.stack([SamplingParams(temperature=1.0)] * len(histories))
    return DraftContext(
        tuple(range(len(histories))), tuple(histories), (room,) * len(histories), params, uniforms,
        (None,) * len(histories), scorer.vocab_size, torch.device("cpu"),
    )  # fmt: skip


def check_laws(model: Any, draft: Any, histories: list[list[int]]) -> None:
    """The law a draft reports is the draft model's own, from a full forward."""
    for i in range(draft.width):
        laws = draft.law.at(torch.full((len(histories),), i))
        for row, history in enumerate(histories):
            seen = [*history, *draft.tokens[row, :i].tolist()]
            torch.testing.assert_close(laws[row], recomputed(model, seen)[-1].softmax(-1), rtol=0, atol=3e-5)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("kind", ("model", "exit"))
@pytest.mark.quick(every=36)
def test_draft_laws_after_every_cut(family: str, kind: str) -> None:
    """The drafter's side of the same: after each number of accepted tokens, a fully kept draft included."""
    target = Scorer(tiny_model(family, layers=3))
    drafter: Any = DraftModel(draft_of(tiny_model(family))) if kind == "model" else EarlyExit(2)
    if kind == "exit":
        drafter.bind(target)
    histories = [TEXT[:1], TEXT[4:16]]
    for row, history in enumerate(histories):
        target.admit(row)
        target.feed([row], [history[:-1]])
        if kind == "model":
            drafter.admit(row, history)
    for accepted in (*range(GAMMA + 1), GAMMA, 0):
        draft = drafter.propose(draft_context(target, histories, GAMMA))
        check_laws(drafter.scorer.model, draft, histories)
        for row, other in ((0, accepted), (1, GAMMA - accepted)):
            new = [*draft.tokens[row, :other].tolist(), 3]
            target.feed([row], [[histories[row][-1], *new[:-1]]])
            histories[row] = [*histories[row], *new]
        drafter.rewind((0, 1), [len(history) - 1 for history in histories])


@pytest.mark.parametrize("family", ("mistral", "gemma3", "gemma2"))
@pytest.mark.parametrize("length", (6, 7, 8, 9, 15, 16, 17, 40))
@pytest.mark.quick(every=2)
def test_windows_at_and_past_their_edge(family: str, length: int) -> None:
    """Window 8, alone and beside rows of other lengths; one token and several."""
    model = tiny_model(family)
    for form in (Form.PAD, Form.SPLIT):
        scorer = Scorer(model, form)
        others = {0: TEXT[:length], 1: TEXT[20:23], 2: TEXT[30:70]}
        for row in others:
            scorer.admit(row)
        scorer.feed(list(others), list(others.values()))
        for block in ([5], [5, 6, 7]):
            logits = scorer.score(list(others), [block] * 3).split(len(block))
            for row, text in others.items():
                check(logits[row], recomputed(model, [*text, *block])[-len(block) :])
                scorer.rewind([row], [len(text)])


@pytest.mark.parametrize("family", ("llama", "codegen"))
def test_last_logits_only(family: str) -> None:
    scorer = Scorer(tiny_model(family))
    for row in (0, 1):
        scorer.admit(row)
    last = scorer.score_last([0, 1], [TEXT[:5], TEXT[5:8]])
    check(last[0], recomputed(scorer.model, TEXT[:5])[-1])
    check(last[1], recomputed(scorer.model, TEXT[5:8])[-1])


@pytest.mark.parametrize("family", ("llama", "codegen", "gemma3"))
def test_long_prompts_are_fed_in_bounded_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "PREFILL_TOKENS", 16)
    scorer = Scorer(tiny_model(family), Form.PAD)
    texts = [TEXT[:50], TEXT[50:53], TEXT[60:95]]
    for row in range(3):
        scorer.admit(row)
    with counted(scorer.model) as seen:
        scorer.feed(range(3), texts)
    assert len(seen) == -(-sum(map(len, texts)) // 16)
    logits = scorer.score(range(3), [[1]] * 3)
    for row, text in enumerate(texts):
        check(logits[row], recomputed(scorer.model, [*text, 1])[-1])


def test_one_prompt_is_encoded_once() -> None:
    scorer = Scorer(tiny_model("llama"), Form.PAD)
    prompts = [TEXT[:20]] * 3 + [TEXT[40:50]] + [TEXT[:20]]
    for row in range(5):
        scorer.admit(row)
    with counted(scorer.model) as seen:
        scorer.feed(range(5), prompts)
    assert sum(seen) == 20 + 10
    logits = scorer.score(range(5), [[row] for row in range(5)])
    for row, prompt in enumerate(prompts):
        check(logits[row], recomputed(scorer.model, [*prompt, row])[-1])


@pytest.mark.parametrize("family", ("llama", "codegen"))
def test_a_pass_that_fails_leaves_no_token(family: str) -> None:
    model = copy.deepcopy(tiny_model(family))
    scorer = Scorer(model)
    for row in (0, 1):
        scorer.admit(row)
    scorer.feed([0, 1], [TEXT[:10], TEXT[:4]])
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = layers[1].register_forward_pre_hook(explode)
    with pytest.raises(RuntimeError, match="out of memory"):
        scorer.score([0, 1], [[1, 2, 3], [4]])
    handle.remove()
    assert [scorer.length(row) for row in (0, 1)] == [10, 4]
    assert model.config._attn_implementation == tiny_model(family).config._attn_implementation
    logits = scorer.score([0, 1], [[1, 2, 3], [4]])
    check(logits[:3], recomputed(model, [*TEXT[:10], 1, 2, 3])[-3:])
    check(logits[3:], recomputed(model, [*TEXT[:4], 4])[-1:])


@pytest.mark.parametrize("family", ALL)
@pytest.mark.quick(every=2)
def test_the_model_is_left_as_it_was(family: str) -> None:
    model = tiny_model(family)
    before, wanted = model.config._attn_implementation, plain_greedy(model, TEXT[:9], 12)
    scorer = Scorer(model)
    scorer.admit(0)
    for i in range(9):
        scorer.score([0], [TEXT[i : i + 1]])
        if i in (0, 4, 8):
            assert model.config._attn_implementation == before
            assert plain_greedy(model, TEXT[:9], 12) == wanted
    check(scorer.score([0], [[5]]), recomputed(model, [*TEXT[:9], 5])[-1:])


@pytest.mark.parametrize("family", REFUSED_FAMILIES)
def test_models_that_cannot_be_cut_back_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=type(tiny_model(family)).__name__):
        Scorer(tiny_model(family))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        Scorer(LlamaModel(tiny_model("llama").config))


def test_unknown_layer_kinds_are_refused() -> None:
    model = copy.deepcopy(tiny_model("qwen3"))
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        Scorer(model)


def test_flash_attention_without_the_interface_is_refused() -> None:
    model = copy.deepcopy(tiny_model("codegen"))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="attn_implementation='eager'"):
        Scorer(model)


def test_families_outside_the_interface_are_refused() -> None:
    model = copy.deepcopy(tiny_model("codegen"))
    model.config.model_type = "something_new"
    with pytest.raises(UnsupportedModel, match="something_new"):
        Scorer(model)


def test_keywords_nobody_honours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(tiny_model("llama"))
    scorer.admit(0)
    right = scorer.modules.call
    monkeypatch.setattr(scorer.modules, "call", partial(right, gate_of_heads=torch.ones(1)))
    with pytest.raises(UnsupportedModel, match="gate_of_heads"):
        scorer.score([0], [[1, 2]])
    assert scorer.length(0) == 0


def test_long_rope_ends_where_its_frequencies_switch() -> None:
    half = MODEL_HEAD // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * half, "long_factor": [4.0] * half,
            "original_max_position_embeddings": 32}  # fmt: skip
    model = tiny_model("phi3", original_max_position_embeddings=32, rope_parameters=rope)
    scorer = Scorer(model)
    assert scorer.context_length == 32
    scorer.admit(0)
    check(scorer.score([0], [TEXT[:30]]), recomputed(model, TEXT[:30]))


MODEL_HEAD = 8


@pytest.mark.parametrize(
    ("family", "length"), [("llama", 512), ("gpt2", 512), ("opt", 512), ("bloom", None), ("falcon_alibi", None)]
)
def test_context_lengths(family: str, length: int | None) -> None:
    assert Scorer(tiny_model(family)).context_length == length


def sinks_model() -> Any:
    torch.manual_seed(3)
    config = GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=512, eos_token_id=None, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = GptOssForCausalLM(config).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        weight.normal_(std=2.0 if "sinks" in name else 0.3)
    return model


def capped_model() -> Any:
    model = copy.deepcopy(tiny_model("gemma2"))
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("make", (sinks_model, capped_model))
@pytest.mark.parametrize("form", (Form.PAD, Form.SPLIT))
def test_sinks_and_softcaps_equal_eager(make: Any, form: Form) -> None:
    model = make()
    scorer, texts = Scorer(model, form), [TEXT[:30], TEXT[30:34]]
    for row in (0, 1):
        scorer.admit(row)
    scorer.feed([0, 1], texts)
    logits = scorer.score([0, 1], [[3, 4, 5]] * 2).split(3)
    for row, text in enumerate(texts):
        check(logits[row], recomputed(model, [*text, 3, 4, 5])[-3:])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("family", ALL)
def test_bfloat16_runs(family: str) -> None:
    model = copy.deepcopy(tiny_model(family)).to(torch.bfloat16)
    scorer = Scorer(model)
    for row in (0, 1):
        scorer.admit(row)
    scorer.feed([0, 1], [TEXT[:9], TEXT[:3]])
    logits = scorer.score([0, 1], [[3, 4], [5]])
    for layer in scorer.cache.layers.values():
        assert layer.keys.dtype == torch.bfloat16
    exact = torch.cat(
        [recomputed(tiny_model(family), t)[-n:] for t, n in (([*TEXT[:9], 3, 4], 2), ([*TEXT[:3], 5], 1))]
    )
    noise = (recomputed(model, [*TEXT[:9], 3, 4])[-2:].float() - exact[:2]).abs().max()
    assert (logits.float() - exact).abs().max() < 3 * noise
