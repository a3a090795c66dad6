"""Encoder-decoder models whose keys are rounded, the decoder's own and those of sources: text follows that model."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor

from exactness import controls
from exactness.rounded import COARSE
from exactness.sampling import PLAIN, Clock, verdict
from exactness.sourced import PROMPTS, START, STEPS, given, law, make_drafter, pair, sources
from forerun import SpeculativeDecoder
from forerun.cache.base import KeyValueCache
from forerun.cache.paged import PagedCache
from forerun.config import SamplingParams
from forerun.drafters import DraftModel, EarlyExit, PromptLookup, Tree
from forerun.engine import Engine, Request
from forerun.kernels import scaled_keys
from forerun.kernels.scaled_keys import ScaledKeys
from forerun.math.scaled import FP8, INT8, Scheme, rounded_rows
from forerun.models import cache_size
from forerun.models.cross_attention import Sources
from forerun.models.seq2seq import Seq2SeqScorer
from forerun.policy import Constant
from forerun.types import Rule, Source
from support.devices import GPU
from support.finish import tokens_by_request
from support.seq2seq import batch_of, rows_of, source_of
from support.tiny import draft_of, ragged_prompts, tiny_model

COPIES = 384
CPU = torch.device("cpu")
Samples = list[list[tuple[int, ...]]]
SCHEMES = pytest.mark.parametrize("scheme", [INT8, FP8], ids=["int8", "fp8"])


def sampled(family: str, drafter: str | None, scheme: Scheme | None = COARSE, rule: str = "token") -> Samples:
    """What rows say of three sources, step by step on the CPU: all in blocks, read by torch."""
    scorer = Seq2SeqScorer(copy.deepcopy(pair(family)[0]), cache=PagedCache(65536, CPU, scheme=scheme))
    guesser = None if drafter is None else make_drafter(drafter, family)
    engine = Engine(scorer, guesser, Constant(2), rule=Rule(rule), clock=Clock())
    read = [source_of(source) for source in sources(family)]
    asked = [
        Request(prompt=PROMPTS[row], source=read[row], max_new_tokens=STEPS + 1, params=PLAIN, seed=row, request_id=i)
        for row in range(3)
        for i in range(row * COPIES, (row + 1) * COPIES)
    ]
    said = tokens_by_request(engine, asked)
    assert len(said) == 3 * COPIES and engine.first_fault is None
    return [[said[row * COPIES + i] for i in range(COPIES)] for row in range(3)]


def misfits(family: str, found: Samples, own: Scheme | None = COARSE, read: Scheme | None = COARSE) -> list[str]:
    return [verdict(samples, law(family, row, own, read)) for row, samples in enumerate(found)]


CASES = [
    ("t5_gated", "tree", "token"), ("mbart", "shared", "block"), ("whisper", "exit", "token"), ("mbart", None, "token"),
    ("whisper", "chain", "coupled"), ("t5_gated", "model", "token"),
]  # fmt: skip


@pytest.mark.quick("mbart-shared-block")
@pytest.mark.parametrize(("family", "drafter", "rule"), CASES)
def test_joint_law_and_its_controls(family: str, drafter: str | None, rule: str) -> None:
    """That of the model which reads rounded keys, both kinds of them."""
    found = sampled(family, drafter, rule=rule)
    assert misfits(family, found) == ["", "", ""]
    assert any(misfits(family, found, None, None)), "rounding cannot be told from not rounding"
    assert any(misfits(family, found, COARSE, None)), "the source's keys might as well not be rounded"
    assert any(misfits(family, found, None, COARSE)), "the decoder's own keys might as well not be rounded"


@pytest.mark.slow
@SCHEMES
def test_joint_law_of_fine_steps(scheme: Scheme) -> None:
    assert misfits("mbart", sampled("mbart", "shared", scheme), scheme, scheme) == ["", "", ""]


@pytest.mark.slow
def test_control_wrong_correction_is_noticed(monkeypatch: MonkeyPatch) -> None:
    controls.correct_from_target(monkeypatch)
    assert any(misfits("mbart", sampled("mbart", "shared")))


def test_control_one_scale_for_all_heads_is_noticed(monkeypatch: MonkeyPatch) -> None:
    def together(new: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        values, scales = rounded_rows(new.flatten(1), scheme)
        return values.view_as(new), scales[:, None].expand(new.shape[:2])

    monkeypatch.setattr(scaled_keys, "rounded_rows", together)
    assert any(misfits("mbart", sampled("mbart", None)))


def test_control_keys_that_are_rounded_twice_are_noticed(monkeypatch: MonkeyPatch) -> None:
    """By steps of other places first: what was rounded once already would be so."""
    write = ScaledKeys.write

    def twice(self: ScaledKeys, addresses: Tensor, new: Tensor) -> None:
        values, scales = rounded_rows(new.flatten(1), COARSE)
        write(self, addresses, (values * scales[:, None]).view_as(new).to(new.dtype))

    monkeypatch.setattr(ScaledKeys, "write", twice)
    assert any(misfits("mbart", sampled("mbart", None)))


def test_control_sources_that_are_left_as_they_are_are_noticed(monkeypatch: MonkeyPatch) -> None:
    """They would be in memory of their own."""
    monkeypatch.setattr(PagedCache, "for_sources", lambda self: PagedCache(65536, CPU))
    found = sampled("whisper", None)
    assert any(misfits("whisper", found)) and misfits("whisper", found, COARSE, None) == ["", "", ""]


def engine(
    family: str, scheme: Scheme, drafter: Any = None, tokens: int = 4096, cache: KeyValueCache | None = None
) -> Engine:
    """In float64, where it makes no difference to what is rounded who decodes beside a row."""
    model = copy.deepcopy(tiny_model(family)).double()
    made: Any = {
        None: lambda: None,
        "own": lambda: DraftModel(draft_of(tiny_model(family)).double()),
        "shared": lambda: DraftModel(draft_of(tiny_model(family)).double(), shares_encoder=True),
        "exit": lambda: EarlyExit(1),
        "lookup": lambda: PromptLookup(max_ngram=1),
        "tree": lambda: Tree(DraftModel(draft_of(tiny_model(family)).double()), nodes=9, width=3),
        "tree of exit": lambda: Tree(EarlyExit(1), nodes=9, width=3),
    }[drafter]()
    cache = PagedCache(tokens, CPU, block_size=8, scheme=scheme) if cache is None else cache
    return Engine(Seq2SeqScorer(model, cache=cache), made, Constant(3))


def asked(family: str, number: int = 6) -> list[Request]:
    """Rows that begin alike, and some that read the same."""
    read = [source_of(row.double() if row.is_floating_point() else row) for row in rows_of(family)]
    beginning = (2, *ragged_prompts(2, 97, 3, longest=20)[1])
    return [
        Request(
            prompt=(*beginning, 5 + i) if i % 2 else (2, 9 + i), source=read[i - 1 if i % 3 == 2 else i],
            max_new_tokens=14 + i, params=SamplingParams(), request_id=i,
        )
        for i in range(number)
    ]  # fmt: skip


GREEDY = [
    ("bart", "own"), ("t5_gated", "shared"), ("whisper", "exit"), ("moonshine", "lookup"), ("bart", "tree"),
    ("t5", "tree of exit"), ("marian", "shared"),
]  # fmt: skip


@pytest.mark.quick("bart-own-int8")
@SCHEMES
@pytest.mark.parametrize(("family", "drafter"), GREEDY)
def test_greedy_text_is_that_of_plain_decoding(family: str, drafter: str, scheme: Scheme) -> None:
    """Over the same rounded keys: with drafts and without, in a batch and alone, and where rows are sent away."""
    wanted = asked(family)
    plain = tokens_by_request(engine(family, scheme), wanted)
    assert len(plain) == len(wanted)
    assert tokens_by_request(engine(family, scheme, drafter), wanted) == plain
    for request in wanted[:3]:
        alone = tokens_by_request(engine(family, scheme, drafter), [request])
        assert alone == {request.request_id: plain[request.request_id]}
    small = engine(family, scheme, drafter, tokens=72)
    for request in wanted:
        small.add(request)
    for step in itertools.count():
        small.step()
        if small.is_idle:
            break
        if step % 3 == 0 and len(small.roster.running) > 1:
            small.roster.preempt_newest()
    assert tokens_by_request(small) == plain
    assert small.num_preempted > 0
    small.target.cache.check()  # type: ignore[attr-defined]


def test_control_rounding_changes_what_is_said() -> None:
    wanted = asked("bart")
    coarse = tokens_by_request(engine("bart", COARSE), wanted)
    assert coarse != tokens_by_request(engine("bart", INT8, cache=PagedCache(4096, CPU)), wanted)


@SCHEMES
def test_keys_of_a_source_are_stored_as_the_reference_rounds_them(scheme: Scheme) -> None:
    """Bit for bit, each head of each position; positions of zeros, one that is no number, of a width no block ends
    with."""
    model = copy.deepcopy(tiny_model("bart"))
    scorer = Seq2SeqScorer(model, cache=PagedCache(64, CPU, block_size=8, scheme=scheme))
    states = torch.randn(11, scorer.encoder.width)
    states[3], states[7, 5] = 0, torch.nan
    for module in model.get_decoder().modules():  # else zeros would have keys
        for name in ("k_proj", "v_proj"):
            if hasattr(module, name):
                getattr(module, name).bias.data.zero_()
    read: Sources = scorer.sources
    scorer.admit(0)
    scorer.read(0, Source(states=states))
    scorer.encode()
    (number,) = read.cache.rows
    rows = read.cache.extend([number], [0])
    blocks, within = read.cache.locate(rows, torch.arange(11)[None])
    for index, project in enumerate(scorer._projections):
        layer = read.cache.layers[index]
        for pool, new in zip((layer.keys, layer.values), project(states), strict=True):
            assert isinstance(pool, ScaledKeys)
            values, scales = rounded_rows(new, scheme)
            assert torch.equal(pool.raw.view(torch.uint8)[blocks[0], within[0]], values.view(torch.uint8))
            stored = pool.scales.transpose(1, 2)[blocks[0], within[0]]
            torch.testing.assert_close(stored, scales, rtol=0, atol=0, equal_nan=True)
            assert not stored[3].any() and not pool.raw.float()[blocks[0, 3], within[0, 3]].any()
            assert stored[7].isnan().all() and stored[[0, 10]].isfinite().all()


@SCHEMES
def test_a_source_that_is_no_number_spoils_its_own_row_alone(scheme: Scheme) -> None:
    model = tiny_model("bart")
    scorer = Seq2SeqScorer(model, cache=PagedCache(64, CPU, block_size=8, scheme=scheme))
    alone = Seq2SeqScorer(model, cache=PagedCache(64, CPU, block_size=8, scheme=scheme))
    states = torch.randn(5, scorer.encoder.width)
    for made, row in ((scorer, 1), (alone, 0)):
        made.admit(row)
        made.read(row, Source(states=states))
    scorer.admit(0)
    scorer.read(0, Source(states=torch.full((9, scorer.encoder.width), torch.nan)))
    logits = scorer.score([0, 1], [[2], [2, 7]])
    assert logits[0].isnan().all()
    torch.testing.assert_close(logits[1:], alone.score([0], [[2, 7]]))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("scheme", [INT8, FP8, COARSE], ids=["int8", "fp8", "coarse"])
@pytest.mark.parametrize(("family", "drafter"), [("t5_gated", "tree"), ("mbart", "shared"), ("whisper", "model")])
def test_joint_law_on_a_gpu(family: str, drafter: str, scheme: Scheme, device: str, monkeypatch: MonkeyPatch) -> None:
    """Recorded rounds over both kinds of keys, against the law from transformers' own caches on the CPU."""
    monkeypatch.setitem(cache_size.CACHE_SCHEMES, scheme.name, scheme)
    target = copy.deepcopy(pair(family)[0]).to(device)
    guesser: Any = {
        "model": lambda: DraftModel(copy.deepcopy(pair(family)[1]).to(device)),
        "shared": lambda: DraftModel(copy.deepcopy(pair(family)[1]).to(device), shares_encoder=True),
        "tree": lambda: Tree(
            DraftModel(copy.deepcopy(pair(family)[1]).to(device)), nodes=5, width=2, siblings="sampled"
        ),
    }[drafter]()
    decoder = SpeculativeDecoder(target, guesser, policy=2, cache_dtype=scheme.name)
    begin = batch_of("t5", [torch.tensor(prompt) for prompt in PROMPTS], "left")
    out = decoder.generate(
        **{name: tensor.to(device) for name, tensor in given(family, range(3)).items()},
        decoder_input_ids=begin["input_ids"].to(device),
        decoder_attention_mask=begin["attention_mask"].to(device),
        decoder_start_token_id=START[0],
        max_new_tokens=STEPS + 1,
        temperature=1.0,
        seed=4,
        num_return_sequences=COPIES,
    )
    found = [[tuple(tokens) for tokens in out.new_tokens[i * COPIES : (i + 1) * COPIES]] for i in range(3)]
    assert drafter == "tree" or decoder.recorded == "whole rounds"
    assert misfits(family, found, scheme, scheme) == ["", "", ""]
    if scheme is COARSE:
        assert any(misfits(family, found, COARSE, None)), "keys of sources were not rounded"
        assert any(misfits(family, found, None, COARSE)), "the decoder's own keys were not rounded"
