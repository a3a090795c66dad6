"""N-gram tables in recorded rounds: the tokens and the law of rounds step by step, and where they stay on the host."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device_engines import GREEDY, SAMPLED, InPython, engine, finish, flown, rehearsing, requests, texts
from exactness.sampling import PLAIN, PROMPT, counted, verdict
from forerun import ops
from forerun.config import Kernels, SamplingParams
from forerun.drafters import Chain, NgramTable, PromptLookup, RandomDraft, device_ngram
from forerun.drafters.device_ngram import DeviceNgrams
from forerun.engine import Engine, Request
from forerun.engine.device import ngram_round
from forerun.engine.device.choose import describe, runner_of
from forerun.errors import ForerunWarning
from forerun.math.laws import SparseLaw
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Rule
from support.markov import joint_law, toy_pair
from support.tiny import tiny_model

KINDS = ("table", "chain of a table")
ROWS, STEPS, VOCAB = 256, 3, 5


class Elsewhere(SparseLaw):
    """Says of every token that it was half as likely as it was."""

    def of(self, tokens: Tensor) -> Tensor:
        return super().of(tokens) / 2


@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.quick("block-chain of a table")
def test_same_tokens_where_rows_ask_something_of_their_logits(drafter: str, rule: Rule) -> None:
    """A table's drafts know nothing of it, on the device as on the host."""
    asked = requests(4, [replace(SAMPLED, repetition_penalty=1.3), GREEDY, SAMPLED, replace(SAMPLED, top_k=7)])
    asked[2] = replace(asked[2], stop_ids=frozenset(range(1, 97, 4)), min_new_tokens=9)
    made = rehearsing(engine(True, drafter=drafter, rule=rule))
    rounds = flown(made)
    assert texts(made, asked) == texts(engine(False, drafter=drafter, rule=rule), asked)
    assert max(rounds) == 4, "none of them is the host's"


@pytest.mark.slow
def test_a_row_that_needs_the_host_leaves_the_others_on_the_device() -> None:
    asked = requests(4, new=30)
    asked[1] = replace(asked[1], processors=(InPython(),))
    made = engine(True, drafter="table")
    rounds = flown(made)
    assert texts(made, asked) == texts(engine(False, drafter="table"), asked)
    assert max(rounds) == 3 and len(rounds) > 8


def test_control_other_counts_are_other_texts() -> None:
    """Rejected drafts leave traces as well, so the comparisons can fail."""
    want, made = texts(engine(False, drafter="table"), requests(3)), engine(True, drafter="table")
    assert made.runner is not None
    made.runner.drafter = DeviceNgrams(NgramTable.count([[5, 6, 7, 8] * 9], vocab_size=97).table)
    assert texts(made, requests(3)) != want


@pytest.mark.slow
@pytest.mark.parametrize("drafter", KINDS)
def test_same_tokens_through_the_kernels(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: a row that may copy and a row that is drawn for, in one verification."""
    pytest.importorskip("support.triton_cpu")
    first, second = requests(2)
    copies = replace(first, prompt=(3, 4, 5, 3, 4, 5, 3), max_new_tokens=6)
    asked = [copies, replace(second, prompt=(3, *second.prompt), max_new_tokens=6)]
    want = texts(engine(False, drafter=drafter, policy=2), asked)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor, use: True)
    assert texts(engine(True, drafter=drafter, policy=2), asked) == want


def samples(number: int, rule: Rule = Rule.TOKEN, copies: bool = False) -> list[tuple[int, ...]]:
    """Rows that copy beside rows that are drawn for, where `copies`."""
    table = counted(VOCAB)
    target = Scorer(toy_pair(VOCAB)[0], use=Kernels.OFF)
    drafter = Chain(PromptLookup(max_ngram=2, min_ngram=2), table) if copies else table
    made = Engine(target, drafter, Constant(3), rule=rule)
    made.pair.runner = runner_of(target, made.drafter, rule, made.clock)
    rounds, found = flown(made), list[tuple[int, ...]]()
    for start in range(0, number, ROWS):
        for i in range(start, start + ROWS):
            made.add(Request(prompt=PROMPT, max_new_tokens=6, params=PLAIN, seed=1, request_id=i))
        found += finish(made).values()
    assert made.runner.drafts and rounds
    return found


@lru_cache
def law() -> Tensor:
    return joint_law(toy_pair(VOCAB)[0], PROMPT, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "copies"), [(rule, copies) for rule in Rule for copies in (False, True)])
def test_the_law_of_the_whole_loop(rule: Rule, copies: bool) -> None:
    assert not verdict(samples(2048, rule, copies), law())


def test_the_law_of_the_whole_loop_briefly() -> None:
    assert not verdict(samples(1024, copies=True), law())


def test_control_a_law_that_is_not_the_one_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_round, "SparseLaw", Elsewhere)
    assert verdict(samples(1024, copies=True), law())


@pytest.mark.slow
def test_control_copies_taken_for_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row must be judged by its own law."""
    nobody = lambda self: torch.zeros(self.table.size, 1, dtype=torch.bool)  # noqa: E731
    law_of = ngram_round.NgramRound._law

    def mistaken(self: Any, *given: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(ngram_round.NgramRound, "_copies", nobody)
            return law_of(self, *given)

    monkeypatch.setattr(ngram_round.NgramRound, "_law", mistaken)
    assert verdict(samples(1024, copies=True), law())


@pytest.mark.parametrize(
    ("drafter", "recorded"),
    [
        (lambda: counted(97), True),
        (lambda: Chain(PromptLookup(), counted(97)), True),
        (lambda: Chain(counted(97), RandomDraft()), True),  # which is never asked
        (lambda: Chain(counted(97), PromptLookup()), False),  # which is, for copies alone
        (lambda: Chain(RandomDraft(), counted(97)), False),
        (lambda: NgramTable.count([[0, 1, 0]], 36, vocab_size=2), False),  # contexts longer than what rounds keep
    ],
)
def test_which_drafters_are_recorded(drafter: Any, recorded: bool) -> None:
    target = Scorer(tiny_model("llama"), use=Kernels.OFF)
    made = Engine(target, drafter(), Constant(3))
    made.pair.runner = runner_of(target, made.drafter, Rule.TOKEN, made.clock)
    assert made.runner.drafts is recorded
    assert (describe(made.runner, target, made.drafter, Rule.TOKEN) == "whole rounds") is recorded


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, memory: int) -> Any:
    """A target that says it lies there."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    return SimpleNamespace(device=torch.device("cuda"), vocab_size=97)


def test_a_table_too_large_for_the_device_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = counted(97)
    most = device_ngram.SHARE * table.table.num_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = on_a_gpu(monkeypatch, most)
        table.bind(target)
        assert table.device_draft().why_not(target) is None
    target = on_a_gpu(monkeypatch, most - device_ngram.SHARE)
    assert "MiB" in (table.device_draft().why_not(target) or "")
    with pytest.warns(ForerunWarning, match="drafted from on the host") as told:
        table.bind(target)
        table.bind(target)
    assert len(told) == 1


def test_what_verification_would_be_slow_with_stays_on_the_host() -> None:
    text = [token for other in range(1, 90) for token in (0, other)]
    table = NgramTable.count([text], 2, vocab_size=97, max_continuations=80)
    reason = table.device_draft().why_not(SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    assert reason is not None and "80 continuations" in reason


def test_engines_share_what_lies_on_a_device_while_there_is_one() -> None:
    table, device = counted(97), torch.device("cpu")
    one, other = (table.device_draft().on(device) for _ in range(2))
    assert one is other and one is not table.table
    copies = device_ngram._copies[table.table]
    assert len(copies) == 1
    del one, other
    gc.collect()
    assert not len(copies)


@pytest.mark.slow
def test_a_greedy_row_beside_sampled_ones() -> None:
    params = [GREEDY, SAMPLED, SamplingParams(temperature=0.5, min_p=0.2)]
    made = engine(True, drafter="chain of a table")
    found = texts(made, requests(3, params))
    assert found == texts(engine(False, drafter="chain of a table"), requests(3, params))
    assert found[0] == texts(engine(False, drafter="none"), requests(3, params))[0]
