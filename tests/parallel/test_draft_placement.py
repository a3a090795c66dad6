"""The draft model of a split target: whole on rank 0 or split as well, by what a step takes, and the same text."""

from __future__ import annotations

import os
from itertools import repeat
from pathlib import Path
from typing import Any

import torch.distributed as dist

import forerun
from forerun.parallel import draft
from forerun.parallel.join import group
from support.folders import VOCAB, save
from support.ranks import load_shard, raised, run_ranks
from support.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8], [9, 3]]
SAMPLED = {"max_new_tokens": 8, "temperature": 0.9, "seed": 3}


def place(folder: str) -> Any:
    """By made-up times of a step, by real ones, and of a draft whose heads do not divide: how many models the drafter
    has split, in which words that is told, how many parts of models this rank was made to keep, and the text."""
    os.environ["FORERUN_KERNELS"] = "off"
    target, told, stepper = load_shard(folder), [], draft._stepper
    for whole, parts, name in ((2e-3, 1e-3, "draft"), (1e-3, 2e-3, "draft"), (0, 0, "draft"), (0, 0, "odd")):
        times = iter([whole, parts])
        draft._stepper = stepper if not whole else lambda model, use: repeat(next(times)).__next__  # noqa: B023
        decoder = forerun.SpeculativeDecoder(target, f"{folder}/{name}", policy=3)
        text = decoder.generate(PROMPTS, **SAMPLED).new_tokens
        parts_kept = len(getattr(group(), "_loaded", ()))
        split = 0 if decoder.drafter is None else len(decoder.drafter.split_models)
        told.append((split, getattr(group(), "draft_placement", None), parts_kept, text))
        del decoder
    if dist.get_rank() == 0:
        told.append(raised(lambda: draft.load_draft(f"{folder}/odd", split="on")))
    return told


def test_the_faster_place_is_taken(tmp_path: Path) -> None:
    folder = save(tmp_path, tiny_model("llama", vocab=VOCAB))
    small = {"seed": 1, "layers": 1, "vocab": VOCAB}
    save(tmp_path / "draft", tiny_model("llama", **small))
    save(tmp_path / "odd", tiny_model("llama", **small, num_attention_heads=3, num_key_value_heads=3, hidden_size=48))
    first, other = run_ranks(2, place, folder)
    assert isinstance(first, list) and isinstance(other, list), (first, other)
    *placed, refused = first
    assert [split for split, *_ in placed[:2]] == [1, 0] and placed[3][0] == 0
    assert placed[0][1] == "split over 2 processes: a step took 1.00 ms split and 2.00 ms whole"
    assert placed[1][1] == "whole on rank 0, not split over 2 processes: a step took 2.00 ms split and 1.00 ms whole"
    assert ("split" in placed[2][1].split(":")[0].split(" not ")[0]) is (placed[2][0] == 1), placed[2][1]
    assert "3 heads of attention and 3 of keys, which do not divide by 2 processes" in placed[3][1]
    assert "do not divide by 2 processes" in refused
    assert [kept for _, _, kept, _ in other[:2]] == [1, 1], "the part of the slower one is given back"
    for name, at in (("draft", (0, 1, 2)), ("odd", (3,))):
        decoder = forerun.SpeculativeDecoder(
            tiny_model("llama", vocab=VOCAB), f"{folder}/{name}", policy=3, kernels="off"
        )
        text = decoder.generate(PROMPTS, **SAMPLED).new_tokens
        assert all(rank[i][3] == text for rank in (first, other) for i in at)
