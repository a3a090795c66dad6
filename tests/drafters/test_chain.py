"""A chain of drafters: who is asked, who wins, and what the combined draft says about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from forerun import SpeculativeDecoder
from forerun.config import SamplingParams
from forerun.drafters import Chain, NgramTable, PromptLookup, RandomDraft
from forerun.drafters.chain import CLASSES
from forerun.errors import InvalidArgument
from forerun.math.laws import MixedLaw, PointMass
from forerun.policy import Constant
from forerun.types import Draft, DraftContext, LawParams, RoundOutcome, Siblings, TreeShape
from support.tiny import tiny_model

VOCAB = 6
TEXT = [[1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 5, 4], [1, 2, 3, 3, 3]]


def context(histories: Sequence[Sequence[int]], rooms: Sequence[int], seed: int = 0) -> DraftContext:
    count = len(histories)
    generator = torch.Generator().manual_seed(seed)
    return DraftContext(
        rows=tuple(range(count)),
        histories=tuple(histories),
        max_lengths=tuple(rooms),
        params=LawParams.stack([SamplingParams(temperature=1)] * count),
        uniforms=torch.rand(count, max(rooms, default=0), generator=generator, dtype=torch.float64),
        adjusters=(None,) * count,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )


class Scripted:
    """Says `lengths[b]` times `token` in row b, as far as there is room, and remembers what it was told."""

    def __init__(self, token: int, lengths: Sequence[int], evidence: tuple[int, ...] | None = None) -> None:
        self.token, self.lengths, self.evidence = token, lengths, evidence
        self.told: list[object] = []

    def propose(self, context: DraftContext) -> Draft:
        self.told.append(context.max_lengths)
        lengths = torch.tensor([min(said, room) for said, room in zip(self.lengths, context.max_lengths, strict=True)])
        tokens = torch.full((len(context.rows), int(lengths.max())), self.token)
        return Draft(tokens, lengths, PointMass(tokens, context.vocab_size), True, self.evidence)

    def rewind(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.told.append(("rewind", rows, lengths))


class Stateful(Scripted):
    def bind(self, target: object, tokenizer: object = None) -> None:
        self.told.append(("bind", target, tokenizer))

    def admit(self, row: int, prompt: Sequence[int]) -> None:
        self.told.append(("admit", row, prompt))

    def release(self, row: int) -> None:
        self.told.append(("release", row))


def said(draft: Draft) -> list[list[int]]:
    return [row[:length] for row, length in zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)]


def test_each_row_takes_the_first_draft_that_is_not_empty() -> None:
    first, second, third = Scripted(1, [2, 0, 0, 2, 0]), Scripted(2, [3, 3, 0, 3, 3]), Scripted(3, [1, 1, 1, 1, 1])
    draft = Chain(first, second, third).propose(context([[0]] * 5, [4, 2, 4, 1, 0]))
    assert said(draft) == [[1, 1], [2, 2], [3], [1], []]
    assert first.told == [(4, 2, 4, 1, 0)]
    assert second.told == [(0, 2, 4, 0, 0)], "rows that have a draft are not offered again"
    assert third.told == [(0, 0, 4, 0, 0)]


def test_drafters_nobody_is_left_for_are_not_asked() -> None:
    idle = Scripted(2, [1, 1])
    Chain(Scripted(1, [1, 1]), idle).propose(context([[0]] * 2, [3, 0]))
    assert idle.told == []


def test_silence_is_a_draft_of_width_zero() -> None:
    for rooms in ([0, 0], [2, 2]):
        draft = Chain(Scripted(1, [0, 0]), PromptLookup()).propose(context([[1], [2]], rooms))
        assert draft.tokens.shape == (2, 0) and draft.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("lengths", [([1, 0], [0, 4]), ([4, 0], [0, 1])])
def test_laws_of_different_widths(lengths: tuple[list[int], list[int]]) -> None:
    draft = Chain(Scripted(1, lengths[0]), Scripted(2, lengths[1])).propose(context([[0]] * 2, [4, 4]))
    assert draft.tokens.shape == (2, 4) and draft.deterministic
    probability = draft.law.of(draft.tokens)
    for row in range(2):
        assert probability[row, : draft.lengths[row]].tolist() == [1.0] * int(draft.lengths[row])
    last = draft.law.at(draft.lengths - 1)
    assert last.argmax(1).tolist() == [1, 2] and last.sum(1).tolist() == [1, 1]
    assert draft.law.at(torch.tensor([3, 3])).shape == (2, VOCAB)


def test_one_speaker_keeps_its_own_law() -> None:
    draft = Chain(Scripted(1, [0, 0]), RandomDraft()).propose(context([[0]] * 2, [2, 1]))
    assert not isinstance(draft.law, MixedLaw)


def test_deterministic_only_if_everyone_who_spoke_is() -> None:
    random = RandomDraft()
    assert Chain(Scripted(1, [1, 1]), random).propose(context([[0]] * 2, [2, 2])).deterministic
    assert not Chain(Scripted(1, [1, 0]), random).propose(context([[0]] * 2, [2, 2])).deterministic
    assert Chain(Scripted(1, [1, 0]), random).propose(context([[0]] * 2, [2, 0])).deterministic


def test_evidence_classes_of_different_drafters_stay_apart() -> None:
    first, second = Scripted(1, [1, 1, 0, 0], (0, 40, 3, 3)), Scripted(2, [0, 0, 1, 0], (3, 3, 3, 3))
    asked = context([[0]] * 4, [2, 2, 2, 2])
    assert Chain(first, second, RandomDraft()).propose(asked).evidence == (0, 15, 19, 32)
    nested = Chain(Chain(first, second), Chain(RandomDraft()))
    assert nested.propose(asked).evidence == (0, 15, 19, 32)


def test_messages_reach_everyone_who_listens() -> None:
    plain, keeper = Scripted(1, [1]), Stateful(2, [1])
    chain = Chain(plain, keeper)
    chain.bind("target", "tokenizer")  # type: ignore[arg-type]
    chain.admit(3, [1, 2])
    chain.rewind([3], [7])
    chain.release(3)
    assert plain.told == [("rewind", [3], [7])]
    bound = ("bind", "target", "tokenizer")
    assert keeper.told == [bound, ("admit", 3, [1, 2]), ("rewind", [3], [7]), ("release", 3)]


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no drafters"):
        Chain()


def test_rows_draw_the_same_in_a_chain_as_alone() -> None:
    table = NgramTable.count(TEXT, vocab_size=VOCAB)
    asked = context([[1, 2, 1], [0, 2], [3, 3, 4]], [3, 4, 2])
    draft = Chain(PromptLookup(), table).propose(asked)
    alone = table.propose(asked)
    assert said(draft)[0] == [2, 1, 2] and said(draft)[1:2] == said(alone)[1:2]
    position = torch.tensor([0, 3, 1])
    torch.testing.assert_close(draft.law.at(position)[1], alone.law.at(position)[1])
    torch.testing.assert_close(draft.law.of(draft.tokens)[1], alone.law.of(alone.tokens)[1])


def test_a_tables_greedy_drafts_are_told_from_copies() -> None:
    """Both are certain, but a policy that takes them for copies learns neither what drawing costs nor what it gains."""
    chain, table = Chain(PromptLookup(min_ngram=2), NgramTable.count(TEXT, vocab_size=VOCAB)), 1
    asked = context([[0, 1, 0, 1], [1, 2], [0]], [2, 2, 2])
    greedy = replace(asked, params=LawParams.stack([SamplingParams()] * 3))
    draft = chain.propose(greedy)
    assert draft.cuttable == (True, False, False) and not draft.deterministic
    assert draft.evidence is not None and [kind // CLASSES for kind in draft.evidence] == [0, table, table]
    alone = chain.propose(replace(greedy, histories=((1, 2), (1, 2), (0,))))
    assert alone.cuttable is None and not alone.deterministic
    tables = Chain(*chain.parts[1:], *chain.parts[1:])
    assert tables.propose(greedy).deterministic, "without copies there is nothing to tell apart"


def test_a_policy_hears_which_greedy_drafts_were_drawn() -> None:
    class Listening(Constant):
        def observe(self, outcome: RoundOutcome) -> None:
            heard.append(outcome)

    heard: list[RoundOutcome] = []
    table = NgramTable.count([[1, 2, 3], [5, 6]], vocab_size=97)
    decoder = SpeculativeDecoder(tiny_model("llama"), Chain(PromptLookup(), table), policy=Listening(3))
    decoder.generate([[5, 9, 7, 11]], max_new_tokens=30, temperature=0.0)
    drafted = [outcome for outcome in heard if any(outcome.drafted)]
    kinds = {(bool(one.copied and one.copied[0]), (one.evidence or (0,))[0] // CLASSES) for one in drafted}
    assert kinds == {(True, 0), (False, 1)}, "copies of the prompt, and drafts of the table"


def pvalue(lookup_first: bool, shift: int) -> float:
    """Chi-square of the second row's tokens against the law that row `1 - shift` reports."""
    chain = Chain(PromptLookup(min_ngram=2), NgramTable.count(TEXT, vocab_size=VOCAB))
    history = [0, 1, 0, 1] if lookup_first else [0, 0]
    asked = context([[*history], [1, 2], [0]] * 3000, [2, 1, 1] * 3000)
    draft = chain.propose(asked)
    law = draft.law.at(torch.zeros_like(draft.lengths))[1 + shift].double()
    seen = torch.bincount(draft.tokens[1::3, 0], minlength=VOCAB).double()
    smoothed = (law + 1e-9) / (law + 1e-9).sum()
    return float(chisquare(seen, smoothed * seen.sum()).pvalue)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("lookup_first", [True, False])
def test_the_mixed_law_is_the_one_drawn_from(lookup_first: bool) -> None:
    assert pvalue(lookup_first, 0) > 1e-4
    assert pvalue(lookup_first, 1) < 1e-6, "the law of a neighbour would be a lie"


def test_context_is_passed_on_unchanged_but_for_the_room() -> None:
    class Nosy(Scripted):
        def propose(self, context: DraftContext) -> Draft:
            seen.append(context)
            return super().propose(context)

    seen: list[DraftContext] = []
    asked = context([[1], [2]], [2, 2])
    Chain(Scripted(1, [1, 0]), Nosy(2, [1, 1])).propose(asked)
    assert seen[0].max_lengths == (0, 2)
    assert seen[0].uniforms is asked.uniforms and replace(seen[0], max_lengths=(2, 2)).rows == asked.rows


class Copying(Scripted):
    copies = True

    def propose(self, context: DraftContext) -> Draft:
        assert context.copy_lengths is not None
        return super().propose(replace(context, max_lengths=context.copy_lengths))


def test_copies_have_room_of_their_own_and_are_told_apart() -> None:
    copying, random = Copying(1, [4, 0, 4, 0]), RandomDraft()
    chain = Chain(copying, random)
    assert chain.is_mixed and not Chain(copying).is_mixed and not Chain(random, random).is_mixed
    asked = replace(context([[0]] * 4, [1, 2, 0, 0]), copy_lengths=(9, 9, 9, 9))
    draft = chain.propose(asked)
    assert draft.lengths.tolist() == [4, 2, 4, 0], "copies may be longer than what is drawn, and come where none is"
    assert draft.cuttable == (True, False, True, False) and not draft.deterministic


class Growing(Scripted):
    """A tree of the last drafter's tokens, drawn ones below the root."""

    makes_trees = True

    def propose(self, context: DraftContext) -> Draft:
        draft = super().propose(context)
        parents = torch.full_like(draft.tokens, -1)
        return replace(draft, deterministic=False, tree=TreeShape(parents, (Siblings.SAMPLED,) * len(parents)))


def test_a_copy_is_judged_alike_with_and_without_a_tree_beside_it() -> None:
    copying, drawing = Copying(1, [3, 0, 0]), Scripted(2, [0, 2, 0])
    for trees in ([0, 0, 2], [0, 0, 0]):
        asked = replace(context([[0]] * 3, [3, 3, 3]), copy_lengths=(3, 3, 3))
        tree = Chain(copying, drawing, Growing(3, trees)).propose(asked).tree
        assert tree is not None
        assert tree.ways[:2] == (Siblings.TOP, Siblings.SAMPLED)
        assert tree.parents[:2].tolist() == [[-1, 0, 1]] * 2


def test_chains_that_are_drawn_alone_are_no_trees() -> None:
    asked = replace(context([[0]] * 3, [3, 3, 3]), copy_lengths=(3, 3, 3))
    chain = Chain(Copying(1, [0, 0, 0]), Scripted(2, [0, 2, 0]), Growing(3, [0, 0, 0]))
    assert chain.propose(asked).tree is None
    assert Chain(Copying(1, [2, 0, 0]), Scripted(2, [0, 2, 0])).propose(asked).tree is None


def test_nobody_is_told_apart_where_all_are_alike() -> None:
    asked = replace(context([[0]] * 2, [2, 2]), copy_lengths=(2, 2))
    assert Chain(Copying(1, [1, 1]), RandomDraft()).propose(asked).cuttable is None
    assert Chain(Copying(1, [0, 0]), RandomDraft()).propose(asked).cuttable is None
