"""Bias and penalties in one kernel against `math.penalties`."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.config import SamplingParams
from forerun.errors import InvalidArgument
from forerun.kernels import penalties as kernel
from forerun.math import penalties as reference
from support.triton_cpu import DEVICE, INTERPRETED  # before any kernel

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
CASES = {
    "repetition": SamplingParams(repetition_penalty=1.3),
    "presence and frequency": SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25),
    "bias": SamplingParams(logit_bias={3: -math.inf, 40: 2.5}),
    "all": SamplingParams(repetition_penalty=0.8, presence_penalty=1.0, frequency_penalty=0.1, logit_bias={5: 1.0}),
}
PROMPT, OUTPUT, DRAFTED = [1, 5, 5, 900, 7], [5, 40, 40, 12], [40, 3, 5, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_same_logits(name: str, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    before = logits.clone()
    given = (logits, PROMPT, OUTPUT, DRAFTED, CASES[name])
    got, want = kernel.adjust(*given), reference.adjust(*given)
    torch.testing.assert_close(got, want, atol=0 if INTERPRETED else 1e-6, rtol=0 if INTERPRETED else 1e-6)
    assert torch.equal(logits, before)
    assert not torch.equal(got, logits.float())


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
