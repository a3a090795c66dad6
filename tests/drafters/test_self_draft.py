"""The target's quantised copy as its draft: the target's text, a copy that says its size, refusals with a reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

import forerun
from forerun.drafters import Chain, EarlyExit, PromptLookup, SelfDraft, named_drafter
from forerun.drafters.base import Drafter
from forerun.drafters.self_draft import scheme_for
from forerun.errors import InvalidArgument
from forerun.kernels.cpu.narrow import NarrowWeight
from forerun.loading.quantise import EIGHT_BITS, INTEGER_GROUPS, quantise
from forerun.math import panels
from forerun.models.seq2seq import scorer_of
from support.devices import GPU
from support.ties import check_greedy, deviation
from support.tiny import tiny_model

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.mark.parametrize(("bits", "kernels"), [(8, "on"), (4, "off")])
def test_the_text_is_the_targets(bits: int, kernels: str) -> None:
    target = copy.deepcopy(tiny_model("llama"))
    before = {name: (id(w), w.clone()) for name, w in target.named_parameters()}
    plain = forerun.SpeculativeDecoder(target, None, kernels=kernels).generate(IDS, max_new_tokens=20)
    decoder = forerun.SpeculativeDecoder(target, SelfDraft(bits), policy=4, kernels=kernels)
    drafted = decoder.generate(IDS, max_new_tokens=20)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.stats.num_accepted_tokens > 0 and drafted.stats.rounds < plain.stats.rounds
    for name, weight in target.named_parameters():
        assert before[name][0] == id(weight) and torch.equal(before[name][1], weight), name


LONG = [[(7 * i + row) % 90 + 1 for i in range(70)] for row in range(3)]


@pytest.mark.parametrize("drafter", [SelfDraft(4), EarlyExit(1), Chain(PromptLookup(), SelfDraft(8))])
def test_the_target_alone_reads_prompts(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that reads a prompt by itself drafts behind keys of its own."""
    decoder = forerun.SpeculativeDecoder(tiny_model("llama"), drafter, policy=3, kernels="off", strict=True)
    part = decoder.drafter.parts[-1] if isinstance(decoder.drafter, Chain) else decoder.drafter
    body, counts = part.scorer.body, list[int]()
    run = body.run
    monkeypatch.setattr(body, "run", lambda call: counts.append(call.rows.num_tokens) or run(call))
    decoder.generate(LONG[:1], max_new_tokens=8)
    assert counts and max(counts) <= 5


def test_what_is_drawn_does_not_depend_on_who_reads_the_prompt() -> None:
    """Prompts that find no room beside others' are read before the first round: its drafts must be the same."""
    texts = []
    for join_tokens in (2048, 0):
        decoder = forerun.SpeculativeDecoder(tiny_model("llama"), SelfDraft(4), policy=3, kernels="off", strict=True)
        decoder.engine.join_tokens = join_tokens
        texts.append(decoder.generate(LONG, max_new_tokens=24, do_sample=True, temperature=1.5, seed=5).new_tokens)
    assert [list(map(int, row)) for row in texts[0]] == [list(map(int, row)) for row in texts[1]]


def test_it_says_what_its_copy_takes_and_follows_its_target() -> None:
    target = copy.deepcopy(tiny_model("llama"))
    drafter, scorer = SelfDraft(8), scorer_of(target)
    drafter.bind(scorer)
    assert drafter.scorer is not None and drafter.scorer.cache is scorer.cache
    narrow = {id(w): w.raw.nbytes for w in drafter.scorer.model.parameters() if isinstance(w, NarrowWeight)}
    assert narrow and sum(narrow.values()) <= drafter.copy_bytes < sum(w.nbytes for w in target.parameters()) / 2
    first = drafter.scorer.model.model.layers[0].mlp.up_proj.weight.dense()
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.mul_(2)
    drafter.bind(scorer)
    torch.testing.assert_close(drafter.scorer.model.model.layers[0].mlp.up_proj.weight.dense(), 2 * first)


@pytest.mark.parametrize(
    ("way", "scheme"), [("SDOT", INTEGER_GROUPS), ("VPDPBUSD", EIGHT_BITS), ("VPMADDWD", EIGHT_BITS)]
)
def test_eight_bits_are_what_the_processor_multiplies_fast(
    way: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.kernels.cpu.panels.WAY", way)
    assert scheme_for(8, torch.device("cpu")) == scheme


@pytest.mark.parametrize(("scheme", "stored"), [(INTEGER_GROUPS, panels.NAME), (EIGHT_BITS, "Q8_0")])
def test_the_text_is_the_targets_in_either(scheme: str, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of both kinds run everywhere, at another speed."""
    monkeypatch.setattr("forerun.drafters.self_draft.scheme_for", lambda bits, device: scheme)
    target = copy.deepcopy(tiny_model("llama"))
    decoder = forerun.SpeculativeDecoder(target, SelfDraft(8), policy=4, strict=True)
    formats = {w.format.name for w in decoder.drafter.scorer.model.parameters() if isinstance(w, NarrowWeight)}
    assert stored in formats
    drafted = decoder.generate(IDS, max_new_tokens=12)
    plain = forerun.SpeculativeDecoder(target, None).generate(IDS, max_new_tokens=12)
    assert torch.equal(plain.sequences, drafted.sequences) and drafted.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("bits", [8, 4])
def test_on_a_gpu_the_text_is_the_targets(bits: int, device: str) -> None:
    wide = tiny_model("llama", hidden_size=128, intermediate_size=128, head_dim=32)
    target = copy.deepcopy(wide).to(device).bfloat16()
    texts = []
    for drafter in (None, SelfDraft(bits)):
        decoder = forerun.SpeculativeDecoder(target, drafter, policy=4)
        texts.append(decoder.generate(IDS.to(device), max_new_tokens=24))
    assert texts[1].stats.num_accepted_tokens > 0
    for prompt, theirs, ours in zip(IDS.tolist(), texts[0].new_tokens, texts[1].new_tokens, strict=True):
        check_greedy(target, prompt, ours, theirs, 2 * deviation(target, prompt + list(theirs)))
    assert 0 < decoder.drafter.copy_bytes < sum(w.nbytes for w in target.parameters()) * bits / 12


def test_speech_reads_with_the_targets_encoder() -> None:
    target = tiny_model("whisper")
    features = torch.randn(2, target.config.num_mel_bins, 2 * target.config.max_source_positions)
    texts = []
    for drafter in (None, SelfDraft(8)):
        decoder = forerun.SpeculativeDecoder(target, drafter, policy=3)
        start = torch.ones(2, 1, dtype=torch.long)
        texts.append(decoder.generate(input_features=features, decoder_input_ids=start, max_new_tokens=12).sequences)
    assert torch.equal(*texts)


def test_it_has_a_name() -> None:
    for name, bits in (("self", 8), ("self:8", 8), ("self:4", 4)):
        found = named_drafter(name)
        assert isinstance(found, SelfDraft) and found.bits == bits
    with pytest.raises(InvalidArgument, match="self:8 or self:4"):
        named_drafter("self:3")


@pytest.mark.parametrize("bits", [3, 16, True, "8"])
def test_other_numbers_of_bits_are_refused(bits: Any) -> None:
    with pytest.raises(InvalidArgument, match="bits"):
        SelfDraft(bits)


def test_a_target_that_is_narrow_already_is_refused() -> None:
    target = copy.deepcopy(tiny_model("llama"))
    quantise(target, "int8", "tiny")
    with pytest.raises(InvalidArgument, match=r"SelfDraft\(bits=8\): the target's weights are stored in"):
        SelfDraft(8).bind(scorer_of(target))
    with pytest.raises(InvalidArgument, match=r"SelfDraft\(bits=4\) computes in float32"):
        SelfDraft(4).bind(scorer_of(copy.deepcopy(tiny_model("llama")).bfloat16()))


def test_it_must_know_its_target_first() -> None:
    from forerun.drafters.within_target import WithinTarget

    assert issubclass(EarlyExit, WithinTarget)
    with pytest.raises(InvalidArgument, match="SelfDraft was used before it knew its target"):
        SelfDraft(8).steps(None)  # type: ignore[arg-type]
