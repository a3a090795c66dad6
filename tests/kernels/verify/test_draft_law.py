"""The kernels read every form of a draft's law, and what a sampler keeps of its rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from forerun.config import SamplingParams
from forerun.kernels.verify import sample as kernel
from forerun.kernels.verify import verify
from forerun.lossy import Lenient
from forerun.math import sample as reference
from forerun.math.laws import LogitLaw, MixedLaw, PointMass, ReducedLaw, SparseLaw
from forerun.types import Draft, Rule
from kernels.verify.cases import ROWS, assert_same, drawn, make, params_of
from support.triton_cpu import DEVICE, INTERPRETED  # before any kernel

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu]
RULES = pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
CUT = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
MIXTURE = [SamplingParams(temperature=0.7), CUT, SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]


@pytest.mark.quick("token")
@RULES
def test_point_masses(rule: Rule) -> None:
    round_ = make(700, some=MIXTURE)
    tokens = round_.target.logits.view(ROWS, -1, 700)[:, :-1].argmax(-1)
    draft = Draft(tokens, round_.draft.lengths, PointMass(tokens, 700))
    other = replace(round_, draft=draft)
    assert_same(other.judged(rule), other.expected(rule))


def test_a_reduced_vocabulary(rule: Rule = Rule.TOKEN) -> None:
    round_ = make(900)
    ids = torch.arange(0, 900, 3, device=DEVICE)
    small = round_.draft.law.logits.view(ROWS, -1, 900)[:, :, ids].contiguous()  # type: ignore[attr-defined]
    law = ReducedLaw(LogitLaw.dense(small, round_.params), ids, 900)
    draft = drawn(law, round_.draft.lengths, round_.draft.width, torch.Generator().manual_seed(1))
    other = replace(round_, draft=draft)
    assert_same(other.judged(rule), other.expected(rule))


def test_sparse_laws(rule: Rule = Rule.TOKEN) -> None:
    round_ = make(700)
    probs = torch.softmax(round_.draft.law.logits.view(ROWS, -1, 700), -1)  # type: ignore[attr-defined]
    top = probs.topk(6, dim=-1)
    law = SparseLaw(top.indices, top.values / top.values.sum(-1, keepdim=True), 700)
    draft = drawn(law, round_.draft.lengths, round_.draft.width, torch.Generator().manual_seed(1))
    other = replace(round_, draft=draft)
    assert_same(other.judged(rule), other.expected(rule))


@pytest.mark.quick("token")
@RULES
def test_a_sparse_law_below_zero_adds_no_mass(rule: Rule) -> None:
    """A negative q would make p - q positive at a token that the target cuts."""
    round_ = make(700, some=[SamplingParams(temperature=1.0, top_k=5)])
    logits = round_.target.logits.view(ROWS, -1, 700)[:, :-1]
    cut = logits.argmin(-1, keepdim=True)
    ids = logits.topk(7, dim=-1).indices[..., 4:]  # two of three are not the target's
    probs = torch.full(ids.shape, 1 / 3, device=DEVICE)
    draft = drawn(
        SparseLaw(ids, probs, 700), round_.draft.lengths, round_.draft.width, torch.Generator().manual_seed(1)
    )
    below_zero = torch.full(cut.shape, -0.5, device=DEVICE)
    law = SparseLaw(torch.cat([ids, cut], -1), torch.cat([probs, below_zero], -1), 700)
    other = replace(round_, draft=replace(draft, law=law))
    got = other.judged(rule)
    assert_same(got, other.expected(rule))
    refused = got.num_accepted < draft.lengths
    forbidden = cut.squeeze(-1).gather(1, got.num_accepted.clamp(max=draft.width - 1).unsqueeze(-1)).squeeze(-1)
    assert refused.any() and not (got.next_token == forbidden)[refused].any()


@pytest.mark.slow
@RULES
def test_rows_that_copy_beside_rows_that_draw(rule: Rule) -> None:
    round_ = make(700, some=MIXTURE)
    best = round_.target.logits.view(ROWS, -1, 700)[:, :-1].argmax(-1)
    choice = torch.arange(ROWS, device=DEVICE) % 2
    law = MixedLaw(choice, (round_.draft.law, PointMass(best, 700)))
    tokens = torch.where(choice.unsqueeze(-1) == 1, best, round_.draft.tokens)
    other = replace(round_, draft=replace(round_.draft, tokens=tokens, law=law))
    assert_same(other.judged(rule), other.expected(rule))


def test_a_draft_with_parameters_and_dtype_of_its_own() -> None:
    round_ = make(700)
    own = params_of([CUT, SamplingParams(temperature=1.5)], ROWS)
    drafted = round_.draft.law.logits.view(ROWS, -1, 700).bfloat16()  # type: ignore[attr-defined]
    draft = drawn(LogitLaw.dense(drafted, own), round_.draft.lengths, round_.draft.width, torch.Generator())
    other = replace(round_, draft=draft)
    assert_same(other.judged(), other.expected())


@pytest.mark.quick("600")
@pytest.mark.parametrize("vocab", [600, 34000])
def test_sampling_is_the_references(vocab: int) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = ROWS
    logits = (2 * torch.randn(rows, vocab, generator=generator)).to(DEVICE)
    params, u = params_of(MIXTURE, rows), torch.rand(rows, generator=generator, dtype=torch.float64).to(DEVICE)
    got, want = kernel.sample(logits, params, u), reference.sample(logits, params, u)
    assert int((got.tokens != want.tokens).sum()) <= (0 if INTERPRETED else 1)
    torch.testing.assert_close(got.log_q, reference_log_q(logits, params, got.tokens), atol=1e-5, rtol=1e-5)


def reference_log_q(logits: torch.Tensor, params: object, tokens: torch.Tensor) -> torch.Tensor:
    law = LogitLaw.dense(logits.unsqueeze(1), params)  # type: ignore[arg-type]
    return law.of(tokens.unsqueeze(-1))[:, 0].log()


@pytest.mark.slow
@RULES
def test_kept_summaries_stand_for_the_rows(rule: Rule) -> None:
    round_ = make(700, some=MIXTURE)
    drafted = round_.draft.law.logits.view(ROWS, -1, 700)  # type: ignore[attr-defined]
    u = torch.rand(ROWS, round_.draft.width, dtype=torch.float64).to(DEVICE)
    steps = [kernel.sample(drafted[:, i], round_.params, u[:, i]) for i in range(round_.draft.width)]
    tokens = torch.stack([step.tokens for step in steps], dim=1)
    plain, kept = (LogitLaw.dense(drafted, round_.params) for _ in range(2))
    kept.kept = torch.stack([step.kept for step in steps], dim=1).flatten(0, 1)  # type: ignore[arg-type]
    want = replace(round_, draft=Draft(tokens, round_.draft.lengths, plain)).expected(rule)
    got = replace(round_, draft=Draft(tokens, round_.draft.lengths, kept)).judged(rule)
    assert_same(got, want)
    kept.kept[:, 4] = -torch.inf  # type: ignore[index]  # it is really they that are read
    lied = replace(round_, draft=Draft(tokens, round_.draft.lengths, kept)).judged(rule)
    assert got.num_accepted.any() and not lied.num_accepted.any()


@pytest.mark.quick("token")
@RULES
def test_kept_summaries_of_a_truncated_draft_do_not_truncate_the_target(rule: Rule) -> None:
    round_, own = make(700), params_of([SamplingParams(temperature=1.0, top_k=5)], ROWS)
    drafted = round_.draft.law.logits.view(ROWS, -1, 700)  # type: ignore[attr-defined]
    u = torch.rand(ROWS, round_.draft.width, dtype=torch.float64).to(DEVICE)
    steps = [kernel.sample(drafted[:, i], own, u[:, i]) for i in range(round_.draft.width)]
    plain, kept = (LogitLaw.dense(drafted, own) for _ in range(2))
    kept.kept = torch.stack([step.kept for step in steps], dim=1).flatten(0, 1)  # type: ignore[arg-type]
    tokens = torch.stack([step.tokens for step in steps], dim=1)
    want = replace(round_, draft=Draft(tokens, round_.draft.lengths, plain)).expected(rule)
    assert_same(replace(round_, draft=Draft(tokens, round_.draft.lengths, kept)).judged(rule), want)


@pytest.mark.quick("token")
@RULES
def test_laws_that_lie_step_after_step(rule: Rule) -> None:
    """As whoever stacks steps and turns the result round gives them: kernels read them so, or leave them."""
    round_, width = make(700), 3
    law = round_.draft.law
    turned = law.logits.view(ROWS, width, 700).transpose(0, 1).reshape(-1, 700)  # type: ignore[attr-defined]
    order = torch.arange(ROWS * width, device=DEVICE)
    step_major = LogitLaw(turned, order.view(width, ROWS).T, round_.params, order % ROWS)
    assert verify.why_not(round_.target, replace(round_.draft, law=step_major), rule) is not None
    one = make(700, width=1)
    column = torch.arange(ROWS, device=DEVICE)[None].T  # as far apart as it likes
    assert column.stride(-1) != 1
    own = LogitLaw(one.draft.law.logits, column, one.params, column[:, 0])  # type: ignore[attr-defined]
    narrow = replace(one, draft=replace(one.draft, law=own))
    assert_same(narrow.judged(rule), narrow.expected(rule))
    points = PointMass(round_.draft.tokens.T.contiguous().T, 700)
    other = replace(round_, draft=replace(round_.draft, law=points))
    assert_same(other.judged(rule), other.expected(rule))


def test_what_no_kernel_reads_is_left_to_the_reference() -> None:
    round_ = make(50)
    double = LogitLaw.dense(round_.target.logits.double().view(ROWS, -1, 50), round_.params)
    assert verify.why_not(double, round_.draft, Rule.TOKEN)
    assert verify.why_not(round_.target, round_.draft, Lenient(0.5))
    assert verify.why_not(round_.target, replace(round_.draft, law=object()), Rule.TOKEN)  # type: ignore[arg-type]


@pytest.mark.slow
def test_forerun_is_imported_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch\n"
        "import forerun.ops\n"
        "from forerun import kernels\n"
        "assert kernels.why_not_triton(torch.device('cuda'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
