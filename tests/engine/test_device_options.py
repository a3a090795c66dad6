"""Penalties, biases, bans, a minimum length and alternatives' log-probabilities in rounds the device runs by itself.

The host's form of a round is what they are compared with: the same tokens for the same keys, row by row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from engine.device_engines import CUT, GREEDY, SAMPLED, engine, requests
from engine.options import OPTIONS, VOCAB
from forerun import ops
from forerun.config import SamplingParams
from forerun.engine import Engine, Request, RowResult
from forerun.engine.device.row_table import RowTable
from forerun.engine.row import Row
from forerun.math.row_options import RowOptions
from forerun.types import Rule
from support.finish import finished


def results(made: Engine, asked: Sequence[Request]) -> list[RowResult]:
    return sorted(finished(made, asked), key=lambda result: result.request.request_id)


def compare(got: Sequence[RowResult], want: Sequence[RowResult]) -> None:
    assert [row.tokens for row in got] == [row.tokens for row in want]
    assert [row.finish_reason for row in got] == [row.finish_reason for row in want]
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.token == other.token and one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
            assert [x for _, x in one.top] == pytest.approx([x for _, x in other.top], abs=1e-4)


@pytest.fixture
def whole_rounds(monkeypatch: MonkeyPatch) -> Callable[[], None]:
    """Call it, and no round may be run step by step any more."""

    def forbid() -> None:
        fail = lambda *_, **__: pytest.fail("a round went step by step")  # noqa: E731
        monkeypatch.setattr("forerun.engine.rounds.run_on_host", fail)

    return forbid


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_one_row_of_three_has_an_option(name: str, whole_rounds: Callable[[], None]) -> None:
    asked = requests(3)
    asked[1] = OPTIONS[name](asked[1])
    want = results(engine(False), asked)
    if name in ("repetition", "bias", "bans"):
        assert want[1].tokens != results(engine(False), requests(3))[1].tokens, "the option does nothing"
    whole_rounds()
    compare(results(engine(True), asked), want)


def drawn(seed: int) -> tuple[dict[str, Any], list[Request]]:
    """An engine's settings and a batch in which every row has options of its own."""
    rng = random.Random(seed)
    settings = {
        "rule": rng.choice(list(Rule)),
        "drafter": rng.choice(("model", "model", "none")),
        "policy": rng.randint(1, 6),
        "family": rng.choice(("llama", "gpt2")),
        "ahead": rng.random() < 0.8,
    }
    asked = []
    for plain in requests(rng.randint(1, 5), rng.choice((SAMPLED, GREEDY, CUT)), new=12):
        params = rng.choice((SAMPLED, GREEDY, CUT)) if rng.random() < 0.3 else plain.params
        request = replace(plain, params=params, seed=seed)
        for name in rng.sample(sorted(OPTIONS), rng.randint(0, 4)):
            request = OPTIONS[name](request)
        asked.append(request)
    return settings, asked


@pytest.mark.quick(*map(str, range(3)))
@pytest.mark.parametrize("seed", range(60))
def test_any_options_in_any_batch(seed: int, whole_rounds: Callable[[], None]) -> None:
    settings, asked = drawn(seed)
    want = results(engine(False, **settings), asked)
    whole_rounds()
    compare(results(engine(True, **settings), asked), want)


TREES = ("tree", "top tree", "small tree", "tree of exit", "tree of feature", "tree of parallel", "tree of fewer ids")


def for_heads(asked: Sequence[Request]) -> list[Request]:
    """With prompts of two tokens or more: a feature of the token before the last one is what heads begin with."""
    return [replace(request, prompt=(3, *request.prompt)) for request in asked]


def along_trees() -> list[Request]:
    """Rows of all kinds in one batch, one of them without an option."""
    each = ("repetition", "frequency"), ("bans",), (), ("bias", "min_new_tokens", "alternatives"), ("presence",)
    asked = for_heads(requests(5, (SAMPLED, GREEDY, CUT, SAMPLED, GREEDY), new=14))
    for place, names in enumerate(each):
        for name in names:
            asked[place] = OPTIONS[name](asked[place])
    return asked


@pytest.mark.quick("tree", "tree of fewer ids")
@pytest.mark.parametrize("drafter", TREES)
def test_every_node_of_a_tree_follows_its_own_path(drafter: str, whole_rounds: Callable[[], None]) -> None:
    want = results(engine(False, drafter=drafter), along_trees())
    assert sum(bool(row.stats.num_accepted_tokens) for row in want) > 1
    whole_rounds()
    compare(results(engine(True, drafter=drafter), along_trees()), want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_options_along_any_tree(seed: int, whole_rounds: Callable[[], None]) -> None:
    settings, asked = drawn(seed)
    settings |= {"rule": Rule.TOKEN, "drafter": TREES[seed % len(TREES)]}
    asked = for_heads(asked)
    want = results(engine(False, **settings), asked)
    whole_rounds()
    compare(results(engine(True, **settings), asked), want)


@pytest.mark.quick("to its path")
@pytest.mark.parametrize("blind", ["to its path", "to branches"])
def test_control_a_node_that_is_blind(blind: str, monkeypatch: MonkeyPatch) -> None:
    want = results(engine(False, drafter="tree"), along_trees())
    right = ops.adjust_rows

    def wrong(*given: Any, seen: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        marks = None if seen is None else torch.full_like(seen, blind == "to branches")
        return right(*given, seen=marks, **more)

    monkeypatch.setattr(ops, "adjust_rows", wrong)
    with pytest.raises(AssertionError):
        compare(results(engine(True, drafter="tree"), along_trees()), want)


@pytest.mark.quick("counts")
@pytest.mark.parametrize("what", ["counts", "bias", "bans", "repetition", "min_new_tokens"])
def test_control_an_option_that_is_dropped_is_noticed(what: str, monkeypatch: MonkeyPatch) -> None:
    names = ("repetition", "bias", "bans", "min_new_tokens")
    asked = [OPTIONS[name](r) for name, r in zip(names, requests(4), strict=True)]
    want = results(engine(False), asked)
    assign = RowTable.assign

    def forgetful(self: RowTable, rows: Sequence[Row], *rest: Any) -> None:
        assign(self, rows, *rest)
        table: torch.Tensor = getattr(self.options, what)
        table.fill_(1 if what == "repetition" else 0)

    monkeypatch.setattr(RowTable, "assign", forgetful)
    with pytest.raises(AssertionError):
        compare(results(engine(True), asked), want)


def test_control_what_is_emitted_must_be_counted(monkeypatch: MonkeyPatch) -> None:
    asked = [OPTIONS["frequency"](request) for request in requests(2, new=40)]
    want = results(engine(False), asked)
    monkeypatch.setattr("forerun.math.advance.count_emitted", lambda *_: None)
    with pytest.raises(AssertionError):
        compare(results(engine(True), asked), want)


def test_a_draft_without_the_options_is_another_draft_and_no_other_law(monkeypatch: MonkeyPatch) -> None:
    """Greedy text does not depend on what is drafted, but how much of it is accepted does."""
    asked = [OPTIONS["repetition"](OPTIONS["bans"](request)) for request in requests(3, GREEDY, new=24)]
    want = results(engine(True), asked)
    right = ops.adjust_rows

    def verifying_alone(logits: Any, options: RowOptions, position: Any, *rest: Any) -> Any:
        return logits if len(logits) == len(position) else right(logits, options, position, *rest)

    monkeypatch.setattr(ops, "adjust_rows", verifying_alone)
    got = results(engine(True), asked)
    assert [row.tokens for row in got] == [row.tokens for row in want]
    accepted, fewer = (sum(row.stats.num_accepted_tokens for row in rows) for rows in (want, got))
    assert fewer < accepted


def test_options_of_rows_that_come_and_go_do_not_linger() -> None:
    def found(on_device: bool) -> list[RowResult]:
        made, asked = engine(on_device, policy=2), requests(6, new=8)
        first = [OPTIONS[name](r) for name, r in zip(("bias", "bans", "repetition"), asked[:3], strict=True)]
        for request in first:
            made.add(request)
        for _ in range(3):
            made.step()
        return results(made, [asked[3], OPTIONS["presence"](asked[4]), asked[5]])

    compare(found(True), found(False))


def test_why_a_row_failed_is_told_as_on_the_host() -> None:
    nothing = SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(VOCAB), -math.inf), presence_penalty=0.1)
    asked = requests(3, [SAMPLED, nothing, SAMPLED])
    got, want = results(engine(True), asked), results(engine(False), asked)
    compare(got, want)
    assert got[1].error == want[1].error and "logit_bias" in (got[1].error or "")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "tree", "top tree"])
def test_through_the_kernels(drafter: str, monkeypatch: MonkeyPatch) -> None:
    """Interpreted; every option in one batch of two rows."""
    pytest.importorskip("support.triton_cpu")
    first, second = (replace(request, prompt=(3, *request.prompt), max_new_tokens=6) for request in requests(2))
    for name in ("repetition", "presence", "frequency", "bias", "alternatives"):
        first = OPTIONS[name](first)
    asked = [first, OPTIONS["bans"](replace(second, stop_ids=frozenset({1, 7}), min_new_tokens=4))]
    want = results(engine(False, drafter=drafter, policy=2), asked)
    monkeypatch.setattr(ops, "_on_gpu", lambda tensor, use: True)
    compare(results(engine(True, drafter=drafter, policy=2), asked), want)


@pytest.mark.slow
def test_a_long_draft_with_log_probabilities() -> None:
    asked = [OPTIONS["alternatives"](request) for request in requests(1, new=34)]
    compare(results(engine(True, policy=32), asked), results(engine(False, policy=32), asked))


def test_more_alternatives_than_there_are_ids() -> None:
    asked = [replace(request, logprobs=2 * VOCAB) for request in requests(1, new=5)]
    compare(results(engine(True, policy=2), asked), results(engine(False, policy=2), asked))
