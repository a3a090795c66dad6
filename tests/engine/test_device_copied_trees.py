"""Copies beside trees in one recorded round: the tokens and the law of rounds step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device_engines import CUT, GREEDY, SAMPLED, engine, rehearsing, requests, texts
from engine.following import Picky, Replayed
from engine.options import OPTIONS
from exactness.sampling import PLAIN, verdict
from forerun import ops
from forerun.config import Kernels, SamplingParams
from forerun.drafters import Chain, DraftModel, FeatureHead, PromptLookup, Tree
from forerun.drafters.base import Drafter, copied_draft
from forerun.drafters.device import Shape
from forerun.engine import Engine, Request, RowResult
from forerun.engine.device import tree_round
from forerun.engine.device.choose import describe, runner_of
from forerun.engine.device.row_table import RowTable
from forerun.engine.device.tree_round import TreeRound
from forerun.models.scorer import Scorer
from forerun.policy import Constant, CostModel
from forerun.types import BatchView, Draft, DraftContext, Rule, TreeShape
from support.finish import finished
from support.heads import head_of
from support.markov import joint_law, toy_pair
from support.tiny import draft_of, plain_greedy, tiny_model

TREES = ("tree", "top tree", "small tree", "tree of exit", "tree of feature", "tree of parallel", "tree of fewer ids")
MIXED = [SAMPLED, GREEDY, CUT, replace(SAMPLED, min_p=0.05), CUT]


def chain_of(tree: str) -> str:
    return f"copies before a {tree}"


def asked(number: int, params: Any = SAMPLED, new: int = 40) -> list[Request]:
    """With prompts of two tokens or more: a feature of the token before the last one is what heads begin with."""
    return [replace(request, prompt=(3, *request.prompt)) for request in requests(number, params, new=new)]


def results(made: Engine, these: Sequence[Request]) -> list[RowResult]:
    return sorted(finished(made, these), key=lambda result: result.request.request_id)


def compare(got: Sequence[RowResult], want: Sequence[RowResult]) -> None:
    """Tokens, and how many were drafted and kept on the way there."""
    assert [row.tokens for row in got] == [row.tokens for row in want]
    columns = ("num_draft_tokens", "num_accepted_tokens", "num_drafts")
    for name in columns:
        assert [getattr(row.stats, name) for row in got] == [getattr(row.stats, name) for row in want], name


def shapes_of(made: Engine) -> list[Shape]:
    """Of rounds that are sent to the device from now on."""
    runner, seen = made.runner, list[Shape]()
    assert runner is not None
    launch = runner.launch

    def noted(*given: Any) -> None:
        launch(*given)
        seen.append(runner.pending[-1].shape)

    runner.launch = noted  # type: ignore[method-assign]
    return seen


@pytest.fixture
def whole_rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and no round may be run step by step any more."""

    def forbid() -> None:
        fail = lambda *_, **__: pytest.fail("a round went step by step")  # noqa: E731
        monkeypatch.setattr("forerun.engine.rounds.run_on_host", fail)

    return forbid


@pytest.mark.quick("tree", "tree of feature")
@pytest.mark.parametrize("tree", TREES)
def test_same_tokens_as_step_by_step(tree: str, whole_rounds: Callable[[], None]) -> None:
    """Three rows: rounds in which some of them copy, all of them, and none."""
    want = results(engine(False, drafter=chain_of(tree)), asked(3))
    whole_rounds()
    made = engine(True, drafter=chain_of(tree))
    shapes = shapes_of(made)
    compare(results(made, asked(3)), want)
    kinds = {(shape.steps is not None, shape.is_tree) for shape in shapes if shape.drafted}
    assert (True, True) in kinds and (False, True) in kinds, "copies beside trees, and trees alone"


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.quick("sampled")
def test_copies_alone_are_chains(params: SamplingParams, whole_rounds: Callable[[], None]) -> None:
    want = results(engine(False, drafter=chain_of("tree")), asked(1, params))
    whole_rounds()
    made = engine(True, drafter=chain_of("tree"))
    shapes = shapes_of(made)
    compare(results(made, asked(1, params)), want)
    assert any(shape.drafted and shape.steps == 0 and not shape.is_tree for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("params", "number"), [(SAMPLED, 5), (CUT, 4), (GREEDY, 3), (MIXED, 5)])
def test_same_tokens_where_each_row_has_a_length_of_its_own(tree: str, params: Any, number: int) -> None:
    policy = Picky()
    got = texts(engine(True, drafter=chain_of(tree), policy=policy), asked(number, params))
    slow = engine(False, drafter=chain_of(tree), policy=Replayed(policy.drafted, policy.copied))
    assert got == texts(slow, asked(number, params))
    columns = zip(policy.drafted.values(), policy.copied.values(), strict=True)
    kinds = {copy for lengths, copies in columns for length, copy in zip(lengths, copies, strict=True) if length}
    assert kinds == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("settings", ({"policy": 9}, {"policy": 1}, {"family": "qwen3"}, {"family": "gpt2"}), ids=str)
@pytest.mark.parametrize("tree", TREES[:5])
def test_other_lengths_and_families(tree: str, settings: dict[str, Any]) -> None:
    got = results(rehearsing(engine(True, drafter=chain_of(tree), **settings)), asked(3))
    compare(got, results(engine(False, drafter=chain_of(tree), **settings), asked(3)))


@pytest.mark.quick("tree")
@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_is_that_of_generate(tree: str) -> None:
    got = texts(engine(True, drafter=chain_of(tree)), asked(3, GREEDY))
    for request in asked(3, GREEDY):
        wanted = plain_greedy(tiny_model("llama"), list(request.prompt), request.max_new_tokens)
        assert list(got[request.request_id]) == wanted


@pytest.mark.slow
def test_auto_says_what_plain_decoding_says() -> None:
    want = texts(engine(False, drafter="none"), asked(3, GREEDY, new=80))
    assert texts(engine(True, drafter=chain_of("tree"), policy=CostModel()), asked(3, GREEDY, new=80)) == want


def with_options() -> list[Request]:
    """Rows of all kinds in one batch, one of them without an option."""
    each = ("repetition", "frequency"), ("bans",), (), ("bias", "min_new_tokens", "alternatives"), ("presence",)
    rows = asked(5, (SAMPLED, GREEDY, CUT, SAMPLED, GREEDY), new=24)
    for place, names in enumerate(each):
        for name in names:
            rows[place] = OPTIONS[name](rows[place])
    return rows


@pytest.mark.quick("tree")
@pytest.mark.parametrize("tree", TREES)
def test_options_follow_copies_and_branches(tree: str, whole_rounds: Callable[[], None]) -> None:
    want = results(engine(False, drafter=chain_of(tree)), with_options())
    whole_rounds()
    made = engine(True, drafter=chain_of(tree))
    shapes = shapes_of(made)
    got = results(made, with_options())
    compare(got, want)
    ours, theirs = ([each.logprob for row in rows for each in row.logprobs or ()] for rows in (got, want))
    assert theirs and ours == pytest.approx(theirs, abs=1e-4)
    assert any(shape.is_tree and shape.steps is not None for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("tree", ["tree", "top tree"])
def test_same_tokens_through_the_kernels(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: a row that copies beside one that a tree is grown for, and alone."""
    pytest.importorskip("support.triton_cpu")
    first, second = asked(2)
    rows = [replace(first, prompt=(3, 4, 5, 3, 4, 5, 3), max_new_tokens=8), replace(second, max_new_tokens=8)]
    for some in (rows, rows[:1]):
        want = results(engine(False, drafter=chain_of(tree), policy=2), some)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "_on_gpu", lambda tensor, use: True)
            made = engine(True, drafter=chain_of(tree), policy=2)
            shapes = shapes_of(made)
            compare(results(made, some), want)
        kinds = {shape.is_tree for shape in shapes if shape.steps is not None}
        assert (len(some) > 1) in kinds, "copies beside a tree, and without one"


@pytest.mark.parametrize("tree", TREES)
def test_such_chains_are_recorded(tree: str) -> None:
    made = engine(True, drafter=chain_of(tree))
    assert describe(made.runner, made.target, made.drafter, Rule.TOKEN) == "whole rounds"


@pytest.mark.parametrize("last", ["tree", "model"])
def test_chains_with_two_that_draw_are_not(last: str) -> None:
    model = tiny_model("llama")
    parts = [DraftModel(draft_of(model)), Tree(DraftModel(draft_of(model, 0.1)))]
    drafter = Chain(PromptLookup(), *(parts if last == "tree" else parts[::-1]))
    made = Engine(Scorer(model, use=Kernels.OFF), drafter, Constant(2))
    runner = runner_of(made.target, made.drafter, Rule.TOKEN, made.clock)
    said = "rounds without a draft, of others the target's pass: Chain drafts on the host"
    assert describe(runner, made.target, made.drafter, Rule.TOKEN) == said


NUMBER, STEPS, VOCAB = 1024, 4, 3
PROMPT = (1, 2, 0, 1, 2)


class Repeats(Drafter):
    """Takes the text for one that counts, where its sum says so: often wrong, and for each row of its own length."""

    copies = True

    def propose(self, context: DraftContext) -> Draft:
        rooms = context.copy_lengths or context.max_lengths
        return copied_draft([self._guess(*row) for row in zip(context.histories, rooms, strict=True)], context)

    @staticmethod
    def _guess(history: Sequence[int], room: int) -> tuple[list[int], int]:
        length = min(room, sum(history) % 4)
        return [(history[-1] + step) % VOCAB for step in range(1, length + 1)], 0

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Nothing is remembered."""


class LongerCopies(Constant):
    """Copies of up to three tokens beside trees of depth two."""

    def copy_lengths(self, view: BatchView) -> tuple[int, ...]:
        return tuple(min(3, room) for room in view.max_lengths)


def of_a_toy_pair(name: str, way: str, on_device: bool = True) -> Engine:
    target, draft = (copy.deepcopy(model) for model in toy_pair(VOCAB))
    inner: Any = DraftModel(draft) if name == "model" else FeatureHead(head_of(target, noise=0.1))
    drafter = Chain(Repeats(), Tree(inner, nodes=5, width=2, siblings=way))
    made = Engine(Scorer(target, use=Kernels.OFF), drafter, LongerCopies(2), join_tokens=0)
    if on_device:
        made.pair.runner = runner_of(made.target, made.drafter, Rule.TOKEN, made.clock)
        assert made.runner is not None and made.runner.whole_rounds
    return made


def short_texts(number: int, new: int) -> list[Request]:
    return [Request(prompt=PROMPT, max_new_tokens=new, params=PLAIN, seed=1, request_id=i) for i in range(number)]


@pytest.mark.quick("sampled")
@pytest.mark.parametrize("way", ["sampled", "top"])
def test_copies_of_any_length(way: str) -> None:
    want = results(of_a_toy_pair("model", way, on_device=False), short_texts(24, 20))
    compare(results(of_a_toy_pair("model", way), short_texts(24, 20)), want)


def test_control_nodes_behind_a_copy_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that no copy fills, taken for a part of it."""
    want = results(of_a_toy_pair("model", "sampled", on_device=False), short_texts(24, 20))
    right = RowTable.send_copies

    def longer(self: RowTable, lengths: Sequence[int], copies: Sequence[Sequence[int]]) -> None:
        right(self, [max(lengths) if copy else n for n, copy in zip(lengths, copies, strict=True)], copies)

    monkeypatch.setattr(RowTable, "send_copies", longer)
    with pytest.raises(AssertionError):
        compare(results(of_a_toy_pair("model", "sampled"), short_texts(24, 20)), want)


def misfit(name: str, way: str) -> str:
    made = of_a_toy_pair(name, way)
    shapes = shapes_of(made)
    found = [result.tokens for result in finished(made, short_texts(NUMBER, STEPS + 2))]
    assert any(shape.is_tree and shape.steps == 2 and shape.drafted == 3 for shape in shapes)
    return verdict(found, joint_law(toy_pair(VOCAB)[0], PROMPT, STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("model", "sampled"), ("model", "top"), ("head", "sampled")])
def test_the_law_of_the_whole_loop(name: str, way: str) -> None:
    assert not misfit(name, way)


@pytest.mark.slow
def test_control_copies_taken_for_sampled_siblings_bend_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the law of the tree that another row has there."""
    right = TreeRound._tree

    def blind(self: TreeRound, parents: Tensor, shape: Shape) -> TreeShape:
        return right(self, parents, replace(shape, steps=None))

    monkeypatch.setattr(TreeRound, "_tree", blind)
    assert misfit("model", "sampled")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sampled", "top"])
def test_control_copies_scored_in_the_place_of_branches_bend_the_law(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tokens sees itself and the text, not the tokens before it."""
    right = tree_round.ancestors

    def blind(parents: Tensor, lengths: Tensor, depth: int) -> Tensor:
        line = torch.arange(-1, parents.shape[1] - 1)
        is_line = (parents == line)[:, :3].all(-1) & (depth == 3)
        return right(torch.where(is_line.unsqueeze(-1), -1, parents), lengths, depth)

    monkeypatch.setattr(tree_round, "ancestors", blind)
    assert misfit("model", way)
