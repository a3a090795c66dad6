"""Greedy output with trained kinds of drafters is the output of `model.generate`, and their drafts are really kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import forerun
from decoder.trained import NEW, oracle, said, save
from forerun.drafters import DraftModel, FeatureHead, ParallelHeads, from_folder
from forerun.errors import InvalidArgument
from forerun.loading.drafter_folder import DrafterManifest, describe_target, save_drafter
from support.batches import padded
from support.heads import head_of
from support.ties import check_greedy
from support.tiny import draft_of, tiny_model
from support.warned import forerun_warnings

# OPT's body is called from within its base model, Mistral has a window, Falcon takes the padded layout.
FAMILIES = ("llama", "qwen3", "gpt_neox", "opt", "mistral", "falcon_rotary")
KINDS = ("feature", "parallel", "causal")
RULES = ("token", "block", "coupled")


def check(decoder: forerun.SpeculativeDecoder, family: str, **keywords: Any) -> Any:
    prompts, wanted, noise = oracle(family)
    out = decoder.generate(*padded(prompts), max_new_tokens=NEW, **keywords)
    copies = keywords.get("num_return_sequences", 1)
    for row, tokens in enumerate(out.new_tokens):
        check_greedy(tiny_model(family), prompts[row // copies], tokens, wanted[row // copies], noise, f"row {row}")
    return out.stats


@pytest.mark.parametrize("reduced", (False, True), ids=("full", "reduced"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("llama-feature-full")
def test_greedy_equals_generate(
    family: str, kind: str, reduced: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Ragged rows, loaded from a folder by its path, under each rule in turn."""
    folder = save(tmp_path / "draft", kind, family, reduced)
    number = FAMILIES.index(family) + KINDS.index(kind)
    for rule, attention in zip(RULES, ("pad", "split", "auto"), strict=True):
        policy = ("auto", 3, 5)[(number + RULES.index(rule)) % 3]
        decoder = forerun.SpeculativeDecoder(
            tiny_model(family), str(folder), policy=policy, rule=rule, attention=attention
        )
        stats = check(decoder, family)
        if policy != "auto":
            assert stats.num_accepted_tokens > 0
    assert not forerun_warnings(recwarn), "a drafter failed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_prompt(kind: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), save(tmp_path / "draft", kind, "llama", True), policy=3)
    check(decoder, "llama", num_return_sequences=3)
    check(decoder, "llama")  # the same rows again, after others
    assert not forerun_warnings(recwarn)


@pytest.mark.slow
def test_a_head_that_is_its_target_saves_rounds() -> None:
    """Identity also holds where nothing is kept: a good head must really be listened to."""
    model = tiny_model("qwen3")
    head, deaf = head_of(model, noise=0), head_of(model, noise=0)
    deaf.fuse.weight.zero_()
    rates = [
        check(forerun.SpeculativeDecoder(model, FeatureHead(either), policy=3), "qwen3").tokens_per_round
        for either in (head, deaf)
    ]
    assert rates[0] > 1.6 and rates[1] < 1.2


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "shares", ((), ("embedding",), ("head",), ("embedding", "head")), ids=lambda s: "+".join(s) or "none"
)
@pytest.mark.parametrize("reduced", (False, True), ids=("full", "reduced"))
def test_causal_drafts_share_what_they_say(shares: tuple[str, ...], reduced: bool, tmp_path: Path) -> None:
    """Parts that are the target's are its own tensors; the rest is what was saved, and so are the laws."""
    model = tiny_model("llama")
    drafter = DraftModel.load(save(tmp_path / "draft", "causal", "llama", reduced, shares))
    draft = forerun.SpeculativeDecoder(model, drafter).drafter.scorer.model
    own = draft_of(model)
    for part, getter in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        source = model if part in shares else own
        wanted = getattr(source, getter)().weight
        if part == "head" and reduced:
            wanted = wanted[said("llama")]
        assert torch.equal(getattr(draft, getter)().weight, wanted)
    layer = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(draft.state_dict()[layer], own.state_dict()[layer])
    assert not torch.equal(draft.state_dict()[layer], model.state_dict()[layer])


@pytest.mark.slow
def test_a_tied_draft_stays_tied(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    tensors = {name: w for name, w in draft_of(model).state_dict().items() if name != "lm_head.weight"}
    save_drafter(tmp_path / "d", DrafterManifest("causal", 0, describe_target(model)), model.config, tensors)
    drafter = DraftModel.load(tmp_path / "d")
    draft = forerun.SpeculativeDecoder(model, drafter).drafter.scorer.model
    assert torch.equal(draft.get_output_embeddings().weight, tensors["model.embed_tokens.weight"])


def test_an_ordinary_model_folder(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """No forerun.json: a draft model as transformers saved it. (Without a tokenizer file it needs the class.)"""
    draft_of(tiny_model("llama")).save_pretrained(tmp_path)
    drafter = DraftModel(LlamaForCausalLM.from_pretrained(tmp_path))
    assert check(forerun.SpeculativeDecoder(tiny_model("llama"), drafter, policy=3), "llama").num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_targets_are_refused(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "draft", kind, "llama", False)
    with pytest.raises(InvalidArgument, match=r"made for .*llama, hidden_size 32.*qwen3, hidden_size 48"):
        forerun.SpeculativeDecoder(tiny_model("qwen3"), folder)
    with pytest.raises(InvalidArgument, match=r"vocab_size 97.*vocab_size 50"):
        forerun.SpeculativeDecoder(tiny_model("llama", vocab=50), folder)


def test_folders_know_their_kind(tmp_path: Path) -> None:
    folders = {kind: save(tmp_path / kind, kind, "llama", True) for kind in KINDS}
    classes = {"feature": FeatureHead, "parallel": ParallelHeads, "causal": DraftModel}
    for kind, folder in folders.items():
        assert type(from_folder(folder, stop_below=0.2)) is classes[kind]
        for other, loader in classes.items():
            if other != kind:
                with pytest.raises(InvalidArgument, match=f"is of kind {kind}, not {other}"):
                    loader.load(folder)
    with pytest.raises(InvalidArgument, match="a drafter's folder"):
        forerun.SpeculativeDecoder(tiny_model("llama"), "no/such/folder")


@pytest.mark.parametrize("way", ("propose", "steps"))
def test_a_trained_draft_model_must_know_its_target(way: str, tmp_path: Path) -> None:
    drafter = DraftModel.load(save(tmp_path / "d", "causal", "llama", False))
    with pytest.raises(InvalidArgument, match="before it knew its target"):
        getattr(drafter, way)(None)


def test_the_command_line_takes_folders(tmp_path: Path) -> None:
    from forerun.drafters import named_drafter

    folder = save(tmp_path / "draft", "feature", "llama", True)
    assert type(named_drafter(str(folder))) is FeatureHead
    chain = named_drafter(f"lookup,{folder}")
    assert isinstance(chain, forerun.Chain) and type(chain.parts[1]) is FeatureHead
