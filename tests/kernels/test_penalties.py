"""Bias and penalties in one kernel against `math.penalties`."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.kernels import penalties as kernel
from forerun.math import penalties as reference
from forerun.math import row_options
from forerun.math.row_options import NEVER, NOT_EARLY, NOT_FIRST, RowOptions
from forerun.math.tree import ancestors, lineage
from support.triton_cpu import DEVICE, INTERPRETED  # before any kernel

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
CASES = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "presence and frequency": SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25),
    "bias": SamplingParams(logit_bias={3: -math.inf, 40: 2.5}),
    "all": SamplingParams(repetition_penalty=0.8, presence_penalty=1.0, frequency_penalty=0.1, logit_bias={5: 1.0}),
}
# Interpreted, kernel and reference take the same steps, each one operation that every processor rounds in the same way.
# A GPU's compiler fuses products into sums: a few roundings less, of numbers below 8.
CLOSE = {"atol": 0 if INTERPRETED else 1e-6, "rtol": 0 if INTERPRETED else 1e-6}
PROMPT, OUTPUT, DRAFTED = [1, 5, 5, 900, 7], [5, 40, 40, 12], [40, 3, 5, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_same_logits(name: str, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    before = logits.clone()
    given = (logits, PROMPT, OUTPUT, DRAFTED, CASES[name])
    got, want = kernel.adjust(*given), reference.adjust(*given)
    torch.testing.assert_close(got, want, **CLOSE)
    assert torch.equal(logits, before)
    assert not torch.equal(got, logits.float())


@pytest.mark.parametrize("name", CASES)
def test_drafts_longer_than_what_is_sent_of_them(name: str) -> None:
    """A bias counts no drafted tokens; each position still has a program, which reads one for each before it."""
    drafted = [40, 3, 5, 3] * 4
    logits = torch.randn(len(drafted) + 1, 700, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    given = (logits, PROMPT, OUTPUT, drafted, CASES[name])
    torch.testing.assert_close(kernel.adjust(*given), reference.adjust(*given), **CLOSE)


def test_no_position_reads_beyond_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(kernel, "to_device", lambda numbers, device: sent.append(numbers) or numbers.to(device))
    positions = 17
    kernel.adjust(torch.zeros(positions, 30, device=DEVICE), [], [], [1] * 16, SamplingParams(logit_bias={3: 1.0}))
    along = len(sent[0]) - 5  # four columns of the table and the bias, of one id
    assert along >= positions - 1 and along % kernel.ALIGNED == 0
    assert set(sent[0][:along].tolist()) == {-1}


def test_many_ids_and_early_stops() -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    given = (logits, list(range(600)), [1, 2, 3], [7, 7], CASES["all"], [2, 1500], 5)
    assert torch.equal(kernel.adjust(*given), reference.adjust(*given)) or not INTERPRETED
    assert kernel.adjust(*given)[:2, 1500].tolist() == [-math.inf] * 2
    assert kernel.adjust(*given)[2, 1500].isfinite()


def test_one_position_and_nothing_to_do() -> None:
    logits = torch.randn(1, 30).to(DEVICE)
    assert torch.equal(kernel.adjust(logits, [], [], [], CASES["repetition"]), logits)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="vocabulary ends at 29"):
        kernel.adjust(torch.zeros(1, 30, device=DEVICE), [], [], [], CASES["bias"])


def options_of(rows: list[tuple[list[int], list[int], SamplingParams]], vocab: int) -> RowOptions:
    """Of rows (prompt, output, parameters)."""
    counts = torch.zeros(len(rows), vocab, dtype=torch.int32)
    bias = torch.zeros(len(rows), vocab)
    for b, (prompt, output, params) in enumerate(rows):
        counts[b, [token for token in prompt if token < vocab]] = 1
        for token in output:
            counts[b, token] += 2
        for token, value in params.logit_bias.items():
            bias[b, token] = value
    numbers = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for _, _, p in rows]
    columns = torch.tensor(numbers, dtype=torch.float64).T.contiguous().to(DEVICE)
    bans = torch.zeros(len(rows), vocab, dtype=torch.uint8)
    early = torch.zeros(len(rows), dtype=torch.int64)
    return RowOptions(*(table.to(DEVICE) for table in (counts, bias, bans)), *columns, early.to(DEVICE))


ROWS = [(PROMPT, OUTPUT, CASES["all"]), ([7], [3, 3], CASES["repetition"]), ([], [], SamplingParams())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 2])
def test_rows_of_a_table_are_adjusted_as_each_by_itself(first: int, dtype: torch.dtype) -> None:
    """Reference and kernel of `adjust_rows` against `math.penalties.adjust`, row by row."""
    positions, vocab = 3, 1100
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(len(ROWS) * positions, vocab, generator=generator).to(DEVICE, dtype)
    drafted = torch.tensor([[40, 3, 5, 40], [3, 3, 9, 1], [1, 2, 3, 4]], device=DEVICE)
    position = torch.tensor([len(output) for _, output, _ in ROWS], device=DEVICE)
    given = (logits, options_of(ROWS, vocab), position, drafted, first)
    parts = zip(ROWS, logits.split(positions), drafted.tolist(), strict=True)
    want = torch.cat(
        [
            reference.adjust(part, prompt, [*output, *tokens[:first]], tokens[first:], params)
            for (prompt, output, params), part, tokens in parts
        ]
    )
    assert torch.equal(row_options.adjust_rows(*given), want) or not INTERPRETED
    torch.testing.assert_close(kernel.adjust_rows(*given), want, **CLOSE)


def test_bans_of_all_kinds_and_a_reduced_vocabulary() -> None:
    options = options_of(ROWS, 700)
    options.bans[:, 5], options.bans[:, 6], options.bans[:, 7] = NEVER, NOT_FIRST, NOT_EARLY | NOT_FIRST
    options.min_new_tokens.copy_(torch.tensor([5, 2, 2]))
    position, drafted = torch.tensor([4, 2, 0], device=DEVICE), torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    logits = torch.randn(9, 700, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    want = row_options.adjust_rows(logits, options, position, drafted)
    torch.testing.assert_close(kernel.adjust_rows(logits, options, position, drafted), want)
    found = want.view(3, 3, 700).isinf()
    assert found[:, :, 5].all()
    assert found[:, :, 6].tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    assert found[:, :, 7].tolist() == [[True, False, False], [False] * 3, [True, True, False]]
    ids = torch.arange(1, 700, 2, device=DEVICE)
    part = logits[:, ids].contiguous()
    for adjust_rows in (kernel.adjust_rows, row_options.adjust_rows):
        torch.testing.assert_close(adjust_rows(part, options, position, drafted, ids=ids), want[:, ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_of_trees_are_adjusted_along_their_own_paths(dtype: torch.dtype) -> None:
    """Reference and kernel against `math.penalties.adjust`, node by node; tokens of other branches do not count."""
    vocab, trees = 1100, [[-1, -1, 0, 0, 2], [-1, 0, 1, 2, 3], [-1, -1, -1, 1, 2]]
    nodes, generator = len(trees[0]), torch.Generator().manual_seed(4)
    drafted = torch.tensor([[40, 3, 40, 5, 9, 9], [3, 3, 9, 3, 1, 1], [1, 2, 3, 2, 2, 1]], device=DEVICE)
    seen = ancestors(torch.tensor(trees), torch.full((3,), nodes), 5)[:, :, 1:]
    number = 3 * (nodes + 1)
    logits = torch.randn(number, vocab, generator=generator).to(DEVICE, dtype)
    position = torch.tensor([len(output) for _, output, _ in ROWS], device=DEVICE)
    options = options_of(ROWS, vocab)
    options.bans[:, 6] = NOT_EARLY
    options.min_new_tokens.copy_(position + 2)
    want = []
    for (prompt, output, params), part, tokens, parents in zip(
        ROWS, logits.split(nodes + 1), drafted.tolist(), trees, strict=True
    ):
        for node, row in enumerate(part, -1):
            path = [tokens[place] for place in lineage(parents, node)]
            early = {"forbid": [6], "min_new_tokens": len(output) + 2}
            want.append(reference.adjust(row[None], prompt, [*output, *path], [], params, **early))
    given = (logits, options, position, drafted)
    assert torch.equal(row_options.adjust_rows(*given, seen=seen.to(DEVICE)), torch.cat(want)) or not INTERPRETED
    torch.testing.assert_close(kernel.adjust_rows(*given, seen=seen.to(DEVICE)), torch.cat(want), **CLOSE)
    ids, last = torch.arange(0, vocab, 3, device=DEVICE), seen[:, -2:].to(DEVICE)
    behind = logits.unflatten(0, (3, -1))[:, -2:].flatten(0, 1)
    of_ids = torch.cat(want).unflatten(0, (3, -1))[:, -2:].flatten(0, 1)[:, ids]
    part = kernel.adjust_rows(behind[:, ids].contiguous(), options, position, drafted, ids=ids, seen=last)
    torch.testing.assert_close(part, of_ids, **CLOSE)
