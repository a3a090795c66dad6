"""The same with compiled kernels: compiling them takes half a minute, so it is done beside others who need them."""

from __future__ import annotations

import pytest
import torch

from forerun import kernels
from fuzz.cases import case_of, check_against_transformers

FUSED = ("llama", "llama_tied", "llama_many_heads", "mistral", "qwen3", "gpt_neox")
pytestmark = [
    pytest.mark.filterwarnings("ignore::forerun.errors.ForerunWarning"),
    pytest.mark.skipif(kernels.why_not_numba() is not None, reason="no compiled kernels here"),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_with_kernels(seed: int) -> None:
    check_against_transformers(case_of(seed, kernels="on", family=FUSED[seed % len(FUSED)], dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2020))
def test_with_kernels_copies_and_a_penalty(seed: int) -> None:
    """A greedy row beside a sampled one, each twice, and a user's drafter that misbehaves."""
    check_against_transformers(
        case_of(
            seed, kernels="on", family=FUSED[seed % len(FUSED)], dtype=torch.float32, drafter="wild", copies=2, new=16,
            policy=3, rule=("token", "block")[seed % 2], temperatures=(0.0, 0.9), options={"frequency_penalty": 0.5},
        )
    )  # fmt: skip
