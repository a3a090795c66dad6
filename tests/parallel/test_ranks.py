"""A target that is split over processes says what it says in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from support import staged
from support.interpreter import on_gpu_alone
from support.ranks import VOCAB, Call, Case, decode_all, run_ranks, save_pair
from support.ties import check_greedy, deviation
from support.tiny import tiny_model

TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
RAGGED = [[5, 6, 7, 8, 5, 6, 7], [9, 3], [4, 4, 1, 2, 11, 12, 13, 14, 15, 16, 17, 18]]
BEGINNING = list(range(20, 90))
SHARED = [[*BEGINNING, 1, 2], [*BEGINNING, 3], BEGINNING]
GREEDY: Call = (RAGGED, {"max_new_tokens": 10})
SAMPLED: Call = (RAGGED, {"max_new_tokens": 10, "temperature": 0.9, "top_p": 0.95, "seed": 3})
PENALISED: Call = (
    SHARED,
    {"max_new_tokens": 6, "temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "seed": 4},
)
CASES = {
    "lookup": Case("lookup", {"policy": 3}, (GREEDY, SAMPLED, PENALISED)),
    "draft": Case("draft", {"policy": 3, "rule": "block"}, (GREEDY, SAMPLED)),
    "split draft": Case("split draft", {"policy": 3, "rule": "block", "keep_rows": 3}, (GREEDY, SAMPLED, PENALISED)),
    "preempted": Case("lookup", {"policy": 2, "cache_tokens": 90}, (SAMPLED, PENALISED)),
    "kept": Case("lookup", {"policy": 2, "keep_rows": 3}, (PENALISED, PENALISED)),
    "tree": Case("tree", {"policy": 3}, (GREEDY, SAMPLED)),
    "split tree": Case("split tree", {"policy": 3}, (GREEDY, SAMPLED)),
    "split kernels": Case("split draft", {"policy": 3, "kernels": "on", "cache_tokens": 120}, (GREEDY, PENALISED)),
    "kernels": Case("lookup", {"policy": 3, "kernels": "on"}, (GREEDY, SAMPLED, PENALISED)),
}


def check(model: Any, folder: Path, cases: list[Case], size: int, backend: str = "gloo") -> None:
    """Greedy text may differ at ties; a sampled one does where a random number falls between two roundings."""
    save_pair(model, folder)
    ranks = run_ranks(size, decode_all, str(folder), cases, backend=backend)
    assert all(rank == ranks[0] for rank in ranks), "ranks returned different results"
    assert isinstance(ranks[0], list), ranks[0]
    noise = 2 * max(deviation(model, prompt) for prompt in RAGGED)
    for case, outcomes in zip(cases, ranks[0], strict=True):
        for (prompts, keywords), got, want in zip(case.calls, outcomes, case.decode(model), strict=True):
            if keywords.get("temperature"):
                assert got == want, (case, keywords)
                continue
            for prompt, ours, theirs in zip(prompts, got, want, strict=True):
                check_greedy(model, prompt, ours, theirs, noise)


def test_two_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    check(tiny_model("llama", vocab=VOCAB), tmp_path, [case for name, case in CASES.items() if name != "split tree"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi3"])
def test_families(family: str, size: int, tmp_path: Path) -> None:
    heads = {"num_key_value_heads": 4} if size == 4 and family != "gpt_neox" else {}
    names = ("lookup", "draft", "split draft", "split tree", "split kernels", "preempted", "kernels")
    cases = [CASES[name] for name in names]
    check(tiny_model(family, vocab=VOCAB, **heads), tmp_path, cases, size)


@pytest.mark.slow
@pytest.mark.skipif(TRANSFORMERS < (5, 22), reason="transformers splits evenly or not at all")
@pytest.mark.parametrize("odd", [{"vocab": VOCAB + 1}, {"intermediate_size": 97}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_sizes_that_do_not_divide(family: str, odd: dict[str, int], tmp_path: Path) -> None:
    """Only heads have to: one rank has a wider part than the other."""
    check(tiny_model(family, **{"vocab": VOCAB, **odd}), tmp_path, [CASES["lookup"], CASES["kernels"]], 2)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu_alone])])
def test_two_ranks_on_one_device(device: str, tmp_path: Path) -> None:
    cases = [CASES[name] for name in ("lookup", "split draft", "preempted", "kernels")]
    check(tiny_model("llama", vocab=VOCAB).to(device), tmp_path, cases, 2, staged.NAME)
