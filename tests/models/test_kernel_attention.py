"""Whole models whose attention and cache writes run through the Triton kernels: the numbers of a plain forward."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

pytest.importorskip("triton")

from exactness.rounded import COARSE
from forerun import kernels
from forerun.cache.paged import PagedCache
from forerun.config import Kernels
from forerun.kernels.attention import attend as kernel
from forerun.kernels.attention import cache_write
from forerun.math.attention import Form
from forerun.math.scaled import Scheme
from forerun.models.masks import known_window
from forerun.models.patches.linear import LinearPatches
from forerun.models.scorer import Scorer
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.types import Source
from support.interpreter import DEVICE, kernel_tests
from support.recompute import check
from support.tiny import tiny_model

pytestmark = kernel_tests()

# Windows of 8 keys (Mistral, Gemma), capped scores (Gemma 2), sinks (GPT-OSS), norms before the rotation (Qwen3), no
# rotation at all (GPT-2, OPT): past and new tokens reach over the window's edge.
FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "qwen3", "gpt2", "opt", "gpt_neox", "phi3", "gpt_oss")
FUSED_WRITES = {"llama", "mistral", "qwen3"}
TEXTS = ([5, 11, 3, 60, 7, 7, 21, 40, 2, 19, 33, 9], [8, 90, 4])
NEW = ([31, 6, 17], [44])


@cache
def model_of(family: str) -> PreTrainedModel:
    if family == "gpt_oss":
        return _gpt_oss().to(DEVICE)
    return copy.deepcopy(tiny_model(family)).to(DEVICE)


def _gpt_oss() -> Any:
    config = GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(0.3 * torch.randn_like(weight))
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):  # the grouped products of newer versions want bfloat16 on a GPU
        model.set_experts_implementation("eager")
    return model


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel was called. Triton kernels are let onto the CPU, where the interpreter runs them."""
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {DEVICE.type})
    calls = {"attend_ragged": 0, "write": 0, "rotate_and_write": 0}

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def spy(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, spy)

    count(kernel, "attend_ragged")
    count(cache_write, "write")
    count(cache_write, "rotate_and_write")
    return calls


def scorer_of(family: str, use: Kernels = Kernels.ON, form: Form = Form.AUTO) -> Scorer:
    """Without the CPU's own kernels, which would get there first."""
    scorer = Scorer(model_of(family), form, use=use)
    scorer.body = scorer.modules
    scorer.modules._linear = LinearPatches(scorer.model, Kernels.OFF)
    for row, text in enumerate(TEXTS):
        scorer.admit(row)
        scorer.feed([row], [text])
    return scorer


@torch.no_grad()
def expected(family: str) -> list[torch.Tensor]:
    """Logits of the new tokens by plain forwards without a cache."""
    model, found = model_of(family), []
    for text, new in zip(TEXTS, NEW, strict=True):
        logits = model(torch.tensor([[*text, *new]], device=DEVICE), use_cache=False).logits[0]
        found.append(logits[-len(new) :])
    return found


def check_new(scorer: Scorer, family: str) -> None:
    got = scorer.score([0, 1], NEW).split([len(new) for new in NEW])
    for own, want in zip(got, expected(family), strict=True):
        check(own, want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_families(family: str, counted: dict[str, int]) -> None:
    scorer = scorer_of(family)
    prompt_writes = counted["write"] + counted["rotate_and_write"]
    assert prompt_writes == 4, "two layers, two prompts"
    assert counted["attend_ragged"] == 0, "a prompt that begins is the library's"
    check_new(scorer, family)
    assert counted["attend_ragged"] == 2
    assert counted["rotate_and_write" if family in FUSED_WRITES else "write"] == prompt_writes + 2


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("form", [Form.PAD, Form.KEYS])
def test_forms(form: Form, counted: dict[str, int]) -> None:
    check_new(scorer_of("gemma2", form=form), "gemma2")
    assert counted["attend_ragged"] == 2


TREES = ([-1, -1, 0, 0, 1], [-1])  # the first row ends in a tree of five nodes behind a token of its own
WITH_TREES = ([31, 6, 17, 52, 9, 70], [44, 12])


def scores_of_trees(family: str, use: Kernels, form: Form = Form.AUTO) -> torch.Tensor:
    return scorer_of(family, use, form).score([0, 1], WITH_TREES, trees=TREES)


# Mistral's windows are Gemma's as well, and GPT-2 asks nothing of a tree that Llama does not.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral", "gpt2"])
def test_trees(family: str, counted: dict[str, int]) -> None:
    """Branches by the kernel's own rule and by a mask: the same logits. Windows of eight keys reach into the past."""
    wanted = scores_of_trees(family, Kernels.OFF)
    assert counted["attend_ragged"] == 0
    check(scores_of_trees(family, Kernels.ON), wanted)
    assert counted["attend_ragged"] == 2
    check(scores_of_trees(family, Kernels.ON, Form.KEYS), wanted)


@pytest.mark.slow
def test_control_a_chain_is_another_tree(counted: dict[str, int]) -> None:
    chain = scorer_of("llama").score([0, 1], WITH_TREES)
    with pytest.raises(AssertionError):
        check(scores_of_trees("llama", Kernels.ON), chain)


def test_a_tree_wider_than_a_window_is_masked(counted: dict[str, int]) -> None:
    """Windows of eight keys, nine new tokens: only layers that see everything are left to the kernel."""
    block, parents = [[31, 6, 17, 52, 9, 70, 3, 81, 25], [44]], [[-1, -1, 0, 0, 1, 2, 2, 5], []]
    wanted, got = (scorer_of("gemma2", use).score([0, 1], block, trees=parents) for use in (Kernels.OFF, Kernels.ON))
    check(got, wanted)
    assert counted["attend_ragged"] == 1


@pytest.mark.slow
def test_a_tree_that_began_earlier_is_masked(counted: dict[str, int]) -> None:
    """A draft model grows its tree pass by pass: keys of other branches lie in the cache already."""
    made = []
    for use in (Kernels.OFF, Kernels.ON):
        scorer = scorer_of("llama", use)
        scorer.score([0], [[31, 6, 17]], trees=[[-1, -1]])
        before = counted["attend_ragged"]
        made.append(scorer.score([0], [[52, 9]], trees=[[-1, -1, 0, 1]]))
        assert counted["attend_ragged"] == before
    check(made[1], made[0])


def test_off_means_off(counted: dict[str, int]) -> None:
    check_new(scorer_of("mistral", Kernels.OFF), "mistral")
    assert not any(counted.values())


@pytest.mark.slow
def test_what_the_kernel_does_not_cover_goes_to_the_reference(
    counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "LARGEST_SIZE", 4)
    for family in ("gemma2", "llama"):
        check_new(scorer_of(family), family)
    assert counted["attend_ragged"] == 0


def test_a_model_that_changes_its_mask_goes_without_the_kernel(
    counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    real = modeling_gpt2.create_causal_mask
    scorer = scorer_of("gpt2")
    with monkeypatch.context() as patched:
        patched.setattr(modeling_gpt2, "create_causal_mask", lambda *a, **k: real(*a, **k).clone())
        got = scorer.score([0, 1], NEW)
    assert counted["attend_ragged"] == 0
    check(got, torch.cat(expected("gpt2")))


@pytest.mark.slow
def test_modules_come_back_as_they_were(counted: dict[str, int]) -> None:
    scorer = scorer_of("llama")
    check_new(scorer, "llama")
    assert not any("forward" in module.__dict__ for module in scorer.model.modules())


class TestKnownRules:
    def test_known(self) -> None:
        assert known_window(causal_mask_function) == 0
        assert known_window(sliding_window_causal_mask_function(7)) == 7

    @pytest.mark.parametrize(
        "rule",
        [
            chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
            and_masks(sliding_window_overlay(7), causal_mask_function, lambda b, h, q, k: q > 3),
            and_masks(sliding_window_overlay(7), lambda b, h, q, k: k <= q),
            and_masks(causal_mask_function, causal_mask_function),
            and_masks(causal_mask_function),
            sliding_window_overlay(7),
            sliding_window_causal_mask_function(0),
            lambda b, h, q, k: k <= q,
        ],
    )
    def test_others_are_not_taken_for_them(self, rule: Any) -> None:
        assert known_window(rule) is None


def sourced(family: str, use: Kernels, in_blocks: PagedCache) -> Tensor:
    """Logits of rows whose sources lie in blocks, after a prompt and a block more."""
    scorer = Seq2SeqScorer(model_of(family), cache=in_blocks, use=use)
    scorer.modules._linear = LinearPatches(scorer.model, Kernels.OFF)
    scorer.body = scorer.modules
    for row, text in enumerate(TEXTS):
        scorer.admit(row)
        scorer.read(row, Source(ids=tuple(range(5, 25 + 30 * row))))
        scorer.feed([row], [text])
    return scorer.score([0, 1], NEW)


@pytest.mark.quick("bart-coarse")
@pytest.mark.parametrize("scheme", [None, COARSE], ids=["plain", "coarse"])
@pytest.mark.parametrize("family", ["bart", "t5_gated"])
def test_sources_in_blocks(family: str, scheme: Scheme | None, counted: dict[str, int]) -> None:
    """Also rounded: in steps so wide that hardly a number lies between two of them."""
    want = sourced(family, Kernels.OFF, PagedCache(1024, DEVICE, scheme=scheme))
    assert counted["attend_ragged"] == counted["write"] == 0
    got = sourced(family, Kernels.ON, PagedCache(1024, DEVICE, scheme=scheme))
    assert counted["attend_ragged"] >= 6, "two layers' sources in three passes"
    assert counted["write"] == 2 * (2 + 3), "two sources, three passes"
    check(got, want)
