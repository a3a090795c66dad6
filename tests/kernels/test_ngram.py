"""`kernels.ngram` against `math.ngram`: the same tokens from the same uniforms, and the same laws."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from forerun.config import SamplingParams
from forerun.drafters import NgramTable
from forerun.kernels import ngram as kernel
from forerun.math import ngram as reference
from forerun.math.ngram import NgramDraft, Ngrams
from forerun.types import LawParams
from support.interpreter import DEVICE, kernel_tests

pytestmark = kernel_tests()

VOCAB, WIDTH, STEPS = 11, 9, 3
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams()
PARAMS = {
    "as counted": [SAMPLED],
    "greedy": [GREEDY],
    "warm": [SamplingParams(temperature=1.7)],
    "top-k": [SamplingParams(temperature=1.0, top_k=2)],
    "top-p": [SamplingParams(temperature=0.8, top_p=0.7)],
    "min-p": [SamplingParams(temperature=1.0, min_p=0.3)],
    "each its own": [
        SamplingParams(temperature=0.7, top_k=3, top_p=0.9),
        GREEDY,
        SamplingParams(temperature=1e-9, min_p=0.1),
        SamplingParams(temperature=1.0, top_k=1),
    ],
}


def counted(order: int = 3, most: int = 5, vocab: int = VOCAB) -> Ngrams:
    """Of text in which some tokens are frequent and others are not."""
    drawn = torch.rand(400, generator=torch.Generator().manual_seed(5)) ** 1.3
    text = (drawn * vocab).long().tolist()
    return NgramTable.count([text], order, vocab_size=vocab, max_continuations=most).table


def both(table: Ngrams, params: Sequence[SamplingParams], rows: int = 5) -> tuple[NgramDraft, NgramDraft]:
    """What the kernel says and what it should. Texts shorter than a context, and ids the table cannot know, occur."""
    generator = torch.Generator().manual_seed(rows)
    recent = torch.randint(-1, table.vocab_size + 2, (rows, WIDTH), generator=generator)
    known = torch.arange(rows) * 2 % 7
    uniforms = torch.rand(rows, STEPS, generator=generator, dtype=torch.float64)
    uniforms[0, 0], uniforms[-1, -1] = 0.0, 1 - 2**-53
    each = [params[row % len(params)] for row in range(rows)]
    here = [part.to(DEVICE) for part in (recent, known, uniforms)]
    got = kernel.draft_ngrams(table.to(DEVICE), here[0], here[1], LawParams.stack(each, DEVICE), here[2])
    want = reference.draft_ngrams(table, recent, known, LawParams.stack(each), uniforms)
    return NgramDraft(*(part.cpu() for part in got)), want


def assert_same(got: NgramDraft, want: NgramDraft) -> None:
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.ids, want.ids)
    assert got.tokens.dtype is got.ids.dtype is torch.int64 and got.probs.dtype is torch.float32
    torch.testing.assert_close(got.probs, want.probs, rtol=2**-22, atol=0)


@pytest.mark.parametrize("kind", PARAMS)
def test_same_drafts(kind: str) -> None:
    got, want = both(counted(), PARAMS[kind])
    assert_same(got, want)
    assert want.tokens.unique().numel() > 2, "else nothing is seen here"


@pytest.mark.parametrize(("order", "most", "vocab"), [(1, 3, VOCAB), (2, 1, VOCAB), (5, 8, 4), (6, 40, 1500)])
def test_orders_and_widths(order: int, most: int, vocab: int) -> None:
    """Of one token, of contexts longer than most rows; 1501 ** 5 is close to what a number can hold."""
    assert_same(*both(counted(order, most, vocab), [SAMPLED, GREEDY]))


def test_a_single_context() -> None:
    table = NgramTable.count([[3]], 3, vocab_size=VOCAB).table
    assert len(table.contexts) == 1
    got, want = both(table, [SAMPLED])
    assert_same(got, want)
    assert set(got.tokens.flatten().tolist()) == {3}


def test_drafts_of_rows_do_not_know_each_other() -> None:
    table = counted()
    together, _ = both(table, [SAMPLED])
    recent, known = torch.tensor([[5, 1, 2]]), torch.tensor([3])
    numbers = torch.rand(1, STEPS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone, twice = (
        kernel.draft_ngrams(
            table.to(DEVICE), recent.repeat(n, 1).to(DEVICE), known.repeat(n).to(DEVICE),
            LawParams.stack([SAMPLED] * n, DEVICE), numbers.repeat(n, 1).to(DEVICE),
        )
        for n in (1, 2)
    )  # fmt: skip
    assert torch.equal(alone.tokens[0], twice.tokens[1]) and torch.equal(alone.probs[0], twice.probs[1])
    assert len(together.tokens.unique(dim=0)) > 1


def test_control_another_context_is_another_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that forgot the tokens they have drawn would be seen above."""
    table = counted()
    got, _ = both(table, [SAMPLED])
    monkeypatch.setattr("forerun.math.ngram.np.concatenate", lambda parts, axis: parts[1])
    with pytest.raises(AssertionError):
        assert_same(got, both(table, [SAMPLED])[1])
