"""Heads on features: the law they report is that of a recompute without any cache, whatever happened before."""

from __future__ import annotations

import copy
import gc
import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import forerun
from forerun.config import SamplingParams
from forerun.drafters import FeatureHead, ParallelHeads
from forerun.drafters import trunk as trunk_module
from forerun.engine import Engine, Request
from forerun.errors import InvalidArgument, UnsupportedModel
from forerun.math.attention import Form
from forerun.models.draft_head import DraftHead
from forerun.models.scorer import Scorer
from forerun.policy import Constant
from forerun.types import Adjuster, Draft, DraftContext, LawParams
from support.finish import finished
from support.heads import head_logits, head_of
from support.tiny import plain_greedy, ragged_prompts, tiny_model

VOCAB = 97
LENGTH = 4
FAMILIES = ("llama", "qwen3", "gpt_neox", "gpt2", "opt", "mistral", "falcon_rotary", "bloom")
TEXT = ragged_prompts(2, VOCAB, seed=11, longest=120)[1]
IDS = torch.arange(1, VOCAB, 3)
SAMPLED = SamplingParams(temperature=1.0)


@lru_cache
def exact(family: str) -> PreTrainedModel:
    return copy.deepcopy(tiny_model(family)).double()


class Stage:
    """A target and a drafter with rows 0, 1, .. that a test moves on by hand."""

    def __init__(self, family: str, blocks: int, ids: Tensor | None, form: Form = Form.AUTO, **options: Any) -> None:
        # Two random models and a recursion multiply float32's rounding by hundreds: float64 shows faults, not noise.
        self.model = exact(family)
        self.head, self.ids = head_of(self.model, blocks, noise=0.03).double(), ids
        kind = ParallelHeads if blocks else FeatureHead
        self.drafter = kind(self.head, draft_vocabulary=ids, form=form, **options)
        self.target = Scorer(self.model, form)
        self.drafter.bind(self.target)
        self.histories: dict[int, list[int]] = {}

    def begin(self, row: int, prompt: list[int]) -> None:
        self.target.admit(row)
        self.drafter.admit(row, prompt)
        self.target.feed([row], [prompt[:-1]])
        self.histories[row] = list(prompt)

    def propose(
        self,
        rows: tuple[int, ...],
        room: int = LENGTH,
        params: SamplingParams = SAMPLED,
        adjusters: tuple[Adjuster | None, ...] | None = None,
    ) -> Draft:
        generator = torch.Generator().manual_seed(sum(map(len, self.histories.values())))
        context = DraftContext(
            rows=rows,
            histories=tuple(self.histories[row] for row in rows),
            max_lengths=(room,) * len(rows),
            params=LawParams.stack([params] * len(rows)),
            uniforms=torch.rand(len(rows), room, dtype=torch.float64, generator=generator),
            adjusters=adjusters or (None,) * len(rows),
            vocab_size=VOCAB,
            device=torch.device("cpu"),
        )
        with torch.inference_mode():
            return self.drafter.propose(context)

    def accept(self, row: int, draft: Draft, place: int, accepted: int) -> None:
        """A round's end: the whole draft is scored, `accepted` tokens of it stand, and another follows them."""
        drafted = draft.tokens[place, : int(draft.lengths[place])].tolist()
        self.target.score([row], [[self.histories[row][-1], *drafted]])
        self.histories[row] += [*drafted[:accepted], 3]
        standing = len(self.histories[row]) - 1
        self.target.rewind([row], [min(standing, self.target.length(row))])
        self.drafter.rewind([row], [standing])

    def law(self, row: int, drafted: list[int]) -> Tensor:
        """[V] by recomputing everything."""
        small = head_logits(self.model, self.head, self.histories[row], drafted, self.ids).softmax(-1)
        return small if self.ids is None else small.new_zeros(VOCAB).index_copy_(0, self.ids, small)

    def check(self, rows: tuple[int, ...], draft: Draft, lengths: int = LENGTH) -> None:
        assert draft.lengths.tolist() == [lengths] * len(rows)
        of = draft.law.of(draft.tokens)
        for i in range(lengths):
            laws = draft.law.at(torch.full((len(rows),), i))
            for place, row in enumerate(rows):
                wanted = self.law(row, draft.tokens[place, :i].tolist())
                torch.testing.assert_close(laws[place], wanted, rtol=0, atol=1e-5)
                torch.testing.assert_close(of[place, i], wanted[draft.tokens[place, i]], rtol=0, atol=1e-5)
                assert of[place, i] > 0


@pytest.mark.parametrize("blocks", (0, LENGTH), ids=("feature", "parallel"))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(every=16)
def test_laws_after_every_cut(family: str, blocks: int) -> None:
    """Every number of accepted tokens, two rows that never agree on it, padded and split, reduced and not."""
    number = FAMILIES.index(family)
    form, ids = (Form.PAD, Form.SPLIT)[number % 2], (IDS, None)[number // 2 % 2]
    stage = Stage(family, blocks, ids, form)
    stage.begin(0, TEXT[:2])
    stage.begin(1, TEXT[4:16])
    for accepted in (*range(LENGTH + 1), LENGTH, 0):
        draft = stage.propose((0, 1))
        stage.check((0, 1), draft)
        stage.accept(0, draft, 0, accepted)
        stage.accept(1, draft, 1, LENGTH - accepted)


@pytest.mark.parametrize("blocks", (0, LENGTH), ids=("feature", "parallel"))
def test_drafting_twice_changes_nothing(blocks: int) -> None:
    stage = Stage("llama", blocks, IDS)
    stage.begin(0, TEXT[:9])
    first, second = stage.propose((0,)), stage.propose((0,))
    assert first.tokens.tolist() == second.tokens.tolist()
    stage.check((0,), second)


def test_control_guessed_keys_that_stay_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys made of guesses left in the cache: the oracle must see it."""
    monkeypatch.setattr(trunk_module.Trunk, "drop_guesses", lambda *call: None)
    stage = Stage("llama", 0, None)
    stage.begin(0, TEXT[:9])
    stage.accept(0, stage.propose((0,)), 0, LENGTH)
    with pytest.raises(AssertionError):
        stage.check((0,), stage.propose((0,)))


@pytest.mark.parametrize("blocks", (0, LENGTH), ids=("feature", "parallel"))
def test_rounds_without_drafts(blocks: int) -> None:
    """Features of rounds in which nothing was drafted are there when drafting begins again."""
    stage = Stage("llama", blocks, IDS)
    stage.begin(0, TEXT[:5])
    silence = Draft(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long), None)  # type: ignore[arg-type]
    for _ in range(3):
        stage.accept(0, silence, 0, 0)
    draft = stage.propose((0,))
    stage.check((0,), draft)
    stage.accept(0, draft, 0, 2)
    stage.accept(0, silence, 0, 0)
    stage.check((0,), stage.propose((0,)))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("cut", (1, 2, 4, 11, 13))
def test_a_row_cut_back_anywhere(cut: int) -> None:
    """A kept row whose next prompt shares only its beginning: what was taken in behind it is taken in anew."""
    stage = Stage("llama", 0, None)
    stage.begin(0, TEXT[:12])
    stage.accept(0, stage.propose((0,)), 0, 2)
    stage.propose((0,))
    stage.target.rewind([0], [cut])
    stage.drafter.rewind([0], [cut])
    stage.histories[0] = [*stage.histories[0][:cut], 50, 51, 52]
    stage.target.feed([0], [[50, 51]])
    stage.check((0,), stage.propose((0,)))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    alone, together = Stage("llama", 0, IDS), Stage("llama", 0, IDS)
    alone.begin(3, TEXT[20:29])
    for row, prompt in ((5, TEXT[:2]), (3, TEXT[20:29]), (8, TEXT[40:80])):
        together.begin(row, prompt)
    one, three = alone.propose((3,)), together.propose((5, 3, 8))
    together.check((5, 3, 8), three)
    same = one.law.at(torch.tensor([0]))[0], three.law.at(torch.tensor([0, 0, 0]))[1]
    torch.testing.assert_close(*same, rtol=0, atol=1e-6)
    together.drafter.release(5)  # the last slot moves into the hole
    together.target.release(5)
    together.accept(3, three, 1, 2)
    together.accept(8, three, 2, 0)
    together.check((8, 3), together.propose((8, 3)))


def test_copied_prompts_are_taken_in_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("llama", 0, None)
    for row in range(3):
        stage.target.admit(row)
        stage.drafter.admit(row, TEXT[:20])
        stage.histories[row] = TEXT[:20]
    stage.target.feed(range(3), [TEXT[:19]] * 3)
    ran: list[int] = []
    run = Scorer.run
    monkeypatch.setattr(Scorer, "run", lambda *call: ran.append(len(call[3])) or run(*call))  # type: ignore[func-returns-value]
    draft = stage.propose((0, 1, 2))
    assert ran == [18, 3, 3, 3, 3]
    stage.check((0, 1, 2), draft)


def test_long_prompts_are_taken_in_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunk_module, "PREFILL_TOKENS", 7)
    stage = Stage("llama", 0, IDS)
    for row, span in enumerate((30, 4, 21)):
        stage.begin(row, TEXT[row : row + span])
    stage.check((0, 1, 2), stage.propose((0, 1, 2)))


def test_rows_without_features_stay_silent() -> None:
    """A prompt of one token has no pair, and a row that ran before anybody listened has no features."""
    stage = Stage("llama", 0, None)
    stage.begin(0, TEXT[:1])
    stage.begin(1, TEXT[:6])
    stage.target.admit(2)
    stage.target.feed([2], [TEXT[:5]])
    stage.histories[2] = TEXT[:6]
    draft = stage.propose((0, 1, 2))
    assert draft.lengths.tolist() == [0, LENGTH, 0]
    stage.target.score([2, 1], [[TEXT[5]], [TEXT[5]]])  # heard in part: row 2 still lacks its beginning
    stage.histories[1].append(9)
    stage.histories[2].append(9)
    assert stage.propose((1, 2)).lengths.tolist() == [LENGTH, 0]
    stage.check((1,), stage.propose((1,)))


def test_failed_passes_are_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("llama", 0, None)
    stage.begin(0, TEXT[:6])
    with monkeypatch.context() as patch:
        patch.setattr(stage.model.lm_head, "forward", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stage.target.score([0], [[TEXT[5], 1, 2]])
    assert stage.drafter.trunk.features.length(0) == stage.target.length(0) == 5
    assert not stage.model.base_model._forward_hooks
    stage.check((0,), stage.propose((0,)))


def test_context_ends() -> None:
    """Positions the body cannot tell apart are not drafted: the target has one more, for the pair's second token."""
    stage = Stage("llama", 0, None)
    limit = stage.model.config.max_position_embeddings
    text = [TEXT[i % len(TEXT)] for i in range(limit)]
    stage.begin(0, text[: limit - 1])
    assert stage.propose((0,)).lengths.tolist() == [3]


def test_parallel_drafts_are_no_longer_than_their_heads() -> None:
    stage = Stage("llama", 2, None)
    stage.begin(0, TEXT[:6])
    stage.check((0,), stage.propose((0,), room=5), lengths=2)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", (0, LENGTH), ids=("feature", "parallel"))
def test_stop_below(blocks: int) -> None:
    """A draft ends after the first token that is doubted, and keeps it; a greedy draft can doubt too."""
    for params in (SAMPLED, SamplingParams()):
        free, careful = Stage("llama", blocks, None), Stage("llama", blocks, None, stop_below=0.3)
        ended = set()
        for start in range(0, 60, 6):
            for stage in (free, careful):
                stage.begin(start, TEXT[start : start + 12])
            long, short = (stage.propose((start,), params=params) for stage in (free, careful))
            tokens = long.tokens[0].tolist()
            chances = [float(free.law(start, tokens[:i])[token]) for i, token in enumerate(tokens)]
            wanted = next((i + 1 for i, chance in enumerate(chances) if chance < 0.3), LENGTH)
            assert short.tokens[0].tolist() == tokens[:wanted]
            ended.add(wanted)
            for stage in (free, careful):
                del stage.histories[start]
        assert len(ended) > 1


@pytest.mark.parametrize("blocks", (0, LENGTH), ids=("feature", "parallel"))
def test_greedy_drafts_are_point_masses(blocks: int) -> None:
    stage = Stage("llama", blocks, IDS)
    stage.begin(0, TEXT[:9])
    draft = stage.propose((0,), params=SamplingParams())
    for i in range(LENGTH):
        best = int(stage.law(0, draft.tokens[0, :i].tolist()).argmax())
        assert draft.tokens[0, i] == best
        assert draft.law.at(torch.tensor([i]))[0].nonzero().tolist() == [[best]]


@pytest.mark.parametrize("blocks", (0, LENGTH), ids=("feature", "parallel"))
def test_adjusters_see_the_whole_vocabulary(blocks: int) -> None:
    """Penalties and processors act on the draft's law too, and its second row has none."""
    stage = Stage("llama", blocks, IDS)
    stage.begin(0, TEXT[:9])
    stage.begin(1, TEXT[:9])
    seen: list[tuple[tuple[int, ...], int, int]] = []

    def adjust(logits: Tensor, drafted: Any, first: int) -> Tensor:
        seen.append((tuple(logits.shape), len(drafted), first))
        assert (logits.isfinite().nonzero()[:, 1] == IDS).all()
        bias = torch.zeros(VOCAB)
        bias[IDS[0]], bias[0] = 4.0, 100.0
        return logits + bias

    draft = stage.propose((0, 1), adjusters=(adjust, None))
    assert seen == [((1, VOCAB), i, i) for i in range(LENGTH)]
    raw = head_logits(stage.model, stage.head, stage.histories[0], [], IDS)
    raw[0] += 4.0
    laws = draft.law.at(torch.tensor([0, 0]))
    torch.testing.assert_close(laws[0, IDS], raw.softmax(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(laws[1], stage.law(1, []), rtol=0, atol=1e-5)
    assert laws[0, 0] == 0


def test_truncation_acts_on_the_drafts_own_law() -> None:
    stage = Stage("llama", 0, IDS)
    stage.begin(0, TEXT[:9])
    draft = stage.propose((0,), params=SamplingParams(temperature=0.7, top_k=3))
    law = draft.law.at(torch.tensor([0]))[0]
    logits = head_logits(stage.model, stage.head, stage.histories[0], [], IDS) / 0.7
    best = logits.topk(3).indices
    torch.testing.assert_close(law[IDS[best]], logits[best].softmax(-1), rtol=0, atol=1e-5)
    assert int((law > 0).sum()) == 3


def engine_of(drafter: Any, length: int = 3, **options: Any) -> Engine:
    return Engine(Scorer(tiny_model("llama")), drafter, Constant(length), **options)


def finish(engine: Engine) -> list[tuple[int, ...]]:
    return [result.tokens for result in finished(engine)]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("edited", (False, True), ids=("continued", "edited"))
def test_the_next_turn_of_a_chat(edited: bool) -> None:
    """A kept row is drafted for in its second turn as it would be anew, and says the same."""
    model = tiny_model("llama")
    first = tuple(TEXT[:10])
    engine = engine_of(FeatureHead(head_of(model)), keep_rows=1)
    engine.add(Request(prompt=first, max_new_tokens=12))
    reply = finish(engine)[0]
    second = (*first, *(reply[:5] if edited else reply), 60, 61, 62)
    fresh = engine_of(FeatureHead(head_of(model)))
    rates = []
    for either in (engine, fresh):
        either.add(Request(prompt=second, max_new_tokens=16))
        result = finished(either)[0]
        assert list(result.tokens) == plain_greedy(model, list(second), 16)
        rates.append((result.stats.num_draft_tokens, result.stats.num_accepted_tokens))
    # The fresh row drafts nothing in its first round, because its prompt runs in that round; the kept one can.
    assert rates[0][0] > 0 and rates[0][1] > 0 and rates[1][1] > 0


def test_heads_beside_early_exit() -> None:
    """The exit writes guessed keys into the target's own cache; the head must not hear of them."""
    model = tiny_model("llama")
    chain = forerun.Chain(forerun.PromptLookup(min_ngram=3), FeatureHead(head_of(model)), forerun.EarlyExit(1))
    engine = engine_of(chain)
    prompts = ragged_prompts(4, VOCAB, seed=5)
    for number, prompt in enumerate(prompts):
        engine.add(Request(prompt=tuple(prompt), max_new_tokens=20, request_id=number))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while not engine.is_idle:
            engine.step()
    results = engine.take_results()
    assert len(results) == len(prompts)
    for result in results:
        assert list(result.tokens) == plain_greedy(model, list(result.request.prompt), 20)


def test_a_second_target_is_heard_instead_of_the_first() -> None:
    first, second = (Scorer(tiny_model("llama")) for _ in range(2))
    drafter = FeatureHead(head_of(first.model))
    drafter.bind(first)
    drafter.bind(second)
    assert (len(first.observers), len(second.observers)) == (0, 1)


@pytest.mark.slow
def test_a_target_outlives_who_listened_to_it() -> None:
    """A scorer may serve one engine after the other; the ears of those that went would be told for ever."""
    target = Scorer(tiny_model("llama"))
    drafter = FeatureHead(head_of(target.model))
    for _ in range(3):
        made = Engine(target, drafter, Constant(3))
        made.add(Request(prompt=tuple(TEXT[:8]), max_new_tokens=12))
        assert list(finish(made)[0]) == plain_greedy(target.model, TEXT[:8], 12)
        assert len(target.observers) == 1
        del made
        gc.collect()
    assert not target.observers


def test_a_head_in_training_is_not_touched() -> None:
    """Another type than the target's: the drafter works with a copy."""
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    head = head_of(tiny_model("llama"))
    decoder = forerun.SpeculativeDecoder(model, FeatureHead(head, draft_vocabulary=IDS), policy=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = decoder.generate(torch.tensor([TEXT[:8]]), max_new_tokens=12)
    assert head.fuse.weight.dtype == torch.float32
    assert out.stats.num_draft_tokens > 0


def test_wrong_targets_are_refused() -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidArgument, match=r"hidden_size 32.*hidden_size 48"):
        engine = Engine(Scorer(tiny_model("qwen3")), FeatureHead(head_of(model)), Constant(2))
        assert engine is None
    made_for = {"name": "other", "model_type": "llama", "hidden_size": 32, "vocab_size": 96}
    with pytest.raises(InvalidArgument, match=r"made for other .*vocab_size 96.*vocab_size 97"):
        engine_of(FeatureHead(head_of(model), made_for=made_for))
    with pytest.raises(InvalidArgument, match="token 97"):
        engine_of(FeatureHead(head_of(model), draft_vocabulary=torch.tensor([1, 97])))
    with pytest.raises(InvalidArgument, match="before it knew its target"):
        FeatureHead(head_of(model)).propose(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", ([3, 1, 2], [1, 1, 2], [-1, 2], [], [[1, 2]], [1.0, 2.0], "12"), ids=str)
def test_a_draft_vocabulary_is_ascending(ids: Any) -> None:
    """Laws look tokens up in it: of others they say that what was drawn has no chance, and it is always kept."""
    given = torch.tensor(ids) if isinstance(ids, list) else ids
    for kind in (FeatureHead, ParallelHeads):
        with pytest.raises(InvalidArgument, match=r"draft_vocabulary.*ascending and without repeats"):
            kind(head_of(tiny_model("llama"), 2), draft_vocabulary=given)


def test_what_is_no_head_is_refused() -> None:
    for kind in (FeatureHead, ParallelHeads):
        with pytest.raises(InvalidArgument, match="head=3: must be a DraftHead"):
            kind(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ("gemma3", "gemma2", "codegen", "gptj"))
def test_bent_embeddings_and_heads_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel, match="heads on its features are not supported"):
        DraftHead.for_target(tiny_model(family), 1)


def test_bad_arguments() -> None:
    head = head_of(tiny_model("llama"))
    with pytest.raises(InvalidArgument, match=r"stop_below=1\.5"):
        FeatureHead(head, stop_below=1.5)
    with pytest.raises(InvalidArgument, match="no blocks"):
        ParallelHeads(head)
    with pytest.raises(InvalidArgument, match="num_layers=0"):
        DraftHead.for_target(tiny_model("llama"), 0)
