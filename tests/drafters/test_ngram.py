"""N-gram tables and random drafts: what is counted, what is drawn, and that q is the law it was drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from scipy.stats import chisquare
from torch import Tensor

from forerun import SpeculativeDecoder
from forerun.config import SamplingParams
from forerun.drafters import Chain, NgramTable, PromptLookup, RandomDraft
from forerun.drafters.base import Drafter
from forerun.drafters.compatible import vocabulary_digest
from forerun.errors import InvalidArgument, ModelNotFound, TokenizerMismatch
from forerun.types import Draft, DraftContext, LawParams
from support.tiny import tiny_model

VOCAB = 6
TEXT = [[1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 5, 4], [1, 2, 3, 3, 3]]
DRAWS = 20_000
SAMPLED = SamplingParams(temperature=1)


def context(
    histories: Sequence[Sequence[int]],
    rooms: Sequence[int],
    params: SamplingParams | Sequence[SamplingParams] = SAMPLED,
    vocab_size: int = VOCAB,
    seed: int = 0,
) -> DraftContext:
    count = len(histories)
    params = [params] * count if isinstance(params, SamplingParams) else list(params)
    generator = torch.Generator().manual_seed(seed)
    return DraftContext(
        rows=tuple(range(count)),
        histories=tuple(histories),
        max_lengths=tuple(rooms),
        params=LawParams.stack(params),
        uniforms=torch.rand(count, max(rooms, default=0), generator=generator, dtype=torch.float64),
        adjusters=(None,) * count,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
    )


def many(drafter: Drafter, history: Sequence[int], params: SamplingParams = SAMPLED, width: int = 2) -> Draft:
    """The same question `DRAWS` times."""
    return drafter.propose(context([history] * DRAWS, [width] * DRAWS, params))


def law_at(draft: Draft, position: int) -> Tensor:
    """[B, V], one law a row."""
    return draft.law.at(torch.full((len(draft.tokens),), position))


def fits(tokens: Tensor, law: Tensor) -> bool:
    """Whether tokens [N] look drawn from `law` [V]: chi-square, and nothing where the law has no mass."""
    seen, law = torch.bincount(tokens, minlength=len(law)).double(), law.double() / law.double().sum()
    if seen[law == 0].any():
        return False
    support = law > 0
    return bool(support.sum() == 1 or chisquare(seen[support], law[support] * len(tokens)).pvalue > 1e-4)


def continuation(table: NgramTable, history: Sequence[int], params: SamplingParams = SAMPLED) -> dict[int, float]:
    """The law of the next token, without zeros."""
    law = law_at(table.propose(context([history], [1], params)), 0)[0]
    return {i: round(p, 6) for i, p in enumerate(law.tolist()) if p}


def test_backs_off_from_the_longest_context_to_plain_frequency() -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    assert continuation(table, [1, 2]) == {3: 0.75, 4: 0.25}
    assert continuation(table, [5, 2]) == {3: 0.75, 4: 0.25}  # 5 2 was never seen, 2 was
    assert continuation(table, [3, 3]) == {3: 1}  # 3 alone is followed by 1, too
    assert continuation(table, [0, 3]) == {1: 0.5, 3: 0.5}
    assert continuation(table, [0]) == continuation(table, []) == {
        1: round(5 / 17, 6), 2: round(4 / 17, 6), 3: round(5 / 17, 6), 4: round(2 / 17, 6), 5: round(1 / 17, 6)
    }  # fmt: skip


def test_evidence_is_the_length_of_the_context() -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    histories = [[1, 2], [5, 2], [2], [0], [], [1, 2, VOCAB + 3], [VOCAB + 3, 2]]
    assert table.propose(context(histories, [1] * 7)).evidence == (2, 1, 1, 0, 0, 0, 1)


def test_tokens_the_table_cannot_know_are_no_context() -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    alias = (2 + 1) + (1 + 1) * (VOCAB + 1) - 1  # written as one digit, it would look like the context 1, 2
    draft = table.propose(context([[alias], [-1], [3, alias]], [1] * 3))
    assert draft.evidence == (0, 0, 0)


def naive(text: Sequence[Sequence[int]], order: int, history: Sequence[int]) -> Counter[int]:
    """Continuations of the longest suffix of `history` that something follows, by looking at every position."""
    for n in range(min(order - 1, len(history)), -1, -1):
        suffix = list(history[len(history) - n :])
        found = Counter(t[i] for t in text for i in range(n, len(t)) if list(t[i - n : i]) == suffix)
        if found:
            return found
    raise AssertionError("no text")


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4)


@given(text=texts, order=st.integers(1, 5), history=st.lists(st.integers(0, 3), max_size=6))
@settings(max_examples=150, deadline=None)
def test_counts_agree_with_a_naive_count(text: list[list[int]], order: int, history: list[int]) -> None:
    found = naive(text, order, history)
    table = NgramTable.count(text, order, vocab_size=4)
    expected = {token: count / found.total() for token, count in found.items()}
    assert continuation(table, history) == pytest.approx(expected, abs=1e-5)


def test_rare_and_surplus_continuations_are_dropped() -> None:
    text = [[0, 1, 0, 1, 0, 1, 0, 2, 0, 2, 0, 3]]
    assert continuation(NgramTable.count(text, 2, vocab_size=4, min_count=2), [0]) == {1: 0.6, 2: 0.4}
    assert continuation(NgramTable.count(text, 2, vocab_size=4, max_continuations=1), [0]) == {1: 1}
    rare = NgramTable.count(text, 2, vocab_size=4, min_count=100)
    assert len(continuation(rare, [0])) == 4  # plain frequencies are always kept


def test_greedy_rows_get_the_most_frequent_continuation_lowest_id_first() -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    greedy = SamplingParams(temperature=0)
    assert continuation(table, [1, 2], greedy) == {3: 1}
    assert continuation(table, [0, 3], greedy) == {1: 1}  # 1 and 3 tie
    draft = table.propose(context([[1, 2], [1, 2]], [3, 3], [greedy, SAMPLED]))
    assert draft.tokens[0].tolist() == [3, 1, 2]
    assert not draft.deterministic, "one row was drawn"
    assert table.propose(context([[1, 2], [3]], [3, 3], greedy)).deterministic


def test_the_row_s_own_sampling_parameters_shape_the_law() -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    assert continuation(table, [1, 2], SamplingParams(temperature=0.5)) == {3: 0.9, 4: 0.1}
    assert continuation(table, [1, 2], SamplingParams(temperature=1, top_k=1)) == {3: 1}
    assert continuation(table, [1, 2], SamplingParams(temperature=1, top_p=0.7)) == {3: 1}
    assert continuation(table, [1, 2], SamplingParams(temperature=1, min_p=0.5)) == {3: 1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("history", [[1, 2], [0]])
def test_table_reports_the_law_it_drew_from(history: list[int], temperature: float) -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    draft = many(table, history, SamplingParams(temperature=temperature))
    assert fits(draft.tokens[:, 0], law_at(draft, 0)[0])
    for first in draft.tokens[:, 0].unique():
        same = draft.tokens[:, 0] == first
        assert fits(draft.tokens[same, 1], law_at(draft, 1)[same][0])


def test_extreme_uniforms_stay_inside_the_law() -> None:
    table = NgramTable.count([[0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 1]], order=2, vocab_size=VOCAB)
    asked = context([[0], [0], [1]], [1, 1, 1])
    asked.uniforms[:, 0] = torch.tensor([0, 1 - 2**-53, 1 - 2**-53], dtype=torch.float64)
    draft = table.propose(asked)
    assert draft.tokens[:, 0].tolist() == [1, 5, 0]
    assert (draft.law.of(draft.tokens) > 0).all()


def test_a_table_that_reports_another_law_is_caught() -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB)
    drawn = many(table, [1, 2], SamplingParams(temperature=0.9))
    claimed = many(table, [1, 2], SamplingParams(temperature=1.0))
    assert not fits(drawn.tokens[:, 0], law_at(claimed, 0)[0])


def test_of_is_at_read_at_the_tokens() -> None:
    draft = NgramTable.count(TEXT, order=3, vocab_size=VOCAB).propose(context([[1, 2], [0], []], [3, 3, 3]))
    for i in range(3):
        read = law_at(draft, i).gather(1, draft.tokens[:, i : i + 1])[:, 0]
        torch.testing.assert_close(draft.law.of(draft.tokens)[:, i], read)
        torch.testing.assert_close(law_at(draft, i).sum(1), torch.ones(3, dtype=torch.float64), check_dtype=False)


@pytest.mark.parametrize("drafter", [NgramTable.count(TEXT, vocab_size=VOCAB), RandomDraft()])
def test_ragged_rooms(drafter: Drafter) -> None:
    draft = drafter.propose(context([[1], [2], [3]], [2, 0, 3]))
    assert draft.lengths.tolist() == [2, 0, 3] and draft.tokens.shape == (3, 3)
    silent = drafter.propose(context([[1], [2]], [0, 0]))
    assert silent.lengths.tolist() == [0, 0] and silent.tokens.shape == (2, 0)


@pytest.mark.parametrize("drafter", [NgramTable.count(TEXT, vocab_size=VOCAB), RandomDraft()])
def test_neighbours_and_width_do_not_change_a_row(drafter: Drafter) -> None:
    asked = context([[1, 2], [3], [0]], [3, 3, 3])
    alone = context([[3]], [2])
    object.__setattr__(alone, "uniforms", asked.uniforms[1:2])
    together = drafter.propose(asked).tokens[1, :2]
    assert drafter.propose(alone).tokens[0, :2].tolist() == together.tolist()


def test_save_and_load_give_the_same_drafts(tmp_path: Path) -> None:
    table = NgramTable.count(TEXT, order=3, vocab_size=VOCAB, tokenizer="abc")
    table.save(tmp_path / "table.safetensors")
    loaded = NgramTable.load(tmp_path / "table.safetensors", tokenizer="abc")
    assert (loaded.order, loaded.vocab_size, loaded.tokenizer) == (3, VOCAB, "abc")
    asked = context([[1, 2], [0], []], [4, 4, 4])
    before, after = table.propose(asked), loaded.propose(asked)
    assert before.tokens.tolist() == after.tokens.tolist() and before.evidence == after.evidence
    assert torch.equal(law_at(before, 0), law_at(after, 0))


def test_a_table_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    NgramTable.count(TEXT, vocab_size=VOCAB, tokenizer="abc").save(path)
    with pytest.raises(TokenizerMismatch, match="'abc', not 'xyz'"):
        NgramTable.load(path, tokenizer="xyz")
    with pytest.raises(TokenizerMismatch, match="holds token 5, the target's vocabulary ends at 4"):
        NgramTable.load(path).propose(context([[1]], [1], vocab_size=5))


@pytest.mark.parametrize("in_chain", [False, True])
def test_a_target_of_other_ids_is_refused_when_the_two_meet(in_chain: bool) -> None:
    """Not when a draft is asked for: the failure of one would silence the whole chain."""
    model = tiny_model("llama")
    table = NgramTable.count([[1, 2, 97]], vocab_size=98)
    with pytest.raises(TokenizerMismatch, match="holds token 97, the target's vocabulary ends at 96"):
        SpeculativeDecoder(model, Chain(PromptLookup(), table) if in_chain else table)


def test_a_vocabulary_is_compared_where_both_are_known() -> None:
    class Words:
        def __init__(self, **vocabulary: int) -> None:
            self.get_vocab, self.decode = lambda: vocabulary, str

    model, mine, other = tiny_model("llama"), Words(a=1, b=2), Words(a=2, b=1)
    table = NgramTable.count(TEXT, vocab_size=VOCAB, tokenizer=vocabulary_digest(mine))
    with pytest.raises(TokenizerMismatch, match="another vocabulary"):
        SpeculativeDecoder(model, table, tokenizer=other)
    named = NgramTable.count(TEXT, vocab_size=VOCAB, tokenizer="a name of one's own")
    for drafter, tokenizer in ((table, Words(b=2, a=1)), (table, None), (named, other)):
        SpeculativeDecoder(model, drafter, tokenizer=tokenizer)


def test_a_padded_vocabulary_is_no_mismatch() -> None:
    table = NgramTable.count(TEXT, vocab_size=VOCAB + 10)
    assert law_at(table.propose(context([[1]], [1], vocab_size=VOCAB)), 0).shape == (1, VOCAB)


def test_missing_cut_and_foreign_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    with pytest.raises(ModelNotFound, match="no such file"):
        NgramTable.load(path)
    NgramTable.count(TEXT, vocab_size=VOCAB).save(path)
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:20], b"", b"not a table at all, only text"):
        path.write_bytes(damaged)
        with pytest.raises(InvalidArgument, match="damaged n-gram table"):
            NgramTable.load(path)
    save_file({"weight": np.zeros(3)}, path)
    with pytest.raises(InvalidArgument, match="format None is not"):
        NgramTable.load(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("contexts", lambda t: t[::-1]),
        ("contexts", lambda t: t + 1),
        ("contexts", lambda t: t * 1000),
        ("starts", lambda t: t[:-1]),
        ("starts", lambda t: t + 1),
        ("starts", lambda t: t[::-1]),
        ("tokens", lambda t: t + VOCAB),
        ("tokens", lambda t: t[:-1]),
        ("tokens", lambda t: t.astype(np.float32)),
        ("counts", lambda t: t * 0),
        ("counts", lambda t: t[:0]),
        ("counts", lambda t: t[::-1]),
        ("counts", None),
    ],
)
def test_inconsistent_tables_are_refused(tmp_path: Path, name: str, change) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "table.safetensors"
    table = NgramTable.count(TEXT, vocab_size=VOCAB)
    tensors = {key: getattr(table.table, key).numpy() for key in ("contexts", "starts", "tokens", "counts")}
    if change is None:
        del tensors[name]
    else:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, path, metadata={"format": "forerun.ngram.1", "order": "3", "vocab_size": str(VOCAB)})
    with pytest.raises(InvalidArgument, match="damaged n-gram table"):
        NgramTable.load(path)


def test_text_and_sizes_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="no tokens"):
        NgramTable.count([[], []], vocab_size=VOCAB)
    with pytest.raises(InvalidArgument, match="token 6"):
        NgramTable.count([[1, 6]], vocab_size=VOCAB)
    with pytest.raises(InvalidArgument, match="token -1"):
        NgramTable.count([[1, -1]], vocab_size=VOCAB)
    with pytest.raises(InvalidArgument, match="order 4 at most"):
        NgramTable.count(TEXT, order=5, vocab_size=151_936)
    with pytest.raises(InvalidArgument, match="order=0"):
        NgramTable.count(TEXT, order=0, vocab_size=VOCAB)
    with pytest.raises(InvalidArgument, match="min_count=0"):
        NgramTable.count(TEXT, vocab_size=VOCAB, min_count=0)
    for name in ("order", "vocab_size", "min_count", "max_continuations"):
        with pytest.raises(InvalidArgument, match=f"{name}=2.5: must be a whole number"):
            NgramTable.count(TEXT, **{"vocab_size": VOCAB, name: 2.5})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [[1.5, 2.0], "12", [[1, 2]], [1, [2]], [True, False], [None], 3])
def test_texts_that_are_no_token_ids_are_refused(text: Any) -> None:
    """Numpy would make ids of most of them: 1 of 1.5, 12 of \"12\"."""
    with pytest.raises(InvalidArgument, match=r"sequences\[1\].*must be a list of token ids"):
        NgramTable.count([[1, 2], text], vocab_size=VOCAB)


def test_large_ids_do_not_collide() -> None:
    top = 151_935
    table = NgramTable.count([[top, top, top, 1, 0, 0, 0, 2]], order=4, vocab_size=top + 1)
    draft = table.propose(context([[top] * 3, [0] * 3], [1, 1], SamplingParams(), vocab_size=top + 1))
    assert draft.tokens[:, 0].tolist() == [1, 2] and draft.evidence == (3, 3)


def test_random_draft_is_uniform_and_says_so() -> None:
    draft = many(RandomDraft(), [1], SamplingParams(temperature=0.3, top_k=2))
    law = law_at(draft, 1)[0]
    assert law.tolist() == [1 / VOCAB] * VOCAB and not draft.deterministic
    assert torch.equal(draft.law.of(draft.tokens), torch.full_like(draft.tokens, 1 / VOCAB, dtype=torch.float64))
    assert fits(draft.tokens[:, 0], law) and fits(draft.tokens[:, 1], law)
    pairs = draft.tokens[:, 0] * VOCAB + draft.tokens[:, 1]
    assert fits(pairs, torch.full((VOCAB**2,), VOCAB**-2.0, dtype=torch.float64))


def test_a_draft_that_is_not_uniform_is_caught() -> None:
    tokens = many(RandomDraft(), [1]).tokens[:, 0]
    slanted = torch.tensor([0.19, 0.15, 0.165, 0.165, 0.165, 0.165], dtype=torch.float64)
    assert not fits(tokens, slanted)
    assert not fits(tokens.clamp(max=VOCAB - 2), torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64))


@pytest.mark.parametrize("vocab_size", [1, 3, 49_152, 151_936, 2**17])
def test_random_draft_stays_in_the_vocabulary(vocab_size: int) -> None:
    asked = context([[1]], [2], vocab_size=vocab_size)
    asked.uniforms[0] = torch.tensor([0, 1 - 2**-53], dtype=torch.float64)
    assert RandomDraft().propose(asked).tokens.tolist() == [[0, vocab_size - 1]]
