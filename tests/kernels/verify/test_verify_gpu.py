"""What only a GPU can show: captured graphs draw anew, nothing waits for the host, and how many launches there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun import ops
from forerun.config import Kernels, SamplingParams
from forerun.kernels.verify import sample, verify
from forerun.math.laws import LogitLaw
from forerun.math.sigmoid import Sigmoid
from forerun.types import Rule
from kernels.verify.cases import assert_same, make
from support.triton_cpu import INTERPRETED  # before any kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")]
CUT = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("vocab", [3000, 40000])
def test_a_captured_graph_draws_anew(rule: Rule, vocab: int) -> None:
    round_ = make(vocab, some=[CUT, SamplingParams(temperature=1.0)], rows=64)
    verify.verify_packed(round_.target, round_.draft, rule, round_.keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = verify.verify_packed(round_.target, round_.draft, rule, round_.keys)
    seen = []
    for _ in range(3):
        round_.keys.round.add_(1)
        round_.keys.position.add_(1)  # which is what the coupled rule draws by
        graph.replay()
        eager = verify.verify_packed(round_.target, round_.draft, rule, round_.keys)
        assert torch.equal(packed, eager)
        seen.append(packed[:, 1].tolist())
    assert len({tuple(tokens) for tokens in seen}) == 3


def test_nothing_waits_for_the_host() -> None:
    round_ = make(3000, some=[CUT], rows=8)
    verify.verify_packed(round_.target, round_.draft, Rule.TOKEN, round_.keys)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rule in Rule:
            verify.verify(round_.target, round_.draft, rule, round_.keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab", [32000, 128256])
def test_at_most_three_launches(vocab: int) -> None:
    round_ = make(vocab, rows=2)
    verify.verify_packed(round_.target, round_.draft, Rule.TOKEN, round_.keys)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        verify.verify_packed(round_.target, round_.draft, Rule.TOKEN, round_.keys)
        torch.cuda.synchronize()
    own = [event.name for event in profile.events() if "CUDA" in str(event.device_type)]
    assert len(own) <= 3, own


def test_the_sigmoid_rule_is_one_launch_captured_or_not() -> None:
    """Nothing sets its counters; graphs that are replayed in turn with other calls find them at 0 all the same."""
    round_ = make(32000, rows=4, scale=3.0)
    rule = Sigmoid(-10.0, 10.0)
    first = verify.verify_packed(round_.target, round_.draft, rule, round_.keys)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        verify.verify_packed(round_.target, round_.draft, rule, round_.keys)
        torch.cuda.synchronize()
    assert len([event for event in profile.events() if "CUDA" in str(event.device_type)]) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = [verify.verify_packed(round_.target, round_.draft, rule, round_.keys) for _ in range(2)]
    for _ in range(3):
        graph.replay()
        again = verify.verify_packed(round_.target, round_.draft, rule, round_.keys)
        assert all(torch.equal(each, first) for each in (*packed, again))


def test_repetition_gives_the_same_bits() -> None:
    round_ = make(128256, some=[CUT, SamplingParams(temperature=1.0, top_p=0.9)], rows=8)
    first = verify.verify_packed(round_.target, round_.draft, Rule.TOKEN, round_.keys)
    for _ in range(50):
        assert torch.equal(verify.verify_packed(round_.target, round_.draft, Rule.TOKEN, round_.keys), first)


def test_ops_choose_the_kernel_and_can_be_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    round_ = make(500, rows=4)
    called: list[str] = []
    monkeypatch.setattr(verify, "verify", lambda *a: called.append("verify"))
    monkeypatch.setattr(sample, "sample", lambda *a: called.append("sample"))
    numbers = torch.rand(4, dtype=torch.float64, device="cuda")
    off, auto = Kernels.OFF, Kernels.AUTO
    for environment, use, wanted in (("off", None, 0), ("auto", None, 1), ("off", auto, 1), ("on", off, 0)):
        monkeypatch.setenv("FORERUN_KERNELS", environment)
        called.clear()
        ops.verify(round_.target, round_.draft, Rule.TOKEN, round_.keys, use=use)
        ops.sample(round_.target.logits[:4], round_.params, numbers, use)
        assert called == ["verify", "sample"] * wanted, (environment, use)


def test_offsets_beyond_32_bits() -> None:
    """Rows far apart in one buffer: their offsets do not fit an int32."""
    small = make(1000, width=1, rows=2)
    try:
        buffer = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pytest.skip("too little memory")
    stride = 2**29 + 2**18
    rows = buffer.as_strided((4, 1000), (stride, 1))
    rows.copy_(small.target.logits)
    owner = torch.tensor([0, 0, 1, 1], device="cuda")
    other = replace(small, target=LogitLaw(rows, small.target.index, small.params, owner))
    assert_same(other.judged(), other.expected())
